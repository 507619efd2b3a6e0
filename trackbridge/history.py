"""Reading a run back: `load` for one, `runs` for a list of them. Never writes; a run may be read while it is recorded."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from trackbridge.errors import ReferenceNotFoundError, TrackbridgeError, UsageError, nearest
from trackbridge.histograms import merge_steps
from trackbridge.journal import Damage, JournalReader, last_seq
from trackbridge.liveness import presumed_dead
from trackbridge.names import is_wide
from trackbridge.records import Anomaly, Artifact, FloatArray, Histograms, Params, Record, Row, RunEnd, RunInfo, Schema
from trackbridge.rundir import RunDirectory, RunFile

if TYPE_CHECKING:
    import pandas as pd

Status: TypeAlias = Literal["running", "finished", "failed", "killed"]
Steps: TypeAlias = npt.NDArray[np.int64]

_BATCH = 4096  # rows turned into one matrix: bounds the memory that single row objects take
_MOST_VALUES = 32_000_000  # held in memory for later questions: 256 MB
_MOST_SCHEMAS = 4096  # sets of names with a matrix of their own


def load(path: str | Path) -> RunRecord:
    """The record of a run: `path` is a run directory, or a directory of runs that holds exactly one.

    A damaged journal gives what is good; a warning (once) and `RunRecord.damage` say what was lost. Raises
    `ReferenceNotFoundError` when there is no run, or more than one.
    """
    directory = find(path)
    record = RunRecord(directory)
    if record.damage:
        warnings.warn(str(record.damage), RuntimeWarning, stacklevel=2)
    return record


def find(path: str | Path) -> RunDirectory:
    """The run directory that `path` means (see `load`)."""
    directory = RunDirectory(path)
    if directory.file.exists():
        return directory
    if not directory.path.is_dir():
        wrong = "is a file" if directory.path.exists() else "does not exist"
        raise ReferenceNotFoundError(f"{directory.path} {wrong}; give a run directory, such as runs/<run-id>")
    inside = sorted(child.parent.name for child in directory.path.glob("*/run.json"))
    if len(inside) == 1:
        return RunDirectory(directory.path / inside[0])
    if not inside:
        raise ReferenceNotFoundError(f"{directory.path} is not a run directory and holds none: there is no run.json")
    more = f" and {len(inside) - 10} more" if len(inside) > 10 else ""
    raise ReferenceNotFoundError(f"{directory.path} holds {len(inside)} runs, name one of: {', '.join(inside[:10])}{more}")


def check_end(directory: RunDirectory, reader: JournalReader, *, running: bool) -> None:
    """Add to the `damage` of the leader's journal, which `reader` has read, what its end lacks: no later record tells of that,
    but trackers' cursors may, and bytes that no entry was made of, unless the run goes on."""
    gone = directory.delivered() - reader.position
    if gone > 0:
        reader.damage.records_lost += gone
        reader.damage.note("the end of the journal, which a tracker has")
    if reader.unread_bytes and not running:
        reader.damage.bytes_skipped += reader.unread_bytes
        reader.damage.note("the end of the newest segment")


class RunRecord:
    """What the leader's journal says about a run, as it was when this was made. Made by `load`.

    Attributes: path; anomalies (newest version of each, by step), artifacts, params (as logged), damage (false if none).
    """

    def __init__(self, directory: RunDirectory) -> None:
        self.path = directory.path
        self._directory = directory
        self._file = directory.read()
        self._columns = _Columns(lambda: (row for row in self.rows(_leader(directory)) if row.seq <= reader.position))
        self._series: dict[str, tuple[Steps, FloatArray]] = {}
        self._end: RunEnd | None = None
        self._newest = 0.0
        self.artifacts: list[Artifact] = []
        self.params: list[Params] = []
        latest: dict[str, Anomaly] = {}
        reader = JournalReader(directory.rows(_leader(directory)))
        while records := reader.read(limit=_BATCH):
            for record in records:
                self._newest = max(self._newest, getattr(record, "time", 0.0))
                match record:
                    case Row():
                        self._columns.add(record)
                    case Anomaly():
                        latest[record.id] = record
                    case Artifact():
                        self.artifacts.append(record)
                    case Params():
                        self.params.append(record)
                    case RunEnd():
                        self._end = record
        self.anomalies: list[Anomaly] = sorted(latest.values(), key=lambda anomaly: (anomaly.step, anomaly.id))
        self.damage: Damage = reader.damage
        check_end(directory, reader, running=self.status == "running")

    def __repr__(self) -> str:
        return f"<RunRecord {self.info.run_id!r}: {self.status}, {len(self._columns)} rows, {len(self.names)} series>"

    @cached_property
    def status(self) -> Status:
        return _status(self._file, self._end, self._newest)

    @property
    def error(self) -> str | None:
        """One line, when `status` is "failed"."""
        return self._end.error if self._end is not None and self.status == "failed" else None

    @cached_property
    def info(self) -> RunInfo:
        return self._directory.info()

    @property
    def config(self) -> dict[str, Any]:
        """The user's own hyperparameters."""
        return self._file.config

    @property
    def settings(self) -> dict[str, Any]:
        """trackbridge's settings for this run."""
        return self._file.settings

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """Git, packages, hardware and flags; empty when they were not recorded."""
        try:
            found = json.loads(self._directory.provenance.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def names(self) -> list[str]:
        """Every series, in the order in which they first appeared."""
        return self._columns.names()

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(self.names)

    def series(self, name: str) -> tuple[Steps, FloatArray]:
        """(steps int64, values float64), both of shape (n,), steps ascending. Where attempts or `run.log` calls wrote a step
        twice, the newest attempt's last value. Raises `UsageError` for an unknown name."""
        if name not in self._series:
            if name not in self._known:
                raise UsageError(f"no series {name!r} in {self.path.name}{nearest(name, self.names)}")
            self._fetch([name])
        return self._series[name]

    def _fetch(self, names: Iterable[str]) -> None:
        """Have the series ready, in as few passes over the journal as can be."""
        self._series |= self._columns.series([n for n in names if n in self._known and n not in self._series])

    def many(self, names: Iterable[str]) -> Iterator[tuple[str, tuple[Steps, FloatArray]]]:
        """Each of `names` that there is, with its series, in as few passes over the journal as memory allows; none is kept."""
        known = [name for name in dict.fromkeys(names) if name in self._known]
        at_once = max(1, _MOST_VALUES // max(1, len(self._columns)))
        for start in range(0, len(known), at_once):
            yield from self._columns.series(known[start : start + at_once]).items()

    def frame(self, names: Iterable[str] | None = None) -> pd.DataFrame:
        """A pandas frame indexed by step, one float64 column per series (all by default); NaN where a step has no value."""
        import pandas as pd

        chosen = self.names if names is None else [names] if isinstance(names, str) else list(names)
        self._fetch(chosen)
        found = {name: self.series(name) for name in chosen}
        steps = _union([pair[0] for pair in found.values()])
        columns = {name: _aligned(steps, *pair) for name, pair in found.items()}
        frame: pd.DataFrame = pd.DataFrame(columns, index=pd.Index(steps, name="step"))
        return frame

    @cached_property
    def layers(self) -> pd.DataFrame:
        """A row per step and layer: step, family ("layer", "act", ...), layer, and a column per statistic. NaN: no value."""
        import pandas as pd

        families: dict[tuple[str, str], dict[str, str]] = {}
        for name in self.names:
            if is_wide(name):
                family, _, rest = name.partition("/")
                layer, _, statistic = rest.rpartition("/")
                families.setdefault((family, layer), {})[statistic] = name
        self._fetch(name for statistics in families.values() for name in statistics.values())
        parts = []
        for (family, layer), statistics in families.items():
            part = self.frame(statistics.values())
            part.columns = pd.Index(statistics)
            part = part.reset_index()
            part.insert(1, "family", family)
            part.insert(2, "layer", layer)
            parts.append(part)
        empty = pd.DataFrame({"step": np.array([], np.int64), "family": [], "layer": []})
        both = pd.concat(parts, ignore_index=True) if parts else empty
        table: pd.DataFrame = both.sort_values("step", kind="stable", ignore_index=True)
        return table

    @cached_property
    def contexts_damage(self) -> Damage:
        """What cannot be read of the step contexts of all ranks, which replays need; false if nothing. Reads them through:
        up to `recorder.context_bytes` each."""
        found = [_damage(self._directory.contexts(rank)) for rank in self._directory.ranks()]
        return max(found, key=lambda damage: (damage.records_lost, damage.bytes_skipped), default=Damage(self.path))

    def histograms(self, rank: int | None = None, steps: Container[int] | None = None) -> list[Histograms]:
        """Histograms of weights and gradients, by step; of a step that was recorded twice the newest attempt's.

        The ranks whose journals are here are merged where every one of them has the step (`trackbridge.histograms.merged`);
        `rank` asks for one rank's own, `steps` for these only. Read anew at each call.
        """
        ranks = self._directory.ranks() if rank is None else [rank]
        found = [read_histograms(self._directory, each, steps) for each in ranks]
        return merge_steps(found, self.info.world_size if rank is None else 0) if found else []

    def rows(self, rank: int = 0) -> Iterator[Row]:
        """The rows of one rank's journal, read anew, in the order in which they were written (every attempt)."""
        if rank not in self._directory.ranks():
            raise UsageError(f"rank {rank} has no journal in {self.path}; there: {self._directory.ranks()}")
        reader = JournalReader(self._directory.rows(rank), kinds={Row})
        while records := reader.read(limit=_BATCH):
            yield from (record for record in records if isinstance(record, Row))


def _damage(journal: Path) -> Damage:
    reader = JournalReader(journal)
    while reader.read(limit=64):
        pass
    return reader.damage


def own_rows(directory: RunDirectory, rank: int, attempt: int, steps: range) -> list[Row]:
    """The rows of a rank's own values as they were written, where its journal has those of all ranks together: the leader's, as
    far back as its ring of step contexts goes. Empty for other ranks: their journal has their own."""
    reader = JournalReader(directory.contexts(rank), kinds={Row}, steps=steps)
    return [row for row in reader.read() if isinstance(row, Row) and row.attempt == attempt]


def read_histograms(directory: RunDirectory, rank: int, steps: Container[int] | None = None) -> list[Histograms]:
    """One rank's histograms, by step, the newest attempt's where a step was recorded twice."""
    reader = JournalReader(directory.rows(rank), kinds={Histograms}, steps=steps)
    found: dict[int, Histograms] = {}
    while records := reader.read(limit=256):
        for record in records:
            if isinstance(record, Histograms) and (record.step not in found or record.attempt >= found[record.step].attempt):
                found[record.step] = record
    return [found[step] for step in sorted(found)]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One line of `trackbridge runs`. `step` is the newest optimizer step, -1 before the first; `loss` its loss."""

    path: Path
    run_id: str
    name: str
    project: str
    created: float
    attempts: int
    status: Status
    step: int
    loss: float | None
    anomalies: int


def runs(directory: str | Path) -> list[RunSummary]:
    """A summary of every run under `directory` (or of the one run that it is), oldest first. Reads only the last values."""
    root = Path(directory)
    if not root.is_dir():
        raise ReferenceNotFoundError(f"{root} does not exist; give the directory that holds your runs")
    paths = [root] if (root / "run.json").exists() else [file.parent for file in root.glob("*/run.json")]
    found = []
    for path in paths:
        try:
            found.append(_summary(RunDirectory(path)))
        except TrackbridgeError as error:
            if path == root:
                raise
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)  # the others are still there to list
    return sorted(found, key=lambda summary: summary.created)


def _summary(directory: RunDirectory) -> RunSummary:
    file = directory.read()
    journal = directory.rows(_leader(directory))
    reader = JournalReader(journal, kinds={Anomaly, RunEnd})
    anomalies: set[str] = set()
    end: RunEnd | None = None
    newest = 0.0
    for record in reader.read():
        if isinstance(record, Anomaly):
            anomalies.add(record.id)
        elif isinstance(record, RunEnd):
            end = record
    step, loss = -1, None
    for record in _last(journal, reader.position):
        newest = max(newest, getattr(record, "time", 0.0))
        if isinstance(record, Row) and record.kind == "step":
            step = record.step
            loss = record.get("train/loss") if "train/loss" in record.schema.names else loss
    return RunSummary(
        path=directory.path,
        run_id=file.run_id,
        name=file.name,
        project=file.project,
        created=file.created,
        attempts=len(file.attempts),
        status=_status(file, end, newest),
        step=step,
        loss=loss,
        anomalies=len(anomalies),
    )


def newest_time(directory: RunDirectory) -> float:
    """When the leader's newest record was made, in epoch seconds; 0 when there is none."""
    journal = directory.rows(_leader(directory))
    return max((getattr(record, "time", 0.0) for record in _last(journal, last_seq(journal))), default=0.0)


def _last(journal: Path, position: int) -> list[Record]:
    """The newest records, going back until a step is among them."""
    records: list[Record] = []
    span = 64
    while position >= 0:
        records = JournalReader(journal, position - span).read()
        if span > position or any(isinstance(record, Row) and record.kind == "step" for record in records):
            break
        span *= 8
    return records


def _status(file: RunFile, end: RunEnd | None, newest_record: float) -> Status:
    """Of the newest attempt: how it ended, else whether anyone still writes."""
    if not file.attempts:
        return end.status if end is not None else "killed"
    attempt = file.attempts[-1]
    if end is not None and end.attempt >= attempt.number:
        return end.status
    return "killed" if presumed_dead(attempt, newest_record, time.time()) else "running"


def _leader(directory: RunDirectory) -> int:
    """Rank 0, or the lowest rank that was copied here."""
    return next(iter(directory.ranks()), 0)


class _Columns:
    """Rows as matrices, one list of them per set of names. Beyond `_MOST_VALUES` only the names are kept, and the series asked
    for are read from the journal anew: a run of a million steps with 500 series is 4 GB."""

    def __init__(self, again: Callable[[], Iterator[Row]]) -> None:
        self._again = again
        self._count = 0
        self._names: dict[str, None] = {}
        self._schemas: dict[int, Schema] = {}  # by id, kept alive
        self._values = 0
        self._blocks: _Blocks | None = _Blocks(None)

    def __len__(self) -> int:
        return self._count

    def add(self, row: Row) -> None:
        self._count += 1
        self._values += len(row.values)
        if id(row.schema) not in self._schemas:
            if len(self._schemas) >= _MOST_SCHEMAS:
                self._schemas.clear()
            self._schemas[id(row.schema)] = row.schema
            self._names.update(dict.fromkeys(row.schema.names))
        if self._values > _MOST_VALUES:
            self._blocks = None
        if self._blocks is not None:
            self._blocks.add(row)

    def names(self) -> list[str]:
        return list(self._names)

    def series(self, names: Iterable[str]) -> dict[str, tuple[Steps, FloatArray]]:
        """Those of `names`, all of them in one pass."""
        wanted = list(names)
        blocks = self._blocks
        if blocks is None and wanted:
            blocks = _Blocks(frozenset(wanted))
            for row in self._again():
                blocks.add(row)
        return {name: blocks.series(name) for name in wanted} if blocks is not None else {}


class _Blocks:
    """The values of rows; only those of `wanted`, if given."""

    def __init__(self, wanted: frozenset[str] | None) -> None:
        self._wanted = wanted
        self._blocks: dict[int, _Block] = {}  # by id of the schema, which the block keeps alive
        self._loose: dict[str, list[tuple[int, int, int, float]]] = {}  # of rows whose set of names hardly anyone shares

    def add(self, row: Row) -> None:
        block = self._blocks.get(id(row.schema))
        if block is None:
            if len(self._blocks) >= _MOST_SCHEMAS:
                self._set_loose(row)
                return
            block = self._blocks[id(row.schema)] = _Block(row.schema, self._wanted)
        block.add(row)

    def _set_loose(self, row: Row) -> None:
        for name, value in row.items():
            if self._wanted is None or name in self._wanted:
                self._loose.setdefault(name, []).append((row.step, row.attempt, row.seq, value))

    def series(self, name: str) -> tuple[Steps, FloatArray]:
        parts = [column for block in self._blocks.values() if (column := block.column(name)) is not None]
        if name in self._loose:
            loose = self._loose[name]
            parts.append((np.array([point[:3] for point in loose], np.int64), np.array([point[3] for point in loose])))
        keys = np.concatenate([keys for keys, _ in parts])
        values = np.concatenate([values for _, values in parts])
        order = np.lexsort((keys[:, 2], keys[:, 1], keys[:, 0]))  # by step, then attempt, then seq
        steps = keys[order, 0]
        last = np.append(steps[1:] != steps[:-1], True)
        return steps[last], values[order][last]


class _Block:
    """The rows of one schema: `keys` (step, attempt, seq) and values, in chunks of `_BATCH` rows."""

    def __init__(self, schema: Schema, wanted: frozenset[str] | None) -> None:
        self._schema = schema
        chosen = [at for at, name in enumerate(schema.names) if wanted is None or name in wanted]
        self._places = {schema.names[at]: place for place, at in enumerate(chosen)}
        self._chosen = np.array(chosen, np.intp)
        self._rows: list[Row] = []
        self._keys: list[Steps] = []
        self._values: list[FloatArray] = []

    def add(self, row: Row) -> None:
        if self._places:
            self._rows.append(row)
            if len(self._rows) >= _BATCH:
                self._pack()

    def column(self, name: str) -> tuple[Steps, FloatArray] | None:
        self._pack()
        at = self._places.get(name)
        if at is None or not self._keys:
            return None
        return np.concatenate(self._keys), np.concatenate([values[:, at] for values in self._values])

    def _pack(self) -> None:
        if self._rows:
            self._keys.append(np.array([(row.step, row.attempt, row.seq) for row in self._rows], np.int64))
            self._values.append(np.stack([row.values[self._chosen] for row in self._rows]))
            self._rows = []


def _union(steps: list[Steps]) -> Steps:
    """All steps, ascending. Most series have the same ones, so equal arrays are merged once."""
    distinct: list[Steps] = []
    for array in steps:
        if not any(array is other or np.array_equal(array, other) for other in distinct[-3:]):
            distinct.append(array)
    return np.unique(np.concatenate(distinct)) if distinct else np.array([], np.int64)


def _aligned(wanted: Steps, steps: Steps, values: FloatArray) -> FloatArray:
    if len(wanted) == len(steps):
        return values
    column = np.full(len(wanted), np.nan)
    column[np.searchsorted(wanted, steps)] = values
    return column
