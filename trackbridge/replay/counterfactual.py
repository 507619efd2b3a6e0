"""`what_if`: the window again, each time with one change, ranked by what would have prevented the anomaly."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trackbridge import plugins
from trackbridge.capsule import SpikeCapsule
from trackbridge.errors import TrackbridgeError, UsageError
from trackbridge.lab import CounterfactualReport, ReplayReport, Try
from trackbridge.lab.counterfactuals import RERUN, Outcome
from trackbridge.names import is_wide
from trackbridge.ranks import Ranks
from trackbridge.records import Anomaly
from trackbridge.replay import settings
from trackbridge.replay.compare import LOSS, compare
from trackbridge.replay.engine import Replay, this_rank
from trackbridge.replay.feed import Incomplete
from trackbridge.replay.guilty import guilty_steps
from trackbridge.replay.judge import Ran
from trackbridge.replay.norms import GradientNorm
from trackbridge.replay.score import Curve, Judge, gradient_judged
from trackbridge.replay.trial import Intervention, Trial

GROUP = "trackbridge.interventions"
ALL = "all"
DEFAULT = (
    "skip-batch", "hold-lr", "lower-lr=0.5", "warmup=16", "clip=1.0", "reset-momentum", "spam", "full-precision",
    "restore-optimizer",
)  # fmt: skip
TOLD_APART = 0.1
LONG = 64  # a longer excursion is no question of its batches
OnTry = Callable[[str, int, int, int, int], None]

_ASKED = re.compile(r"(?P<name>[A-Za-z][\w-]*)(=(?P<value>[^@]+))?(@(?P<first>\d+)(-(?P<last>\d+))?)?")


@dataclass(frozen=True)
class Asked:
    """``name[=value][@first[-last]]``, and what it means."""

    text: str
    intervene: Intervention
    value: str | None
    first: int | None
    last: int | None

    @classmethod
    def parse(cls, text: str) -> Asked:
        """Raises `UsageError` for what has not this form, `ConfigError` for a name that nobody registered."""
        match = _ASKED.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"{text!r} is no change to try; the form is NAME[=VALUE][@STEP[-STEP]], such as lower-lr=0.5")
        first, last = (None if match[key] is None else int(match[key]) for key in ("first", "last"))
        if first is not None and last is not None and last < first:
            raise UsageError(f"{text!r}: step {last} comes before step {first}")
        return cls(text.strip(), plugins.load(GROUP, match["name"]), match["value"], first, last)

    def check(self, capsule: SpikeCapsule) -> None:
        """Raises `UsageError` where the steps it names are none of the window."""
        first, last = capsule.restart_step, capsule.span[1]
        if self.first is not None and (self.first > last or (self.first if self.last is None else self.last) < first):
            raise UsageError(f"{self.text}: the window is steps {first} to {last}")


def what_if(
    capsule: SpikeCapsule,
    build: Callable[[], Any],
    tries: Sequence[str] = (ALL,),
    *,
    replay: ReplayReport | None = None,
    deterministic: bool | None = None,
    rank: int | None = None,
    on_step: OnTry | None = None,
) -> CounterfactualReport:
    """Run the window of `capsule` again from the same state with the same data, once for each change, and rank the changes.

    Args:
        capsule, build, deterministic, rank: as for `rerun`.
        tries: changes by name, ``"all"`` for the usual ones and those that the diagnosis names (docs/replay.md lists them).
        replay: the report of a replay of the same capsule, default the one that is kept in it; without either the window is
            replayed first. Counterfactuals are only as good as that replay.
        on_step: called as ``on_step(name, number, count, step, last)`` after each step of each try.

    Raises:
        UsageError, ConfigError: a change of no known name or form, or what `build()` returned does not fit the record.
        TrackbridgeError: the capsule lacks what a replay needs, or the step function raised in the replay without a change.
    """
    from trackbridge.replay.engine import rerun

    if not isinstance(capsule, SpikeCapsule):
        raise UsageError(f"a replay takes a capsule, from trackbridge.pull(REF), not a {type(capsule).__name__}")
    began = time.monotonic()
    wanted = [Asked.parse(text) for text in expand(tries, capsule.anomaly)]
    for asked in wanted:
        asked.check(capsule)
    own_rank = this_rank() if rank is None else rank
    replay = replay or capsule.replay
    ours = replay is not None and (replay.rank == own_rank or Ranks.current().world_size > 1)  # one report for all ranks
    if replay is None or not ours or replay.verdict == "incomplete":
        replay = rerun(capsule, build, deterministic=deterministic, rank=own_rank)
    if replay.verdict == "incomplete":
        raise TrackbridgeError(f"this capsule cannot be replayed, so nothing can be tried: {replay.reason}")
    guilty = guilty_steps(capsule.anomaly, capsule.restart_step)
    judge = Judge(capsule, own_rank, guilty)
    lab = _Lab(Replay(capsule, build, own_rank, deterministic, None), judge, guilty, len(wanted) + 1, on_step)
    with settings.kept(), lab.replay.random_state_kept():
        plain = lab.run(Asked.parse(RERUN), tests=())
        if not plain.ran:
            raise TrackbridgeError(plain.reason)
        found = [lab.run(asked, tests=_tests(asked.text, capsule.anomaly)) for asked in wanted]
    return CounterfactualReport(
        run=capsule.run,
        anomaly_id=capsule.anomaly.id,
        anomaly_step=capsule.step,
        onset=capsule.anomaly.onset,
        series=capsule.anomaly.series,
        restart_step=capsule.restart_step,
        last_step=capsule.span[1],
        guilty=guilty,
        verdict=replay.verdict,
        caution=_caution(replay, plain, lab.left_at),
        trend=judge.trend,
        rerun=plain,
        tries=ranked(found),
        seconds=time.monotonic() - began,
    )


def expand(tries: Sequence[str], anomaly: Anomaly) -> list[str]:
    """The names to try, each once, also from one text with commas: "all" stands for those that the hypotheses name, then for
    `DEFAULT`."""
    names: list[str] = []
    for text in tries.split(",") if isinstance(tries, str) else tries:
        if not isinstance(text, str):
            raise UsageError(f"a change to try is a text such as 'lower-lr=0.5', not a {type(text).__name__}")
        if text.strip() != ALL:
            names.append(text.strip())
            continue
        for hypothesis in anomaly.hypotheses:
            if hypothesis.intervention and _known(hypothesis.intervention):
                names.append(hypothesis.intervention)
        names += DEFAULT
        over = anomaly.recovered_after
        if over is not None and 1 < over <= LONG:
            names.append(f"skip-batch={over}")
    return [name for name in dict.fromkeys(names) if name != RERUN]


def ranked(tries: Sequence[Try]) -> tuple[Try, ...]:
    """In order: what prevented the anomaly, then what did not, each by score; then what did not run. Scores that are the same
    to the nearest `TOLD_APART` are a tie, which the change that gave up less wins."""

    def place(t: Try) -> tuple[bool, int, float, float]:
        score = t.score or 0.0
        return t.outcome != "prevented", round(score / TOLD_APART), t.given_up, score

    ran = sorted((t for t in tries if t.ran), key=place)
    placed = [t.model_copy(update={"rank": place}) for place, t in enumerate(ran, 1)]
    return (*placed, *(t for t in tries if not t.ran))


class _Lab:
    """Runs one try after another."""

    def __init__(self, replay: Replay, judge: Judge, guilty: tuple[int, ...], count: int, on_step: OnTry | None) -> None:
        self.replay = replay
        self._judge = judge
        self._guilty = guilty
        self._count = count
        self._done = 0
        self._on_step = on_step
        self.left_at: int | None = None  # the first step at which the rerun is not the record

    def run(self, asked: Asked, tests: tuple[str, ...]) -> Try:
        capsule = self._judge.capsule
        trial = Trial(capsule, asked.intervene, asked.value, self._guilty, asked.first, asked.last)
        norm = GradientNorm() if gradient_judged(capsule.anomaly.series) else None
        began = time.monotonic()
        number, self._done = self._done, self._done + 1
        trial.on_step = (lambda step: self._tell(asked.text, number, step)) if self._on_step else None
        trial.norm = norm
        outcome: Outcome
        try:
            history = self.replay.run(number, trial)
        except Incomplete as why:  # NotRunnable is one
            outcome, reason = "not-runnable", str(why.args[0])
        except UsageError:
            raise
        except (TrackbridgeError, torch.OutOfMemoryError) as error:
            outcome, reason = "failed", " ".join(str(error).split())
        else:
            if asked.text == RERUN:
                self.left_at = self._left(history)
            return self._judged(asked.text, trial, tests, _curve(history, norm), time.monotonic() - began)
        seconds = time.monotonic() - began
        return Try(name=asked.text, what=trial.what, tests=tests, outcome=outcome, reason=reason, seconds=seconds)

    def _left(self, history: dict[int, Ran]) -> int | None:
        record, first = self.replay.record, min(history)
        return next((s for s in sorted(history) if compare(record[s], history[s].seen, first=s == first)[1]), None)

    def _judged(self, name: str, trial: Trial, tests: tuple[str, ...], curve: Curve, seconds: float) -> Try:
        judge = self._judge
        told = judge.remains(curve)
        distance = judge.distance(curve)
        if told is None:
            reason = ""
        else:
            reason = str(told) if isinstance(told, Anomaly) else f"the loss is out of its band at step {told}"
        if trial.acted == 0:
            reason = "; ".join(filter(None, (reason, "it never came into play")))
        losses = {step: values[LOSS] for step, values in curve.items() if LOSS in values}
        return Try(
            name=name,
            what=trial.what,
            tests=tests,
            outcome="prevented" if told is None else "remains",
            reason=reason,
            score=distance + trial.given_up,
            distance=distance,
            given_up=trial.given_up,
            peak=judge.peak(curve),
            final=next(reversed(losses.values()), None),
            skipped=tuple(trial.skipped),
            steps=tuple(losses),
            losses=tuple(losses.values()),
            seconds=seconds,
        )

    def _tell(self, name: str, number: int, step: int) -> None:
        assert self._on_step is not None
        self._on_step(name, number, self._count, step, self._judge.capsule.span[1])


def _curve(history: dict[int, Ran], norm: GradientNorm | None) -> Curve:
    """What the probes saw, as the record would show it."""
    curve = {}
    for step, ran in history.items():
        values = {name: value for name, value in ran.seen.values.items() if not is_wide(name)}
        values[LOSS] = ran.seen.loss
        if norm is not None and step in norm.values:
            values["grad/norm"] = norm.values[step]
        curve[step] = values
    return curve


def _tests(text: str, anomaly: Anomaly) -> tuple[str, ...]:
    return tuple(hypothesis.name for hypothesis in anomaly.hypotheses if hypothesis.intervention == text)


def _known(intervention: str) -> bool:
    match = _ASKED.fullmatch(intervention)
    return match is not None and match["name"] in plugins.available(GROUP)


def _caution(replay: ReplayReport, plain: Try, left_at: int | None) -> str | None:
    if plain.outcome == "prevented":
        return (
            "The anomaly did not come back when the window was run again without any change: what caused it was not in the "
            "data, the weights or the code, and no change below proves anything"
        )
    if replay.verdict == "not-reproduced":
        return f"The replay does not reproduce the record ({replay.reason}): read the table below with care"
    if replay.verdict == "exact" and left_at is not None:
        return (
            f"The replay was exact, but the rerun below leaves the record at step {left_at}: the code or the machine is not "
            "what it was then, or noise is rare; replay it again before you trust the table"
        )
    return None
