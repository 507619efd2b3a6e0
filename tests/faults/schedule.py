"""One schedule: a trainer that is killed and resumed, a disk that fills up, a shipper that dies, a tracker that breaks in every
way it can; and at the end the question what the tracker has, against what the journal has.

What must hold: each row that the stream policy selects from the journal is in the tracker exactly once, equal to the bit as far
as the tracker's numbers allow, and every artifact is there with every byte.
"""

from __future__ import annotations

import math
import random
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.trackers import FORK, Points, Tracker, folder_of
from tests.faults.trainer import Life, train
from trackbridge.coalesce import Budget
from trackbridge.config import StreamConfig
from trackbridge.journal import JournalReader
from trackbridge.records import Artifact, Record, Row
from trackbridge.rundir import RunDirectory
from trackbridge.shipping.claim import Claim
from trackbridge.shipping.cursor import Cursor
from trackbridge.shipping.settle import settle
from trackbridge.shipping.worker import Situation, Worker
from trackbridge.stream import Stream

SECONDS = 90.0
"""What a schedule may take before it counts as stuck."""
LIFE_SECONDS = 20.0
"""After which a trainer that is to be killed is killed, though it has not journalled enough: its disk may have stayed full."""
NOT_COMPARED = ("trackbridge/lag_rows", "anomaly/")
"""Series that tell of the delivery itself: which row carries them depends on when it was sent."""
COMPARED = frozenset(
    ("train/loss", "grad/norm", "act/h/rms", "eval/loss", "layers/grad_norm_max", "nonfinite/grad/norm", "trackbridge/seq")
)


@dataclass
class Outcome:
    """What happened (`story`), and what was wrong in the end (`faults`; empty when all is well)."""

    seed: int
    story: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    rows: int = 0
    artifacts: int = 0
    seconds: float = 0.0


def run(tracker: Tracker, seed: int, folder: Path) -> Outcome:
    """Play the schedule `seed`. The folder is removed when all went well."""
    made = _Schedule(tracker, seed, folder / f"{tracker.name}-{seed}")
    begun = time.monotonic()
    try:
        made.play()
    except Exception as error:
        made.outcome.faults.append(f"{type(error).__name__}: {error}")
    made.outcome.seconds = time.monotonic() - begun
    if not made.outcome.faults:
        shutil.rmtree(made.directory.path.parent, ignore_errors=True)
    return made.outcome


class _Schedule:
    def __init__(self, tracker: Tracker, seed: int, folder: Path) -> None:
        self.outcome = Outcome(seed)
        self._tracker = tracker
        self._rng = random.Random(f"{tracker.name} {seed}")
        self.directory = RunDirectory(folder / f"run-{tracker.name}-{seed}")
        self._trouble: threading.Timer | None = None
        self._worker: Worker | None = None
        self._deadline = time.monotonic() + SECONDS

    def play(self) -> None:
        rng = self._rng
        start = 0
        lives = rng.randrange(1, self._tracker.lives + 1)
        for number in range(lives):
            end = rng.choice(["finished", "failed", None]) if number == lives - 1 else rng.choice(["failed", None])
            steps = rng.randrange(8, 60)
            low = start + rng.randrange(steps)
            full = range(low, low + rng.randrange(2, 12)) if rng.random() < 0.35 else range(0)
            self._live(Life(number, start, steps, end, full, rng.randrange(1 << 30)))  # type: ignore[arg-type]
            newest = max((r.step for r in self._journal() if isinstance(r, Row)), default=start)
            start = max(newest - rng.randrange(25), 0)  # resume, from an older checkpoint perhaps
        self._finish(lives - 1)
        self._compare()

    def _tell(self, words: str) -> None:
        self.outcome.story.append(words)

    def _live(self, life: Life) -> None:
        """One attempt: the trainer in its process, the shipper here, and what goes wrong."""
        self._tell(f"attempt {life.number} from step {life.start_step}, ends {life.end}, disk full {life.full_disk}")
        child = FORK.Process(target=train, args=(str(self.directory.path), life), daemon=True)
        child.start()
        journalled, begun = 0, time.monotonic()
        reader = JournalReader(self.directory.rows(), after=self._position())
        while child.is_alive():
            journalled += len(reader.read())
            if life.end is None and (journalled >= life.steps or time.monotonic() - begun > LIFE_SECONDS):
                child.kill()
                self._tell(f"trainer killed after {journalled} records")
            self._ship_a_little()
        child.join()
        if life.end is not None and child.exitcode != 0:
            raise AssertionError(f"the trainer failed with {child.exitcode}")

    def _position(self) -> int:
        reader = JournalReader(self.directory.rows(), kinds=())
        reader.read()
        return reader.position

    def _ship_a_little(self) -> None:
        rng = self._rng
        if not self.directory.file.exists():
            time.sleep(0.002)
            return
        if (self._trouble is None or not self._trouble.is_alive()) and rng.random() < 0.12:
            what, lift = self._tracker.disturb(rng)
            self._tell(what)
            self._trouble = threading.Timer(rng.uniform(0.02, self._tracker.trouble_seconds), lift)
            self._trouble.start()
        if self._worker is not None and rng.random() < 0.03:
            self._kill_shipper()
        self._step(follow=True)

    def _step(self, *, follow: bool, over: bool = False) -> bool:
        """One step of the shipper. True when it has nothing left to do."""
        if self._worker is None:
            self._worker = Worker(
                self._tracker.config(self.directory), self.directory, StreamConfig(), Situation(over=over, follow=follow),
                clock=time.monotonic, rng=random.Random(self._rng.random()),
            )  # fmt: skip
        time.sleep(min(self._worker.step(), 0.02))
        return self._worker.done

    def _kill_shipper(self) -> None:
        """As SIGKILL: nothing is closed or saved; a child of it sees the end of its pipe."""
        assert self._worker is not None
        process = getattr(self._worker.backend, "_process", None)
        if process is not None:
            process.kill()
        self._worker.claim.path.unlink(missing_ok=True)  # stale with its process; here the process lives on
        self._worker = None
        self._tell("shipper killed")

    def _heal(self) -> None:
        if self._trouble is not None:
            self._trouble.join()

    def _finish(self, attempt: int) -> None:
        """The tracker is well again; what `trackbridge sync` does."""
        self._heal()
        if self._worker is not None:
            if self._rng.random() < 0.5:
                self._kill_shipper()
            else:
                self._worker.finish(10.0)
                self._worker = None
        settle(self.directory, attempt, Claim(self.directory.shipper / "journal.claim"), dead=True)
        while not self._step(follow=False, over=True):
            assert time.monotonic() < self._deadline, f"stuck: {Cursor.load(self.directory, self._tracker.name)}"
        assert self._worker is not None
        self._worker.finish(10.0)

    # -- what must be there

    def _journal(self) -> list[Record]:
        return JournalReader(self.directory.rows()).read()

    def _compare(self) -> None:
        records = self._journal()
        config: Any = self._tracker.config(self.directory)
        lives = self.directory.read().attempts
        stream = Stream(
            StreamConfig(),
            budget=Budget(config.rows_per_minute, config.values_per_minute),
            starts={life.number: life.start_step for life in lives},
        )
        wanted: Points = {}
        for record in [*stream.push(records), *stream.finish()]:
            if isinstance(record, Row):
                self.outcome.rows += 1
                for name, value in record.items():
                    if name in COMPARED and not name.startswith(NOT_COMPARED):
                        wanted.setdefault(name, []).append((record.step, value))
        held = self._tracker.held(self.directory, set(COMPARED))
        faults = self.outcome.faults
        for name in sorted(COMPARED):
            got, want = sorted(map(_key, held.series.get(name, []))), sorted(map(self._as_kept, wanted.get(name, [])))
            if got != want:
                extra, lost = _minus(got, want), _minus(want, got)
                faults.append(f"{name}: {len(lost)} lost {lost[:3]}, {len(extra)} too many {extra[:3]}")
        letters = Cursor.load(self.directory, self._tracker.name).dead_letters
        if letters:
            faults.append(f"{letters} dead letters")
        artifacts = [record for record in records if isinstance(record, Artifact)]
        self.outcome.artifacts = len(artifacts)
        for artifact in artifacts:
            if held.artifacts.get(artifact.name) != folder_of(self.directory.path / artifact.path):
                faults.append(f"artifact {artifact.name} is {'damaged' if artifact.name in held.artifacts else 'lost'}")

    def _as_kept(self, point: tuple[int, float]) -> tuple[int, bytes]:
        step, value = point
        return _key((step, float(np.float32(value)) if self._tracker.single else value))


def _key(point: tuple[int, float]) -> tuple[int, bytes]:
    """Comparable to the bit; one NaN is like another."""
    step, value = point
    return step, b"nan" if math.isnan(value) else np.float64(value).tobytes()


def _minus(some: list[Any], others: list[Any]) -> list[Any]:
    rest = list(others)
    left = []
    for one in some:
        if one in rest:
            rest.remove(one)
        else:
            left.append(one)
    return left
