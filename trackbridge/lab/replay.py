"""What a replay found: plain data, and the same as Markdown. Rendering in a terminal is the command line's."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

Verdict: TypeAlias = Literal["exact", "within-noise", "not-reproduced", "incomplete"]


class Found(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")


class StepReport(Found):
    """One step. `losses` are the replays'. `compared` counts series, `different` those that some replay did not reproduce;
    `ulp` is the largest distance among them from the record, in `worst`; `noise_ulp` and `noise_max_ulp` are the typical
    (geometric mean over all compared series, one ULP added) and the largest distance between two replays (float32 ULP). `rng`
    says whether the random state before the step was restored and, where the record knows it, found again after it."""

    step: int
    loss_recorded: float | None
    losses: tuple[float, ...]
    compared: int
    different: int
    worst: str | None = None
    ulp: float = 0.0
    noise_ulp: float = 0.0
    noise_max_ulp: float = 0.0
    rng: Literal["exact", "inexact", "differs after"] = "exact"


class Divergence(Found):
    """Where the replay first left the record. `series` is the first that differs in the order of computation, `statistic` its
    last part; `layer` is the parameter (else the module) that changed most at that step, by the share `change` of its norm;
    `suspects` are the next ones."""

    step: int
    series: str
    layer: str | None
    statistic: str
    recorded: float | None
    replayed: float | None
    ulp: float
    suspects: tuple[str, ...] = ()
    change: float = 0.0

    def __str__(self) -> str:
        where = f" (most in {self.layer})" if self.layer else ""
        values = f"recorded {_value(self.recorded)}, replayed {_value(self.replayed)}"
        return f"step {self.step}: {self.series}{where}: {values}, {_ulp(self.ulp)}"


class EnvironmentDifference(Found):
    """A fact of the recording's provenance that is another one here; None is absent."""

    name: str
    recorded: Any
    now: Any


class ReplayReport(Found):
    """The verdict of a replay with its evidence.

    `reason` is one sentence. `noise_ulp` is the noise floor: the typical distance between two replays at the noisiest step,
    `noise_max_ulp` the largest of any series; None with nothing to compare.
    `missing` names what an incomplete replay lacks. `seconds` is the wall time. On several ranks this is the report of `rank`,
    which has the worst verdict, and `verdicts` are those of all.
    """

    verdict: Verdict
    reason: str
    run: str
    anomaly_step: int
    restart_step: int
    last_step: int
    rank: int = 0
    runs: int = 0
    deterministic: bool = False
    environment: tuple[EnvironmentDifference, ...] = ()
    missing: tuple[str, ...] = ()
    first_divergence: Divergence | None = None
    noise_ulp: float | None = None
    noise_max_ulp: float | None = None
    steps: tuple[StepReport, ...] = ()
    seconds: float = 0.0
    verdicts: tuple[Verdict, ...] = ()

    def to_markdown(self) -> str:
        """The report for a person: differences of environment first, then the verdict, then its evidence."""
        lines = [f"# Replay of {self.run}, steps {self.restart_step} to {self.last_step}", "", "## Environment", ""]
        if self.environment:
            lines += ["| what | recorded | here |", "|---|---|---|"]
            lines += [f"| {_cell(d.name)} | {_cell(d.recorded)} | {_cell(d.now)} |" for d in self.environment]
        else:
            lines.append("As recorded.")
        lines += ["", f"## Verdict: {self.verdict}", "", f"{self.reason[0].upper()}{self.reason[1:]}."]
        if self.verdicts:
            lines += ["", f"By rank: {', '.join(self.verdicts)}; what follows is rank {self.rank}'s."]
        if self.first_divergence is not None:
            lines += ["", f"First divergence: {self.first_divergence}."]
            if self.first_divergence.suspects:
                lines += ["", f"Next in line: {', '.join(self.first_divergence.suspects)}."]
        if self.noise_ulp is not None:
            most = f", at most {_ulp(self.noise_max_ulp)}" if self.noise_max_ulp else ""
            lines += ["", f"{self.runs} replays; they differ from each other typically by {_ulp(self.noise_ulp)}{most}."]
        if self.missing:
            lines += ["", "## What is missing", "", *(f"- {text}" for text in self.missing)]
        if self.steps:
            lines += ["", "## Steps", "", "| step | loss recorded | loss replayed | compared | different | worst | RNG |"]
            lines.append("|---|---|---|---|---|---|---|")
            lines += [_row(step, self.anomaly_step) for step in self.steps]
        return "\n".join(lines) + "\n"


def _row(step: StepReport, anomaly_step: int) -> str:
    mark = " (anomaly)" if step.step == anomaly_step else ""
    worst = f"{step.worst}: {_ulp(step.ulp)}" if step.worst else ""
    replayed = ", ".join(dict.fromkeys(_value(loss) for loss in step.losses))
    cells = (f"{step.step}{mark}", _value(step.loss_recorded), replayed, step.compared, step.different, _cell(worst), step.rng)
    return f"| {' | '.join(map(str, cells))} |"


def _value(value: float | None) -> str:
    return "absent" if value is None else f"{value:.9g}"


def _ulp(value: float) -> str:
    return "not comparable (one is absent or not finite)" if math.isinf(value) else f"{value:.3g} ULP (float32)"


def _cell(value: Any) -> str:
    text = "absent" if value is None else " ".join(str(value).split())
    return (text if len(text) <= 120 else text[:117] + "...").replace("|", "\\|")
