"""Reductions over lists of tensors: L2 norm, largest absolute element, count of non-finite elements.

Each takes non-empty dense real tensors of one device and one dtype, and returns float64 of shape (k,) on that device (float32
where there is no float64). On the CPU the result is a function of the tensor alone: the same tensor gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Summary: TypeAlias = "tuple[Tensor, Tensor, Tensor | None]"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # that the kernels read
CHUNK = 1 << 15
LARGE = 1 << 18  # on the CPU vector_norm keeps eight float32 sums: 1e-6 off at this size, 4e-4 at ten million elements


def summary(tensors: Sequence[Tensor]) -> Summary:
    """Norms, peaks and counts of non-finite elements, each (k,). The counts are None when all are known to be zero."""
    kernels = kernels_for(tensors[0])
    if kernels is not None:
        norm, peak, bad = kernels.summarise(tensors).unbind()
        return norm, peak, bad
    norm, peak = norms(tensors), peaks(tensors)
    if norm.device.type != "cpu":
        return norm, peak, nonfinites(tensors)
    suspects = np.flatnonzero(~np.isfinite(norm.numpy())).tolist()  # reading a CPU tensor is no synchronisation
    if not suspects:
        return norm, peak, None
    bad = torch.zeros_like(norm)
    bad[suspects] = nonfinites([tensors[i] for i in suspects])
    return norm, peak, bad


def norms_and_differences(new: Sequence[Tensor], old: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Norms of `new` and of ``new - old``, each (k,). May overwrite `old`."""
    kernels = kernels_for(new[0])
    if kernels is not None:
        norm, moved = kernels.summarise(new, old).unbind()
        return norm, moved
    found = norms(new)
    torch._foreach_sub_(list(old), list(new))
    return found, norms(old)


def scalable(tensors: Sequence[Tensor], total: Tensor) -> bool:
    """True if `scale` can multiply `tensors`: plain, dense, each in memory of its own, on the GPU that `total` is on."""
    if type(total) is not Tensor or kernels_for(total) is None or not tensors:
        return False
    device, dtype = total.device, tensors[0].dtype
    for tensor in tensors:
        if type(tensor) is not Tensor or tensor.dtype is not dtype or tensor.device != device:
            return False
        if not tensor.is_contiguous() and not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            return False
    return dtype in DTYPES and len({tensor.data_ptr() for tensor in tensors}) == len(tensors)


def scale(tensors: Sequence[Tensor], factor: Tensor, total: Tensor) -> Any:
    """Multiply in place, and measure on the way; `scaled_summary` of the result says what was found. See `kernels.scale`."""
    kernels = kernels_for(total)
    assert kernels is not None
    return kernels.scale(tensors, factor, total)


def scaled_summary(partial: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Norms and peaks after, counts of non-finite elements before; each (k,)."""
    kernels = _kernels()
    assert kernels is not None
    norm, peak, bad = kernels.combine(partial).unbind()
    return norm, peak, bad


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
    """L2 norms. Finite wherever the true norm is a finite float64."""
    first = tensors[0]
    dtype = None if first.dtype in (torch.float32, torch.float64) else torch.float32
    if first.device.type != "cpu":
        kernels = kernels_for(first)
        if kernels is not None:
            return kernels.summarise(tensors)[0]  # type: ignore[no-any-return]
        return _widest(torch.stack(_foreach_norm(tensors, dtype)))
    result = torch.empty(len(tensors), dtype=torch.float64)
    small = [i for i, tensor in enumerate(tensors) if tensor.numel() <= LARGE]
    if small:
        found = torch.stack(_foreach_norm([tensors[i] for i in small], dtype)).double()
        result[small] = found
    for i, tensor in enumerate(tensors):
        if tensor.numel() > LARGE:
            result[i] = _large_norm(tensor)
    _mend(result.numpy(), tensors)
    return result


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
    sizes = torch.tensor([tensor.numel() for tensor in tensors])
    return _widest(sizes.to(counts.device, non_blocking=True) - counts)


def _foreach_norm(tensors: Sequence[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    return list(torch._foreach_norm(list(tensors), 2, dtype=dtype))


def _large_norm(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    whole = flat.numel() // CHUNK * CHUNK
    wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
    parts = torch.linalg.vector_norm(flat[:whole].view(-1, CHUNK), dim=1, dtype=wide).double()
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float64).reshape(1)
    norm: Tensor = torch.linalg.vector_norm(torch.cat((parts, rest)))
    return norm


def _mend(found: np.ndarray, tensors: Sequence[Tensor]) -> None:
    """Redo in float64 what float32 squares may have overflowed or lost."""
    for i in np.flatnonzero(~((found > 1e-15) & np.isfinite(found))).tolist():
        if tensors[i].dtype != torch.float64:
            found[i] = torch.linalg.vector_norm(tensors[i], dtype=torch.float64).item()


def _widest(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)
