"""What `trackbridge demo` does, step by step, and which of its promises were kept. Shows nothing itself."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import trackbridge
from trackbridge import answers
from trackbridge.capsule import SpikeCapsule
from trackbridge.demo import picture
from trackbridge.demo.trackers import LOSS, DemoTracker, program, trackers
from trackbridge.demo.train import OnStep, Plan, settings, train
from trackbridge.history import RunRecord
from trackbridge.records import Anomaly
from trackbridge.reports.markup import Table
from trackbridge.reports.page import page
from trackbridge.reports.run_page import run_page_data

BUILD = "trackbridge.demo.train:build"
AFTER_EXACT = (
    "Exact rules out a passing hardware fault: look at the batch and at what changed in the settings; leave those samples out "
    "or change it, and resume from before the spike."
)


@dataclass(frozen=True)
class Promise:
    """Something the demo must show; `detail` is the evidence, or what went wrong."""

    text: str
    kept: bool
    detail: str = ""


@dataclass(frozen=True)
class Delivered:
    """What one tracker's own reader gave back. `equal` counts the steps whose loss is the journal's, in `number` format;
    `look`, `pull` and `replay` are commands."""

    title: str
    number: str
    steps: int
    equal: int
    capsules: tuple[str, ...]
    look: str
    pull: str | None
    replay: str | None
    error: str | None = None

    def complete(self, steps: int) -> bool:
        return self.error is None and self.steps == self.equal == steps and bool(self.capsules)


@dataclass
class Story:
    """One demo in `folder`. Call the steps in order; `promises` grows."""

    folder: Path
    plan: Plan
    seed: int = 0
    promises: list[Promise] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.trackers: list[DemoTracker] = trackers(self.folder)

    def promise(self, text: str, kept: bool, detail: str = "") -> None:
        self.promises.append(Promise(text, kept, detail))

    def train(self, on_step: OnStep | None = None) -> dict[str, float]:
        """Train with every tracker at once. Returns the held-out loss before and after."""
        backends = [tracker.config for tracker in self.trackers]
        run = trackbridge.init(**settings(self.plan, self.folder / "runs", backends, self.seed))
        self.directory = run.dir
        with run:
            held_out = train(run, self.plan, seed=self.seed, on_step=on_step)
        self.record: RunRecord = trackbridge.load(run.dir)
        fell = f"{held_out['first']:.3f} to {held_out['last']:.3f} nats per byte"
        self.promise("the held-out loss fell", held_out["last"] < 0.7 * held_out["first"], fell)
        return held_out

    @property
    def spike(self) -> Anomaly | None:
        """The anomaly that the bad files caused, as detected: the loss spike, else any that began there."""
        bad = range(self.plan.bad_at, self.plan.bad_at + self.plan.bad_steps)
        found = [anomaly for anomaly in self.record.anomalies if anomaly.onset in bad]
        return min(found, key=lambda anomaly: (anomaly.series != LOSS, anomaly.onset), default=None)

    def detected(self) -> None:
        spike = self.spike
        where = f"at step {spike.onset}, {answers.how_far(spike)}" if spike else "nothing was detected there"
        self.promise(f"the bad files at step {self.plan.bad_at} were noticed", spike is not None, where)
        sealed = spike is not None and spike.capsule is not None and (self.directory / spike.capsule).is_dir()
        self.promise("a capsule was sealed", sealed, str(self.directory / spike.capsule) if spike and spike.capsule else "")

    def delivered(self) -> list[Delivered]:
        """Ask each tracker's own reader for every step's loss and compare it with the journal's."""
        steps, losses = self.record.series(LOSS)
        journal = dict(zip(steps.tolist(), losses.tolist(), strict=True))
        found = [self._ask(tracker, journal) for tracker in self.trackers]
        for answer in found:
            detail = answer.error or f"{answer.equal} of {len(journal)} steps equal as {answer.number}"
            self.promise(f"{answer.title} has every step's loss and the capsule", answer.complete(len(journal)), detail)
        return found

    def _ask(self, tracker: DemoTracker, journal: dict[int, float]) -> Delivered:
        run = self.record.info
        pull = self._command("pull", tracker) if tracker.pull else None
        replay = self._command("replay", tracker, f"--build {BUILD}") if tracker.pull else None
        answer = Delivered(tracker.title, tracker.number.__name__, 0, 0, (), tracker.look(run), pull, replay)
        try:
            held = tracker.read(run)
        except Exception as error:  # a promise that is not kept, not a crash of the demo
            return dataclasses.replace(answer, error=f"{type(error).__name__}: {error}")
        equal = sum(
            step in journal and np.array_equal(tracker.number(value), tracker.number(journal[step]), equal_nan=True)
            for step, value in held.losses
        )
        return dataclasses.replace(answer, steps=len(held.losses), equal=equal, capsules=tuple(held.capsules))

    def pull(self) -> SpikeCapsule | None:
        """The capsule, out of MLflow, into a folder of its own."""
        spike = self.spike
        if spike is None:
            return None
        source = self.trackers[0]
        with _environment(source.variables):
            capsule = trackbridge.pull(self._reference(source), self.folder / "pulled")
        files = f"{capsule.verify()} files match their digests, tier {capsule.tier}"
        self.promise("the capsule came back out of MLflow", capsule.tier == "re-execute", files)
        return capsule

    def replay(self, capsule: SpikeCapsule) -> dict[str, Any]:
        """Run the capsule's steps again in a fresh process. Returns `ReplayReport` as JSON."""
        command = [sys.executable, "-m", "trackbridge.cli", "replay", str(capsule.path), "--build", BUILD, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if not done.stdout.strip():
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            self.promise("a fresh process ran the bad step again, bit for bit", False, lines[-1])
            return {"verdict": "error", "reason": lines[-1], "steps": []}
        report: dict[str, Any] = json.loads(done.stdout)
        exact = report["verdict"] == "exact"
        self.promise("a fresh process ran the bad step again, bit for bit", exact, f"{report['verdict']}: {report['reason']}")
        return report

    def reports(self, capsule: SpikeCapsule | None, delivered: Sequence[Delivered]) -> dict[str, Path]:
        """Write the page, the picture and the W&B report. Returns where each is."""
        written = {"loss.svg": self._picture(), "wandb-report.json": self._wandb_report()}
        if capsule is not None:
            written["report.html"] = self._page(capsule, delivered)
        paths = {}
        for name, text in written.items():
            paths[name] = self.folder / name
            paths[name].write_text(text, encoding="utf-8")
        self.promise("the report is written", "report.html" in paths, ", ".join(str(path) for path in paths.values()))
        return paths

    def _picture(self) -> str:
        steps, losses = self.record.series(LOSS)
        marks = [
            (a.onset, a.onset + max((a.recovered_after or 1) - 1, 0), f"{a.kind} at {a.onset}") for a in self.record.anomalies
        ]
        return picture.loss_picture(steps.tolist(), losses.tolist(), marks=marks, title=f"{LOSS}, nats per byte")

    def _wandb_report(self) -> str:
        from trackbridge.panels import TEMPLATES
        from trackbridge.reports import subject, wandb_report

        about = subject.of_run(self.record, self.spike.step if self.spike else None)
        return json.dumps(wandb_report.build(TEMPLATES["spike-forensics"], about), indent=1)

    def _page(self, capsule: SpikeCapsule, delivered: Sequence[Delivered]) -> str:
        """The run's page, about the bad files' anomaly, with the trackers in it."""
        data = run_page_data(self.record)
        anomaly = self.spike or capsule.anomaly
        spikes = sorted(data.spikes, key=lambda spike: spike.anomaly.id != anomaly.id)
        where = [(d.title, ", ".join(d.capsules), d.look) for d in delivered]
        return page(
            dataclasses.replace(
                data,
                title=f"{anomaly.kind.capitalize()} in {anomaly.series} at step {anomaly.onset}",
                spikes=spikes,
                actions=self._actions(),
                tables=(Table("Where it is", ("tracker", "capsule", "look at it"), where), *data.tables),
            )
        )

    def _actions(self) -> list[tuple[str, str]]:
        source = self.trackers[0]
        return [
            ("Fetch the capsule out of the tracker, on any machine:", self._command("pull", source)),
            ("Run the bad step again:", self._command("replay", source, f"--build {BUILD}")),
            (AFTER_EXACT, ""),
        ]

    def _reference(self, tracker: DemoTracker) -> str:
        where = tracker.pull(self.record.info) if tracker.pull else ""
        return f"{where}@{self.spike.step}" if self.spike else where

    def _command(self, command: str, tracker: DemoTracker, *options: str) -> str:
        """What to type, with the variables it needs."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in tracker.variables.items()]
        return " ".join([*variables, program("trackbridge"), command, shlex.quote(self._reference(tracker)), *options])


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set `variables` for a while. Only here, where training is over: observers write no environment."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
