"""torch's total norm of gradients on the CPU, with the norm of each gradient that it is made of.

torch works out the norm of each gradient, then the norm of those, and gives the second only. To read the gradients once more
for the first would cost as much again. This does the same two operations and gives both.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 1 << 20  # elements: torch adds up squares in float32, which keeps five digits of so many
_KIND = attrgetter("device", "dtype", "layout", "requires_grad")
_PLAIN = {(torch.device("cpu"), torch.float32, torch.strided, False)}


class Norms(NamedTuple):
    """`total`, one element, is the L2 norm of `parts`, (k,), those of the gradients. All finite, float32."""

    total: Tensor
    parts: Tensor


class TotalNorm:
    """Its first result is held against torch's own. Where that has other bits, as only another torch could, it gives none."""

    def __init__(self) -> None:
        self._as_torch: bool | None = None

    @torch.no_grad()
    def of(self, gradients: Sequence[Tensor]) -> Norms | None:
        """None for gradients that are not plain float32 tensors of the CPU with some elements each, but no more than `LARGEST`,
        and where one is not finite."""
        if self._as_torch is False or not gradients or set(map(type, gradients)) != {Tensor}:
            return None
        sizes = list(map(Tensor.numel, gradients))
        if set(map(_KIND, gradients)) != _PLAIN or not 0 < min(sizes) <= max(sizes) <= LARGEST:
            return None
        parts = torch.stack(torch._foreach_norm(list(gradients), 2.0))
        total = torch.linalg.vector_norm(parts, 2.0)
        if not torch.isfinite(total):
            return None
        if self._as_torch is None:
            self._as_torch = torch.equal(total, torch.nn.utils.get_total_norm(gradients))
            if not self._as_torch:
                return None
        return Norms(total, parts)
