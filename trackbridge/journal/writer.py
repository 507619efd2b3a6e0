"""Appending to a journal. One writer per directory; whoever comes later goes on in a new segment."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trackbridge.errors import UsageError, logger
from trackbridge.journal import codec, segments
from trackbridge.journal.scan import Walk
from trackbridge.journal.segments import Entry, Segment
from trackbridge.records import Anomaly, Record, Row, RunEnd, Schema, StepContext

_SCHEMA_AGAIN = 2 << 20  # bytes after which a schema is repeated, so that one flipped byte costs few rows
_SCHEMA_CACHE = 256
_RETRY_SECONDS = 1.0  # between attempts on a full disk
_KEPT = 10_000  # anomalies, artifacts, ... held in memory while the disk is full


@dataclass
class _Closed:
    """A segment that is complete, as retention sees it."""

    segment: Segment
    bytes: int
    max_step: int
    min_step: int = 0


class JournalWriter:
    """Appends records and numbers them. Thread-safe. `fsync_seconds` is the most that a power cut loses; a crash of the process
    loses nothing, since every record is handed to the kernel at once.

    `ring_bytes` is a budget for the directory: the oldest whole segments are deleted, except those that hold a step protected
    with `hold`. `floor` is the least `seq` to go on with: after a power cut a tracker may know more than the disk does.
    `on_closed` is called when a segment is complete, by the thread that appends.

    A full or failing disk never raises: rows are lost and counted in `rows_lost`, everything else is kept and written when
    there is space again, in a new segment. Raises `UsageError` here, once, when the directory cannot be written at all.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        segment_bytes: int,
        fsync_seconds: float,
        ring_bytes: int | None = None,
        floor: int = 0,
        on_closed: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = Path(directory)
        self.next_seq = floor
        self.rows_lost = 0
        self._segment_bytes = segment_bytes if ring_bytes is None else max(min(segment_bytes, ring_bytes // 8), 4096)
        self._ring_bytes = ring_bytes
        self._on_closed = on_closed
        self._fsync_seconds = fsync_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._held: list[tuple[int, int]] = []
        self._closed: list[_Closed] = []
        self._kept: list[Record] = []
        self._digests: dict[int, tuple[Schema, bytes, bytes]] = {}  # by id: (schema, kept alive), digest, payload
        self._file = -1
        self._segment: Segment
        self._marker = b""
        self._schemas: dict[bytes, int] = {}  # digest -> offset where it was last written in this segment
        self._max_step = self._min_step = -1
        self._size = 0
        self._dirty = False
        self._synced = clock()
        self._open = True
        self._failed_at: float | None = None
        self._number = 0
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._survey()
            self._new_segment()
        except OSError as error:
            raise UsageError(
                f"cannot write a journal in {self.directory}: {error.strerror or error}; choose another dir="
            ) from None

    def append(self, record: Record) -> int:
        """Write `record` and return the `seq` it got, or -1 if the disk does not take it (its own `seq` is ignored)."""
        with self._lock:
            if not self._open:
                self._lose(record)
                return -1
            seq = self._try(record)
            if seq < 0:
                self._lose(record)
            return seq

    def sync(self) -> None:
        """Make everything appended so far survive a power cut."""
        with self._lock:
            self._sync()

    def sync_if_due(self) -> None:
        """Call now and then while nothing is appended: then a power cut costs `fsync_seconds` all the same."""
        with self._lock:
            if self._open and self._dirty and self._clock() - self._synced >= self._fsync_seconds:
                self._sync()

    def close(self) -> None:
        """Write what was kept back, sync, and close. A second call does nothing."""
        with self._lock:
            if not self._open:
                return
            self._failed_at = None
            self._flush_kept()
            self._close_segment()
            self._open = False
            if self._kept or self.rows_lost:
                logger.error(
                    "trackbridge: %s rows and %s other records are not in %s", self.rows_lost, len(self._kept), self.directory
                )

    def hold(self, first: int, last: int) -> None:
        """Keep every record of the steps `first` to `last` until `release(first, last)`, whatever the ring's budget says."""
        with self._lock:
            self._held.append((first, last))

    def release(self, first: int, last: int) -> None:
        with self._lock:
            self._held.remove((first, last))
            self._retain()

    # -- one record

    def _try(self, record: Record) -> int:
        """Append with the lock held; -1 on a disk that does not take it."""
        if self._failed_at is not None and self._clock() - self._failed_at < _RETRY_SECONDS:
            return -1
        if not self._flush_kept():
            return -1
        return self._put(record)

    def _put(self, record: Record) -> int:
        now = self._clock()
        try:
            if self._file < 0 or (self._size > segments.SEGMENT.size and self._size >= self._segment_bytes):
                self._close_segment()
                self._new_segment()
                self._retain()
                if self._on_closed is not None:
                    self._on_closed()
            data = self._encode(record)
            self._write(data)
        except OSError as error:
            self._fail(error, now)
            return -1
        if self._failed_at is not None:
            self._failed_at = None
            logger.warning("trackbridge: the journal in %s goes on; %d rows were lost", self.directory, self.rows_lost)
        seq = self.next_seq
        self.next_seq += 1
        step = codec.step_of(record)
        self._max_step = max(self._max_step, step)
        self._min_step = step if self._min_step < 0 else min(self._min_step, step)
        if isinstance(record, (Anomaly, RunEnd)) or now - self._synced >= self._fsync_seconds:
            self._sync()
        return seq

    def _encode(self, record: Record) -> bytes:
        if not isinstance(record, Row):
            kind, payload = codec.encode(record)
            return self._entry(kind, codec.step_of(record), payload)
        digest, schema = self._digest(record.schema)
        row = self._entry(codec.ROW, int(record.step), codec.encode_row(record, digest))
        written = self._schemas.get(digest)
        if written is not None and self._size - written < _SCHEMA_AGAIN:
            return row
        self._schemas[digest] = self._size
        return self._entry(codec.SCHEMA, -1, schema) + row

    def _entry(self, kind: int, step: int, payload: bytes) -> bytes:
        return segments.pack_entry(self._marker, kind, self.next_seq, step, payload) + payload

    def _digest(self, schema: Schema) -> tuple[bytes, bytes]:
        known = self._digests.get(id(schema))
        if known is None:
            if len(self._digests) >= _SCHEMA_CACHE:
                self._digests.clear()
            known = self._digests[id(schema)] = (schema, *codec.encode_schema(schema))
        return known[1], known[2]

    def _write(self, data: bytes) -> None:
        done = 0
        while done < len(data):  # at an offset of our own: what a full disk cut off is written over
            done += os.pwrite(self._file, memoryview(data)[done:], self._size + done)
        self._size += len(data)
        self._dirty = True

    # -- trouble

    def _lose(self, record: Record) -> None:
        if isinstance(record, (Row, StepContext)) or len(self._kept) >= _KEPT:
            self.rows_lost += 1
        else:
            self._kept.append(record)

    def _flush_kept(self) -> bool:
        while self._kept:
            if self._put(self._kept[0]) < 0:
                return False
            del self._kept[0]
        return True

    def _fail(self, error: OSError, now: float) -> None:
        """Leave the segment as it was before the half-written record; the next attempt opens a new one."""
        if self._failed_at is None:
            logger.error(
                "trackbridge: cannot write the journal in %s: %s; training goes on, rows are lost until there is space",
                self.directory,
                error.strerror or error,
            )
        self._failed_at = now
        self._schemas.clear()  # one of them may be what was not written
        if self._file < 0:
            return
        try:
            os.ftruncate(self._file, self._size)
            if 0 < self._size <= segments.SEGMENT.size:
                return  # still empty: try again in this one
        except OSError:
            pass  # the reader will call the rest damage, which it is
        self._close_segment()

    # -- segments

    def _survey(self) -> None:
        """Learn from what is there: where numbering goes on, and what retention may delete."""
        found = segments.listing(self.directory)
        newest = -1  # the highest number found so far; the floor says nothing about what is here
        for segment in reversed(found):
            if self._ring_bytes is None and newest >= segment.first_seq:
                break  # older segments only hold smaller numbers
            last, max_step = extent(segment)
            newest = max(newest, last)
            self.next_seq = max(self.next_seq, last + 1, segment.first_seq)
            self._closed.insert(0, _Closed(segment, segment.path.stat().st_size, max_step))
        self._number = found[-1].number + 1 if found else 0

    def _new_segment(self) -> None:
        segment = Segment(self._number, self.next_seq, self.directory / segments.name(self._number, self.next_seq))
        self._number += 1
        self._file = os.open(segment.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._segment = segment
        self._marker = segments.new_marker()
        self._schemas = {}
        self._max_step = self._min_step = -1
        self._size = 0
        self._synced = self._clock()
        self._write(segments.pack_segment(self._marker))
        segments.sync_directory(self.directory)

    def _close_segment(self) -> None:
        if self._file < 0:
            return
        self._sync()
        try:
            os.close(self._file)
        except OSError:
            pass  # NFS reports a late ENOSPC here; the records of this segment were counted as written
        self._file = -1
        closed = _Closed(self._segment, self._size, self._max_step, self._min_step)
        if self._size > 0:
            self._closed.append(closed)
        else:
            self._delete(closed)

    def _sync(self) -> None:
        self._synced = self._clock()
        if self._file < 0 or not self._dirty:
            return
        try:
            os.fsync(self._file)
            self._dirty = False
        except OSError as error:
            logger.warning("trackbridge: fsync of %s failed: %s", self._segment.path, error.strerror or error)

    def _retain(self) -> None:
        """Delete the oldest segments beyond the budget, except those that hold a protected step."""
        if self._ring_bytes is None:
            return
        excess = sum(closed.bytes for closed in self._closed) + self._segment_bytes - self._ring_bytes
        for closed in list(self._closed):
            if excess <= 0:
                return
            if not any(first <= closed.max_step and closed.min_step <= last for first, last in self._held):
                self._delete(closed)
                self._closed.remove(closed)
                excess -= closed.bytes

    def _delete(self, closed: _Closed) -> None:
        try:
            closed.segment.path.unlink()
        except OSError:
            pass  # gone already, or not ours to delete: it will be counted again at the next start


def last_seq(directory: str | Path) -> int:
    """The highest `seq` in a journal, -1 when it has no record."""
    for segment in reversed(segments.listing(Path(directory))):
        try:
            seq, _ = extent(segment)
        except FileNotFoundError:
            continue
        if seq >= 0:
            return seq
    return -1


def extent(segment: Segment) -> tuple[int, int]:
    """(highest seq, highest step) of the intact entry headers in a segment, -1 where there is none."""
    headers: list[Entry] = []

    def damaged(start: int, end: int, entry: Entry | None) -> None:
        if entry is not None:
            headers.append(entry)  # its number was given out, though its payload is cut off

    headers += [entry for entry, _ in Walk(segment).entries(True, lambda entry: False, damaged)]
    records = [entry for entry in headers if entry.kind != codec.SCHEMA]
    return max((entry.seq for entry in records), default=-1), max((entry.step for entry in records), default=-1)
