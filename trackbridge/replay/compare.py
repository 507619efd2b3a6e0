"""Comparing what a replayed step showed with what was recorded: which series, and how far apart two values are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trackbridge.names import LOCAL, is_wide

LOSS = "train/loss"
RATE = "train/lr"
_F32_MANTISSA = 24

# Times, sizes and counts belong to one process; the norm before clipping is only known where run.clip_grad_norm_ was used, and
# grad/norm_clipped says the same of the gradient that mattered; single samples are known to run.micro only.
_NOT_COMPARED = ("perf/", "mem/", "host/", "trackbridge/", "anomaly/", "nonfinite/", "ranks/", "train/sample_")
_NOT_COMPARED_EXACT = frozenset({"grad/norm", "train/tokens", "optim/applied", "optim/skipped", "grad/unlocated"})
# Counts over a threshold, of more steps than a replay has, or of another use of the bits that are compared anyway.
_NOT_COMPARED_END = ("/dead_rows", "/checksum", "/replicas_differ", "grad/zero", "grad/vanishing", "/grad_zeros", "/grad_mean")

_IDS = ("embedding/hottest_row/",)


@dataclass(frozen=True, slots=True)
class Observation:
    """One replayed step. `values` are those that the probes gave, by series; `known` every series that they could have given.
    `rates` are the learning rates when the optimizer stepped and at the end of the step."""

    loss: float
    loss_eps: float
    values: Mapping[str, float]
    known: frozenset[str]
    rates: tuple[Mapping[str, float], ...] = ()
    micros: int = 1


@dataclass(frozen=True, slots=True)
class Difference:
    """A series whose replayed value is not the recorded one; None is absent. `ulp` is inf where one of them is not finite."""

    series: str
    recorded: float | None
    replayed: float | None
    ulp: float


def same(a: float, b: float) -> bool:
    """Equal numbers, or both NaN."""
    return a == b or (a != a and b != b)


def ulps(a: float, b: float) -> float:
    """How far apart `a` and `b` are, in units of float32's spacing at the larger one (2^-23 of its power of two).

    float32 because that is what most of what is compared was computed in; the statistics over it are float64.
    """
    if same(a, b):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    _, exponent = math.frexp(max(abs(a), abs(b)))
    return abs(a - b) / math.ldexp(1.0, exponent - _F32_MANTISSA)


def comparable(series: str) -> bool:
    series = series.removesuffix(LOCAL)
    return not series.startswith(_NOT_COMPARED) and series not in _NOT_COMPARED_EXACT and not series.endswith(_NOT_COMPARED_END)


_TOTALS = {
    "grad/norm_clipped": "layer/*/grad_norm",
    "param/norm": "layer/*/weight_norm",
    "optim/exp_avg_norm": "layer/*/exp_avg_norm",
    "optim/exp_avg_sq_norm": "layer/*/exp_avg_sq_norm",
    "optim/update_ratio": "layer/*/update_ratio",
}


def family(series: str) -> str:
    """The statistic that a series is one of: over all layers (``layer/*/grad_norm``), its total included, over all routers,
    experts or hottest rows, or the series."""
    series = series.removesuffix(LOCAL)
    parts = series.split("/")
    if len(parts) > 2 and is_wide(series):
        return f"{parts[0]}/*/{parts[-1]}"
    if parts[0] == "embedding" and len(parts) > 2:
        return "/".join(parts[:2])
    return _TOTALS.get(series, series)


def is_id(series: str) -> bool:
    """Whether the series says which one, not how much: ids differ or not, but are not near to or far from each other."""
    return series.startswith(_IDS)


def compare(recorded: Mapping[str, float], seen: Observation, *, first: bool) -> tuple[int, list[Difference]]:
    """(series compared, differences) of one step. `first`: the first step has statistics of every cadence, recorded or not."""
    compared = 0
    found: list[Difference] = []
    difference: Difference | None
    clipped_nan = not math.isfinite(recorded.get("grad/norm", 0.0))
    for series, value in recorded.items():
        if not comparable(series):
            continue
        if series == LOSS:
            difference = _loss(value, seen)
        elif series == RATE or series.startswith(RATE + "/"):
            difference = _rate(series, value, seen)
        elif clipped_nan and series.removesuffix(LOCAL).endswith("nonfinite") and not series.startswith("act/"):
            continue  # clipping by a non-finite norm spreads it; run.clip_grad_norm_ had counted before
        elif series in seen.known:
            replayed = seen.values.get(series)
            difference = Difference(series, value, replayed, math.inf if replayed is None else ulps(value, replayed))
        else:
            continue
        if difference is None:
            continue
        compared += 1
        if difference.ulp > 0:
            found.append(difference)
    if not first:
        families = {family(series) for series in recorded if is_wide(series)}
        for series, value in seen.values.items():
            if series not in recorded and is_wide(series) and family(series) in families and comparable(series):
                found.append(Difference(series, None, value, math.inf))
    return compared, found


def _loss(recorded: float, seen: Observation) -> Difference:
    """Bit-equal; with several micro-batches, equal up to the rounding of a mean: the recorded one is taken in float64."""
    distance = ulps(recorded, seen.loss)
    rounding = seen.micros * seen.loss_eps * max(abs(recorded), abs(seen.loss))
    if seen.micros > 1 and abs(recorded - seen.loss) <= rounding:
        distance = 0.0
    return Difference(LOSS, recorded, seen.loss, distance)


def _rate(series: str, recorded: float, seen: Observation) -> Difference | None:
    """The scheduler may have moved the rate before or after `run.step` recorded it: either value counts."""
    there = [rates[series] for rates in seen.rates if series in rates]
    if not there:
        return None
    nearest = min(there, key=lambda value: ulps(recorded, value))
    return Difference(series, recorded, nearest, ulps(recorded, nearest))
