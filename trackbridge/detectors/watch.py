"""`Watch`: rows in, anomalies out. Runs in the scribe thread, once per step row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from trackbridge.config import DetectionConfig
from trackbridge.detectors.band import BandDetector
from trackbridge.detectors.base import FloatArray, IntArray, Verdict
from trackbridge.detectors.episodes import Episode, severity
from trackbridge.records import Anomaly, Row, Schema

_WIDE = ("/grad_norm", "/kurtosis", "/update_ratio")
_COUNTS = ("/grad_nonfinite", "/nonfinite")
_REGIME = ("lr_restart", "epoch", "batch_size", "sequence_length")


def run_level(name: str) -> bool:
    """True for the series that can raise an anomaly by themselves."""
    return name == "train/loss" or name.startswith("train/loss/") or name in ("grad/norm", "grad/norm_clipped")


def tracked(name: str) -> bool:
    return run_level(name) or (name.startswith(("layer/", "act/")) and name.endswith(_WIDE))


@dataclass(slots=True)
class _Plan:
    """How one schema maps to the detector's columns. Holds the schema so that its `id` stays taken."""

    schema: Schema
    columns: IntArray  # places in the row of the tracked series
    positions: IntArray  # their columns in the detector
    counts: IntArray  # places of the non-finite counters
    skipped: int  # place of optim/skipped, or -1
    amp_safe: IntArray  # places that must be finite even in a step the scaler skipped


class Watch:
    """Detection over the rows of one run. `update` is called with every step row in order."""

    def __init__(self, settings: DetectionConfig | None = None) -> None:
        self.settings = settings or DetectionConfig()
        self.detector = BandDetector(self.settings)
        self.amp_skips = 0
        self._plans: dict[int, _Plan] = {}
        self._heads: list[int] = []
        self._open: dict[str, Episode] = {}
        self._skipped = -1.0
        self._resumed = -1
        self._buffers()

    def note(self, event: str, step: int) -> None:
        """Tell of a known regime change. "resume": later anomalies carry ``after_resume`` for a while. "lr_restart",
        "epoch", "batch_size", "sequence_length": the bands learn anew for a few steps and stay silent meanwhile."""
        if event == "resume":
            self._resumed = step
        elif event in _REGIME:
            self.detector.relearn()

    def update(self, row: Row) -> list[Anomaly]:
        """New anomalies of this row, and newer versions (same `id`) of open ones."""
        if row.kind != "step" or not self.settings.enabled:
            return []
        plan = self._plans.get(id(row.schema)) or self._plan(row.schema)
        skip = self._amp_skip(row, plan)
        out = self._nonfinite(row, plan, skip)
        self._values[plan.positions] = row.values[plan.columns]
        self._present[:] = False
        if not skip:
            self._present[plan.positions] = True
        verdicts = self.detector.update(row.step, self._values, self._present)
        return out + self._excursion(row, verdicts)

    def finish(self) -> list[Anomaly]:
        """Close open episodes; they did not recover."""
        closed = [episode.refreshed() for episode in self._open.values()]
        self._open.clear()
        return closed

    # -- columns ---------------------------------------------------------------------------------------------------

    def _plan(self, schema: Schema) -> _Plan:
        where = {name: i for i, name in enumerate(self.detector.series)}
        columns = [i for i, name in enumerate(schema.names) if tracked(name)]
        new = [schema.names[i] for i in columns if schema.names[i] not in where]
        if new:
            self.detector.bind((*self.detector.series, *new))
            where = {name: i for i, name in enumerate(self.detector.series)}
            self._buffers()
        counts = [
            i for i, name in enumerate(schema.names)
            if name == "grad/nonfinite" or (name.startswith(("layer/", "act/")) and name.endswith(_COUNTS))
        ]  # fmt: skip
        plan = _Plan(
            schema,
            np.array(columns, np.int64),
            np.array([where[schema.names[i]] for i in columns], np.int64),
            np.array(counts, np.int64),
            schema.names.index("optim/skipped") if "optim/skipped" in schema.names else -1,
            np.array([i for i, name in enumerate(schema.names) if name.startswith("train/loss")], np.int64),
        )
        self._plans[id(schema)] = plan
        return plan

    def _buffers(self) -> None:
        series = self.detector.series
        self._values: FloatArray = np.zeros(len(series))
        self._present = np.zeros(len(series), bool)
        heads = [i for i, name in enumerate(series) if run_level(name)]
        if "grad/norm" in series and "grad/norm_clipped" in series:
            heads.remove(series.index("grad/norm_clipped"))
        self._heads = heads
        self._is_head = np.zeros(len(series), bool)
        self._is_head[heads] = True

    def _amp_skip(self, row: Row, plan: _Plan) -> bool:
        """True when the scaler skipped this step: its gradients say nothing about the model."""
        if plan.skipped < 0:
            return False
        now = float(row.values[plan.skipped])
        skip = now > max(self._skipped, 0.0)
        self._skipped = now
        self.amp_skips += skip
        return skip

    # -- non-finite ------------------------------------------------------------------------------------------------

    def _nonfinite(self, row: Row, plan: _Plan, skip: bool) -> list[Anomaly]:
        bad = ~np.isfinite(row.values)
        bad[plan.counts] |= row.values[plan.counts] > 0
        if skip:
            judged = np.zeros(len(bad), bool)
            judged[plan.amp_safe] = bad[plan.amp_safe]
            bad = judged
        episode = self._open.get("nonfinite")
        if not bad.any():
            if episode is None:
                return []
            del self._open["nonfinite"]
            return [episode.refreshed(recovered_after=row.step - episode.anomaly.onset)]
        names = row.schema.names
        where = np.flatnonzero(bad).tolist()
        if episode is not None:
            if row.step > episode.anomaly.step + self.settings.cascade_steps:
                return []
            known = len(episode.members)
            self._join(episode, [(names[i], row.step, i) for i in where])
            return [episode.refreshed()] if len(episode.members) > known else []
        head = min(where, key=lambda i: (not run_level(names[i]), i))
        expected = self._expected(names[head])
        anomaly = Anomaly(
            id=f"{row.attempt}-{row.step}-nonfinite", kind="nonfinite", step=row.step, onset=row.step, severity=1.0,
            series=names[head], value=float(row.values[head]), expected=expected, score=math.inf,
            attempt=row.attempt, time=row.time, notes=self._notes(row.step),
        )  # fmt: skip
        episode = self._open["nonfinite"] = Episode(anomaly)
        self._precursors(episode, row.step)
        self._join(episode, [(names[i], row.step, i) for i in where])
        return [episode.refreshed()]

    def _expected(self, name: str) -> float:
        """What `name` was expected to be; 0 for counters and for series without history."""
        if name in self.detector.series:
            index = self.detector.series.index(name)
            if self.detector.seen[index]:
                return self.detector.expected(index)
        return 0.0

    # -- excursions ------------------------------------------------------------------------------------------------

    def _excursion(self, row: Row, verdicts: list[Verdict]) -> list[Anomaly]:
        out = [v for v in verdicts if v.kind != "nonfinite"]
        heads = [v for v in out if self._is_head[v.index]]
        episode = self._open.get("excursion")
        if episode is None:
            if not heads:
                return []
            lead = max(heads, key=lambda v: v.score)
            name = self.detector.series[lead.index]
            anomaly = Anomaly(
                id=f"{row.attempt}-{row.step}-{lead.kind}", kind=lead.kind, step=row.step, onset=lead.onset,
                severity=severity(lead.kind, lead.score), series=name, value=lead.value, expected=lead.expected,
                score=lead.score, attempt=row.attempt, time=row.time, notes=self._notes(row.step),
            )  # fmt: skip
            episode = self._open["excursion"] = Episode(anomaly)
            self._precursors(episode, lead.onset)
            self._join(episode, [(self.detector.series[v.index], v.onset, v.index) for v in out])
            return [episode.refreshed()]
        return self._continue(episode, row, out, heads)

    def _continue(self, episode: Episode, row: Row, out: list[Verdict], heads: list[Verdict]) -> list[Anomaly]:
        anomaly = episode.anomaly
        changes: dict[str, Any] = {}
        for v in heads:
            if self.detector.series[v.index] == anomaly.series and v.score > anomaly.score:
                changes.update(value=v.value, expected=v.expected, score=v.score, severity=severity(anomaly.kind, v.score))
                anomaly = anomaly.updated(**changes)
        if row.step <= anomaly.step + self.settings.cascade_steps:
            self._join(episode, [(self.detector.series[v.index], v.onset, v.index) for v in out])
        episode.anomaly = anomaly
        shift = next((v for v in heads if v.kind == "shift"), None)
        if shift is not None and self.detector.series[shift.index] == anomaly.series:
            del self._open["excursion"]
            kind = "shift" if self.detector.settled[shift.index] else "divergence"
            return [episode.refreshed(kind=kind, severity=severity(kind, anomaly.score))]
        if heads or self.detector.run[self._heads].max() > 0:
            episode.quiet = 0
        else:
            if episode.quiet == 0:
                episode.quiet_since = row.step
            episode.quiet += 1
            if episode.quiet >= self.settings.quiet:
                del self._open["excursion"]
                return [episode.refreshed(recovered_after=episode.quiet_since - anomaly.onset)]
        if not episode.settled and row.step >= anomaly.step + self.settings.cascade_steps:
            episode.settled = True
            return [episode.refreshed()]
        return []

    def _precursors(self, episode: Episode, onset: int) -> None:
        """Series that were out of their band shortly before the onset, and still are or were until just now."""
        d = self.detector
        recent = (d.last_out >= onset - 2) & (d.onset >= onset - self.settings.lookback) & (d.onset <= onset)
        self._join(episode, [(d.series[i], int(d.onset[i]), i) for i in np.flatnonzero(recent & (d.last_out >= 0)).tolist()])

    @staticmethod
    def _join(episode: Episode, entries: list[tuple[str, int, int]]) -> None:
        for series, step, position in entries:
            episode.join(series, step, position)

    def _notes(self, step: int) -> tuple[str, ...]:
        recent = self._resumed >= 0 and step - self._resumed <= self.settings.after_resume
        return ("after_resume",) if recent else ()

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; a Watch that loads it continues as if it had never stopped."""
        return {
            "version": 1,
            "detector": self.detector.state_dict(),
            "open": {key: episode.state() for key, episode in self._open.items()},
            "amp_skips": self.amp_skips,
            "skipped": self._skipped,
            "resumed": self._resumed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.detector.load_state_dict(state["detector"])
        self._open = {key: Episode.restore(value) for key, value in state["open"].items()}
        self.amp_skips, self._skipped, self._resumed = state["amp_skips"], state["skipped"], state["resumed"]
        self._plans.clear()
        self._buffers()
