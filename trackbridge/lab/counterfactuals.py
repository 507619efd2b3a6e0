"""What replays with one thing changed showed: the ranked table, plain data. How it is scored: docs/replay.md."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from trackbridge.lab.replay import Found, Verdict

Outcome: TypeAlias = Literal["prevented", "remains", "failed", "not-runnable"]
RERUN = "rerun"


class Trend(Found):
    """Where the loss was going before the spike: ``level + slope * (step - onset)``, plus or minus `sigma`, fitted to the
    recorded steps `first` to `last`."""

    level: float
    slope: float
    sigma: float
    first: int
    last: int

    def at(self, step: int, onset: int) -> float:
        return self.level + self.slope * (step - onset)


class Try(Found):
    """One replay with one change.

    `name` is what was asked for (``lower-lr=0.5``), `what` a sentence that says what was changed and from which step on,
    `tests` the hypotheses of the diagnosis that name it. `outcome`: "prevented" (the detector that told the anomaly tells
    nothing), "remains", "failed" (the step function raised) or "not-runnable"; `reason` says in a sentence why.

    `rank` counts from 1 and is None for what did not run. `score` is `distance` + `given_up`, less is better; `distance` is by
    how many sigmas the loss lies above the trend from the onset to the end of the window, on average; `given_up` the share of
    the training in that stretch which the change gave up. `skipped` names the steps that were not trained on. `losses` has one
    value per step of `steps` (a skipped step has none). `seconds` is the wall time.
    """

    name: str
    what: str
    tests: tuple[str, ...] = ()
    outcome: Outcome
    reason: str = ""
    rank: int | None = None
    score: float | None = None
    distance: float | None = None
    given_up: float = 0.0
    peak: float | None = None
    final: float | None = None
    skipped: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    losses: tuple[float, ...] = ()
    seconds: float = 0.0

    @property
    def ran(self) -> bool:
        return self.outcome in ("prevented", "remains")


class CounterfactualReport(Found):
    """The ranked table of `trackbridge.replay.what_if`. `tries` are in order of rank, then those that did not run.

    `verdict` is that of the plain replay of the same window, whose loss is the curve `RERUN`: counterfactuals are only as good
    as that replay is, and `caution` says so in a sentence where it is not "exact" or "within-noise", or no longer (else None).
    `guilty` are the steps whose batches are suspected, the first of them being where changes are aimed at.
    """

    run: str
    anomaly_id: str
    anomaly_step: int
    onset: int
    series: str
    restart_step: int
    last_step: int
    guilty: tuple[int, ...]
    verdict: Verdict
    caution: str | None = None
    trend: Trend
    rerun: Try
    tries: tuple[Try, ...] = ()
    seconds: float = 0.0

    @property
    def best(self) -> Try | None:
        """The first of the table, if it prevented the anomaly."""
        first = self.tries[0] if self.tries else None
        return first if first is not None and first.outcome == "prevented" else None

    def curves(self) -> dict[str, tuple[tuple[int, ...], tuple[float, ...]]]:
        """{name: (steps, losses)} for a plot: the plain rerun first, then the tries by rank."""
        return {t.name: (t.steps, t.losses) for t in (self.rerun, *self.tries) if t.ran}

    def to_markdown(self) -> str:
        lines = [f"# What would have prevented the {self.series} anomaly at step {self.onset} of {self.run}", ""]
        if self.caution:
            lines += [f"**{self.caution}**", ""]
        lines += ["| rank | change | outcome | distance | given up | score | |", "|---|---|---|---|---|---|---|"]
        for t in (*self.tries, self.rerun):
            cells = [str(t.rank or ""), t.name, t.outcome, number(t.distance), f"{t.given_up:.0%}", number(t.score)]
            lines.append(f"| {' | '.join(_cell(cell) for cell in (*cells, t.reason or t.what))} |")
        lines += ["", f"Distance: mean sigmas above the trend of steps {self.trend.first} to {self.trend.last}."]
        return "\n".join(lines) + "\n"


def number(value: float | None) -> str:
    """Three digits, for a table; what is not finite in words."""
    if value is None:
        return ""
    return f"{value:.3g}" if math.isfinite(value) else "not finite"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
