"""From a recorded trial to an outcome: was it found, when, and what was named?"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.faults.causes import FAULTS, Fault
from benchmarks.faults.healthy import CONTROLS, STEPS, Control
from benchmarks.faults.held import HELD_CONTROLS, HELD_FAULTS, HELD_OUT
from benchmarks.faults.tasks import DEVELOPMENT, FIRST, SECOND, Task
from benchmarks.faults.trial import Trial
from trackbridge.explain import explain
from trackbridge.journal import JournalReader
from trackbridge.records import Anomaly, Row
from trackbridge.rundir import RunDirectory

DONE = "done.json"
AFTER = 8  # recorder.after, its default: what is known when a capsule is sealed
NEVER = 1 << 40
BITES = 12.0  # sigmas of effect from which an injection counts: one step by 12, or eight on average by 6
EARLIEST, LATEST = 140, 180  # the injection comes at a step in between
SEEDS = {"first": (1, 2, 3), "second": (101, 102, 103), "held-out": (2001, 2002, 2003)}
RATES, HELD_RATES = (0.5, 1.0, 2.0), (0.7, 1.4)  # times each task's own
TASKS = {task.name: task for task in (*DEVELOPMENT, *HELD_OUT)}
WAYS = {way.__name__: way for way in (*FAULTS, *CONTROLS, *HELD_FAULTS, *HELD_CONTROLS)}


@dataclass(frozen=True)
class Plan:
    """One trial: a way of a cause (or a control), a task, a seed, a rate relative to the task's own."""

    way: str
    task: str
    seed: int
    size: float = 0.0
    lr: float = 1.0
    part: str = "development"

    @property
    def label(self) -> str:
        return f"{self.way}-{self.task}-{self.seed}-{self.size:g}-{self.lr:g}"


@dataclass
class Outcome:
    """`false_alarms` are (step, kind, series) before the injection; `hypotheses` the names in order, of the first event after
    it. `effect` is how far the loss rose above its twin's, in the twin's own noise: see `effect`. `delay` counts from the
    injection, or, where the cause grows, None; `lead` from the first mover to the detection."""

    plan: Plan
    cause: str
    effect: float = math.inf
    healthy_steps: int = 0
    false_alarms: list[tuple[int, str, str]] = field(default_factory=list)
    gradual: bool = False
    detected: bool = False
    kind: str = ""
    series: str = ""
    delay: int | None = None
    lead: int | None = None
    hypotheses: list[str] = field(default_factory=list)
    evidence: list[list[str]] = field(default_factory=list)
    error: str = ""
    """Why there is no outcome: the trial itself failed, and counts nowhere."""

    @property
    def place(self) -> int | None:
        """Of the true cause among the hypotheses, "unknown" left out, from 0."""
        named = [name for name in self.hypotheses if name != "unknown"]
        return named.index(self.cause) if self.cause in named else None

    @property
    def first(self) -> str:
        return self.hypotheses[0] if self.hypotheses else "missed"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Outcome:
        return cls(**{**kept, "plan": Plan(**kept["plan"]), "false_alarms": [tuple(one) for one in kept["false_alarms"]]})


def run(plan: Plan, keep: Path | None = None) -> Outcome:
    """Train, record, judge. The record is removed unless `keep` names a folder for records; one that is there already is judged
    again without training, by the rules as they are now."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="fault-")) if keep is None else keep / plan.label
    again = (folder / DONE).exists()
    try:
        if not again:
            shutil.rmtree(folder, ignore_errors=True)
            (folder / DONE).write_text(json.dumps(record(plan, folder)))
        (directory,) = (RunDirectory(path.parent) for path in folder.glob("*/run.json"))
        told = journal(directory)
        if again:  # what was answered as it happened is the answer of the rules of that day
            told = [r.updated(hypotheses=()) if isinstance(r, Anomaly) else r for r in told]
        return judge(plan, directory, json.loads((folder / DONE).read_text()), told)
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def record(plan: Plan, folder: Path) -> dict[str, Any]:
    """Train and record in `folder`: the step of the injection and its effect on the loss."""
    way, task = WAYS[plan.way], TASKS[plan.task]
    if not issubclass(way, Fault):
        Trial(task, plan.seed, plan.lr, folder).train(way(), STEPS)
        return {"at": STEPS, "effect": 0.0}
    at = EARLIEST + (plan.seed * 7919 + len(plan.way) * 31) % (LATEST - EARLIEST)
    injection = way(at, plan.size)
    trial, twin = (Trial(task, plan.seed, plan.lr * way.lr, where) for where in (folder, None))
    trial.train(injection, at + injection.span + injection.tail)
    twin.train(way(NEVER, plan.size), len(trial.losses))
    return {"at": at, "effect": effect(trial.losses, twin.losses, at)}


def effect(losses: Sequence[float], twin: Sequence[float], at: int) -> float:
    """How much higher the loss is than in the same training without the injection, in robust sigmas of that training's step to
    step noise: the largest of one step, or twice that of eight steps' mean. Infinite where the loss is not finite."""
    noise = np.diff(twin[at - 60 : at])
    sigma = 1.4826 * float(np.median(np.abs(noise - np.median(noise)))) / math.sqrt(2)
    rise = np.asarray(losses[at:]) - np.asarray(twin[at : len(losses)])
    if not np.isfinite(rise).all():
        return math.inf
    means = np.convolve(rise, np.ones(8) / 8, "valid")
    return float(max(rise.max(), 2 * means.max()) / sigma)


def journal(directory: RunDirectory) -> list[Anomaly | Row]:
    """Step rows and anomalies in the order in which they were written."""
    found = JournalReader(directory.rows(0), kinds={Anomaly, Row}).read()
    return [r for r in found if isinstance(r, Anomaly) or (isinstance(r, Row) and r.kind == "step")]


def first_versions(told: Sequence[Anomaly | Row]) -> list[Anomaly]:
    """Every anomaly as it was first told, in order."""
    found: dict[str, Anomaly] = {}
    for record in told:
        if isinstance(record, Anomaly):
            found.setdefault(record.id, record)
    return list(found.values())


def as_sealed(told: Sequence[Anomaly | Row], anomaly: Anomaly) -> Anomaly:
    """The version of `anomaly` that was known when its capsule would have been sealed."""
    known = anomaly
    for record in told:
        if isinstance(record, Anomaly):
            known = record if record.id == anomaly.id else known
        elif record.attempt == anomaly.attempt and record.step > anomaly.step + AFTER:
            break
    return known


def judge(plan: Plan, directory: RunDirectory, done: Mapping[str, Any], told: Sequence[Anomaly | Row]) -> Outcome:
    """What was `told` of a trial, beside what was done in it."""
    way, at = WAYS[plan.way], int(done["at"])
    events = first_versions(told)
    if not issubclass(way, Fault):
        return Outcome(plan, "healthy", 0.0, STEPS, [(a.step, a.kind, a.series) for a in events])
    injection = way(at, plan.size)
    # A layer that is frozen for a while is part of the fault; nothing before that is.
    begins = injection.at - (injection.span if plan.way == "Frozen" else 0)
    outcome = Outcome(
        plan, injection.cause, math.inf if injection.always else float(done["effect"]), begins,
        [(a.step, a.kind, a.series) for a in events if a.step < begins], gradual=injection.gradual,
    )  # fmt: skip
    first = next((a for a in events if a.step >= injection.at), None)
    if first is not None:
        known = as_sealed(told, first)
        outcome.detected, outcome.kind, outcome.series = True, known.kind, known.series
        outcome.delay = None if injection.gradual else first.step - injection.at
        outcome.lead = first.step - known.first_mover[1] if known.first_mover else 0
        live = [a.hypotheses for a in told if isinstance(a, Anomaly) and a.id == first.id and a.hypotheses]
        found = live[-1] if live else explain(directory, known)
        outcome.hypotheses = [h.name for h in found]
        outcome.evidence = [
            [h.name, *(f"+ {text}" for text in h.evidence_for), *(f"- {text}" for text in h.evidence_against)] for h in found
        ]
    return outcome


def plans(part: str, seeds: int = 3) -> list[Plan]:
    """All trials of a part: every way on every task it fits, sizes and rates taken in turn over the seeds."""
    if part == "held-out":
        return _plans(HELD_OUT, HELD_FAULTS, HELD_CONTROLS, SEEDS["held-out"][:seeds], HELD_RATES, part)
    return [
        plan
        for tasks, own in ((FIRST, SEEDS["first"]), (SECOND, SEEDS["second"]))
        for plan in _plans(tasks, FAULTS, CONTROLS, own[:seeds], RATES, part)
    ]


def _plans(
    tasks: Sequence[Task], faults: Sequence[type[Fault]], controls: Sequence[type[Control]], seeds: Sequence[int],
    rates: Sequence[float], part: str,
) -> list[Plan]:  # fmt: skip
    found = []
    for task in tasks:
        for way in (*faults, *controls):
            sizes: Sequence[float] = (0.0,)
            if issubclass(way, Fault):
                sizes = way.second_sizes if task in SECOND else way.sizes
            if way.fits(task):
                found += [
                    Plan(way.__name__, task.name, seed, sizes[k % len(sizes)], rates[(k + _turn(way)) % len(rates)], part)
                    for k, seed in enumerate(seeds)
                ]
    return found


def _turn(way: type) -> int:
    """Where in turn a way begins: by its name, so that it stays when others come."""
    return sum(way.__name__.encode())
