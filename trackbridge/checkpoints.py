"""Which checkpoint to go back to after a spike: the newest one that is clean by the record, not merely the newest.

A checkpoint is known from `run.checkpoint_saved`. It is clean if, in the life it was saved in, nothing had begun to go wrong by
then: no precursor of an anomaly (its onset, its first mover, a drift under way), and no non-finite value that reached the
weights. A life begins with a process, and where one went back to an earlier step. What says nothing of the weights (slow steps,
growing memory, a stall, a plateau) taints no checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from trackbridge.errors import ReferenceNotFoundError
from trackbridge.history import find
from trackbridge.journal import JournalReader
from trackbridge.names import is_wide
from trackbridge.records import Anomaly, Params, Row
from trackbridge.rundir import RunDirectory

RECENT = 10
"""Non-finite values within this many steps before a checkpoint make it suspect."""
SETTLED = 16
"""A lasting new level counts as settled this many steps after it was told."""
_NOT_OF_WEIGHTS = ("throughput", "memory", "stall", "plateau")
_NONE = "no checkpoint was told of; tell of each as it is saved, with run.checkpoint_saved(path, step)"
_MACHINE = ("perf/", "mem/", "host/", "trackbridge/")


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of the state after `step` steps, that is before step number `step` of a run counted from 0."""

    path: Path
    step: int
    attempt: int = 0

    def __str__(self) -> str:
        return f"{self.path} (after {self.step} steps)"


@dataclass(frozen=True, slots=True)
class Rejected:
    """A checkpoint that is not clean; `why` is a clause: it "was saved after ..."."""

    saved: Saved
    why: str


@dataclass(frozen=True, slots=True)
class Rollback:
    """Where to go back to. `checkpoint` is the newest clean one, None if there is none; `rejected` are the newer ones, newest
    first. `anomaly` is what is gone back from, None if the run has none; `precursor` its first sign (series, step). Where
    `checkpoint` was saved when that was already over, `before` is the newest clean one without its steps: the one to take when
    they are not to have happened, as with a skip plan."""

    anomaly: Anomaly | None
    precursor: tuple[str, int] | None
    checkpoint: Saved | None
    rejected: tuple[Rejected, ...] = ()
    before: Saved | None = None

    @property
    def after(self) -> bool:
        """Whether `checkpoint` has the anomaly's steps in it (which was over by then)."""
        return self.checkpoint is not None and self.checkpoint != self.before

    def __str__(self) -> str:
        if self.checkpoint is None:
            return f"none of the {len(self.rejected)} checkpoints is clean" if self.rejected else _NONE
        return str(self.checkpoint)


def rollback(run: str | Path, *, step: int | None = None) -> Rollback:
    """The newest checkpoint of `run` (a run directory) that is clean by its record, and why each newer one is not.

    `step` says which anomaly to go back from (its onset, or where it was detected); default: the newest that did not recover,
    else the most severe. Raises `ReferenceNotFoundError` if there is no such run, or no such anomaly.
    """
    lives = Lives.read(find(run))
    anomaly = lives.subject(step)
    precursor = None if anomaly is None else lives.precursor(anomaly)
    newest: Saved | None = None
    rejected: list[Rejected] = []
    for saved in sorted(lives.checkpoints, key=lives.order, reverse=True):
        why = lives.fault(saved)
        if why is None:
            newest = newest or saved
            if anomaly is None or not lives.has(saved, anomaly):
                return Rollback(anomaly, precursor, newest, tuple(rejected), saved)
        elif newest is None:
            rejected.append(Rejected(saved, why))
    return Rollback(anomaly, precursor, newest, tuple(rejected))


def saved_checkpoints(directory: RunDirectory) -> list[Saved]:
    """Every checkpoint that `run.checkpoint_saved` told of, in order; of a path written twice the newer."""
    return Lives.read(directory, rows=False).checkpoints


class Lives:
    """What a run's leader wrote down that decides about checkpoints."""

    def __init__(self) -> None:
        self.starts: list[int] = []  # first step of each life
        self.checkpoints: list[Saved] = []
        self.anomalies: list[Anomaly] = []  # those that say something of the weights
        self._lives: dict[str | Path, int] = {}  # of each anomaly by id, and of each checkpoint by path
        self._bad: dict[tuple[int, int], str] = {}  # (life, step): what was not finite and reached the weights
        self._lost: set[tuple[int, int]] = set()  # steps whose loss was not finite

    @classmethod
    def read(cls, directory: RunDirectory, *, rows: bool = True) -> Lives:
        found = cls()
        saved: dict[Path, Saved] = {}
        latest: dict[str, Anomaly] = {}
        before: tuple[int, int] | None = None  # (attempt, step) of the newest row
        newest: dict[int, int] = {}  # life of each attempt
        skipped = 0.0
        reader = JournalReader(directory.rows(min(directory.ranks(), default=0)), kinds={Row, Params, Anomaly})
        while records := reader.read(limit=4096):
            for record in records:
                if isinstance(record, Row) and record.kind == "step":
                    if before is None or record.attempt != before[0] or record.step <= before[1]:
                        found.starts.append(record.step)
                        newest[record.attempt] = found._life
                    now = record.get("optim/skipped") or 0.0
                    if rows:
                        found._note(record, held=now > (skipped if before and before[0] == record.attempt else 0.0))
                    before, skipped = (record.attempt, record.step), now
                elif isinstance(record, Anomaly):
                    if record.kind not in _NOT_OF_WEIGHTS and not record.series.startswith(_MACHINE):
                        latest[record.id] = record
                        found._lives.setdefault(record.id, newest.get(record.attempt, found._life))
                elif isinstance(record, Params) and isinstance(record.values.get("checkpoint"), dict):
                    told = record.values["checkpoint"]
                    path = Path(str(told["path"]))
                    saved.pop(path, None)
                    saved[path] = Saved(path, int(told["step"]), before[0] if before else 0)
                    found._lives[path] = found._life
        found.checkpoints = list(saved.values())
        found.anomalies = sorted(latest.values(), key=lambda anomaly: (anomaly.onset, anomaly.step))
        return found

    def order(self, saved: Saved) -> tuple[int, int]:
        """What is later is newer, even where it is an earlier step."""
        return self._lives[saved.path], saved.step

    @property
    def _life(self) -> int:
        """The one under way."""
        return max(len(self.starts) - 1, 0)

    def _note(self, row: Row, *, held: bool) -> None:
        if not all(map(math.isfinite, (row.get("train/loss") or 0.0, row.get("param/norm") or 0.0))):
            self._lost.add((self._life, row.step))
        if held:
            return  # the update was left out: nothing reached the weights
        for name, value in row.items():
            if is_wide(name) or not name.startswith(("train/loss", "grad/", "param/")):
                continue
            if not math.isfinite(value) or (name == "grad/nonfinite" and value > 0):
                self._bad[self._life, row.step] = name
                return

    def subject(self, step: int | None) -> Anomaly | None:
        """The anomaly to go back from."""
        if step is not None:
            found = [anomaly for anomaly in self.anomalies if step in (anomaly.onset, anomaly.step)]
            if not found:
                there = ", ".join(str(anomaly.onset) for anomaly in self.anomalies) or "none"
                raise ReferenceNotFoundError(f"no anomaly at step {step}; there are some at: {there}")
            return found[-1]
        lasting = [anomaly for anomaly in self.anomalies if anomaly.recovered_after is None and anomaly.kind != "shift"]
        if lasting:
            return lasting[-1]
        return max(self.anomalies, key=lambda anomaly: (anomaly.severity, anomaly.onset), default=None)

    def precursor(self, anomaly: Anomaly) -> tuple[str, int]:
        """The first sign of `anomaly`: (series, step). A drift that led into it counts as one."""
        signs = [(anomaly.series, anomaly.onset), *([anomaly.first_mover] if anomaly.first_mover else []), *anomaly.cascade]
        first = min(signs, key=lambda sign: sign[1])
        for drift in self.anomalies:
            if drift.kind == "drift" and drift.id != anomaly.id and self._lives[drift.id] == self._lives[anomaly.id]:
                over = math.inf if drift.recovered_after is None else drift.onset + drift.recovered_after
                if drift.onset < first[1] <= over:
                    first = (drift.series, drift.onset)
        return first

    def fault(self, saved: Saved) -> str | None:
        """Why `saved` is not clean, None if it is."""
        if not saved.path.exists():
            return "is not on this disk"
        life = self._lives[saved.path]
        for anomaly in self.anomalies:
            series, first = self.precursor(anomaly)
            if self.has(saved, anomaly) and saved.step <= self._over(anomaly):
                sign = f"after {series} began to move at step {first}"
                until = "" if anomaly.recovered_after is None else f", over at step {anomaly.onset + anomaly.recovered_after}"
                return f"was saved {sign}: {anomaly.title} at step {anomaly.onset}{until}"
        for step in range(saved.step - 1, saved.step - 1 - RECENT, -1):
            name = self._bad.get((life, step))
            if name is not None:
                return f"was saved {saved.step - step} step(s) after {name} was not finite (step {step})"
        if (life, saved.step) in self._lost:
            return f"gave a loss that was not finite in the very next step ({saved.step})"
        return None

    def has(self, saved: Saved, anomaly: Anomaly) -> bool:
        """Whether the step of the first sign of `anomaly` is among those that made `saved`."""
        first = self.precursor(anomaly)[1]
        return saved.step > first and self._led_to(self._lives[saved.path], self._lives[anomaly.id], first)

    def _led_to(self, life: int, earlier: int, step: int) -> bool:
        """Whether `step` of the life `earlier` is among the steps that made what was saved in `life`."""
        return earlier <= life and all(start > step for start in self.starts[earlier + 1 : life + 1])

    @staticmethod
    def _over(anomaly: Anomaly) -> float:
        """The last step that `anomaly` taints."""
        if anomaly.recovered_after is not None:
            return anomaly.onset + anomaly.recovered_after
        return anomaly.step + SETTLED if anomaly.kind == "shift" else math.inf
