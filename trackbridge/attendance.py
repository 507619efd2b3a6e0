"""Waiting until the other ranks have written their part of a capsule: bounded, and only for ranks that share this disk.

A rank has written its part when its receipt is there (`trackbridge.pins`) and its journal has the window's last step or its
end. One that makes no progress for `PATIENCE` seconds is not waited for: it may have died, and the capsule says what is
missing of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from trackbridge.journal import JournalReader, last_seq
from trackbridge.records import Row, RunEnd
from trackbridge.rundir import RunDirectory

PATIENCE = 5.0
_LOOK = 0.1
_BACK = 64  # records before the newest at which reading begins


def wait_for(
    directory: RunDirectory,
    capsule: str,
    attempt: int,
    last: int,
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[int, ...]:
    """The ranks that have a folder here and did not write their part up to step `last` within `seconds`."""
    deadline = clock() + seconds
    waiting = [_Rank(directory, rank, capsule, attempt, last) for rank in directory.ranks()]
    progressed = clock()
    while True:
        moved = [rank.look() for rank in waiting]  # every one of them looks
        waiting = [rank for rank in waiting if not rank.ready]
        if any(moved):
            progressed = clock()
        if not waiting or clock() >= min(deadline, progressed + PATIENCE):
            return tuple(rank.rank for rank in waiting)
        sleep(_LOOK)


class _Rank:
    def __init__(self, directory: RunDirectory, rank: int, capsule: str, attempt: int, last: int) -> None:
        self.rank = rank
        self._receipt = directory.pin(capsule, rank)
        self._attempt, self._last = attempt, last
        rows = directory.rows(rank)
        self._reader = JournalReader(rows, max(last_seq(rows) - _BACK, -1), kinds={Row, RunEnd})
        self._written = self._received = self._ended = False

    @property
    def ready(self) -> bool:
        return self._ended or (self._written and self._received)

    def look(self) -> bool:
        """Whether anything new is there."""
        before = self._reader.position, self._received
        for record in self._reader.read():
            if isinstance(record, RunEnd):
                self._ended = self._ended or record.attempt >= self._attempt
            elif isinstance(record, Row) and record.attempt >= self._attempt and record.kind == "step":
                self._written = self._written or record.step >= self._last
        self._received = self._received or self._receipt.exists()
        return (self._reader.position, self._received) != before
