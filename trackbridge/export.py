"""A run's rows as a file for other tools: parquet, CSV or JSON lines. Streams: the memory it takes does not grow with the run.

One line per row of the journal, every attempt, in the order in which they were written: ``seq``, ``attempt``, ``kind``
("step" or "log"), ``step``, ``time``, then a column per series; a series that is called like one of these five is the column
``series/<name>`` (JSON lines keep series apart, under ``values``). A series that has no value at a step is null (parquet),
empty (CSV) or absent (JSON lines); NaN and infinities are values: as such in parquet, the words NaN, Infinity, -Infinity
elsewhere.
"""

from __future__ import annotations

import csv
import fnmatch
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol, TypeAlias

import numpy as np

from trackbridge.errors import TrackbridgeError, UsageError, nearest
from trackbridge.history import check_end, find, runs
from trackbridge.journal import Damage, JournalReader
from trackbridge.records import Row, Schema
from trackbridge.rundir import RunDirectory, dumps

Format: TypeAlias = Literal["parquet", "csv", "jsonl"]
FORMATS: tuple[Format, ...] = ("parquet", "csv", "jsonl")

_READ = 1024  # rows at a time
_GROUP_VALUES = 2_000_000  # of a parquet row group: 16 MB
_STAMPS = ("seq", "attempt", "kind", "step", "time")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: a file, its rows and its series. `damage` says what the journal had lost."""

    path: Path
    rows: int
    series: tuple[str, ...]
    damage: Damage


def export(
    run: str | Path,
    to: Format,
    out: str | Path | None = None,
    *,
    names: Sequence[str] = (),
    rank: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write the rows of `run` to `out` (default: ``<run id>.<to>`` here). `names` are series or patterns such as ``grad/*``.

    `on_progress(done, total)` counts rows. The file appears when it is whole. Raises `UsageError` for an unknown series or
    rank, or a file that exists, `ReferenceNotFoundError` if there is no run.
    """
    directory = find(run)
    ranks = directory.ranks()
    chosen_rank = next(iter(ranks), 0) if rank is None else rank
    if rank is not None and rank not in ranks:
        raise UsageError(f"rank {rank} has no journal in {directory.path}; there: {ranks}")
    path = Path(f"{directory.path.name}.{to}" if out is None else out)
    if path.exists():
        raise UsageError(f"{path} exists: name another file with --out")
    journal = directory.rows(chosen_rank)
    total, there, surveyed = _survey(journal)
    if chosen_rank == next(iter(ranks), 0):
        check_end(directory, surveyed, running=_running(directory))
    series = _chosen(there, names)
    writers: dict[Format, Callable[[Path, tuple[str, ...]], Any]] = {"parquet": _parquet, "csv": _csv, "jsonl": _jsonl}
    reader = JournalReader(journal, kinds={Row})
    done = 0
    part = path.with_name(f".{path.name}.part")
    try:
        with writers[to](part, series) as writer:
            places = _Places(series)
            while done < total and (rows := [r for r in reader.read(limit=_READ) if isinstance(r, Row)]):
                rows = rows[: total - done]  # what a live run writes meanwhile is for the next time
                writer.add([(row, *places.of(row.schema)) for row in rows])
                done += len(rows)
                if on_progress is not None:
                    on_progress(done, total)
        part.rename(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)
    return Exported(path, done, series, surveyed.damage)


def _running(directory: RunDirectory) -> bool:
    """Rows can be exported without a run.json that can be read."""
    try:
        return runs(directory.path)[0].status == "running"
    except TrackbridgeError:
        return False


def _survey(journal: Path) -> tuple[int, dict[str, None], JournalReader]:
    """(how many rows, every series in the order of its first appearance, the reader that has read them all)."""
    reader = JournalReader(journal, kinds={Row})
    count = 0
    names: dict[str, None] = {}
    seen: Schema | None = None
    while rows := reader.read(limit=_READ):
        count += len(rows)
        for row in rows:
            assert isinstance(row, Row)
            if row.schema is not seen:
                seen = row.schema
                names.update(dict.fromkeys(seen.names))
    return count, names, reader


def _chosen(there: dict[str, None], wanted: Sequence[str]) -> tuple[str, ...]:
    if not wanted:
        return tuple(there)
    for pattern in wanted:
        if not any(fnmatch.fnmatchcase(name, pattern) or name == pattern for name in there):
            some = ", ".join(list(there)[:20]) + (f" and {len(there) - 20} more" if len(there) > 20 else "")
            raise UsageError(f"no series {pattern!r}{nearest(pattern, there)}; there are: {some}")
    return tuple(name for name in there if any(fnmatch.fnmatchcase(name, p) or name == p for p in wanted))


Placed: TypeAlias = "tuple[Row, np.ndarray[Any, Any], np.ndarray[Any, Any]]"
"""A row, where its wanted values are in it, and the columns they belong to."""


class _Places:
    """Which values of a row go to which column, remembered by schema."""

    def __init__(self, series: Sequence[str]) -> None:
        self._columns = {name: column for column, name in enumerate(series)}
        self._known: dict[int, tuple[Schema, np.ndarray[Any, Any], np.ndarray[Any, Any]]] = {}

    def of(self, schema: Schema) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        known = self._known.get(id(schema))
        if known is None:
            if len(self._known) >= 1024:
                self._known.clear()
            at = np.array([i for i, name in enumerate(schema.names) if name in self._columns], np.intp)
            columns = np.array([self._columns[schema.names[i]] for i in at.tolist()], np.intp)
            known = self._known[id(schema)] = (schema, at, columns)
        return known[1], known[2]


def _columns(series: Sequence[str]) -> list[str]:
    """A column's name for each series: its own, unless that is taken, which readers of tables do not forgive."""
    taken = {*_STAMPS, *series}
    columns = []
    for name in series:
        column = name
        while name in _STAMPS and column in taken:
            column = f"series/{column}"
        taken.add(column)
        columns.append(column)
    return columns


class _Writer(Protocol):
    def add(self, rows: Sequence[Placed]) -> None: ...


@contextmanager
def _parquet(path: Path, series: tuple[str, ...]) -> Iterator[_Writer]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    stamps = [("seq", pa.int64()), ("attempt", pa.int32()), ("kind", pa.string()), ("step", pa.int64()), ("time", pa.float64())]
    schema = pa.schema([*stamps, *((name, pa.float64()) for name in _columns(series))])

    class Parquet:
        def __init__(self, file: Any) -> None:
            self._file = file
            self._waiting: list[Placed] = []

        def add(self, rows: Sequence[Placed]) -> None:
            self._waiting += rows
            if len(self._waiting) * (len(series) + len(stamps)) >= _GROUP_VALUES:
                self.flush()

        def flush(self) -> None:
            rows, self._waiting = self._waiting, []
            values = np.zeros((len(series), len(rows)))
            absent = np.ones((len(series), len(rows)), bool)
            for number, (row, at, columns) in enumerate(rows):
                values[columns, number] = row.values[at]
                absent[columns, number] = False
            heads = [
                pa.array([getattr(row, name) for row, _, _ in rows], kind) for name, kind in stamps
            ]  # fmt: skip
            arrays = [pa.array(values[i], mask=absent[i]) for i in range(len(series))]
            if rows:
                self._file.write_table(pa.Table.from_arrays([*heads, *arrays], schema=schema))

    with pq.ParquetWriter(path, schema, compression="zstd") as file:
        writer = Parquet(file)
        yield writer
        writer.flush()


@contextmanager
def _csv(path: Path, series: tuple[str, ...]) -> Iterator[_Writer]:
    with path.open("w", encoding="utf-8", newline="") as file:
        yield _Csv(file, series)


class _Csv:
    def __init__(self, file: IO[str], series: tuple[str, ...]) -> None:
        self._out = csv.writer(file)
        self._width = len(series)
        self._out.writerow([*_STAMPS, *_columns(series)])

    def add(self, rows: Sequence[Placed]) -> None:
        for row, at, columns in rows:
            cells = [""] * self._width
            for column, value in zip(columns.tolist(), row.values[at].tolist(), strict=True):
                cells[column] = repr(value) if math.isfinite(value) else _word(value)
            self._out.writerow([row.seq, row.attempt, row.kind, row.step, repr(row.time), *cells])


@contextmanager
def _jsonl(path: Path, series: tuple[str, ...]) -> Iterator[_Writer]:
    with path.open("w", encoding="utf-8") as file:
        yield _JsonLines(file, series)


class _JsonLines:
    def __init__(self, file: IO[str], series: tuple[str, ...]) -> None:
        self._file = file
        self._series = series

    def add(self, rows: Sequence[Placed]) -> None:
        for row, at, columns in rows:
            values = {self._series[c]: v for c, v in zip(columns.tolist(), row.values[at].tolist(), strict=True)}
            head = {name: getattr(row, name) for name in _STAMPS}
            self._file.write(dumps({**head, "values": values}) + "\n")


def _word(value: float) -> str:
    return "NaN" if value != value else ("Infinity" if value > 0 else "-Infinity")
