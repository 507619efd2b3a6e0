"""What trackers get of the journal: `StreamConfig` applied to records, in order, so that a backend just writes what comes.

Of a row, the wide series (``layer/*``, ``act/*``, ``router/*``, ``expert/*``) are kept as `StreamConfig.layers` says, and
their extrema over all layers are added. Every row gets ``trackbridge/step``, ``trackbridge/seq`` and ``trackbridge/attempt``,
and ``nonfinite/<name>`` = 1 for each value that is NaN or infinite, because most charts show nothing there.

An anomaly is sent as itself, and as two sparse series on the row of its step: ``anomaly/score`` and ``anomaly/count`` (its
number in the run). The journal holds it right behind that row, so a row waits for what follows it. If it could not wait
(`settle`), the next row of the run carries them.

With `every` > 1, or where a tracker takes only so many rows or values a minute (`trackbridge.coalesce`), the rows around an
anomaly are sent all the same, none coalesced: a row that would be left out waits a dozen steps. Of a budgeted tracker the
wide series of such a window are sent at the onset and at the detection; the capsule has them all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from trackbridge import names
from trackbridge.coalesce import Budget, Gathered, Slot, width
from trackbridge.config import StreamConfig
from trackbridge.records import Anomaly, FloatArray, Record, Row, Schema

AROUND = 8  # steps before an anomaly's onset and after its detection that are always sent
_LATE = 4  # steps from onset to detection that this holds for

_EXTREMA: dict[str, tuple[str, str, np.ufunc]] = {
    "layers/grad_norm_max": (names.LAYER, "grad_norm", np.fmax),
    "layers/grad_max": (names.LAYER, "grad_max", np.fmax),
    "layers/grad_nonfinite": (names.LAYER, "grad_nonfinite", np.add),
    "layers/weight_norm_max": (names.LAYER, "weight_norm", np.fmax),
    "layers/weight_max": (names.LAYER, "weight_max", np.fmax),
    "layers/update_ratio_max": (names.LAYER, "update_ratio", np.fmax),
    "layers/act_max": (names.ACT, "max", np.fmax),
    "layers/act_rms_max": (names.ACT, "rms", np.fmax),
    "layers/kurtosis_max": (names.ACT, "kurtosis", np.fmax),
    "layers/channel_kurtosis_max": (names.ACT, "channel_kurtosis", np.fmax),
    "layers/load_max": (names.ROUTER, "load_max", np.fmax),
    "layers/act_nonfinite": (names.ACT, "nonfinite", np.add),
}
_STAMPS = (names.STEP, names.SEQ, names.ATTEMPT)
_ADDED = frozenset((*_EXTREMA, *_STAMPS, "anomaly/score", "anomaly/count"))
_PLANS = 512  # schemas remembered
_UNKNOWN = 1 << 62
_SOON = 1.0  # seconds: a slot shorter than this is over when nothing more comes


@dataclass(slots=True)
class _Plan:
    """How rows of one schema become what is sent. `narrow` has the series that every row sends, the extrema last; `wide` the
    others. `schemas`: the result's schema, by what was added for this row only and whether wide series are in it."""

    source: Schema  # kept alive: plans are found by its id
    narrow_at: npt.NDArray[np.intp]
    narrow: tuple[str, ...]
    extrema: list[tuple[npt.NDArray[np.intp], np.ufunc]]
    wide_at: npt.NDArray[np.intp]
    wide: tuple[str, ...]
    schemas: dict[tuple[bool, tuple[str, ...]], Schema] = field(default_factory=dict)

    def values(self, row: Row) -> FloatArray:
        """The narrow series of `row`."""
        extrema = [function.reduce(row.values[where]) for where, function in self.extrema]
        return np.concatenate((row.values[self.narrow_at], extrema)) if extrema else row.values[self.narrow_at]


@dataclass(frozen=True, slots=True)
class _Mark:
    attempt: int
    step: int
    score: float
    count: int


class Stream:
    """One tracker's view of the journal. `known` are the anomalies up to where reading starts; `budget` is what the tracker
    takes in a minute; `starts` says at which step each attempt began.

    Records come out in ascending `seq`, some time after they went in. `decided` is the highest `seq` up to which every record
    was either given out or left out on purpose. `before` maps the seq of a row that stands for others to the seq before the
    first of them: where to go on reading to make it again. Whoever takes the row takes the entry.
    """

    def __init__(
        self,
        config: StreamConfig,
        *,
        after: int = -1,
        known: Iterable[Anomaly] = (),
        budget: Budget | None = None,
        starts: Mapping[int, int] | None = None,
    ) -> None:
        self.decided = after
        self.before: dict[int, int] = {}
        self._config = config
        self._budget = budget or Budget()
        self._starts = {} if starts is None else starts  # grows while we read
        self._slot: Slot | None = None
        self._last = after  # seq of the newest row in it
        self._wide_sent = -math.inf  # time of the newest row that carried wide series
        self._peaks: deque[tuple[int, int]] = deque(maxlen=512)  # attempt and step of onsets and detections
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
                elif self._coalesces(head):
                    alone = self._alone(head, waited)
                    if not (final or alone or self._past(head)):
                        break
                    out += self._gather(head)
                    if alone:
                        out += self._close()
                else:
                    out += self._close()
                    out.append(self._project(head))
            else:
                out += self._close()
                out.append(head)
            self._held.popleft()
            self.decided = head.seq if self._slot is None else self._slot.before
        if final:
            before = self._slot is not None
            out += self._close()
            if before:
                self.decided = self._last
        return out

    # -- which rows

    def _sparse(self, row: Row) -> bool:
        """True for a row that `every` leaves out, as far as is known now."""
        return row.kind == "step" and row.step % self._config.every != 0 and not self._near(row)

    def _near(self, row: Row) -> bool:
        """True for a row in the window of an anomaly."""
        return any(attempt == row.attempt and low <= row.step <= high for attempt, low, high in self._windows)

    def _position(self, row: Row) -> int:
        """How many steps of its attempt came before it; a large number where that is not known."""
        return row.step - self._starts.get(row.attempt, -_UNKNOWN)

    def _coalesces(self, row: Row) -> bool:
        """True for a row that may have to stand back: the budget does not simply let it pass, and no anomaly is near."""
        if not self._budget or self._budget.free(self._position(row), self._width(row)):
            return False
        return row.kind == "log" or not self._near(row)

    def _width(self, row: Row) -> int:
        return width(self._plan_of(row).narrow) + len(_STAMPS)

    def _slot_of(self, row: Row) -> Slot:
        if self._slot is not None and self._slot.holds(row):
            return self._slot
        return Slot.of(row, self._budget.seconds(self._width(row)))

    def _alone(self, row: Row, waited: bool) -> bool:
        """True for a row whose slot has no other: nothing to wait for."""
        slot = self._slot_of(row)
        if slot is self._slot:
            return False
        following = next((record for record in islice(self._held, 1, None) if isinstance(record, Row)), None)
        return slot.seconds <= _SOON and waited if following is None else not slot.holds(following)

    def _gather(self, row: Row) -> list[Record]:
        """Put `row` into its slot; returns what the slot before it comes to."""
        slot = self._slot_of(row)
        out = self._close() if slot is not self._slot else []
        self._slot = slot
        self._last = row.seq
        slot.add(row)
        if row.kind == "step":
            plan = self._plan_of(row)
            slot.steps.add(plan.narrow, plan.values(row))
        return out

    def _close(self) -> list[Record]:
        slot, self._slot = self._slot, None
        if slot is None:
            return []
        out: list[Record] = []
        for row in slot.chosen():
            self.before[row.seq] = slot.before
            out.append(self._project(row, slot.steps if row is slot.best and slot.steps.rows > 1 else None))
        return out

    def _past(self, row: Row) -> bool:
        """True when no anomaly can claim `row` any more."""
        attempt, step = self._newest
        return attempt != row.attempt or step >= row.step + AROUND + _LATE

    def _note(self, anomaly: Anomaly) -> None:
        if anomaly.id in self._seen:
            return
        self._seen.add(anomaly.id)
        self._peaks += [(anomaly.attempt, anomaly.onset), (anomaly.attempt, anomaly.step)]
        self._windows.append((anomaly.attempt, min(anomaly.onset, anomaly.step) - AROUND, anomaly.step + AROUND))
        self._marks.append(_Mark(anomaly.attempt, anomaly.step, anomaly.score, len(self._seen)))

    # -- what of a row

    def _project(self, row: Row, gathered: Gathered | None = None) -> Row:
        """What is sent of `row`, which stands for the rows that `gathered` has seen."""
        plan = self._plan_of(row)
        wide = bool(plan.wide) and self._wide_now(row, len(plan.wide))
        values = plan.values(row)
        sent, series = (
            (np.concatenate((values, row.values[plan.wide_at])), (*plan.narrow, *plan.wide)) if wide else (values, plan.narrow)
        )
        counts = {series[at]: 1 for at in np.flatnonzero(~np.isfinite(sent)).tolist()}
        extra = {
            f"{names.NONFINITE}{name}": float(count)
            for name, count in {**counts, **(gathered.nonfinite if gathered else {})}.items()
        }
        if gathered is not None:
            extra |= gathered.told()
        marks = self._due(row)
        if marks:
            extra |= {
                "anomaly/score": max(mark.score for mark in marks),
                "anomaly/count": float(max(mark.count for mark in marks)),
            }
        numbers = [*extra.values(), float(row.step), float(row.seq), float(row.attempt)]
        schema = self._schema(plan, wide, tuple(extra))
        return replace(row, schema=schema, values=np.concatenate((sent, np.array(numbers))))

    def _wide_now(self, row: Row, wide: int) -> bool:
        """True when the budget has room for the wide series of `row`, or an anomaly is just there."""
        if self._budget.values is None or row.kind == "log":
            return True
        seconds = self._budget.wide_seconds(wide)
        if not self._budget.free_wide(self._position(row), wide):
            if self._near(row):
                return (row.attempt, row.step) in self._peaks
            if row.time < self._wide_sent + seconds and row.time // seconds == self._wide_sent // seconds:
                return False
        self._wide_sent = row.time
        return True

    def _due(self, row: Row) -> list[_Mark]:
        if not self._marks or row.kind != "step":
            return []
        due = [mark for mark in self._marks if (mark.attempt, mark.step) <= (row.attempt, row.step)]
        self._marks = [mark for mark in self._marks if mark not in due]
        return due

    def _plan_of(self, row: Row) -> _Plan:
        return self._plans.get(id(row.schema)) or self._plan(row.schema)

    def _plan(self, schema: Schema) -> _Plan:
        wanted = {"summary": (), "blocks": (names.ACT, names.ROUTER), "all": names.WIDE}[self._config.layers]
        ours = [(at, name) for at, name in enumerate(schema.names) if name not in _ADDED]
        measured = {name for _, name in ours if names.is_measured_wide(name)}
        narrow = [(at, name) for at, name in ours if name not in measured]
        wide = [(at, name) for at, name in ours if name in measured and name.startswith(wanted)]
        if self._config.layers == "blocks":
            wide = _evenly(wide, self._config.max_series)
        series = [name for _, name in narrow]
        extrema = []
        for name, (family, statistic, function) in _EXTREMA.items():
            where = [at for at, n in enumerate(schema.names) if n.startswith(family) and n.endswith(f"/{statistic}")]
            if where:
                series.append(name)
                extrema.append((np.array(where, np.intp), function))
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        plan = self._plans[id(schema)] = _Plan(
            schema, _places(narrow), tuple(series), extrema, _places(wide), tuple(name for _, name in wide)
        )
        return plan

    def _schema(self, plan: _Plan, wide: bool, extra: tuple[str, ...]) -> Schema:
        key = (wide, extra)
        if key not in plan.schemas:
            if len(plan.schemas) >= _PLANS:
                plan.schemas.clear()
            plan.schemas[key] = Schema((*plan.narrow, *(plan.wide if wide else ()), *extra, *_STAMPS))
        return plan.schemas[key]


def _places(chosen: list[tuple[int, str]]) -> npt.NDArray[np.intp]:
    return np.array([at for at, _ in chosen], np.intp)


def _evenly(wide: list[tuple[int, str]], most: int) -> list[tuple[int, str]]:
    """At most `most` of the wide series: every statistic of evenly spaced modules, the first and the last among them."""
    if len(wide) <= most:
        return wide
    modules = list(dict.fromkeys(name.rpartition("/")[0] for _, name in wide))
    count = max(most * len(modules) // len(wide), 1)
    chosen = {modules[round(place)] for place in np.linspace(0, len(modules) - 1, count).tolist()}
    return [(at, name) for at, name in wide if name.rpartition("/")[0] in chosen][:most]


def with_lag(row: Row, lag: int) -> Row:
    """`row` with ``trackbridge/lag_rows``: how many records the tracker is behind when it is sent."""
    values: FloatArray = np.append(row.values, float(lag))
    return replace(row, schema=Schema((*row.schema.names, "trackbridge/lag_rows")), values=values)
