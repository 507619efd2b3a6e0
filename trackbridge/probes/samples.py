"""A sample of each parameter's elements, on which the size of an update is measured.

A parameter of fewer than `2 * FEW` elements is its own sample. Of a larger one it is every k-th element in the order in which
they lie in memory: about `FEW` of them, more where that is fewer than one in `RAREST`. k is an odd prime of which no dimension
is a multiple, so that the sample meets rows and columns alike (of the smallest ones that can leave it few: 1,844 of 96 x 96,
where 3 will not do). It is a function of the shape alone: ranks, replays and the two sides of an update take the same.

The norm of the whole is estimated as that of the sample times the root of their sizes' ratio. Its relative standard error is
about sqrt((kurtosis - 1) / m) / 2 for m elements drawn, kurtosis being that of the differences (not excess; 3 for normal ones:
1.1%).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from trackbridge.probes import cpu, reduce
from trackbridge.probes.strides import odd_prime, stride

FEW = 1 << 12
RAREST = 257


class Layout(NamedTuple):
    """What the shapes of some tensors say of their samples."""

    intervals: tuple[int, ...]
    counts: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Layout:
        return _layout(tuple([tensor.shape for tensor in tensors]))


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Those of some tensors, one after the other, in float32 or better."""

    flat: Tensor
    layout: Layout

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Samples:
        """Copy the samples of tensors of one device and dtype, none empty. No sync."""
        layout = Layout.of(tensors)
        if (gathering := _kernels_for(tensors)) is not None:
            return cls(gathering.gather(tensors, layout.counts, layout.intervals), layout)
        return cls(_copied(tensors), layout)

    def fit(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the samples of `tensors` are laid out like these."""
        return Layout.of(tensors) == self.layout

    def distances(self, now: Sequence[Tensor]) -> Tensor:
        """Estimates of the L2 norms of the differences between the whole tensors `now`, which `fit`, and those that were
        sampled; shape (k,). Uses the samples up: on CUDA the differences take their place, and no more memory than they."""
        intervals, counts, sizes = self.layout
        if self.flat.device.type == "cpu":
            found = torch.from_numpy(cpu.distances(_copied(now), self.flat, counts))
        else:
            if (gathering := _kernels_for(now)) is not None:
                gathering.subtract(now, counts, intervals, apart := self.flat)
            else:
                apart = _copied(now).sub_(self.flat)
            found = reduce.norms(torch.split(apart, list(counts)))
        return found if counts == sizes else found * _roots(counts, sizes, found.device, found.dtype)


@lru_cache(maxsize=64)
def _layout(shapes: tuple[torch.Size, ...]) -> Layout:
    intervals, sizes = tuple(map(interval, shapes)), tuple(map(math.prod, shapes))
    return Layout(intervals, tuple(-(-size // every) for size, every in zip(sizes, intervals, strict=True)), sizes)


def _copied(tensors: Sequence[Tensor]) -> Tensor:
    dtype = torch.float64 if tensors[0].dtype is torch.float64 else torch.float32
    joined = cpu.joined if tensors[0].device.type == "cpu" else torch.cat
    return joined([sample(tensor).to(dtype) for tensor in tensors])


def _kernels_for(tensors: Sequence[Tensor]) -> ModuleType | None:
    """The kernels that gather samples, if they can read all `tensors`."""
    kernels = reduce.kernels_for(tensors[0])
    if kernels is None or not all(map(kernels.is_dense, tensors)):
        return None
    from trackbridge.probes import sample_kernels

    return sample_kernels


@lru_cache(maxsize=64)
def _roots(counts: tuple[int, ...], sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    pairs = zip(sizes, counts, strict=True)
    roots = torch.tensor([(size / count) ** 0.5 for size, count in pairs], dtype=dtype, pin_memory=device.type == "cuda")
    return roots.to(device, non_blocking=True)


def sample(tensor: Tensor) -> Tensor:
    """A view of the sample, shape (m,); of a tensor that does not fill its memory a copy, by its logical order."""
    flat, every = tensor.detach(), interval(tensor.shape)
    if flat.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(flat):
        return flat.reshape(-1)[::every] if every > 1 else flat.reshape(-1)
    return flat.as_strided((-(-flat.numel() // every),), (every,))


@lru_cache(maxsize=1024)
def interval(shape: tuple[int, ...]) -> int:
    """k of a parameter of this shape."""
    return stride(odd_prime(min(max(1, math.prod(shape) // FEW), RAREST)), shape)
