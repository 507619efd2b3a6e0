"""A tracker that is a JSONL file, with faults on a seeded schedule: a third-party backend in a folder of its own, found through
its entry point like any other. The faults are those of a network: refused, half done, done but the answer lost, done but
not confirmed yet."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from trackbridge.backends.base import BackendConfig
from trackbridge.errors import Rejected, RetryLater
from trackbridge.records import Anomaly, Artifact, Record, Row, RunEnd, RunInfo
from trackbridge.rundir import dumps

_BUILT: Counter[Path] = Counter()


class FlakyConfig(BackendConfig):
    """`faults`: how often a call goes wrong. `refuse`: seqs it never takes. `knows`: whether `open` can tell what it holds.
    `only_at_close`: confirm nothing before. `hang`: seconds that a write takes."""

    kind: Literal["flaky", "other"] = "flaky"
    path: Path
    seed: int = 0
    faults: float = 0.0
    refuse: tuple[int, ...] = ()
    knows: bool = True
    only_at_close: bool = False
    hang: float = 0.0

    def build(self) -> FlakyTracker:
        return FlakyTracker(self)

    def where(self, run: RunInfo) -> str:
        return f"less {self.path}"


class OtherConfig(FlakyConfig):
    kind: Literal["other"] = "other"


class FlakyTracker:
    """See the module. `log` is what was called, for tests in the same process."""

    def __init__(self, config: FlakyConfig) -> None:
        self.config = config
        self.log: list[tuple[Any, ...]] = []
        _BUILT[config.path] += 1  # each one has its own luck
        self._rng = random.Random(f"{config.seed} {_BUILT[config.path]}")
        self._run: RunInfo | None = None
        self._confirmed = -1

    def open(self, run: RunInfo, /) -> int:
        self.log.append(("open", run.attempt))
        self._fault("open")
        self._run = run
        self._held = {line["seq"] for line in read(self.config.path)}
        self._confirmed = -1
        return max(self._held, default=-1) if self.config.knows else -1

    def write(self, batch: Sequence[Record], /, *, timeout: float) -> int:
        assert self._run is not None, "write before open"
        seqs = [record.seq for record in batch]
        assert seqs == sorted(set(seqs)), "not ascending"
        assert not any(seq <= self._confirmed for seq in seqs), "offered again after it was confirmed"
        self.log.append(("write", *seqs))
        time.sleep(self.config.hang)
        self._fault("write")
        refused = {seq: "bad value" for seq in seqs if seq in self.config.refuse}
        taken = [record for record in batch if record.seq not in refused]
        if self._rng.random() < self.config.faults:
            self._store(taken[: self._rng.randrange(len(taken) + 1)])
            raise ConnectionResetError("half of it arrived")
        self._store(taken)
        if refused:
            raise Rejected(refused)
        if self._rng.random() < self.config.faults:
            raise TimeoutError("all of it arrived, but nobody said so")
        if self.config.only_at_close:
            return -1
        safe = seqs[self._rng.randrange(len(seqs))] if self._rng.random() < self.config.faults else seqs[-1]
        self._confirmed = max(self._confirmed, safe)
        return safe

    def close(self, end: RunEnd | None, /, *, timeout: float) -> int:
        self.log.append(("close", end and end.status))
        self._fault("close")
        if end is not None:
            self._store([end])
        self._run = None
        return max(self._held, default=-1)

    def _fault(self, where: str) -> None:
        if self._rng.random() < self.config.faults:
            raise RetryLater(0.1, "busy") if self._rng.random() < 0.3 else ConnectionRefusedError(f"{where}: server away")

    def _store(self, records: Sequence[Record]) -> None:
        lines = [line(record) for record in records if record.seq not in self._held]
        self._held.update(record.seq for record in records)
        self.config.path.parent.mkdir(parents=True, exist_ok=True)
        with self.config.path.open("ab", buffering=0) as file:  # whole lines, also when we are killed
            file.write("".join(dumps(one) + "\n" for one in lines).encode())


def line(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {"type": type(record).__name__, "seq": record.seq}
    match record:
        case Row():
            found |= {"step": record.step, "attempt": record.attempt, "values": dict(record.items())}
        case Artifact():
            found |= {"name": record.name, "path": record.path}
        case Anomaly():
            found |= {"id": record.id}
        case RunEnd():
            found |= {"status": record.status, "attempt": record.attempt}
    return found


def read(path: Path) -> list[dict[str, Any]]:
    """What the tracker holds, in the order in which it came."""
    if not path.exists():
        return []
    return [json.loads(one) for one in path.read_text(encoding="utf-8").splitlines()]
