"""Gets spike capsules made, beside training: pins what they need at once, has a child process seal when the window is full.

Sealing imports pyarrow and pandas, writes parquet and hashes: in this process that would hold the GIL for a third of a
second. So it runs as ``python -m trackbridge.seal`` and reads only the run directory.

Among ranks the leader decides and seals (`Sealer`); the others report to it and keep what it asks for (`Follower`).
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Protocol

from pydantic import TypeAdapter

from trackbridge import children, ranks
from trackbridge.allowance import Allowance, Kept
from trackbridge.config import RecorderConfig
from trackbridge.explainer import Explainer
from trackbridge.journal import JournalWriter
from trackbridge.notices import Notices, private
from trackbridge.pins import Pins
from trackbridge.recorder import Recorder
from trackbridge.records import Anomaly, Hypothesis, RunInfo
from trackbridge.rundir import RunDirectory, dumps

logger = logging.getLogger("trackbridge")

SEALED_KINDS = ("spike", "nonfinite", "divergence", "shift")
"""Anomalies that get a capsule. Slow ones (drift, plateau) have no step that a replay could explain."""

SEAL_SECONDS = 600.0
PARTING_SECONDS = 20.0
"""How long a rank that finishes waits for the others, so that the last anomaly is kept on all of them."""
_LOOK = 0.02


class Sealing(Protocol):
    """What the scribe asks, always on its own thread but for `finish`."""

    def consider(self, anomaly: Anomaly) -> Anomaly:
        """A new anomaly, with the capsule it will be in, if it gets one."""

    def update(self, anomaly: Anomaly) -> None:
        """A newer version of one that was considered."""

    def advance(self, step: int) -> None:
        """`step` is in the journal."""

    def heard(self) -> list[Anomaly]:
        """What other ranks detected since the last call, and this one did not."""

    def part(self, seconds: float) -> list[Anomaly]:
        """This rank detects nothing more. Waits for the others, bounded; returns what they still detected."""

    def seen_here(self, anomaly: Anomaly) -> str | None:
        """The id of the anomaly whose capsule under way holds the step of another rank's `anomaly` too."""

    def settle(self, anomaly: Anomaly) -> bool:
        """The capsule of `anomaly` is sealed. False if the budget of bytes does not hold it."""

    @property
    def given_up(self) -> int:
        """Anomalies whose capsule was not made or not kept, for the sake of more severe ones."""

    def finish(self, timeout: float) -> bool:
        """Everything under way is done, else False after `timeout` seconds."""


@dataclass(slots=True)
class _Capsule:
    """One capsule under way. `first` is the first step it must hold."""

    anomaly: Anomaly
    first: int
    last: int
    kept: Kept
    asked: bool = False
    sealed: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def open(self) -> bool:
        return not self.asked and not self.kept.given_up


class Sealer:
    """The leader's. `sealed(anomaly, error)` is called on the worker thread when a capsule is ready (`error` None) or could
    not be made; `gave_up(path, anomaly, why)` on the scribe's thread when one gives way to a more severe anomaly."""

    def __init__(
        self,
        directory: RunDirectory,
        config: RecorderConfig,
        pins: Pins,
        sealed: Callable[[Anomaly, str | None], None],
        gave_up: Callable[[str, Anomaly, str], None],
        notices: Notices | None = None,
        explainer: Explainer | None = None,
    ) -> None:
        self._directory = directory
        self._config = config
        self._pins = pins
        self._explainer = explainer
        self._sealed = sealed
        self._notices = notices
        self._allowance = Allowance(directory, config, lambda *what: self._gave_up(gave_up, *what))
        self._capsules: list[_Capsule] = []
        self._waiting: deque[_Capsule] = deque()
        self._child: subprocess.Popen[str] | None = None
        self._giving_up = False
        self._step = -1
        self._parted = 0  # ranks that have nothing more to report

    def consider(self, anomaly: Anomaly) -> Anomaly:
        """A neighbour of an open capsule shares it. With the budget full the least severe capsule gives way, or the anomaly
        gets none, and a note says so."""
        if anomaly.kind not in SEALED_KINDS or anomaly.capsule is not None:
            self._only_explain(anomaly)
            return anomaly
        shared = self._covering(anomaly)
        if shared is not None:
            self._only_explain(anomaly)
            shared.kept.severity = max(shared.kept.severity, anomaly.severity)
            return anomaly.updated(capsule=shared.kept.path)
        gone: list[Kept] = []
        refused = self._allowance.make_room(anomaly, gone.append)
        if refused is not None:
            self._only_explain(anomaly)
            return anomaly.updated(notes=(*anomaly.notes, refused))
        anomaly = anomaly.updated(capsule=self._place(anomaly.step))
        kept = self._allowance.add(anomaly)
        first, last = max(anomaly.onset - self._config.before, 0), anomaly.step + self._config.after
        self._capsules.append(_Capsule(anomaly, first, last, kept))
        self._pins.pin(kept.name, first, anomaly.onset, last)
        if self._notices is not None:
            self._notices.tell({"pin": kept.name, "first": first, "onset": anomaly.onset, "last": last, "step": anomaly.step})
        for each in gone:  # only now: the new one may need the same snapshot
            self._remove(each)
        return anomaly

    def _gave_up(self, tell: Callable[[str, Anomaly, str], None], path: str, anomaly: Anomaly, why: str) -> None:
        self._only_explain(anomaly)
        tell(path, anomaly, why)

    def _only_explain(self, anomaly: Anomaly) -> None:
        if self._explainer is not None:
            self._explainer.consider(anomaly)

    def update(self, anomaly: Anomaly) -> None:
        for capsule in self._capsules:
            if capsule.kept.path == anomaly.capsule:
                capsule.kept.severity = max(capsule.kept.severity, anomaly.severity)

    def _covering(self, anomaly: Anomaly) -> _Capsule | None:
        """The open capsule in whose window `anomaly` is."""
        return next((c for c in self._capsules if c.open and c.first <= anomaly.step <= c.last), None)

    def seen_here(self, anomaly: Anomaly) -> str | None:
        shared = self._covering(anomaly)
        return None if shared is None else shared.anomaly.id

    def advance(self, step: int) -> None:
        """Seal what is due: the step has passed the end of its window, or the training went back: it ends here."""
        back, self._step = step < self._step, step
        for capsule in self._capsules:
            if capsule.open and (back or step >= capsule.last):
                self._ask(capsule)
        if self._explainer is not None:
            self._explainer.advance(step)

    def heard(self) -> list[Anomaly]:
        return [] if self._notices is None else self._reports(self._notices, now=False)

    def part(self, seconds: float) -> list[Anomaly]:
        """What the other ranks detected in their last steps; then they are told that nothing more will be asked of them."""
        if self._notices is None:
            return []
        deadline = time.monotonic() + min(seconds, PARTING_SECONDS)
        found = self._reports(self._notices, now=True)
        while self._parted < self._notices.others and self._notices.alive and time.monotonic() < deadline:
            time.sleep(_LOOK)
            found += self._reports(self._notices, now=True)
        if self._parted < self._notices.others:
            logger.warning("trackbridge: %d other ranks have not finished", self._notices.others - self._parted)
        return found

    def finish(self, timeout: float) -> bool:
        """Seal everything now. Returns False if not all was done within `timeout` seconds; `trackbridge sync` does the rest."""
        deadline = time.monotonic() + timeout
        if self._notices is not None:
            self._notices.tell({"last": True})
        for capsule in self._capsules:
            if capsule.open:
                self._ask(capsule)
        asked = [capsule for capsule in self._capsules if capsule.asked]
        done = all(capsule.done.wait(max(deadline - time.monotonic(), 0)) for capsule in asked)
        self._giving_up = True
        child = self._child  # the worker forgets it when it is done
        if not done and child is not None:
            child.kill()
        explained = self._explainer is None or self._explainer.finish(max(deadline - time.monotonic(), 0))
        return done and explained

    def settle(self, anomaly: Anomaly) -> bool:
        """Gives up what the budget of bytes does not hold."""
        return self._allowance.settle(anomaly.capsule, self._remove)

    @property
    def given_up(self) -> int:
        return self._allowance.given_up

    def _place(self, step: int) -> str:
        path = plain = f"capsules/spike-{step}"
        again = 1
        while any(c.kept.path == path for c in self._capsules) or (self._directory.path / path).exists():
            again += 1  # a resumed attempt, or a loop that rolled back, saw the step before
            path = f"{plain}-{again}"
        return path

    def _reports(self, notices: Notices, *, now: bool) -> list[Anomaly]:
        """What other ranks detected; those that have nothing more to report are counted."""
        found = []
        for message in notices.heard(now=now):
            if "anomaly" in message:
                found.append(_foreign(message["anomaly"], int(message["rank"])))
            self._parted += "drained" in message
        return found

    def _ask(self, capsule: _Capsule) -> None:
        capsule.asked = True
        self._pins.sync()
        self._waiting.append(capsule)
        self._pins.run(self._seal)

    def _remove(self, kept: Kept) -> None:
        self._pins.release(kept.name)
        if self._notices is not None:
            self._notices.tell({"release": kept.name})
        self._pins.run(lambda: self._allowance.remove(kept, self._directory))
        self._pins.run(self._sweep)

    def _sweep(self) -> None:
        """What was pinned for capsules that gave way is of no use any more; worker thread."""
        if self.given_up and all(capsule.sealed or capsule.kept.given_up for capsule in tuple(self._capsules)):
            self._allowance.sweep(self._directory)

    def _seal(self) -> None:
        """Seal everything that waits, in one child: its imports cost more than its work."""
        capsules = {}
        while self._waiting and not self._giving_up:
            capsule = self._waiting.popleft()
            capsules[capsule.anomaly.id] = capsule
        if not capsules:
            return
        sealed: set[str] = set()
        complaints = ""
        try:
            printed, complaints = self._child_says(
                [sys.executable, "-m", "trackbridge.seal", str(self._directory.path), *capsules]
            )
            sealed = {line.split("\t")[0] for line in printed.splitlines()}
        except (OSError, subprocess.SubprocessError) as error:
            complaints = str(error)
        finally:
            for name, capsule in capsules.items():
                self._pins.release(capsule.kept.name)
                capsule.sealed = name in sealed
                self._allowance.weigh(capsule.kept, self._directory)
                self._sealed(capsule.anomaly, None if name in sealed else self._why(name, complaints))
                capsule.done.set()
        self._sweep()

    def _why(self, name: str, complaints: str) -> str:
        """What the child said about this capsule, in one line. A child that was stopped says nothing."""
        stopped = "the run ended before it was done; the shipper does it, else `trackbridge sync`"
        lines = complaints.strip().splitlines() or [stopped if self._giving_up else "the sealing process was ended"]
        return next((line for line in lines if line.startswith(f"{name}: ")), lines[-1])

    def _child_says(self, command: list[str]) -> tuple[str, str]:
        """Run the child. It has its own session: Ctrl-C is the trainer's; and it imports nothing from the folder we run in."""
        self._child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            start_new_session=True, env=children.environment(),
        )  # fmt: skip
        try:
            return self._child.communicate(timeout=SEAL_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.communicate()
        finally:
            self._child = None


class Follower:
    """Any other rank's. `asked(step)` is called on the scribe's thread when the leader found an anomaly, detected at `step`."""

    def __init__(self, directory: RunDirectory, pins: Pins, notices: Notices, asked: Callable[[int], None]) -> None:
        self._directory = directory
        self._pins = pins
        self._notices = notices
        self._asked = asked
        self._last = False

    def consider(self, anomaly: Anomaly) -> Anomaly:
        """Report it; the leader, which may have seen it too, decides."""
        if anomaly.kind in SEALED_KINDS:
            self._notices.tell({"rank": self._notices.rank, "anomaly": dumps(asdict(anomaly))})
        return anomaly

    def update(self, anomaly: Anomaly) -> None:
        pass

    def advance(self, step: int) -> None:
        pass

    def heard(self) -> list[Anomaly]:
        self._listen(now=False)
        return []

    def part(self, seconds: float) -> list[Anomaly]:
        """Keep what the leader still asks for, until it says that this was all."""
        deadline = time.monotonic() + min(seconds, PARTING_SECONDS)
        self._notices.tell({"rank": self._notices.rank, "drained": True})
        self._notices.parting = True
        self._listen(now=True)
        while not self._last and self._notices.alive and time.monotonic() < deadline:
            time.sleep(_LOOK)
            self._listen(now=True)
        return []

    def finish(self, timeout: float) -> bool:
        return self._pins.wait(timeout)

    def seen_here(self, anomaly: Anomaly) -> str | None:
        return None

    def settle(self, anomaly: Anomaly) -> bool:
        return True

    @property
    def given_up(self) -> int:
        return 0  # the leader counts

    def _listen(self, *, now: bool) -> None:
        for message in self._notices.heard(now=now):
            if "pin" in message:
                self._pins.pin(message["pin"], message["first"], message["onset"], message["last"])
                self._asked(message["step"])
                self._pins.sync()
            if "release" in message:  # given up
                self._pins.release(message["release"])
            self._last = self._last or "last" in message
        for name in self._pins.held():  # on a disk that is the leader's too
            if (self._directory.capsules / name).exists():
                self._pins.release(name)


class Telling(Protocol):
    """What a sealer tells of its capsules, to whoever tells the anomalies."""

    def sealed(self, anomaly: Anomaly, error: str | None) -> None: ...
    def gave_up(self, path: str, anomaly: Anomaly, why: str) -> None: ...
    def ask_histograms(self, detected: int | None) -> None: ...
    def explained(self, anomaly_id: str, hypotheses: tuple[Hypothesis, ...]) -> None: ...


def sealing(
    to: Telling, directory: RunDirectory, run: RunInfo, config: RecorderConfig, recorder: Recorder, contexts: JournalWriter
) -> Sealing:
    """The sealer of this rank."""
    pins = Pins(directory, run.rank, recorder, contexts, config.snapshot_every)
    notices = None
    if run.world_size > 1 and (store := ranks.store()) is not None:
        notices = Notices(private(store), f"{run.run_id}/{run.attempt}", run.rank, run.world_size)
    if run.rank and notices is not None:
        return Follower(directory, pins, notices, to.ask_histograms)
    explainer = Explainer(directory, config.after, to.explained, pins.sync, pins.run)
    return Sealer(directory, config, pins, to.sealed, to.gave_up, notices, explainer)


def _foreign(text: str, rank: int) -> Anomaly:
    """The anomaly that another rank reported, as one of ours."""
    anomaly = TypeAdapter(Anomaly).validate_json(text)
    return anomaly.updated(id=f"{anomaly.id}-rank-{rank}", ranks=(rank,), notes=(*anomaly.notes, f"detected on rank {rank}"))
