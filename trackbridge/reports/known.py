"""What is known of one anomaly, from its capsule or from the run's own record: the numbers a post-mortem states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbridge.capsule import SpikeCapsule
from trackbridge.capsule_parts import HISTORY, read_narrow
from trackbridge.diagnosis.batch import Batches
from trackbridge.history import RunRecord
from trackbridge.journal import JournalReader
from trackbridge.lab.counterfactuals import CounterfactualReport
from trackbridge.records import Anomaly, MicroBatch, StepContext
from trackbridge.rundir import RunDirectory

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

BEFORE = 64
"""Steps before the onset that are read from a run's journal."""


@dataclass(frozen=True)
class Known:
    """`window` are the first and last recorded step that were looked at, `restart` the first a replay can run (None without a
    capsule)."""

    anomaly: Anomaly
    run: str
    name: str
    window: tuple[int, int]
    values: Mapping[str, tuple[IntArray, FloatArray]]
    batches: Mapping[int, tuple[MicroBatch, ...]]
    provenance: Mapping[str, Any]
    config: Mapping[str, Any]
    missing: tuple[str, ...] = ()
    capsule: SpikeCapsule | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_capsule(cls, capsule: SpikeCapsule, anomaly: Anomaly | None = None) -> Known:
        """Of the capsule's own anomaly, or of another one that shares the capsule."""
        written = capsule.path / HISTORY  # not yet listed while the capsule is being sealed
        steps = {**(read_narrow(written) if written.is_file() else {}), **capsule.series()}
        names = dict.fromkeys(name for row in steps.values() for name in row)
        values = {name: _arrays({step: row[name] for step, row in steps.items() if name in row}) for name in names}
        return cls(
            anomaly or capsule.anomaly, capsule.run, capsule.name or capsule.run, capsule.span, values, capsule.batches,
            capsule.provenance, capsule.config, tuple(capsule.missing), capsule, capsule.settings,
        )  # fmt: skip

    @classmethod
    def of_record(cls, record: RunRecord, anomaly: Anomaly) -> Known:
        """From the journal; what a capsule would keep is read from the leader's rank, as far as the ring still has it."""
        first, last = max(anomaly.onset - BEFORE, 0), anomaly.step + BEFORE
        values = {}
        for name, (steps, found) in record.many(record.names):
            inside = (steps >= first) & (steps <= last)
            if inside.any():
                values[name] = (steps[inside], found[inside])
        directory = RunDirectory(record.path)
        contexts = JournalReader(directory.contexts(directory.ranks()[0]), kinds={StepContext}, steps=range(first, last + 1))
        batches = {c.step: c.micro for c in contexts.read() if isinstance(c, StepContext) and c.attempt == anomaly.attempt}
        seen = [int(steps[-1]) for steps, _ in values.values()]
        info = record.info
        return cls(
            anomaly, info.run_id, info.name or info.run_id, (first, max(seen, default=anomaly.step)), values, batches,
            record.provenance, record.config, ("a capsule: this is from the run's journal",), None, record.settings,
        )  # fmt: skip

    @property
    def counterfactuals(self) -> CounterfactualReport | None:
        """What replays with one thing changed have shown: of the capsule's own anomaly, nothing of one that shares it."""
        if self.capsule is None or self.capsule.anomaly.id != self.anomaly.id:
            return None
        return self.capsule.counterfactuals

    # -- numbers

    def before(self, series: str, last: int | None = None) -> FloatArray:
        """Finite values before the onset, oldest first; only the `last` ones if given."""
        steps, values = self.values.get(series, (np.zeros(0, np.int64), np.zeros(0)))
        found = values[(steps < self.anomaly.onset) & np.isfinite(values)]
        return found if last is None else found[-last:]

    def at_onset(self, series: str) -> float | None:
        steps, values = self.values.get(series, (np.zeros(0, np.int64), np.zeros(0)))
        found = values[steps == self.anomaly.onset]
        return float(found[0]) if len(found) else None

    def peak(self, series: str) -> tuple[float, int] | None:
        """(value, step) of the largest value from the onset on; one that is not a number outranks all."""
        steps, values = self.values.get(series, (np.zeros(0, np.int64), np.zeros(0)))
        later = steps >= self.anomaly.onset
        steps, values = steps[later], values[later]
        if not len(values):
            return None
        place = int(np.argmax(np.where(np.isnan(values), np.inf, values)))
        return float(values[place]), int(steps[place])

    def ema(self, series: str, span: int) -> tuple[float, int]:
        """(value, steps) of the exponential average over about `span` steps before the onset (alpha = 2 / (span + 1)), weights
        adjusted for the start. NaN without a value."""
        values = self.before(series)
        if not len(values):
            return math.nan, 0
        weights = (1 - 2 / (span + 1)) ** np.arange(len(values) - 1, -1, -1)
        return float((weights * values).sum() / weights.sum()), len(values)

    @cached_property
    def identity(self) -> Batches:
        """Statistics of the batches, to tell the onset's from those before."""
        contexts = [StepContext(-1, step, self.anomaly.attempt, {}, self.batches[step]) for step in sorted(self.batches)]
        return Batches(contexts, self.anomaly.onset)


def _arrays(points: Mapping[int, float]) -> tuple[IntArray, FloatArray]:
    steps = sorted(points)
    return np.array(steps, np.int64), np.array([points[step] for step in steps], np.float64)
