"""Reductions over lists of tensors: L2 norm, largest absolute element, count of non-finite elements.

Each takes non-empty dense real tensors of one device and one dtype, and returns float64 of shape (k,) on that device (float32
where there is no float64). On the CPU the result is a function of the tensor alone: the same tensor gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 15
LARGE = 1 << 18  # on the CPU vector_norm keeps eight float32 sums: 1e-6 off at this size, 4e-4 at ten million elements


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """L2 norms. Finite wherever the true norm is a finite float64."""
    first = tensors[0]
    dtype = None if first.dtype in (torch.float32, torch.float64) else torch.float32
    if first.device.type != "cpu":
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


def nonfinites(tensors: Sequence[Tensor]) -> Tensor:
    """How many elements are NaN or infinite."""
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
