"""Memory that creeps up: a list of tensors with their graphs, a cache without a bound, an allocator that fragments.

What is followed is the low-water mark of stretches of `_STRETCH` steps, so that what is freed again does not count. Creep is a
mark that rises through the latest `_MARKS` stretches without falling back, and is still rising. It is told apart:

    slope          it rises in most stretches: something leaks at every step
    staircase      it rises in a few: something leaks at an epoch, an evaluation, a checkpoint
    fragmentation  the allocator's memory grows while what tensors hold does not
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

from trackbridge.config import MemoryConfig
from trackbridge.detectors.monitors.base import SCHEDULED, Look, Monitor, Sign

_SERIES = ("mem/allocated_bytes", "mem/reserved_bytes", "host/rss_bytes")
_STRETCH = 64
_MARKS = 16
_WARMUP = 256  # steps in which optimizer state, caches and pools are made
_BACK = 0.1  # of the rise may be taken back on the way
_LATE = 0.1  # of the rise must lie in the last quarter: a pool that fills up comes to rest
_STAIRS = 3  # rises that make a staircase; fewer are a new level


class Memory(Monitor):
    NAME = "memory"
    KEPT: ClassVar[tuple[str, ...]] = ("marks", "stretch", "first", "told", "level", "ended")
    CAUSAL = False

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__()
        self.config = config
        self.first = -1
        self.stretch = -1  # the number of the present stretch
        self.marks: dict[str, list[float]] = {name: [] for name in _SERIES}  # the last one is of the present stretch
        self.told = ""
        self.level = 0.0  # what the series that was told held before
        self.ended = -1

    def changed(self, event: str) -> None:
        if event not in SCHEDULED:
            self.marks = {name: [] for name in _SERIES}
            self.first = self.stretch = -1

    def update(self, look: Look) -> Sign | None:
        values = {name: value for name in _SERIES if name in look.places and (value := look.finite(name)) is not None}
        if not values:
            return None
        if self.first < 0:
            self.first = look.step
        if look.step - self.first < _WARMUP:
            return None
        number = (look.step - self.first) // _STRETCH
        fresh, self.stretch = number != self.stretch, number
        for name, value in values.items():
            marks = self.marks[name]
            if fresh or not marks:
                self.marks[name] = [*marks, value][-_MARKS - 1 :]
            else:
                marks[-1] = min(marks[-1], value)
        if not fresh:
            return None
        if self.told and self.told in values and values[self.told] < self.level:
            self.told, self.ended = "", look.step
        if self.told:
            return None
        return next((sign for name in _SERIES if (sign := self._creep(name, look.step)) is not None), None)

    def over(self) -> int | None:
        return self.ended if self.ended >= 0 else None

    def _creep(self, name: str, step: int) -> Sign | None:
        marks = self.marks[name][:-1]
        if len(marks) < _MARKS:
            return None
        rise = marks[-1] - marks[0]
        if rise < max(self.config.least_bytes, self.config.least_share * marks[0]):
            return None
        highest, fall = marks[0], 0.0
        for mark in marks:
            highest = max(highest, mark)
            fall = max(fall, highest - mark)
        ups = [b - a for a, b in pairwise(marks) if b - a > rise / (4 * _MARKS)]
        late = marks[-1] - marks[-_MARKS // 4 - 1]
        if fall > _BACK * rise or len(ups) < _STAIRS or late < _LATE * rise:
            return None
        held = self.marks["mem/allocated_bytes"][:-1]
        alone = name == "mem/reserved_bytes" and len(held) == _MARKS and held[-1] - held[0] < rise / 4
        if name == "mem/reserved_bytes" and len(held) == _MARKS and not alone:  # it holds what tensors hold: they are told
            name, marks, rise = "mem/allocated_bytes", held, held[-1] - held[0]
        return self._tell(name, marks, rise, len(ups), step, held if alone else None)

    def _tell(self, name: str, marks: list[float], rise: float, ups: int, step: int, held: list[float] | None) -> Sign:
        steps = _STRETCH * (_MARKS - 1)
        onset = step - _STRETCH * _MARKS
        if held is not None:
            fault, how = "fragmentation", f"while tensors hold {max(held[-1] - held[0], 0) / 2**20:.0f} MiB more"
        elif ups >= _MARKS * 2 // 3:
            fault, how = "slope", f"{rise / steps / 2**10:.1f} KiB a step"
        else:
            fault, how = "staircase", f"in {ups} jumps"
        self.told, self.level, self.ended = name, marks[0] + rise / 2, -1
        words = f"{name} rose by {rise / 2**20:.0f} MiB in {steps} steps, {how}"
        terms = f"{rise / 2**20:.0f} MiB more than {steps} steps before"
        return Sign(fault, "memory", name, onset, marks[-1], marks[0], rise / marks[0], 0.5, words, terms=terms)
