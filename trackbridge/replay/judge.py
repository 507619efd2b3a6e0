"""From observations to a verdict, and to the layer that moved first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trackbridge.lab.replay import Divergence, StepReport, Verdict
from trackbridge.names import ACT, LAYER, LOCAL
from trackbridge.replay.compare import LOSS, Difference, Observation, compare
from trackbridge.replay.noise import Noise

ROUNDING = 2.0**16
"""One last bit of bfloat16. Replays of the first step begin with the same bits: where their gradients typically differ
by more, that is not rounding, but something random that was not captured."""

SUSPECTS = 8

_NOT_REPRODUCED = (
    "the replay differs from the record by more than the {} replays differ from each other (at step {}: {}): a transient "
    "fault of the recording machine, a difference in code or environment, or state that was not captured"
)

_ALIKE = "every compared number of {} is the recorded one"
_NEAR = "the numbers of {} differ from the record no more than the replays do from each other"
_MOVED = ", but step {} left another random state behind than it did when it was recorded"

_COMPILED = (
    "; torch's compiler was at work in that step of the replay, and may draw random numbers, more or fewer with what its "
    "caches hold; the step after it began from the recorded state, and no number points to a fault"
)

_RANDOM = (
    "the replays already differ from each other at their first step by more than rounding can ({:.3g} ULP of float32): "
    "something random was not captured; name your generators in run.watch(generators=...) and Rebuilt(generators=...)"
)

Record = Mapping[int, Mapping[str, float]]


@dataclass(frozen=True)
class Ran:
    """One replayed step: what was seen, whether the random state was restored exactly before it (else why not), and whether
    the state after it was the one recorded before the next step (None: not known). `compiled`: the compiler made a graph."""

    seen: Observation
    rng_problem: str | None
    rng_after: bool | None
    compiled: bool = False


@dataclass(frozen=True)
class Judgement:
    verdict: Verdict
    reason: str
    steps: tuple[StepReport, ...]
    first_divergence: Divergence | None
    noise_ulp: float
    noise_max_ulp: float
    missing: tuple[str, ...] = ()
    noisy: bool = False  # the replays differ from each other


def judge(record: Record, histories: Sequence[Mapping[int, Ran]]) -> Judgement:
    """The verdict over all replays of a window, at least two. Never "exact" unless every compared series of every step of every
    replay is the recorded one, the loss among them, and the random state is, before and after each step."""
    steps: list[StepReport] = []
    left_at: int | None = None
    differences_from: list[list[Difference]] = []
    beyond: tuple[int, str] | None = None
    alone: int | None = None  # the place of the first step that no replay reproduced
    compiled: set[int] = set()
    problems: dict[str, int] = {}
    no_loss: list[int] = []
    unknown = 0  # steps after which the random state is not known
    window = sorted(histories[0])
    noise = Noise([[history[step].seen for step in window] for history in histories])
    for place, step in enumerate(window):
        recorded, runs = record[step], [history[step] for history in histories]
        results = [compare(recorded, ran.seen, first=place == 0) for ran in runs]
        between = noise.at(place)
        every = {d.series: d for _, differences in reversed(results) for d in differences}
        distances = [{d.series: d.ulp for d in differences} for _, differences in results]
        nearest = {name: min(known.get(name, 0.0) for known in distances) for name in every}
        if alone is None and all(distances):
            alone = place
        if alone is not None and beyond is None:
            away = {name: distance for name, distance in nearest.items() if distance}
            why = noise.bounds(place, place - alone).beyond(away, min(compared for compared, _ in results))
            beyond = (step, why) if why else None
        worst = max(every.values(), key=lambda d: d.ulp, default=None)
        left_at = step if every and left_at is None else left_at
        if left_at is not None:
            differences_from.append(list(every.values()))
        if LOSS not in recorded:
            no_loss.append(step)
        for ran in runs:
            if ran.rng_problem:
                problems.setdefault(ran.rng_problem, step)
        compiled |= {step} if any(ran.compiled for ran in runs) else set()
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
                noise_ulp=noise.typical(place),
                noise_max_ulp=max(between.values(), default=0.0),
                rng="inexact" if not before_ok else "exact" if after_ok else "differs after",
            )
        )
    first = None if left_at is None else blame(left_at, record[left_at], differences_from)
    floor, most = max(report.noise_ulp for report in steps), max(report.noise_max_ulp for report in steps)
    moved = [report.step for report in steps if report.rng == "differs after"]
    span = f"steps {window[0]} to {window[-1]}"

    def found(verdict: Verdict, reason: str, *missing: str) -> Judgement:
        return Judgement(verdict, reason, tuple(steps), first, floor, most, missing, noise.any)

    if problems:
        why, step = next(iter(problems.items()))
        return found("incomplete", f"the random state could not be restored exactly before step {step}: {why}", *problems)
    if first is not None and noise.opening() > ROUNDING:
        return found("not-reproduced", _RANDOM.format(noise.opening()))
    if beyond is not None:
        return found("not-reproduced", _NOT_REPRODUCED.format(len(histories), *beyond))
    if no_loss:
        reason = f"no loss was recorded at {len(no_loss)} steps, first at step {no_loss[0]}: pass it to run.step(loss=...)"
        return found("incomplete", reason, f"loss of step {no_loss[0]}")
    if moved:
        reason = (_ALIKE if first is None else _NEAR).format(span) + _MOVED.format(moved[0])
        return found("not-reproduced", reason + (_COMPILED if compiled.issuperset(moved) else ""))
    if first is not None:
        reason = f"the replays differ from the record no more than from each other (typically {floor:.3g} ULP of float32)"
        return found("within-noise", reason)
    compared = sum(report.compared for report in steps)
    reason = f"all {compared} compared numbers of {span} are the recorded ones, bit for bit, and so is the random state"
    if unknown:
        reason += f" before each step; after {unknown} of the {len(steps)} steps the record does not know it"
    return found("exact", reason)


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
