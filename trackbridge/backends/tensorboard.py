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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator

from trackbridge import plugins, untrusted
from trackbridge.backends import exhibits, folders, held, words
from trackbridge.backends.base import Backend, BackendConfig, to_a_new_run
from trackbridge.backends.eventfile import EventFile
from trackbridge.backends.eventpack import Packer
from trackbridge.errors import NO_PLACE, ConfigError, ReferenceNotFoundError, Rejected, RetryLater, TrackbridgeError
from trackbridge.records import Anomaly, Artifact, Histograms, Params, Record, Row, RunEnd, RunInfo
from trackbridge.rundir import RunDirectory

_OURS = re.compile(r"events\.out\.tfevents\.(\d+)\.trackbridge\.(\d{5,})\.a(\d{4,})$")
_EVENTS = "events.out.tfevents.*"
_ARTIFACTS = "artifacts"
_STATUS_TAG = "status"
_DISK_TROUBLE_SECONDS = 10.0


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

    @property
    def keeps(self) -> bool:
        return True

    def build(self) -> Backend:
        return TensorboardBackend(self)

    def root(self, run: RunInfo) -> Path:
        """The folder of `run`: what holds its event files and artifacts. Where another recording of the same id has taken it
        (the run's directory was deleted, or is on another machine), one with the time beside it: neither may be taken for the
        other."""
        if self.logdir is None:
            return Path(run.directory) / "tensorboard"
        created = f"{int(run.created):010d}"
        there = self.logdir / run.run_id
        found = [
            match for path in (*there.glob(_EVENTS), *there.glob(f"rank-*/{_EVENTS}")) if (match := _OURS.search(path.name))
        ]
        taken = bool(found) and all(match[1] != created for match in found)
        return self.logdir / f"{run.run_id}-{created}" if taken else there

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
        self._run, self._root = run, self._config.root(run)
        self._folder = self._root if run.rank == 0 else self._root / f"rank-{run.rank:04d}"
        self._packer = Packer()
        self._series: set[str] = set()
        self._let_go()
        self._held, self._attempt, self._ended = -1, 0, ""
        self._step = run.start_step
        for _, attempt, path in reversed(_our_files(self._folder)):
            self._attempt = max(self._attempt, attempt)
            self._held, tag, text = self._packer.last(path)
            if self._held >= 0:
                self._ended = text if tag == _STATUS_TAG else ""
                break
        return self._held

    def write(self, batch: Sequence[Record], /, *, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        ready: list[bytes] = []
        last = self._held
        refused: dict[int, str] = {}
        for schema in {id(record.schema): record.schema for record in batch if isinstance(record, Row)}.values():
            self._series.update(schema.names)  # before a file begins: its layout goes by them
        for record in batch:
            if record.seq <= self._held:
                continue
            if isinstance(record, RunEnd):
                self._append(ready, last)
                self._end(record)
                last = self._held
                continue
            if isinstance(record, Row) and record.attempt > self._attempt:
                self._append(ready, last)
                self._start_attempt(record)
            if isinstance(record, Artifact):
                self._append(ready, last)
                try:
                    self._copy(record, deadline)
                except FileNotFoundError as error:
                    refused[record.seq] = f"artifact {record.name!r} is not on this disk any more: {error.filename}"
                    continue
            try:
                ready += self._events(record)
                last = record.seq
            except ValueError as error:  # a step that does not fit 64 bits
                refused[record.seq] = str(error)
        self._append(ready, last)
        if refused:
            raise Rejected(refused)
        return self._held

    def close(self, end: RunEnd | None, /, *, timeout: float) -> int:
        if end is not None:
            self._end(end)
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
            about = words.table({**facts, **words.flatten(record.metadata)})
            texts, images = exhibits.of(self._root / _ARTIFACTS / record.name)
            texts = {f"artifact/{record.name}": about, **{f"{tag}/{record.name}": text for tag, text in texts.items()}}
            yield pack.shown(texts, images, step=record.step, time=record.time, seq=record.seq)
        elif isinstance(record, Histograms):
            yield pack.histograms(record)
        elif isinstance(record, Params):
            text = words.table(words.flatten(record.values))
            yield pack.text(f"params/{record.seq}", text, step=self._step, time=record.time, seq=record.seq)

    def _end(self, end: RunEnd) -> None:
        """Tell how the run ended, unless that is the last thing that was told. What was sealed after the end may be held
        already, so the event carries the highest seq there is."""
        text = words.table({"status": end.status, "attempt": str(end.attempt), "error": end.error or ""})
        if text == self._ended:
            self._held = max(self._held, end.seq)
            return
        if end.attempt > self._attempt:
            self._start_attempt(end)
        seq = max(end.seq, self._held)
        ready = [self._packer.text(_STATUS_TAG, text, step=self._step, time=end.time, seq=seq)]
        _, images = exhibits.of(RunDirectory(self._run.directory).views)
        if images:  # before the status, which is looked for at the end
            ready.insert(0, self._packer.shown({}, images, step=self._step, time=end.time, seq=seq))
        self._append(ready, seq)
        self._ended = text

    def _append(self, ready: list[bytes], last: int) -> None:
        """Make `ready` durable; `last` is then the highest seq held. Empties `ready`."""
        if not ready:
            return
        if self._file is not None and not self._file.there():  # what is written to it now is nowhere
            path = self._file.path
            self._let_go()
            raise TrackbridgeError(f"the event file {path} was removed; {to_a_new_run(self._run, self._config.kind)}")
        try:
            if self._file is None:
                self._file = self._new_file([])
            self._file.append(ready)
        except OSError as error:
            if self._file is not None and self._file.damaged:
                path = self._file.path
                self._let_go()
                self._held = max(self._held, self._packer.last(path)[0])
            raise self._disk_trouble(error) from error
        self._held, self._ended = last, ""
        ready.clear()

    def _start_attempt(self, record: Row | RunEnd) -> None:
        """From here on what is written belongs to the attempt of `record`: a new file, which says what it replaces."""
        first_step = self._run.start_step
        if isinstance(record, Row):  # an attempt may begin before `start_step`: from an older checkpoint, or delivered late
            first_step = record.step if record.attempt != self._run.attempt else min(first_step, record.step)
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
        return EventFile(self._folder / name, [*self._packer.header(self._run.created, self._series), *more])

    def _disk_trouble(self, error: OSError) -> RetryLater | TrackbridgeError:
        said = f"cannot write below {self._root}: {error.strerror or error}"
        return TrackbridgeError(said) if error.errno in NO_PLACE else RetryLater(_DISK_TROUBLE_SECONDS, said)

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
    found = [(match, path) for path in folder.glob(_EVENTS) if (match := _OURS.search(path.name))]
    return sorted((int(match[2]), int(match[3]), path) for match, path in found)


def fetch_capsule(logdir: str, step: int | None, dest: Path, *, max_bytes: int = untrusted.TOTAL_BYTES) -> Path:
    """Copy the capsule of `step` (None: the newest) found under `logdir` into the folder `dest`; returns the copy. What an
    interrupted try has copied is not copied again.

    `logdir` is a run's folder, a logdir with runs in it, a run directory, or a folder of run directories.
    """
    root = Path(logdir).expanduser()
    if not root.is_dir():
        raise ReferenceNotFoundError(f"there is no folder {root}")
    found = held.choose(list(_held(root)), step, str(root))
    source = Path(found.where)
    return held.bring(folders.plain(source), dest / source.name, str(source), max_bytes=max_bytes)


def _held(root: Path) -> Iterator[held.HeldCapsule]:
    for prefix in ("", "tensorboard/", "*/", "*/tensorboard/"):
        for manifest in root.glob(f"{prefix}{_ARTIFACTS}/*/{held.MANIFEST}"):
            folder = manifest.parent
            if folder.name.startswith("."):
                continue
            capsule = held.read_manifest(manifest, run=str(folder.parent.parent), where=str(folder))
            if capsule is not None:
                yield capsule
