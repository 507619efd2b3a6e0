"""Walking one segment file, entry by entry, past whatever is damaged in it.

A segment that is not the newest is *sealed*: nobody appends to it any more. In an open one, bad bytes at the very end are an
entry that is still being written, so the walk stops before them and looks again next time. Bad bytes with a good entry after
them, or in a sealed segment, are damage.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, TypeAlias

from trackbridge.errors import TrackbridgeError
from trackbridge.journal.segments import (
    ENTRY,
    MARKER_BYTES,
    MARKER_PREFIX,
    SEGMENT,
    VERSION,
    Entry,
    Segment,
    unpack_entry,
    unpack_segment,
)

_CHUNK = 1 << 20

OnDamage: TypeAlias = Callable[[int, int, "Entry | None"], None]  # from, to, the entry when its header is intact


class Walk:
    """A position in one segment. `at` is the offset of the next entry, `size` what the file held at the last pass."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.at = 0
        self.size = 0
        self._marker: bytes | None = None
        self._searched = 0  # no good entry begins before this offset, apart from those passed already

    def entries(self, sealed: bool, want: Callable[[Entry], bool], damaged: OnDamage) -> Iterator[tuple[Entry, bytes | None]]:
        """The entries from `at` on, with their payload where `want` says so (others are passed unread). May be abandoned:
        `at` is behind the last entry yielded. Raises `FileNotFoundError` when the file is gone."""
        with self.segment.path.open("rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            window = _Window(file, self.size)
            while (entry := self._next(window, sealed, damaged)) is not None:
                start = self.at
                end = start + ENTRY.size + entry.length
                if end > self.size:
                    if not sealed or not self._resync(window, sealed, damaged, entry):
                        return
                    continue
                payload = window.get(start + ENTRY.size, entry.length) if want(entry) else None
                if payload is not None and zlib.crc32(payload) != entry.crc:
                    if end == self.size and not sealed:
                        return
                    self.at = end
                    damaged(start, end, entry)
                    continue
                self.at = end
                yield entry, payload

    def _next(self, window: _Window, sealed: bool, damaged: OnDamage) -> Entry | None:
        """The entry at `at`, or the next good one; None when there is nothing (yet)."""
        if self.at > 0 or self._head(window):
            entry = window.entry(self.at, self._marker)
            if entry is not None:
                return entry
        if self.at == window.size or (window.size - self.at < ENTRY.size and not sealed):
            return None
        return window.entry(self.at, self._marker) if self._resync(window, sealed, damaged) else None

    def _head(self, window: _Window) -> bool:
        head = window.get(0, SEGMENT.size)
        known = unpack_segment(head) if len(head) == SEGMENT.size else None
        if known is None:
            return False
        version, self._marker = known
        if version > VERSION:
            raise TrackbridgeError(
                f"{self.segment.path} is journal format {version}, this trackbridge reads {VERSION}: upgrade trackbridge"
            )
        self.at = SEGMENT.size
        return True

    def _resync(self, window: _Window, sealed: bool, damaged: OnDamage, entry: Entry | None = None) -> bool:
        """Move `at` to the next good entry header behind it; False if there is none. `entry` is one cut off at `at`."""
        start = self.at
        found = self._find(window, max(start + 1, self._searched))
        if found is None:
            self._searched = max(start + 1, window.size - ENTRY.size + 1)
            if sealed:
                self.at = window.size
                damaged(start, window.size, entry)
            return False
        self.at = found
        damaged(start, found, entry)
        return True

    def _find(self, window: _Window, start: int) -> int | None:
        pattern = self._marker or MARKER_PREFIX
        while start + ENTRY.size <= window.size:
            chunk = window.get(start, _CHUNK)
            hit = chunk.find(pattern)
            if hit < 0:
                start += max(len(chunk) - MARKER_BYTES + 1, 1)
                continue
            entry = window.entry(start + hit, self._marker)
            if entry is not None:
                self._marker = entry.marker
                return start + hit
            start += hit + 1
        return None


class _Window:
    """Random access to a file through one chunk in memory; never past `size`, even while the file grows."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.size = size
        self._file = file
        self._start = 0
        self._data = b""

    def get(self, at: int, length: int) -> bytes:
        """`length` bytes from `at`, fewer at the end."""
        length = max(min(length, self.size - at), 0)
        if at < self._start or at + length > self._start + len(self._data):
            self._file.seek(at)
            self._data = self._file.read(min(max(length, _CHUNK), self.size - at))
            self._start = at
        low = at - self._start
        return self._data[low : low + length]

    def entry(self, at: int, marker: bytes | None) -> Entry | None:
        head = self.get(at, ENTRY.size)
        return unpack_entry(head, 0, marker) if len(head) == ENTRY.size else None
