"""Reading W&B's own run files, ``run-<id>.wandb``: history, config, summary, artifacts, alerts and exit code.

The file is a LevelDB log: a 7-byte header, then blocks of 32 KiB filled with chunks (CRC-32, length, type, bytes) that make
up records, which are protobuf messages of the wandb package. A writer that was killed leaves a torn tail, which is waited
for; a chunk whose checksum is wrong costs the rest of its block, and is counted.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trackbridge.errors import ReferenceNotFoundError, TrackbridgeError
from trackbridge.plugins import require

BLOCK = 32 * 1024
_FILE = struct.Struct("<4sHB")
_CHUNK = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_LARGEST_RECORD = 256 * 1024 * 1024


class RunFile:
    """Follows one file: each `read` returns the records that became complete since the one before.

    `damage` counts the places where bytes had to be skipped. Raises `TrackbridgeError` if it is no such file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage = 0
        self._offset = 0
        self._parts: list[bytes] | None = None

    def read(self) -> list[Any]:
        """New records as ``wandb_internal_pb2.Record``."""
        return [record for data in self.payloads() if (record := self.parsed(data)) is not None]

    def parsed(self, data: bytes) -> Any:
        """The record of which `data` are the bytes; None, and counted, if they are none."""
        record = require("wandb.proto.wandb_internal_pb2", "wandb").Record()
        try:
            record.ParseFromString(data)
        except Exception:
            self.damage += 1
            return None
        return record

    def payloads(self) -> Iterator[bytes]:
        """The bytes of each new record; they are whole, their checksums hold."""
        with self.path.open("rb") as handle:
            if self._offset == 0 and not self._header(handle.read(_FILE.size)):
                return
            handle.seek(self._offset)
            while True:
                left = BLOCK - self._offset % BLOCK
                head = handle.read(min(left, _CHUNK.size))
                if left < _CHUNK.size:  # too little room for a chunk: the writer left it zero
                    if len(head) < left:
                        return
                    self._offset += left
                    continue
                if len(head) < _CHUNK.size:
                    return
                crc, size, kind = _CHUNK.unpack(head)
                if size > left - _CHUNK.size:
                    if not self._skip(handle, left):
                        return
                    continue
                data = handle.read(size)
                if len(data) < size:
                    return
                if kind not in (_FULL, _FIRST, _MIDDLE, _LAST) or zlib.crc32(data, zlib.crc32(bytes([kind]))) != crc:
                    if not self._skip(handle, left, padding=crc == size == kind == 0):
                        return
                    continue
                self._offset += _CHUNK.size + size
                if (whole := self._join(kind, data)) is not None:
                    yield whole

    def _header(self, head: bytes) -> bool:
        if len(head) < _FILE.size:
            return False
        name, magic, version = _FILE.unpack(head)
        if name != b":W&B" or magic != 0xBEE1 or version > 1:
            raise TrackbridgeError(f"{self.path} is not a W&B run file of a version that can be read")
        self._offset = _FILE.size
        return True

    def _skip(self, handle: Any, left: int, *, padding: bool = False) -> bool:
        """Go to the next block, if it is there; nothing in this one can be trusted any more."""
        handle.seek(self._offset + left)
        if not handle.read(1):
            return False
        handle.seek(self._offset + left)
        self._offset += left
        if not padding:
            self.damage += 1
            self._parts = None
        return True

    def _join(self, kind: int, data: bytes) -> bytes | None:
        if kind == _FULL:
            self._parts = None
            return data
        if kind == _FIRST:
            self._parts = [data]
        elif self._parts is not None:
            self._parts.append(data)
            if sum(map(len, self._parts)) > _LARGEST_RECORD:
                self.damage += 1
                self._parts = None
            elif kind == _LAST:
                whole, self._parts = b"".join(self._parts), None
                return whole
        return None


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of an artifact that was recorded offline: where its bytes are, their MD5 (base64) and number."""

    local: str
    md5: str
    size: int


@dataclass(frozen=True, slots=True)
class RecordedArtifact:
    name: str
    kind: str
    aliases: tuple[str, ...]
    metadata: dict[str, Any]
    files: dict[str, FileEntry]


@dataclass
class RecordedRun:
    """What one or several run files say about a run. History rows are in the order they were logged; non-finite numbers are
    floats. `exit_code` is None while the run goes on, or when it was killed."""

    run_id: str = ""
    project: str = ""
    entity: str = ""
    name: str = ""
    group: str = ""
    tags: tuple[str, ...] = ()
    history: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    artifacts: list[RecordedArtifact] = field(default_factory=list)
    alerts: list[tuple[str, str, str]] = field(default_factory=list)
    metrics: dict[str, str] = field(default_factory=dict)
    exit_code: int | None = None
    damage: int = 0

    def add(self, record: Any) -> None:
        kind = record.WhichOneof("record_type")
        if kind == "history":
            self.history.append(_values(record.history.item))
        elif kind == "summary":
            self.summary.update(_values(record.summary.update))
            for item in record.summary.remove:
                self.summary.pop(item_key(item), None)
        elif kind == "config":
            self.config.update(_values(record.config.update))
        elif kind == "run":
            run = record.run
            self.run_id, self.project, self.entity = run.run_id, run.project, run.entity
            self.name, self.group, self.tags = run.display_name, run.run_group, tuple(run.tags) or self.tags
            self.config.update({key: value for key, value in _values(run.config.update).items() if key != "_wandb"})
            self.exit_code = None
        elif kind == "artifact":
            self.artifacts.append(_artifact(record.artifact))
        elif kind == "alert":
            self.alerts.append((record.alert.title, record.alert.text, record.alert.level))
        elif kind == "metric":
            self.metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "exit":
            self.exit_code = record.exit.exit_code


def load(path: Path) -> RecordedRun:
    """Read a ``.wandb`` file, an offline run's folder, or a folder of several lives of one run, oldest first."""
    run = RecordedRun()
    for file in run_files(path):
        reader = RunFile(file)
        for record in reader.read():
            run.add(record)
        run.damage += reader.damage
    return run


def run_files(path: Path, run_id: str = "*") -> list[Path]:
    """The run files at or under `path`, oldest first. Raises `ReferenceNotFoundError` if there is none."""
    if path.is_file():
        return [path]
    found = [*path.glob(f"run-{run_id}.wandb"), *path.glob(f"*run-*/run-{run_id}.wandb")]
    if not found:
        raise ReferenceNotFoundError(f"{path} holds no W&B run file (run-<id>.wandb)")
    return sorted(found, key=_age)


def _age(path: Path) -> tuple[str, int]:
    """Order of creation: the time in the folder's name, then the number W&B appends within one second."""
    stamp, _, rest = path.parent.name.partition("run-")[2].partition("-")
    last = rest.rpartition("-")[2]
    return stamp, int(last) if last.isdigit() and rest != path.stem.removeprefix("run-") else 0


HISTORY, SUMMARY = 2, 3  # numbers of two kinds of record
_OTHER = frozenset((1, 16, 19, 200))  # fields of a record that do not say its kind
_VARINT, _LONG, _BYTES, _SHORT = 0, 1, 2, 5


def kind_of(data: bytes) -> int:
    """The number of the field that says what kind of record `data` are, found without reading what is in it; -1 where that is
    not clear."""
    at = 0
    try:
        while at < len(data):
            tag, at = _varint(data, at)
            if tag >> 3 not in _OTHER:
                return tag >> 3
            wire = tag & 7
            length, at = _varint(data, at) if wire in (_VARINT, _BYTES) else (0, at)
            at += {_VARINT: 0, _LONG: 8, _BYTES: length, _SHORT: 4}[wire]
    except (IndexError, KeyError):
        pass
    return -1


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, where it ends)."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def number_in(data: bytes, key: str) -> int | None:
    """The whole number that the history or summary record `data` has under `key`, found without reading the hundreds of others;
    None if it has none. `key` is ASCII and shorter than 128.

    An item is its key, with the length before it, then the tag of its value. The tag (82 01) cannot follow ASCII inside a text,
    which is UTF-8; so this is our item, or one whose key ends as ours does after the byte of our length. With two of them the
    record is read.
    """
    head = bytes([len(key)]) + key.encode() + b"\x82\x01"
    at = data.rfind(head)
    if at < 0:
        return None
    if data.find(head) != at:
        return _read_number(data, key)
    start = at + len(head)
    return int(json.loads(data[start + 1 : start + 1 + data[start]]))


def _read_number(data: bytes, key: str) -> int | None:
    record = require("wandb.proto.wandb_internal_pb2", "wandb").Record.FromString(data)
    items = (*record.history.item, *record.summary.update)
    return next((int(json.loads(item.value_json)) for item in items if item_key(item) == key), None)


def item_key(item: Any) -> str:
    """The name of one value of a history, summary or config record."""
    return item.key or ".".join(item.nested_key)


def _values(items: Iterable[Any]) -> dict[str, Any]:
    return {item_key(item): _number(_decode(item.value_json)) for item in items}


def _whole(text: str) -> int | float:
    """W&B writes -0.0 as ``-0``."""
    return -0.0 if text == "-0" else int(text)


_decode = json.JSONDecoder(parse_int=_whole).decode


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity") else value


def _artifact(artifact: Any) -> RecordedArtifact:
    files = {entry.path: FileEntry(entry.local_path, entry.digest, entry.size) for entry in artifact.manifest.contents}
    metadata = json.loads(artifact.metadata or "{}")
    return RecordedArtifact(artifact.name, artifact.type, tuple(artifact.aliases), metadata, files)
