"""TensorBoard's event files: framing, checksums, and a writer whose records are on disk when it says so.

A record is ``uint64 length | uint32 crc(length) | data | uint32 crc(data)``, little-endian, each CRC being CRC-32C (RFC 3720)
rotated and offset by TensorFlow's record format. A reader stops at the first record that does not check, so nothing may be
appended behind one: after a failed write the file is cut back to its last good record, or given up.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

_HEADER = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_LARGEST = 1 << 30


@cache
def crc32c() -> Callable[[bytes], int]:
    """CRC-32C of a byte string: google-crc32c's where it is installed, else ours (400 times slower, same result)."""
    try:
        from google_crc32c import value
    except ImportError:
        return crc32c_python
    return value  # type: ignore[no-any-return]


@cache
def _table() -> tuple[int, ...]:
    def entry(number: int) -> int:
        for _ in range(8):
            number = (number >> 1) ^ (0x82F63B78 if number & 1 else 0)  # the Castagnoli polynomial, bits reversed
        return number

    return tuple(entry(number) for number in range(256))


def crc32c_python(data: bytes) -> int:
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def masked_crc(data: bytes) -> int:
    crc = crc32c()(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def frame(data: bytes) -> bytes:
    """`data` as one record of an event file."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, _CRC.pack(masked_crc(length)), data, _CRC.pack(masked_crc(data))))


def records(path: Path) -> Iterator[bytes]:
    """The records of `path` up to the first damage: what TensorBoard itself would show."""
    with path.open("rb") as handle:
        while len(header := handle.read(_HEADER.size)) == _HEADER.size:
            length, check = _HEADER.unpack(header)
            if check != masked_crc(header[:8]) or length > _LARGEST:
                return
            data, tail = handle.read(length), handle.read(_CRC.size)
            if len(tail) < _CRC.size or _CRC.unpack(tail)[0] != masked_crc(data):
                return
            yield data


class EventFile:
    """A new event file, appended to by one writer.

    `append` raises `OSError` (disk full, for one) and leaves the file as it was; where even that fails, `damaged` is True and
    nothing more may be written."""

    def __init__(self, path: Path, header: Iterable[bytes]) -> None:
        """Create `path`, which must not exist, with `header` as its first records."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._good = 0
        self.damaged = False
        try:
            self.append(header)
        except OSError:
            self.close()
            path.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)

    def append(self, events: Iterable[bytes]) -> None:
        """Write `events`, all or nothing, and return when they are on the disk."""
        view = memoryview(b"".join(frame(event) for event in events))
        written = 0
        try:
            while written < len(view):
                written += os.write(self._descriptor, view[written:])
            os.fsync(self._descriptor)
        except OSError:
            self.damaged = True
            os.ftruncate(self._descriptor, self._good)
            self.damaged = False
            raise
        self._good += written

    def there(self) -> bool:
        """Whether the file still has its name: readers find it by that."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except FileNotFoundError:
            return False

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _sync_folder(folder: Path) -> None:
    """Make a new file's name durable, where the file system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
