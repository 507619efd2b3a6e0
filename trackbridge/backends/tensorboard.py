"""TensorBoard: event files without tensorflow or torch, one packed event a step, and artifacts as folders beside them.

On disk, with `root` the run directory's ``tensorboard/`` or ``<logdir>/<run id>/``::

    root/events.out.tfevents.<created>.trackbridge.<file>.a<attempt>    rank 0; other ranks in root/rank-NNNN/
    root/artifacts/<name>/...                                           our artifacts and capsules, as plain files

TensorBoard has two readers that treat a step going backwards differently, and both stop at a damaged record. So every
process start and every attempt begins a new file, an attempt after the first with a SessionLog START at its first step:
the Python reader then drops what that attempt replaced, the default (Rust) one drops it tag by tag as the new points come.
The older file still holds the replaced values. Each event also carries the journal's `seq` in a tensor that no dashboard
draws; reading the last one back is how nothing is written twice. Values are float32: that is the format's number type.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import field_validator

from trackbridge import plugins
from trackbridge.backends import folders, held, words
from trackbridge.backends.base import Backend, BackendConfig
from trackbridge.backends.eventfile import EventFile, records
from trackbridge.errors import ConfigError, ReferenceNotFoundError, Rejected, RetryLater
from trackbridge.records import Anomaly, Artifact, Params, Record, Row, RunEnd, RunInfo, Schema

SEQ_TAG = "trackbridge__seq__"
_LAYOUT_TAG = "custom_scalars__config__"
_OURS = re.compile(r"events\.out\.tfevents\.\d+\.trackbridge\.(\d{5,})\.a(\d{4,})$")
_ARTIFACTS = "artifacts"
_DT_STRING, _DT_INT64 = 7, 9
_DISK_TROUBLE_SECONDS = 10.0

# category -> chart title -> regular expressions of tags
_LAYOUT = {
    "trackbridge": {
        "loss": [r"train/loss$"],
        "gradient norm": [r"grad/norm(_clipped)?$"],
        "learning rate": [r"train/lr"],
        "anomalies": [r"anomaly/"],
        "activation kurtosis": [r"act/.*/kurtosis$"],
    }
}


class TensorboardConfig(BackendConfig):
    """`logdir`: what ``tensorboard --logdir`` is pointed at; the run gets a folder of its own inside it. Default: the folder
    ``tensorboard`` of the run directory."""

    kind: Literal["tensorboard"] = "tensorboard"
    logdir: Path | None = None

    @field_validator("logdir", mode="before")
    @classmethod
    def _on_a_disk(cls, value: Any) -> Any:
        if isinstance(value, str) and "://" in value:
            raise ConfigError(f"tensorboard logdir must be a folder on a disk, not {value.split('://')[0]}://...: mount it")
        return value

    @field_validator("logdir")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser().absolute()

    def check(self) -> None:
        plugins.require("tensorboard", "tensorboard")

    def build(self) -> Backend:
        return TensorboardBackend(self)

    def root(self, run: RunInfo) -> Path:
        """The folder of `run`: what holds its event files and artifacts."""
        return Path(run.directory) / "tensorboard" if self.logdir is None else self.logdir / run.run_id

    def where(self, run: RunInfo) -> str:
        shown = self.root(run) if self.logdir is None else self.logdir
        return f"tensorboard --logdir {shown} --samples_per_plugin scalars=1000000"


class TensorboardBackend:
    """See the module. A file is created by the first new record, so opening a finished run leaves no trace."""

    def __init__(self, config: TensorboardConfig) -> None:
        self._config = config
        self._file: EventFile | None = None
        self._attempt = 0
        self._step = 0
        self._held = -1

    def open(self, run: RunInfo, /) -> int:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._run, self._root = run, self._config.root(run)
        self._folder = self._root if run.rank == 0 else self._root / f"rank-{run.rank:04d}"
        self._packer = Packer(event_pb2, summary_pb2)
        self._let_go()
        self._held, self._attempt = -1, 0
        self._step = run.start_step
        for _, attempt, path in reversed(_our_files(self._folder)):
            self._attempt = max(self._attempt, attempt)
            self._held = self._packer.last_seq(path)
            if self._held >= 0:
                break
        return self._held

    def write(self, batch: Sequence[Record], /, *, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        ready: list[bytes] = []
        last = self._held
        refused: dict[int, str] = {}
        for record in batch:
            if record.seq <= self._held:
                continue
            if isinstance(record, (Row, RunEnd)) and record.attempt > self._attempt:
                self._append(ready, last)
                self._start_attempt(record)
            if isinstance(record, Artifact):
                self._append(ready, last)
                try:
                    self._copy(record, deadline)
                except FileNotFoundError as error:
                    refused[record.seq] = f"artifact {record.name!r} is not on this disk any more: {error.filename}"
                    continue
            ready += self._events(record)
            last = record.seq
        self._append(ready, last)
        if refused:
            raise Rejected(refused)
        return self._held

    def close(self, end: RunEnd | None, /, *, timeout: float) -> int:
        if end is not None:
            self.write([end], timeout=timeout)
        self._let_go()
        return self._held

    # -- events

    def _events(self, record: Record) -> Iterator[bytes]:
        pack = self._packer
        if isinstance(record, Row):
            self._step = record.step
            yield pack.row(record)
        elif isinstance(record, Anomaly):
            # a tag of its own: a text of an older step must not push later ones out of the default reader
            text = words.anomaly_markdown(record)
            yield pack.text(f"anomaly/{record.id}", text, step=record.step, time=record.time, seq=record.seq)
        elif isinstance(record, Artifact):
            facts = {"kind": record.kind, "folder": str(self._root / _ARTIFACTS / record.name)}
            text = words.table({**facts, **words.flatten(record.metadata)})
            yield pack.text(f"artifact/{record.name}", text, step=record.step, time=record.time, seq=record.seq)
        elif isinstance(record, Params):
            text = words.table(words.flatten(record.values))
            yield pack.text(f"params/{record.seq}", text, step=self._step, time=record.time, seq=record.seq)
        elif isinstance(record, RunEnd):
            facts = {"status": record.status, "attempt": str(record.attempt), "error": record.error or ""}
            yield pack.text("status", words.table(facts), step=self._step, time=record.time, seq=record.seq)

    def _append(self, ready: list[bytes], last: int) -> None:
        """Make `ready` durable; `last` is then the highest seq held. Empties `ready`."""
        if not ready:
            return
        try:
            if self._file is None:
                self._file = self._new_file([])
            self._file.append(ready)
        except OSError as error:
            if self._file is not None and self._file.damaged:
                path = self._file.path
                self._let_go()
                self._held = max(self._held, self._packer.last_seq(path))
            raise self._disk_trouble(error) from error
        self._held = last
        ready.clear()

    def _start_attempt(self, record: Row | RunEnd) -> None:
        """From here on what is written belongs to the attempt of `record`: a new file, which says what it replaces."""
        first_step = self._run.start_step
        if isinstance(record, Row) and record.attempt != self._run.attempt:  # an older attempt, delivered late
            first_step = record.step
        before, self._attempt = self._attempt, record.attempt
        self._let_go()
        try:
            self._file = self._new_file([self._packer.start(first_step, record.time)])
        except OSError as error:
            self._attempt = before
            raise self._disk_trouble(error) from error

    def _new_file(self, more: list[bytes]) -> EventFile:
        there = _our_files(self._folder)
        number = there[-1][0] + 1 if there else 0
        # readers go through the files in the order of their names, so these must not depend on a clock
        name = f"events.out.tfevents.{int(self._run.created):010d}.trackbridge.{number:05d}.a{self._attempt:04d}"
        return EventFile(self._folder / name, [*self._packer.header(self._run.created), *more])

    def _disk_trouble(self, error: OSError) -> RetryLater:
        return RetryLater(_DISK_TROUBLE_SECONDS, f"cannot write below {self._root}: {error.strerror or error}")

    def _let_go(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    # -- artifacts

    def _copy(self, record: Artifact, deadline: float) -> None:
        source = Path(self._run.directory) / record.path
        try:
            folders.deliver(source, self._root / _ARTIFACTS / record.name, deadline=deadline)
        except TimeoutError as error:
            raise RetryLater(0.0, str(error)) from error
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._disk_trouble(error) from error


def _our_files(folder: Path) -> list[tuple[int, int, Path]]:
    """(number, attempt, path) of the event files of this backend in `folder`, in the order they were begun."""
    found = [(match, path) for path in folder.glob("events.out.tfevents.*") if (match := _OURS.search(path.name))]
    return sorted((int(match[1]), int(match[2]), path) for match, path in found)


class Packer:
    """Records as serialised `Event` messages.

    A row is packed by template: with a schema's tags fixed, only the float32 of each value changes, always at the same
    offset, so a row of 1,000 values costs microseconds instead of 1,000 protobuf objects.
    """

    _FLOAT: ClassVar[int] = 4

    def __init__(self, event_pb2: Any, summary_pb2: Any) -> None:
        self._event, self._session = event_pb2.Event, event_pb2.SessionLog
        self._summary = summary_pb2.Summary
        self._metadata = summary_pb2.SummaryMetadata
        self._templates: dict[tuple[str, ...], tuple[np.ndarray, np.ndarray]] = {}

    def header(self, created: float) -> list[bytes]:
        """The first events of every file: the format's version and the custom-scalars layout."""
        version = self._event(wall_time=created, file_version="brain.Event:2")
        layout = self._tensor_value(_LAYOUT_TAG, _layout(), "custom_scalars")
        return [
            version.SerializeToString(),
            self._event(wall_time=created, summary=self._summary(value=[layout])).SerializeToString(),
        ]

    def start(self, step: int, when: float) -> bytes:
        """SessionLog START: what came before with this step or a later one is replaced."""
        log = self._session(status=self._session.START)
        return bytes(self._event(wall_time=when, step=step, session_log=log).SerializeToString())

    def row(self, row: Row) -> bytes:
        template, offsets = self._template(row.schema)
        body = template.copy()
        with np.errstate(over="ignore"):
            values = row.values.astype("<f4")
        body[offsets] = values.view(np.uint8).reshape(-1, self._FLOAT)
        # one message cut in two is one message: protobuf joins the repeated values of both
        seq = self._summary(value=[self._seq_value(row.seq)])
        head = self._event(wall_time=row.time, step=row.step, summary=seq).SerializeToString()
        return bytes(head + b"\x2a" + _varint(body.size) + body.tobytes())

    def text(self, tag: str, markdown: str, *, step: int, time: float, seq: int) -> bytes:
        values = [self._seq_value(seq), self._tensor_value(tag, markdown.encode(), "text")]
        return bytes(self._event(wall_time=time, step=step, summary=self._summary(value=values)).SerializeToString())

    def last_seq(self, path: Path) -> int:
        """The journal seq of the last record in `path` that a reader can see, -1 if there is none: seqs only ascend."""
        last = deque(records(path), maxlen=1)
        values = self._event.FromString(last[0]).summary.value if last else ()
        return int(values[0].tensor.int64_val[0]) if values and values[0].tag == SEQ_TAG else -1

    def _template(self, schema: Schema) -> tuple[np.ndarray, np.ndarray]:
        found = self._templates.get(schema.names)
        if found is None:
            body, ends = bytearray(), []
            for name in schema.names:
                value = self._summary.Value(tag=name, simple_value=1.0).SerializeToString()
                body += b"\x0a" + _varint(len(value)) + value
                ends.append(len(body))
            offsets = np.array(ends, np.intp).reshape(-1, 1) - self._FLOAT + np.arange(self._FLOAT)
            found = self._templates[schema.names] = np.frombuffer(bytes(body), np.uint8), offsets
        return found

    def _seq_value(self, seq: int) -> Any:
        value = self._tensor_value(SEQ_TAG, b"", "trackbridge")
        value.tensor.dtype = _DT_INT64
        del value.tensor.string_val[:]
        value.tensor.int64_val.append(seq)
        return value

    def _tensor_value(self, tag: str, content: bytes, plugin: str) -> Any:
        value = self._summary.Value(tag=tag)
        value.metadata.plugin_data.plugin_name = plugin
        value.tensor.dtype = _DT_STRING
        value.tensor.tensor_shape.SetInParent()  # a scalar
        value.tensor.string_val.append(content)
        return value


def _layout() -> bytes:
    from tensorboard.plugins.custom_scalar import layout_pb2 as pb

    def chart(title: str, tags: list[str]) -> Any:
        return pb.Chart(title=title, multiline=pb.MultilineChartContent(tag=tags))

    categories = [
        pb.Category(title=category, chart=[chart(title, tags) for title, tags in charts.items()])
        for category, charts in _LAYOUT.items()
    ]
    return bytes(pb.Layout(category=categories).SerializeToString())


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append((number & 0x7F) | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def fetch_capsule(logdir: str, step: int | None, dest: Path) -> Path:
    """Copy the capsule of `step` (None: the newest) found under `logdir` into the folder `dest`; returns the copy.

    `logdir` is a run's folder, a logdir with runs in it, a run directory, or a folder of run directories.
    """
    root = Path(logdir).expanduser()
    if not root.is_dir():
        raise ReferenceNotFoundError(f"there is no folder {root}")
    found = held.choose(list(_held(root)), step, str(root))
    source = Path(found.where)
    target = dest / source.name
    copy = held.staging(target)
    folders.copy(source, copy)
    return held.place(copy, target)


def _held(root: Path) -> Iterator[held.HeldCapsule]:
    for prefix in ("", "tensorboard/", "*/", "*/tensorboard/"):
        for manifest in root.glob(f"{prefix}{_ARTIFACTS}/*/{held.MANIFEST}"):
            folder = manifest.parent
            if folder.name.startswith("."):
                continue
            capsule = held.read_manifest(manifest, run=str(folder.parent.parent), where=str(folder))
            if capsule is not None:
                yield capsule
