"""What hooks have copied on the CPU, and its moments, taken together at the end of the step.

A hook that runs once in 10 ms finds neither the code of its statistics nor their buffers in the cache, and each of ten small
operations costs several times what it costs when all are done in a row. So it only copies (the output may be changed in place
later), and copies of one length go through the same few operations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from trackbridge.probes import cpu, moments
from trackbridge.records import FloatArray

ROOM = 1 << 19  # elements of all copies, 2 MiB: they are still in the cache when they are measured
LONGEST = cpu.PIECE  # elements of one; of more the arithmetic is what costs


class Copies:
    """`rows`: where the moments of each site go, shape (sites, `moments.WIDTH`); `by_channel` adds elements of a site, shape
    (tokens, channels), to the statistics of its channels. Copies are measured when there is no room left
    and at the end of the step; each gives the bits that it would have given at once, and those of a site are merged in the
    order in which they came. What another thread than the one that made this has is measured at once."""

    def __init__(self, rows: FloatArray, by_channel: Callable[[Tensor, int], None]) -> None:
        self._rows = rows
        self._by_channel = by_channel
        self._room: cpu.Array = np.empty(0, np.float32)
        self._held: list[tuple[int, int, int, int]] = []  # how many elements, where they end, of which site, channels or 0
        self._thread = threading.get_ident()

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
        begin = self._held[-1][1] if self._held else 0
        if begin + n > len(self._room):
            self._make_room()
            begin = 0
        np.copyto(self._room[begin : begin + n].reshape(x.shape), x)
        self._held.append((n, begin + n, site, width))

    def measure(self) -> None:
        """Measure what is held, and let go of it."""
        held, self._held = self._held, []
        for n, group in groupby(held, lambda copy: copy[0]):
            copies = list(group)
            xs = self._room[copies[0][1] - n : copies[-1][1]].reshape(-1, n)
            moments.add_all_on_cpu(xs, [self._rows[site] for _, _, site, _ in copies])
            for x, (_, _, site, width) in zip(xs, copies, strict=True):
                if width:
                    self._by_channel(torch.from_numpy(x).view(-1, width), site)

    def settle(self, site: int) -> None:
        """Measure what is held of `site`: more of it comes another way."""
        if any(other == site for _, _, other, _ in self._held) and threading.get_ident() == self._thread:
            self.measure()

    def _at_once(self, y: Tensor, site: int, width: int) -> None:
        self.settle(site)
        moments.add_on_cpu(y, self._rows[site])
        if width:
            self._by_channel(y, site)

    def _make_room(self) -> None:
        self.measure()
        if not len(self._room):
            self._room = np.empty(ROOM, np.float32)


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
