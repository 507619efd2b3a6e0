"""From observations to a verdict, and to the layer that moved first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from trackbridge.lab.replay import Divergence, StepReport, Verdict
from trackbridge.names import ACT, LAYER, LOCAL
from trackbridge.replay.compare import LOSS, Difference, Observation, comparable, compare, family, ulps

TYPICAL = 4.0
SINGLE = 64.0
"""A difference from the record is noise while the distance from the record of a typical series (the median) is at most
`TYPICAL` times the typical distance between the replays so far, and that of each series at most `SINGLE` times the largest
between the replays in the same statistic of any layer; one ULP is added for the rounding. Under noise alone, two replays gave
at most 2.1 and 16 in 24 trials on a small model; a flipped bit of an exponent gave at least 5 and 28 (docs/replay.md)."""

ROUNDING = 2.0**16
"""One last bit of bfloat16. Replays of the first step begin with the same bits: where their gradients typically differ
by more, that is not rounding, but something random that was not captured."""

SUSPECTS = 8

_NOT_REPRODUCED = (
    "the replay differs from the record by more than the replays differ from each other: a transient fault of the recording "
    "machine, a difference in code or environment, or state that was not captured"
)

_RANDOM = (
    "the replays already differ from each other at their first step by more than rounding can ({:.3g} ULP of float32): "
    "something random was not captured; name your generators in run.watch(generators=...) and Rebuilt(generators=...)"
)

Record = Mapping[int, Mapping[str, float]]


@dataclass(frozen=True)
class Ran:
    """One replayed step: what was seen, whether the random state was restored exactly before it (else why not), and whether
    the state after it was the one recorded before the next step (None: not known)."""

    seen: Observation
    rng_problem: str | None
    rng_after: bool | None


@dataclass(frozen=True)
class Judgement:
    verdict: Verdict
    reason: str
    steps: tuple[StepReport, ...]
    first_divergence: Divergence | None
    noise_ulp: float
    noise_max_ulp: float
    missing: tuple[str, ...] = ()


def judge(record: Record, histories: Sequence[Mapping[int, Ran]]) -> Judgement:
    """The verdict over all replays of a window. Never "exact" unless every compared series of every step of every replay is
    the recorded one, the loss among them, and the random state is, before and after each step."""
    steps: list[StepReport] = []
    left_at: int | None = None
    differences_from: list[list[Difference]] = []
    within = True
    typical = 0.0
    floors: dict[str, float] = {}
    problems: dict[str, int] = {}
    no_loss: list[int] = []
    opening = 0.0
    unknown = 0  # steps after which the random state is not known
    for place, step in enumerate(sorted(histories[0])):
        recorded, runs = record[step], [history[step] for history in histories]
        results = [compare(recorded, ran.seen, first=place == 0) for ran in runs]
        noise = _noise([ran.seen for ran in runs])
        for name, distance in noise.items():
            floors[family(name)] = max(floors.get(family(name), 0.0), distance)
        every = {d.series: d for _, differences in reversed(results) for d in differences}
        nearest = {name: min(_distance(name, differences) for _, differences in results) for name in every}
        if place == 0:
            moved = [distance for name, distance in noise.items() if family(name) == "layer/*/grad_norm"]
            opening = median(moved) if moved else 0.0
        typical = max(typical, median(noise.values()) if noise else 0.0)
        within = within and _is_noise(nearest, typical, floors)
        worst = max(every.values(), key=lambda d: d.ulp, default=None)
        left_at = step if every and left_at is None else left_at
        if left_at is not None:
            differences_from.append(list(every.values()))
        if LOSS not in recorded:
            no_loss.append(step)
        for ran in runs:
            if ran.rng_problem:
                problems.setdefault(ran.rng_problem, step)
        unknown += any(ran.rng_after is None for ran in runs)
        before_ok = not any(ran.rng_problem for ran in runs)
        after_ok = all(ran.rng_after is not False for ran in runs)
        steps.append(
            StepReport(
                step=step,
                loss_recorded=recorded.get(LOSS),
                losses=tuple(ran.seen.loss for ran in runs),
                compared=min(compared for compared, _ in results),
                different=len(every),
                worst=worst.series if worst else None,
                ulp=worst.ulp if worst else 0.0,
                noise_ulp=median(noise.values()) if noise else 0.0,
                noise_max_ulp=max(noise.values(), default=0.0),
                rng="inexact" if not before_ok else "exact" if after_ok else "differs after",
            )
        )
    first = None if left_at is None else blame(left_at, record[left_at], differences_from)
    verdict, reason, missing = _verdict(steps, first, within, problems, no_loss, unknown, opening)
    floor, most = max(report.noise_ulp for report in steps), max(report.noise_max_ulp for report in steps)
    return Judgement(verdict, reason, tuple(steps), first, floor, most, missing)


def _verdict(
    steps: Sequence[StepReport],
    first: Divergence | None,
    within: bool,
    problems: Mapping[str, int],
    no_loss: Sequence[int],
    unknown: int,
    opening: float,
) -> tuple[Verdict, str, tuple[str, ...]]:
    moved = next((report.step for report in steps if report.rng == "differs after"), None)
    span = f"steps {steps[0].step} to {steps[-1].step}"
    if problems:
        why, step = next(iter(problems.items()))
        reason = f"the random state could not be restored exactly before step {step}: {why}"
        return "incomplete", reason, tuple(problems)
    if first is not None and opening > ROUNDING:
        return "not-reproduced", _RANDOM.format(opening), ()
    if first is not None and not within:
        return "not-reproduced", _NOT_REPRODUCED, ()
    if no_loss:
        reason = f"no loss was recorded at {len(no_loss)} steps, first at step {no_loss[0]}: pass it to run.step(loss=...)"
        return "incomplete", reason, (f"loss of step {no_loss[0]}",)
    if moved is not None:
        reason = (
            f"every compared number of {span} is the recorded one, but step {moved} left another random state behind than it "
            "did when it was recorded"
        )
        return "not-reproduced", reason, ()
    if first is not None:
        floor = max(report.noise_ulp for report in steps)
        reason = f"the replays differ from the record no more than from each other (typically {floor:.3g} ULP of float32)"
        return "within-noise", reason, ()
    compared = sum(report.compared for report in steps)
    reason = f"all {compared} compared numbers of {span} are the recorded ones, bit for bit, and so is the random state"
    if unknown:
        reason += f" before each step; after {unknown} of the {len(steps)} steps the record does not know it"
    return "exact", reason, ()


def _distance(series: str, differences: Sequence[Difference]) -> float:
    return next((d.ulp for d in differences if d.series == series), 0.0)


def _is_noise(nearest: Mapping[str, float], typical: float, floors: Mapping[str, float]) -> bool:
    """`nearest`: distance of the record from the nearest replay, of the series that differ. Between replays that do not differ
    from each other there is no noise."""
    if not nearest:
        return True
    single = all(ulp <= SINGLE * (floors.get(family(series), 0.0) + 1.0) for series, ulp in nearest.items())
    return bool(floors) and single and median(nearest.values()) <= TYPICAL * (typical + 1.0)


def _noise(seen: Sequence[Observation]) -> dict[str, float]:
    """Largest distance between any two replays, by series; 0 is left out."""
    found: dict[str, float] = {}
    for a, b in combinations(seen, 2):
        pairs = [(LOSS, a.loss, b.loss)]
        pairs += [(name, value, b.values[name]) for name, value in a.values.items() if name in b.values and comparable(name)]
        for name, left, right in pairs:
            distance = ulps(left, right)
            if distance:
                found[name] = max(found.get(name, 0.0), distance)
    return found


# -- which layer


def blame(step: int, recorded: Mapping[str, float], differences: Sequence[Sequence[Difference]]) -> Divergence:
    """Where the replay left the record: the first series that differs at `step` in the order of computation (activations as
    the model runs, loss, the rest), and the parameters that changed most. `differences` are those of `step` and of the steps
    after it.

    A parameter under a module whose activations are all as recorded ran before the fault; one under a later module than the
    first that differs ran after it. Among the others the change of the weight's norm counts, at the first step that has one: a
    flipped bit stays. Gradients, where no weight was measured, are a guess, since a fault changes them everywhere.
    """
    here = {d.series: d for d in differences[0]}
    sites = list(dict.fromkeys(name[len(ACT) :].rpartition("/")[0] for name in (*recorded, *here) if name.startswith(ACT)))
    bad = [site for site in sites if any(name.startswith(ACT) and name[len(ACT) :].rpartition("/")[0] == site for name in here)]
    suspects = _suspects(differences, cleared=[site for site in sites if site not in bad[:1]] if bad else [])
    order = [name for name in here if bad and name.startswith(f"{ACT}{bad[0]}/")]
    order += [LOSS, *(f"{LAYER}{suspect}/grad_norm{end}" for suspect in suspects for end in ("", LOCAL)), *here]
    series = next(name for name in order if name in here)
    return Divergence(
        step=step,
        series=series,
        layer=next(iter(suspects), bad[0] if bad else None),
        statistic=series.rpartition("/")[2].removesuffix(LOCAL),
        recorded=here[series].recorded,
        replayed=here[series].replayed,
        ulp=here[series].ulp,
        suspects=tuple(list(suspects)[1 : 1 + SUSPECTS]),
        change=next(iter(suspects.values()), 0.0),
    )


def _suspects(differences: Sequence[Sequence[Difference]], cleared: Sequence[str]) -> dict[str, float]:
    """{parameter: share by which its norm changed}, the most changed first, of those that are not under a cleared module."""
    for statistic, steps in (("weight_norm", differences), ("grad_norm", differences[:1])):
        for found in steps:
            changes: dict[str, float] = {}
            for d in found:
                if d.series.startswith(LAYER) and d.series.removesuffix(LOCAL).endswith(f"/{statistic}"):
                    parameter = d.series[len(LAYER) :].rpartition("/")[0]
                    if not any(parameter.startswith(f"{site}.") for site in cleared):
                        changes[parameter] = _relative(d)
            if changes:
                return dict(sorted(changes.items(), key=lambda item: item[1], reverse=True))
    return {}


def _relative(d: Difference) -> float:
    if d.recorded is None or d.replayed is None or not (math.isfinite(d.recorded) and math.isfinite(d.replayed)):
        return math.inf
    scale = min(abs(d.recorded), abs(d.replayed))
    return abs(d.recorded - d.replayed) / scale if scale else math.inf
