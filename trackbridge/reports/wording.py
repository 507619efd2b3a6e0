"""Words that page, post-mortem and demo share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trackbridge.records import Anomaly, Hypothesis

GRADIENT_NORM = "gradient norm (before clipping where that is recorded)"

# What to change, by hand, in a run that tests a hypothesis.
INTERVENTIONS = {
    "skip-batch": "rerun with the batch left out (run.batches(loader, skip=...)) and see whether the anomaly is gone",
    "lower-lr=0.5": "rerun with half the learning rate, set in your training code or in the build function of the replay",
    "clip=1.0": "rerun with the gradient clipped to a norm of 1 before the optimizer's step",
    "full-precision": "rerun in float32, without autocast and loss scaling",
    "reset-momentum": "rerun with the optimizer's state cleared at the restart step",
    "rerun": "rerun as recorded: what does not come back was not in the data, the weights or the code",
}


def how_to_test(intervention: str) -> str:
    """A sentence, without its full stop, for the name of an intervention; a rule of a third party may give its own sentence."""
    return INTERVENTIONS.get(intervention, intervention).rstrip(".")


def shown(hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """The hypotheses worth a reader's time: "unknown" only where it leads."""
    return [hypothesis for place, hypothesis in enumerate(hypotheses) if place == 0 or hypothesis.name != "unknown"]


def plural(count: int, what: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def moved_first(anomaly: Anomaly) -> str:
    """What left its band before the series that raised the alarm, in words; "" when nobody looked."""
    mover = anomaly.first_mover
    if mover is None:
        return ""
    own = dict(anomaly.cascade).get(anomaly.series, anomaly.onset)
    if mover[0] != anomaly.series and mover[1] < own:
        return f"{mover[0]} at step {mover[1]}"
    name = "the loss" if anomaly.series == "train/loss" else anomaly.series
    together = all(step == mover[1] for _, step in anomaly.cascade)
    return f"nothing before {name} itself ({'all ' if together else ''}at step {mover[1]})"


def sigmas(score: float) -> str:
    """``40.3 sigma``, or what is said of a value that is not a number at all."""
    return f"{score:.3g} sigma" if math.isfinite(score) else "not finite"


def peak(anomaly: Anomaly) -> str:
    """The note on how far it went after its own step, "" without one."""
    return next((note for note in anomaly.notes if note.startswith("peak ")), "")
