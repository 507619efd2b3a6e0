"""What hooks have copied on the CPU, and its moments, taken together after the end of the step.

A hook that runs once in 10 ms finds neither the code of its statistics nor their buffers in the cache, and each of ten small
operations costs several times what it costs when all are done in a row. So it only copies (the output may be changed in place
later), copies of one length go through the same few operations, and that on the scribe's thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trackbridge.probes import cpu, moments
from trackbridge.records import FloatArray

ROOM = 1 << 19  # elements of all copies, 2 MiB; when they fill it, the training thread measures them
ROOMS = 4  # of which the scribe has some; when it has all others, the training thread measures as well
LONGEST = cpu.PIECE  # elements of one; of more the arithmetic is what costs


class Copy(NamedTuple):
    """`size` elements of an output of `site`, which end at `end`; tokens of `width` channels where those count, else 0."""

    size: int
    end: int
    site: int
    width: int


@dataclass(slots=True, eq=False)
class Held:
    """Copies in the order in which they were made, and the room they lie in, float32: it goes back to the free ones, `home`."""

    room: cpu.Array
    home: deque[cpu.Array]
    copies: list[Copy] = field(default_factory=list)

    def measure(self, rows: FloatArray, by_channel: Callable[[Tensor, int], None] | None = None) -> None:
        """Merge their moments into the `rows` of their sites, shape (sites, `moments.WIDTH`), and let go of them. On any
        thread: the same copies give the same bits."""
        copies, self.copies = self.copies, []
        for size, group in groupby(copies, lambda copy: copy.size):
            alike = list(group)
            xs = self.room[alike[0].end - size : alike[-1].end].reshape(-1, size)
            moments.add_all_on_cpu(xs, [rows[copy.site] for copy in alike])
            for x, copy in zip(xs, alike, strict=True):
                if copy.width and by_channel is not None:
                    by_channel(torch.from_numpy(x).view(-1, copy.width), copy.site)

    def give_back(self) -> None:
        """The copies have been measured, or are not wanted: others may have the room. On any thread; once."""
        self.home.append(self.room)


class Copies:
    """`rows`: where the moments of each site go, shape (sites, `moments.WIDTH`); `by_channel` adds elements of a site, shape
    (tokens, channels), to the statistics of its channels. Copies are measured when there is no room left, and else after the
    step by whoever `take`s them; each gives the bits that it would have given at once, and those of a site are merged in the
    order in which they came. What another thread than the one that made this has is measured at once. Whoever writes to the
    statistics has the `lock`."""

    def __init__(self, rows: FloatArray, by_channel: Callable[[Tensor, int], None]) -> None:
        self._rows = rows
        self._by_channel = by_channel
        self._free: deque[cpu.Array] = deque()
        self._held = Held(np.empty(0, np.float32), self._free)
        self._unmade = ROOMS
        self._thread = threading.get_ident()
        self.lock = threading.RLock()

    def add(self, y: Tensor, site: int) -> None:
        """Elements of an output of `site`, on the CPU."""
        if y.dtype is torch.float32:
            self.hold(y.resolve_neg().numpy(), site)
        else:
            self._at_once(y, site, 0)

    def hold(self, x: cpu.Array, site: int, width: int = 0) -> None:
        """The same as float32 of numpy; with a `width`, by channel as well: shape (tokens, width)."""
        n = x.size
        if n > LONGEST or threading.get_ident() != self._thread:
            self._at_once(torch.from_numpy(x), site, width)
            return
        held = self._held
        begin = held.copies[-1].end if held.copies else 0
        if begin + n > len(held.room):
            self._make_room()
            begin = 0
        np.copyto(held.room[begin : begin + n].reshape(x.shape), x)
        held.copies.append(Copy(n, begin + n, site, width))

    def measure(self) -> None:
        """Measure what is held, and let go of it."""
        with self.lock:
            self._held.measure(self._rows, self._by_channel)

    def take(self) -> Held | None:
        """What is held at the end of a step, to be measured elsewhere and given back; None if there is nothing, or if no other
        room is free: then it was measured here."""
        if not self._held.copies:
            return None
        room = self._another()
        if room is None:
            self.measure()
            return None
        held, self._held = self._held, Held(room, self._free)
        return held

    def settle(self, site: int) -> None:
        """Measure what is held of `site`: more of it comes another way."""
        if any(copy.site == site for copy in self._held.copies) and threading.get_ident() == self._thread:
            self.measure()

    def _at_once(self, y: Tensor, site: int, width: int) -> None:
        self.settle(site)
        with self.lock:
            moments.add_on_cpu(y, self._rows[site])
            if width:
                self._by_channel(y, site)

    def _make_room(self) -> None:
        self.measure()
        if not len(self._held.room) and (first := self._another()) is not None:
            self._held.room = first

    def _another(self) -> cpu.Array | None:
        """A room that nobody has; None if there is none left."""
        if self._free:
            return self._free.popleft()
        if not self._unmade:
            return None
        self._unmade -= 1
        return np.empty(ROOM, np.float32)


def plain(output: object) -> bool:
    """Whether `output` is a float32 tensor that numpy can read in order, as it is."""
    return (
        type(output) is Tensor
        and output.dtype is torch.float32
        and output.is_cpu
        and output.layout is torch.strided
        and not output.is_nested
        and output.is_contiguous()
    )
