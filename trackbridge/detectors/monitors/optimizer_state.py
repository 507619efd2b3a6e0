"""A second moment that fell faster than it can: the optimizer's state was lost, reset, or replaced.

Adam's second moment is an average of squares with decay b, so in k steps no element of it falls below b^k of its value, and
neither does its norm (arXiv:1412.6980, algorithm 1). With b >= 0.9 that is 0.35 over the ten steps between two
measurements, whatever the gradients do.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from trackbridge.config import OptimizerStateConfig
from trackbridge.detectors.monitors.base import Look, Monitor, Sign
from trackbridge.records import FloatArray

LOST, STALE = "optimizer-state-lost", "stale-second-moment"
_WHOLE = "optim/exp_avg_sq_norm"
_TAIL = "/exp_avg_sq_norm"
_SPAN = 10  # steps between two measurements for which `fall` is meant


class OptimizerState(Monitor):
    """Follows ``optim/exp_avg_sq_norm`` and that of each layer. All layers at once: lost; a few: theirs is stale, and named."""

    NAME = "optimizer_state"
    KEPT: ClassVar[tuple[str, ...]] = ("at", "names", "norms")

    def __init__(self, config: OptimizerStateConfig) -> None:
        super().__init__()
        self.config = config
        self.at = -1  # step of the latest measurement
        self.names: list[str] = []
        self.norms: list[float] = []

    def follows(self, name: str) -> bool:
        return name == _WHOLE or name.endswith(_TAIL)

    def update(self, look: Look) -> Sign | None:
        if _WHOLE not in look.places:
            return None
        names, columns = self.columns(look)
        now = look.row.values[columns]
        gap = look.step - self.at
        sign = None
        if self.names == list(names) and 0 < gap <= self.config.longest_gap:
            sign = self._compare(look.step, names, np.array(self.norms), now, gap)
        self.at = look.step
        kept = np.where(np.isfinite(now), now, 0.0)
        self.names, self.norms = list(names), kept.tolist()
        return sign

    def _compare(self, step: int, names: tuple[str, ...], before: FloatArray, now: FloatArray, gap: int) -> Sign | None:
        known = (before > 0) & np.isfinite(now)
        if not known.any():
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            ratio = np.where(known, now / np.where(known, before, 1.0), 1.0)
        limit = self.config.fall ** max(gap / _SPAN, 1.0)
        fell = known & (ratio < limit)
        if not fell.any():
            return None
        layers = np.array([name != _WHOLE for name in names])
        whole = names.index(_WHOLE)
        if not layers.any() or float(np.median(ratio[layers & known] if (layers & known).any() else ratio)) < limit:
            worst, fault, severity = whole, LOST, 0.7
            if not fell[whole]:
                worst = int(np.argmin(ratio))
            words = f"the second moment fell to {ratio[worst]:.3g} of its value within {gap} steps, in all layers"
        else:
            worst = int(np.argmin(np.where(layers, ratio, np.inf)))
            count, layer = int((fell & layers).sum()), names[worst].removesuffix(_TAIL).removeprefix("layer/")
            others = f" and {count - 1} more" if count > 1 else ""
            fault, severity = STALE, 0.6
            words = f"the second moment of {layer}{others} fell to {ratio[worst]:.3g} of its value within {gap} steps"
        score = limit / max(float(ratio[worst]), 1e-12)
        value, expected = float(now[worst]), float(before[worst])
        terms = f"{ratio[worst]:.3g} of the {expected:.3g} of {gap} steps before, where a decay leaves {limit:.3g} or more"
        return Sign(fault, "shift", names[worst], step, value, expected, score, severity, words, self.at + 1, terms)
