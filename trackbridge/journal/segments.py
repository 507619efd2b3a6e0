"""Segment files: their names, their header, and the header of each entry. What both writer and reader must agree on.

A segment starts with `SEGMENT`; each entry is `ENTRY` and its payload. Every entry begins with the segment's *marker*, eight
bytes of which four are random: where a damaged stretch ends, the marker is what one looks for, and bytes of another journal
that happen to lie in a payload cannot be taken for an entry.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

VERSION = 1
MAGIC = b"TBJRNL\r\n"
MARKER_PREFIX = b"\xf5TBR"
MARKER_BYTES = 8

SEGMENT = struct.Struct("<8sHH8sI")  # magic, version, 0, marker, crc32 of what is before
ENTRY = struct.Struct("<8sB3xIQqII")  # marker, kind, payload bytes, seq, step, crc32 of the payload, crc32 of what is before

_NAME = re.compile(r"(\d{8})-(\d{12})(?:\.t([1-9]))?\.tbj")


class Segment(NamedTuple):
    """One file. Segments are read in the order of `number`; every seq in it is >= `first_seq`. `level` is 0 as written,
    higher where retention has replaced it by a thinned one (`trackbridge.journal.thin`)."""

    number: int
    first_seq: int
    path: Path
    level: int = 0


class Entry(NamedTuple):
    """The header of one entry, checked."""

    marker: bytes
    kind: int
    length: int
    seq: int
    step: int
    crc: int


def name(number: int, first_seq: int, level: int = 0) -> str:
    return f"{number:08d}-{first_seq:012d}{f'.t{level}' if level else ''}.tbj"


def listing(directory: Path) -> list[Segment]:
    """The segments in `directory`, in order; empty if it does not exist. Of a segment and the thinned one that is about to
    take its place, the thinned one."""
    found = _listed(directory)
    if found and found[-1].number - found[0].number >= len(found):
        found = _listed(directory)  # a hole: listed while one file took another's place, perhaps
    return found


def files(directory: Path) -> list[Segment]:
    """Every segment file there is, also one that a thinned one has replaced and that a crash left behind."""
    try:
        found = os.listdir(directory)  # noqa: PTH208 - names only, no objects
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = (_NAME.fullmatch(entry) for entry in found)
    return sorted(Segment(int(m[1]), int(m[2]), directory / m[0], int(m[3] or 0)) for m in matches if m)


def _listed(directory: Path) -> list[Segment]:
    newest: dict[int, Segment] = {}
    for segment in files(directory):
        known = newest.get(segment.number)
        if known is None or segment.level > known.level:
            newest[segment.number] = segment
    return list(newest.values())


def new_marker() -> bytes:
    return MARKER_PREFIX + os.urandom(MARKER_BYTES - len(MARKER_PREFIX))


def pack_segment(marker: bytes) -> bytes:
    head = SEGMENT.pack(MAGIC, VERSION, 0, marker, 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head))


def unpack_segment(data: bytes) -> tuple[int, bytes] | None:
    """(version, marker), or None when the header is damaged."""
    magic, version, _, marker, crc = SEGMENT.unpack_from(data)
    return (version, marker) if magic == MAGIC and crc == zlib.crc32(data[: SEGMENT.size - 4]) else None


def pack_entry(marker: bytes, kind: int, seq: int, step: int, payload: bytes) -> bytes:
    """The header that goes before `payload`."""
    head = ENTRY.pack(marker, kind, len(payload), seq, step, zlib.crc32(payload), 0)[:-4]
    return head + struct.pack("<I", zlib.crc32(head))


def unpack_entry(data: bytes | memoryview, at: int, marker: bytes | None) -> Entry | None:
    """The entry header at `at`, or None when there is no good one. `marker` None accepts any segment's marker."""
    mark, kind, length, seq, step, crc, check = ENTRY.unpack_from(data, at)
    fits = mark == marker if marker is not None else mark.startswith(MARKER_PREFIX)
    if not fits or check != zlib.crc32(data[at : at + ENTRY.size - 4]):
        return None
    return Entry(mark, kind, length, seq, step, crc)


def sync_directory(directory: Path) -> None:
    """Make a new file's name durable, where the file system lets us."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
