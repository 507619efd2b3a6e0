# mypy: disable-error-code="untyped-decorator,no-untyped-def,attr-defined"
# ruff: noqa: N803
"""A Triton kernel that counts how many tokens went to each expert. Imported only where CUDA and Triton are.

Each program counts its part in a histogram of its own and adds that to the slab with atomics: whole numbers in float64, so
that the order does not matter and the same data give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from trackbridge.probes.launch import launch

BLOCK = 2048


@triton.jit
def _count(numbers, slab, n, offset, experts, gate, BINS: tl.constexpr, BLOCK: tl.constexpr):
    if tl.load(slab + gate) > 0:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        number = tl.load(numbers + at, mask=at < n, other=-1).to(tl.int32)
        number = tl.where((number >= 0) & (number < experts), number, experts)  # what is no expert's has a bin of its own
        counts = tl.histogram(number, BINS)
        expert = tl.arange(0, BINS)
        tl.atomic_add(slab + offset + expert, counts.to(tl.float64), mask=(expert < experts) & (counts > 0))


def count(numbers: Tensor, slab: Tensor, offset: int, experts: int, gate: int) -> None:
    """Add how often each expert is in `numbers`, integers of any shape, to ``slab[offset : offset + experts]``."""
    numbers = numbers.contiguous()
    n = numbers.numel()
    constants = triton.next_power_of_2(experts + 1), BLOCK
    launch(_count, (triton.cdiv(n, BLOCK), 1, 1), (numbers, slab, n, offset, experts, gate), constants, warps=4)
