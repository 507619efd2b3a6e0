"""The counterfactual that removes a planted cause ranks first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from tests.replay import causes
from tests.replay.causes import BAD, EARLY, Cause


def nonsense(step: int, batch: list[Tensor]) -> list[Tensor]:
    """Labels that belong to other samples, and far too large inputs."""
    x, y = batch
    return [-3 * x, y] if step == BAD else [x, y]


def loud(step: int, batch: list[Tensor]) -> list[Tensor]:
    """Inputs as large as float16 can just hold them: what a layer makes of them is too much for it. The normalisation after
    that layer takes the size out again, so in float32 nothing happens."""
    x, y = batch
    return [x * 3e4 if step >= BAD else x, y]


@dataclass(frozen=True)
class Planted:
    cause: Cause
    cure: str
    record: Callable[[Path, Cause], Path] = causes.record


CAUSES: dict[str, Planted] = {
    "bad-batch": Planted(Cause(spoil=nonsense), "skip-batch"),
    "lr-jump": Planted(Cause(rate=lambda step: 100.0 if BAD <= step < BAD + 3 else 1.0), "hold-lr"),
    "stale-second-moment": Planted(
        Cause(bad=200, loud=20.0, gate=lambda step: 1e-3 if step <= EARLY else 1.0),
        "reset-momentum",
        partial(causes.resumed, stale=True),
    ),
    "fp16-overflow": Planted(Cause(spoil=loud, half=True, gate=lambda step: 0.0), "full-precision"),
    "optimizer-state-lost": Planted(Cause(lr=1e-2, width=256), "restore-optimizer", partial(causes.resumed, lost=True)),
}
