"""What trackers get of the journal: `StreamConfig` applied to records, in order, so that a backend just writes what comes.

Of a row, the wide series (``layer/*``, ``act/*``) are kept as `StreamConfig.layers` says, and their extrema over all layers
are added. Every row gets ``trackbridge/step``, ``trackbridge/seq`` and ``trackbridge/attempt``, and ``nonfinite/<name>`` = 1
for each value that is NaN or infinite, because most charts show nothing there.

An anomaly is sent as itself, and as two sparse series on the row of its step: ``anomaly/score`` and ``anomaly/count`` (its
number in the run). The journal holds it right behind that row, so a row waits for what follows it. If it could not wait
(`settle`), the next row of the run carries them.

With `every` > 1, the rows around an anomaly are sent all the same: a row that would be left out waits a dozen steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from trackbridge import names
from trackbridge.config import StreamConfig
from trackbridge.records import Anomaly, FloatArray, Record, Row, Schema

AROUND = 8  # steps before an anomaly's onset and after its detection that are always sent
_LATE = 4  # steps from onset to detection that this holds for

_EXTREMA: dict[str, tuple[str, str, np.ufunc]] = {
    "layers/grad_norm_max": (names.LAYER, "grad_norm", np.fmax),
    "layers/grad_max": (names.LAYER, "grad_max", np.fmax),
    "layers/grad_nonfinite": (names.LAYER, "grad_nonfinite", np.add),
    "layers/weight_norm_max": (names.LAYER, "weight_norm", np.fmax),
    "layers/update_ratio_max": (names.LAYER, "update_ratio", np.fmax),
    "layers/act_max": (names.ACT, "max", np.fmax),
    "layers/act_rms_max": (names.ACT, "rms", np.fmax),
    "layers/kurtosis_max": (names.ACT, "kurtosis", np.fmax),
    "layers/act_nonfinite": (names.ACT, "nonfinite", np.add),
}
_STAMPS = (names.STEP, names.SEQ, names.ATTEMPT)
_ADDED = frozenset((*_EXTREMA, *_STAMPS, "anomaly/score", "anomaly/count"))
_PLANS = 512  # schemas remembered


@dataclass(slots=True)
class _Plan:
    """How rows of one schema become what is sent. `schemas`: the result's schema, by what was added for this row only."""

    source: Schema  # kept alive: plans are found by its id
    keep: npt.NDArray[np.intp]
    kept: tuple[str, ...]
    extrema: list[tuple[npt.NDArray[np.intp], np.ufunc]]
    schemas: dict[tuple[str, ...], Schema] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Mark:
    attempt: int
    step: int
    score: float
    count: int


class Stream:
    """One tracker's view of the journal. `known` are the anomalies up to where reading starts.

    Records come out in ascending `seq`, some time after they went in. `decided` is the highest `seq` up to which every record
    was either given out or left out on purpose.
    """

    def __init__(self, config: StreamConfig, *, after: int = -1, known: Iterable[Anomaly] = ()) -> None:
        self.decided = after
        self._config = config
        self._held: deque[Record] = deque()
        self._newest = (-1, -1)  # attempt and step of the newest step row
        self._followed = -1  # rows below this seq have had their anomalies: something else came after them
        self._windows: deque[tuple[int, int, int]] = deque(maxlen=256)  # attempt, first step, last step
        self._seen: set[str] = set()
        self._marks: list[_Mark] = []
        self._plans: dict[int, _Plan] = {}
        for anomaly in known:
            self._note(anomaly)
        self._marks.clear()

    def push(self, records: Iterable[Record]) -> list[Record]:
        """Take records, in order; returns those that can go out now."""
        out: list[Record] = []
        for record in records:
            self._held.append(record)
            if isinstance(record, Anomaly):
                self._note(record)
                continue
            self._followed = record.seq
            if isinstance(record, Row) and record.kind == "step":
                self._newest = (record.attempt, record.step)
            out += self._release(waited=False, final=False)
        return out

    def settle(self) -> list[Record]:
        """Nothing came for a while: what only waited for its anomaly goes out."""
        return self._release(waited=True, final=False)

    def finish(self) -> list[Record]:
        """Nothing will come any more: everything is decided."""
        return self._release(waited=True, final=True)

    def _release(self, *, waited: bool, final: bool) -> list[Record]:
        out: list[Record] = []
        while self._held:
            head = self._held[0]
            if isinstance(head, Row):
                if not (waited or head.seq < self._followed):
                    break
                if self._sparse(head):
                    if not final and not self._past(head):
                        break
                else:
                    out.append(self._project(head))
            else:
                out.append(head)
            self.decided = head.seq
            self._held.popleft()
        return out

    # -- which rows

    def _sparse(self, row: Row) -> bool:
        """True for a row that `every` leaves out, as far as is known now."""
        if row.kind != "step" or row.step % self._config.every == 0:
            return False
        return not any(attempt == row.attempt and low <= row.step <= high for attempt, low, high in self._windows)

    def _past(self, row: Row) -> bool:
        """True when no anomaly can claim `row` any more."""
        attempt, step = self._newest
        return attempt != row.attempt or step >= row.step + AROUND + _LATE

    def _note(self, anomaly: Anomaly) -> None:
        if anomaly.id in self._seen:
            return
        self._seen.add(anomaly.id)
        self._windows.append((anomaly.attempt, min(anomaly.onset, anomaly.step) - AROUND, anomaly.step + AROUND))
        self._marks.append(_Mark(anomaly.attempt, anomaly.step, anomaly.score, len(self._seen)))

    # -- what of a row

    def _project(self, row: Row) -> Row:
        plan = self._plans.get(id(row.schema)) or self._plan(row.schema)
        values = row.values[plan.keep]
        extrema = np.array([function.reduce(row.values[where]) for where, function in plan.extrema])
        values = np.concatenate((values, extrema)) if len(extrema) else values
        bad = np.flatnonzero(~np.isfinite(values))
        extra = [f"{names.NONFINITE}{plan.kept[at]}" for at in bad.tolist()]
        numbers = [1.0] * len(extra)
        marks = self._due(row)
        if marks:
            extra += ["anomaly/score", "anomaly/count"]
            numbers += [max(mark.score for mark in marks), float(max(mark.count for mark in marks))]
        numbers += [float(row.step), float(row.seq), float(row.attempt)]
        schema = self._schema(plan, tuple(extra))
        return replace(row, schema=schema, values=np.concatenate((values, np.array(numbers))))

    def _due(self, row: Row) -> list[_Mark]:
        if not self._marks or row.kind != "step":
            return []
        due = [mark for mark in self._marks if (mark.attempt, mark.step) <= (row.attempt, row.step)]
        self._marks = [mark for mark in self._marks if mark not in due]
        return due

    def _plan(self, schema: Schema) -> _Plan:
        wanted = {"summary": (), "blocks": (names.ACT,), "all": (names.LAYER, names.ACT)}[self._config.layers]
        keep = [
            at
            for at, name in enumerate(schema.names)
            if name not in _ADDED and (not names.is_wide(name) or name.startswith(wanted))
        ]
        kept = [schema.names[at] for at in keep]
        extrema = []
        for name, (family, statistic, function) in _EXTREMA.items():
            where = [at for at, n in enumerate(schema.names) if n.startswith(family) and n.endswith(f"/{statistic}")]
            if where:
                kept.append(name)
                extrema.append((np.array(where, np.intp), function))
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        plan = self._plans[id(schema)] = _Plan(schema, np.array(keep, np.intp), tuple(kept), extrema)
        return plan

    def _schema(self, plan: _Plan, extra: tuple[str, ...]) -> Schema:
        if extra not in plan.schemas:
            if len(plan.schemas) >= _PLANS:
                plan.schemas.clear()
            plan.schemas[extra] = Schema((*plan.kept, *extra, *_STAMPS))
        return plan.schemas[extra]


def with_lag(row: Row, lag: int) -> Row:
    """`row` with ``trackbridge/lag_rows``: how many records the tracker is behind when it is sent."""
    values: FloatArray = np.append(row.values, float(lag))
    return replace(row, schema=Schema((*row.schema.names, "trackbridge/lag_rows")), values=values)
