"""`Watch`: rows in, anomalies out. Runs in the scribe thread, once per step row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from trackbridge.config import DetectionConfig
from trackbridge.detectors.band import BandDetector, Tuning
from trackbridge.detectors.columns import Columns
from trackbridge.detectors.events import Events
from trackbridge.detectors.excursions import Excursions
from trackbridge.detectors.faults import Faults
from trackbridge.detectors.layers import Layers
from trackbridge.detectors.monitors import Look, Regime, monitors
from trackbridge.detectors.nans import NaNs
from trackbridge.detectors.settling import Settling
from trackbridge.detectors.skips import Skips
from trackbridge.records import Anomaly, Row, StepContext


class Watch:
    """Detection over the rows of one run. `update` is called with every step row in order.

    At most one episode of each sort is open at a time: a non-finite one, an excursion (spike, shift, divergence), a drift, one
    of single layers, and one per monitor. What follows a monitor's fault until things have settled is the same event
    (`aftermath`)."""

    def __init__(self, settings: DetectionConfig | None = None, tuning: Tuning | None = None) -> None:
        self.settings = settings or DetectionConfig()
        self._monitors = {monitor.NAME: monitor for monitor in monitors(self.settings)}
        self._regime = cast(Regime, self._monitors[Regime.NAME])
        self._band = band = BandDetector(self.settings, tuning)
        self._columns = columns = Columns(band)
        self._events = events = Events(self.settings.after_resume, self._regime)
        causes = [*(name for name, monitor in self._monitors.items() if monitor.CAUSAL), "layers"]
        self._skips = Skips()
        self._faults = Faults(self._monitors, band, events)
        self._nans = NaNs(band, events)
        self._excursions = Excursions(band, columns, events, causes)
        self._settling = Settling(band, columns, events)
        self._layers = Layers(band, events)
        self._row: Row | None = None  # the latest

    @property
    def amp_skips(self) -> int:
        """Steps so far that a gradient scaler skipped."""
        return self._skips.count

    def note(self, event: str, step: int) -> None:
        """Tell of a known regime change. "resume": later anomalies carry ``after_resume`` for a while. "amp_skip": the
        gradients of `step` mean nothing. "lr_restart", "epoch", "batch_size", "sequence_length": the bands learn anew for
        a few steps and stay silent meanwhile. Other events change nothing."""
        if event == "resume":
            self._events.resumed = step
        elif event == "amp_skip":
            self._skips.tell(step)
        self._faults.changed(event)

    def update(self, row: Row, context: StepContext | None = None) -> list[Anomaly]:
        """New anomalies of this row, and newer versions (same `id`) of open ones. `context` is the step's, where known."""
        if row.kind != "step" or not self.settings.enabled:
            return []
        self._row = row
        plan = self._columns.plan(row.schema)
        skip = self._skips.skipped(row, plan)
        out = self._faults.update(Look(row, plan.places, context, self._events.recent(row.step)))
        out += self._nans.update(row, plan, skip)
        self._columns.fill(row, plan, judged=self._regime.judged and not skip)
        judged = self._band.update(row.step, self._columns.values, self._columns.present, self._regime.widen)
        verdicts = [v for v in judged if v.kind != "nonfinite"]
        out += self._settling.update(row, verdicts)
        out += self._excursions.begin(row, verdicts)
        return out + self._layers.begin(row, verdicts)

    def wait(self, seconds: float) -> list[Anomaly]:
        """No step has come for `seconds`, pauses not counted: is that a stall? Ask now and then, by whatever clock there is."""
        row = self._row
        if row is None or not self.settings.enabled:
            return []
        return self._faults.waiting(seconds, replace(row, step=row.step + 1, time=row.time + seconds))

    def finish(self) -> list[Anomaly]:
        """Close open episodes; they did not recover."""
        return self._events.finish()

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; a Watch that loads it continues as if it had never stopped."""
        return {
            "version": 1,
            "detector": self._band.state_dict(),
            **self._events.state_dict(),
            **self._excursions.state_dict(),
            **self._skips.state_dict(),
            **self._nans.state_dict(),
            "monitors": {name: monitor.state_dict() for name, monitor in self._monitors.items()},
            "rested": self._layers.rested,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._band.load_state_dict(state["detector"])
        self._columns.forget()
        self._events.load_state_dict(state)
        self._excursions.load_state_dict(state)
        self._skips.load_state_dict(state)
        self._nans.load_state_dict(state)
        self._layers.rested = state.get("rested", -1)
        for name, kept in state.get("monitors", {}).items():  # absent in the state of an older version
            if name in self._monitors:
                self._monitors[name].load_state_dict(kept)
