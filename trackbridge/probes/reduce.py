"""Reductions over lists of tensors: L2 norm, largest absolute element, sum, counts of elements that are not finite or not 0.

Each takes non-empty dense real tensors of one device and one dtype, and returns float64 of shape (k,) on that device (float32
where there is no float64). On the CPU the result is a function of the tensor alone: the same tensor gives the same bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trackbridge.probes import cpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # that the kernels read
_KIND = attrgetter("device", "dtype", "layout", "requires_grad")


class Summary(NamedTuple):
    """Each (k,). `peak` is NaN where there is a NaN. `peak`, `total` and `nonzero` are None where they were not asked for."""

    norm: Tensor
    peak: Tensor | None
    nonfinite: Tensor
    total: Tensor | None
    nonzero: Tensor | None


class Extent(NamedTuple):
    """The first three of a `Summary`, each (k,)."""

    norm: Tensor
    peak: Tensor
    nonfinite: Tensor


def summary(tensors: Sequence[Tensor], *, elements: bool = True) -> Summary:
    """One pass on the CPU and on CUDA. Without `elements` the CPU gives norms and counts of non-finite elements only."""
    kernels = kernels_for(tensors[0])
    if kernels is not None:
        return Summary(*kernels.summarise(tensors).unbind())
    if tensors[0].device.type != "cpu":
        return Summary(*extent(tensors), _totals(tensors), _nonzeros(tensors))
    if elements:
        return Summary(*torch.from_numpy(cpu.summarise(tensors, sums=True)).unbind())
    norm = norms(tensors)
    return Summary(norm, None, torch.zeros_like(norm) if norm.isfinite().all() else nonfinites(tensors), None, None)


def extent(tensors: Sequence[Tensor]) -> Extent:
    """One pass on the CPU and on CUDA."""
    kernels = kernels_for(tensors[0])
    if kernels is not None:
        return Extent(*kernels.summarise(tensors)[:3].unbind())
    if tensors[0].device.type == "cpu":
        return Extent(*torch.from_numpy(cpu.summarise(tensors)).unbind())
    return Extent(norms(tensors), peaks(tensors), nonfinites(tensors))


def scalable(tensors: Sequence[Tensor], total: Tensor) -> bool:
    """True if `scale` can multiply `tensors`: plain, dense, each in memory of its own that holds its elements as they are, on
    the GPU that `total` is on; or on the CPU, contiguous, of float32 and finite. Nothing that autograd follows: it is not
    told; and nothing made in inference mode, which has no version to tell what was written since."""
    if type(total) is not Tensor or not tensors:
        return False
    on_cpu = total.device.type == "cpu"
    if (total.dtype is not torch.float32 or not math.isfinite(total.item())) if on_cpu else kernels_for(total) is None:
        return False
    dtype = tensors[0].dtype
    if set(map(type, tensors)) != {Tensor} or set(map(_KIND, tensors)) != {(total.device, dtype, torch.strided, False)}:
        return False
    if any(map(Tensor.is_neg, tensors)) or any(map(Tensor.is_inference, tensors)):
        return False
    for tensor in itertools.filterfalse(Tensor.is_contiguous, tensors):
        if on_cpu or not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            return False
    known = dtype is torch.float32 if on_cpu else dtype in DTYPES
    return known and len(set(map(Tensor.data_ptr, tensors))) == len(tensors)


def scale(tensors: Sequence[Tensor], factor: Tensor, total: Tensor, *, elements: bool = True) -> Any:
    """Multiply in place by `factor`, one element, and measure on the way; `scaled_summary` of the result says what was found,
    on the CPU without `elements` only norms. Where the factor is 1 nothing is written."""
    torch.autograd.graph.increment_version(list(tensors))  # written by address, and autograd may have saved them
    if total.device.type == "cpu":
        by: float | None = factor.item()
        by = None if by == 1.0 else by
        return torch.from_numpy(cpu.summarise(tensors, sums=True, by=by) if elements else cpu.norms(tensors, by=by)[None])
    kernels = kernels_for(total)
    assert kernels is not None
    return kernels.scale(tensors, factor, total)


def scaled_summary(partial: Any) -> Tensor:
    """Of the tensors after it, but counts of non-finite elements before: the fields of `Summary`, shape (5 or 1, k)."""
    if isinstance(partial, Tensor):
        return partial
    kernels = _kernels()
    assert kernels is not None
    return kernels.combine(partial)  # type: ignore[no-any-return]


@cache
def _kernels() -> ModuleType | None:
    """The Triton kernels, where Triton works."""
    try:
        from trackbridge.probes import kernels
    except ImportError:
        return None
    return kernels


def kernels_for(tensor: Tensor) -> ModuleType | None:
    """The kernels if they can read `tensor`."""
    if tensor.device.type != "cuda":
        return None
    kernels = _kernels()
    return kernels if kernels is not None and tensor.dtype in DTYPES else None


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norms. Finite wherever the true norm is a finite float64 (on devices without kernels: float32)."""
    if tensors[0].device.type == "cpu":
        return torch.from_numpy(cpu.norms(tensors))
    kernels = kernels_for(tensors[0])
    if kernels is not None:
        return kernels.summarise(tensors)[0]  # type: ignore[no-any-return]
    dtype = None if tensors[0].dtype in (torch.float32, torch.float64) else torch.float32
    return _widest(torch.stack(list(torch._foreach_norm(list(tensors), 2, dtype=dtype))))


def peaks(tensors: Sequence[Tensor]) -> Tensor:
    """Largest absolute elements; NaN where there is a NaN."""
    ends = [torch.aminmax(tensor) for tensor in tensors]
    lows, highs = torch.stack([end.min for end in ends]), torch.stack([end.max for end in ends])
    return _widest(torch.maximum(highs, lows.neg()))


def nonfinites(tensors: Sequence[Tensor], total: Tensor | None = None) -> Tensor:
    """How many elements are NaN or infinite. Where `total`, one element on their device, is finite, none is: a kernel does
    not read them then."""
    kernels = kernels_for(tensors[0]) if total is not None and total.device == tensors[0].device else None
    if kernels is not None:
        return kernels.summarise(tensors, unless_finite=total)[2]  # type: ignore[no-any-return]
    counts = torch.stack([torch.isfinite(tensor).sum() for tensor in tensors])
    sizes = torch.tensor([tensor.numel() for tensor in tensors], device="cpu")
    return _widest(sizes.to(counts.device, non_blocking=True) - counts)


def _totals(tensors: Sequence[Tensor]) -> Tensor:
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return _widest(torch.stack([tensor.sum(dtype=dtype) for tensor in tensors]))


def _nonzeros(tensors: Sequence[Tensor]) -> Tensor:
    return _widest(torch.stack([torch.count_nonzero(tensor) for tensor in tensors]))


def _widest(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)
