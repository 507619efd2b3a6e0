"""Thinned stretches of a journal: of each series its smallest, largest and last value, and its first non-finite one.

Every value that is kept is a real one at its own step: a thinned stretch reads as rows that have fewer series, so whoever reads
rows needs to know nothing of it, and no extremum is lost. What is absent was left out; nothing is averaged.

Payload of an entry of `KIND` (little-endian; its `seq` and `step` are those of the last row of the stretch)::

    8 bytes   which schema: the names of the series
    uint32    R, rows that have something left
    uint32    P, values
    R times   uint64 seq, int64 step, float64 time, uint32 attempt, uint32 kind (0 step, 1 log)
    P times   uint32 row;  P times uint32 series;  P times float64 value
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trackbridge.journal import codec, segments
from trackbridge.journal.scan import Walk
from trackbridge.journal.segments import Entry, Segment
from trackbridge.records import Histograms, Record, Row, Schema

KIND = 9
"""The entry kind of a thinned stretch."""

_HEAD = struct.Struct("<8sII")
_ROWS = np.dtype([("seq", "<u8"), ("step", "<i8"), ("time", "<f8"), ("attempt", "<u4"), ("kind", "<u4")])
_KINDS = ("step", "log")


def digest(payload: bytes) -> bytes:
    """Which schema the stretch in `payload` needs."""
    return payload[:8]


def rows(payload: bytes, schema: Schema) -> list[Row]:
    """The rows of a stretch, each with the series that are left. Raises one of `codec.MALFORMED`."""
    heads, row, series, values = _points(payload)
    if len(row) and (int(row.max()) >= len(heads) or int(series.max()) >= len(schema.names)):
        raise ValueError("a thinned stretch does not fit its schema")
    names = np.array(schema.names, dtype=object)
    order = np.lexsort((series, row))
    starts = np.searchsorted(row[order], np.arange(len(heads) + 1))
    found = []
    for number, head in enumerate(heads):
        of = order[starts[number] : starts[number + 1]]
        found.append(
            Row(
                int(head["seq"]), int(head["step"]), float(head["time"]), int(head["attempt"]),
                Schema(tuple(names[series[of]].tolist())), values[of], "log" if int(head["kind"]) else "step",
            )
        )  # fmt: skip
    return found


def _points(
    payload: bytes,
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    _, count, points = _HEAD.unpack_from(payload)
    at = _HEAD.size
    heads = np.frombuffer(payload, _ROWS, count, at)
    at += heads.nbytes
    row = np.frombuffer(payload, "<u4", points, at).astype(np.int64)
    series = np.frombuffer(payload, "<u4", points, at + 4 * points).astype(np.int64)
    return heads, row, series, np.frombuffer(payload, "<f8", points, at + 8 * points).astype(np.float64)


@dataclass
class Stretch:
    """Rows of one attempt that follow each other, to be thinned together."""

    rows: list[Row] = field(default_factory=list)
    steps: int = 0  # distinct step numbers

    def add(self, row: Row) -> None:
        self.steps += not self.rows or row.step != self.rows[-1].step
        self.rows.append(row)

    def packed(self) -> tuple[Schema, bytes]:
        """(schema, payload without its digest's 8 bytes) of what is left of the rows."""
        names: dict[str, int] = {}
        plans: dict[int, npt.NDArray[np.int64]] = {}
        for each in self.rows:
            if id(each.schema) not in plans:
                plans[id(each.schema)] = np.array([names.setdefault(n, len(names)) for n in each.schema.names], np.int64)
        series = np.concatenate([plans[id(each.schema)] for each in self.rows])
        row = np.repeat(np.arange(len(self.rows)), [len(each.values) for each in self.rows])
        values = np.concatenate([each.values for each in self.rows])
        kept = _extremes(series, values)
        used, row_kept = np.unique(row[kept], return_inverse=True)
        heads = np.array(
            [(r.seq, r.step, r.time, r.attempt, _KINDS.index(r.kind)) for r in (self.rows[i] for i in used.tolist())], _ROWS
        )
        parts = [
            struct.pack("<II", len(heads), len(kept)), heads.tobytes(), row_kept.astype("<u4").tobytes(),
            series[kept].astype("<u4").tobytes(), values[kept].astype("<f8").tobytes(),
        ]  # fmt: skip
        return Schema(tuple(names)), b"".join(parts)


def _extremes(series: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Where each series has its last value, its smallest and largest finite one, and its first non-finite one. Ascending."""
    every = np.arange(len(series))
    finite = np.isfinite(values)
    good, bad = every[finite], every[~finite]
    by_value = good[np.lexsort((values[good], series[good]))]
    in_order = every[np.argsort(series, kind="stable")]
    bad_in_order = bad[np.argsort(series[bad], kind="stable")]
    chosen = [*_ends(series, by_value), _ends(series, in_order)[1], _ends(series, bad_in_order)[0]]
    return np.unique(np.concatenate(chosen))


def _ends(series: npt.NDArray[np.int64], ordered: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(first, last) of `ordered` in each group of one series."""
    if not len(ordered):
        return ordered, ordered
    edges = np.flatnonzero(np.diff(series[ordered])) + 1
    return ordered[np.concatenate(([0], edges))], ordered[np.concatenate((edges - 1, [len(ordered) - 1]))]


class Damaged(Exception):  # noqa: N818 - a signal
    """A segment with damage in it is left as it is: what a person could still get out of it must not be thrown away."""


class Source:
    """The records of one closed segment, in order, with the stretches of a thinned one as their rows. Raises `Damaged`."""

    def __init__(self, segment: Segment) -> None:
        self._walk = Walk(segment)
        self._schemas: dict[bytes, Schema] = {}

    def records(self) -> Iterator[Record]:
        for entry, payload in self._walk.entries(True, lambda entry: True, self._damaged):
            assert payload is not None
            try:
                found = self._decoded(entry, payload)
            except codec.MALFORMED as error:
                raise Damaged(f"{self._walk.segment.path.name}: {error}") from None
            yield from found

    def _decoded(self, entry: Entry, payload: bytes) -> Sequence[Record]:
        if entry.kind == codec.SCHEMA:
            key, schema = codec.decode_schema(payload)
            self._schemas.setdefault(key, schema)
            return ()
        if entry.kind == KIND:
            return rows(payload, self._schemas[digest(payload)])
        if entry.kind == codec.ROW:
            return [codec.decode_row(entry.seq, entry.step, payload, self._schemas[codec.digest_in_row(payload)])]
        if entry.kind not in codec.TYPES:
            raise Damaged(f"{self._walk.segment.path.name}: kind {entry.kind} of a newer version")
        return [codec.decode(entry.kind, entry.seq, entry.step, payload)]

    def _damaged(self, start: int, end: int, entry: Entry | None) -> None:
        raise Damaged(f"{self._walk.segment.path.name}@{start}")


class Target:
    """The bytes of a thinned segment. `rows_gone` counts rows that do not have all their values any more."""

    def __init__(self, stretch_steps: int, histograms: int) -> None:
        self._marker = segments.new_marker()
        self._parts = [segments.pack_segment(self._marker)]
        self._schemas: set[bytes] = set()
        self._stretch_steps = stretch_steps
        self._histograms = histograms
        self._seen = 0
        self._open = Stretch()
        self.rows_gone = 0

    def add(self, record: Record, *, whole: bool) -> None:
        """`whole`: nothing of it may be left out."""
        if isinstance(record, Histograms) and not whole:
            self._seen += 1
            if self._seen % self._histograms:
                return
        if isinstance(record, Row) and not whole:
            rows_ = self._open.rows
            if rows_ and (record.attempt != rows_[-1].attempt or self._open.steps >= self._stretch_steps):
                self._close()
            self._open.add(record)
            return
        self._close()
        self._entry(record)

    def finish(self) -> bytes:
        self._close()
        return b"".join(self._parts)

    def _close(self) -> None:
        done, self._open = self._open, Stretch()
        if len(done.rows) <= 2:  # nothing to gain
            for row in done.rows:
                self._entry(row)
            return
        schema, packed = done.packed()
        key = self._schema(schema, done.rows[0].seq)
        self._put(KIND, done.rows[-1].seq, done.rows[-1].step, key + packed)
        self.rows_gone += len(done.rows)

    def _entry(self, record: Record) -> None:
        if isinstance(record, Row):
            key = self._schema(record.schema, record.seq)
            self._put(codec.ROW, record.seq, record.step, codec.encode_row(record, key))
        else:
            kind, payload = codec.encode(record)
            self._put(kind, record.seq, codec.step_of(record), payload)

    def _schema(self, schema: Schema, seq: int) -> bytes:
        key, payload = codec.encode_schema(schema)
        if key not in self._schemas:
            self._schemas.add(key)
            self._put(codec.SCHEMA, seq, -1, payload)
        return key

    def _put(self, kind: int, seq: int, step: int, payload: bytes) -> None:
        self._parts.append(segments.pack_entry(self._marker, kind, seq, step, payload))
        self._parts.append(payload)
