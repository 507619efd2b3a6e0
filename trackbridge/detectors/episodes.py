"""From verdicts to events: one `Anomaly` per episode, however many series and steps take part in it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from trackbridge.records import Anomaly

CASCADE = 64  # entries an anomaly carries at most


def severity(kind: str, score: float) -> float:
    """0 to 1, for ranking: a tenfold score is half the scale. 5 sigmas 0.35, 10: 0.5, 100 and more: 1. Non-finite is 1,
    a divergence at least 0.9."""
    if kind == "nonfinite":
        return 1.0
    grade = min(1.0, math.log10(max(score, 1.0)) / 2)
    return max(grade, 0.9) if kind == "divergence" else grade


def stage(series: str) -> int:
    """Where in one step a series is made: forward activations, loss, gradients, update. Orders a tie in a cascade."""
    if series.startswith("act/"):
        return 0
    if series.startswith("train/"):
        return 1
    if series.startswith("layer/"):
        return 4 if series.endswith("update_ratio") else 2
    return 3 if series.startswith("grad/") else 4


@dataclass
class Episode:
    """An event under way. `members` maps each series that left its band to the step it did so."""

    anomaly: Anomaly
    members: dict[str, int] = field(default_factory=dict)
    order: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    quiet: int = 0
    quiet_since: int = -1
    settled: bool = False

    def join(self, series: str, step: int, position: int) -> None:
        """Note that `series` left its band at `step`; `position` is its place in the model's own order."""
        if series not in self.members:
            self.members[series] = step
            rank = stage(series)
            self.order[series] = (step, rank, -position if rank == 2 else position)

    def cascade(self) -> tuple[tuple[str, int], ...]:
        """(series, step) in the order in which the step computes them: forward order, then loss, then backward order."""
        ordered = sorted(self.members, key=lambda name: self.order[name])
        return tuple((name, self.members[name]) for name in ordered[:CASCADE])

    def refreshed(self, **changes: Any) -> Anomaly:
        cascade = self.cascade()
        self.anomaly = self.anomaly.updated(cascade=cascade, first_mover=cascade[0] if cascade else None, **changes)
        return self.anomaly

    def state(self) -> dict[str, Any]:
        plain = asdict(self)
        del plain["anomaly"]["hypotheses"]
        return plain

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Episode:
        given = dict(state["anomaly"])
        for key in ("value", "expected", "score"):
            given[key] = float(given[key])
        given["cascade"] = tuple((name, step) for name, step in given["cascade"])
        given["first_mover"] = tuple(given["first_mover"]) if given["first_mover"] else None
        given["ranks"], given["notes"] = tuple(given["ranks"]), tuple(given["notes"])
        order = {name: (a, b, c) for name, (a, b, c) in state["order"].items()}
        return cls(Anomaly(**given), dict(state["members"]), order, state["quiet"], state["quiet_since"], state["settled"])
