"""What can be known about the process that records a run: has it said that it ended, and is it there?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from trackbridge.history import newest_time
from trackbridge.journal import JournalReader
from trackbridge.liveness import alive, presumed_dead
from trackbridge.records import RunEnd
from trackbridge.rundir import RunDirectory

_ASK_SECONDS = 5.0  # between questions to the operating system about a process that is not our parent


class Trainer:
    """The newest attempt of a run. `parent`: its process id, when this process is its child."""

    def __init__(self, directory: RunDirectory, parent: int | None, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._parent = parent
        self._clock = clock
        self._life = directory.read().attempts[-1]
        self._ends = JournalReader(directory.rows(), kinds={RunEnd})
        self._ended = -1
        self._asked = float("-inf")
        self._dead = False

    @property
    def attempt(self) -> int:
        return self._life.number

    def ended(self) -> bool:
        """The attempt's end is in the journal."""
        for record in self._ends.read():
            if isinstance(record, RunEnd):
                self._ended = max(self._ended, record.attempt)
        return self._ended >= self._life.number

    def dead(self) -> bool:
        """Nobody will write the journal any more. A parent is asked each time, any other process every few seconds."""
        if self._parent is not None:
            return os.getppid() != self._parent and not alive(self._parent, self._life.time)
        if not self._dead and self._clock() - self._asked >= _ASK_SECONDS:
            self._asked = self._clock()
            self._dead = presumed_dead(self._life, newest_time(self._directory), time.time())
        return self._dead

    def superseded(self) -> bool:
        """A newer attempt has begun, which brings a shipper of its own. One that no trainer started goes on with it."""
        newest = self._directory.read().attempts[-1]
        if newest.number <= self._life.number:
            return False
        if self._parent is None:
            self._life, self._dead = newest, False
        return self._parent is not None
