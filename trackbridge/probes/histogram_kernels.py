# mypy: disable-error-code="untyped-decorator,no-untyped-def,attr-defined"
# ruff: noqa: N803
"""A Triton kernel that counts the elements of many tensors by their code, each element read once. Imported only where CUDA and
Triton are. Counts are integers, so the order of adding does not matter: the same data gives the same counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from trackbridge.histograms import CODES
from trackbridge.probes.kernels import DTYPES, WARPS, is_dense, pointers_of, table_of
from trackbridge.probes.launch import launch

BLOCK = 4096


@triton.jit
def _count(
    pointers, sizes, owners, chunks, scale, counts,
    DTYPE: tl.constexpr, SCALED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """One chunk: its counts are added to the row of its tensor."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    begin = tl.load(chunks + program).to(tl.int64) * CHUNK
    length = tl.minimum(tl.load(sizes + tensor) - begin, CHUNK).to(tl.int32)
    data = tl.load(pointers + tensor).to(tl.pointer_type(DTYPE)) + begin
    by = 1.0
    if SCALED:
        by = tl.load(scale).to(tl.float32)
    found = tl.zeros([CODES], tl.int32)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < length
        x = tl.load(data + at, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            x = tl.div_rn(x, by)
        code = (x.to(tl.int32, bitcast=True) >> 22) & (CODES - 1)
        found += tl.histogram(tl.where(inside, code, 0), CODES)
    codes = tl.arange(0, CODES)
    found -= tl.where(codes == 0, tl.cdiv(length, BLOCK) * BLOCK - length, 0)  # what is outside was counted as 0
    tl.atomic_add(counts + tensor.to(tl.int64) * CODES + codes, found.to(tl.int64), mask=found > 0, sem="relaxed")


def count(tensors: Sequence[Tensor], scale: Tensor | None = None) -> Tensor:
    """Counts by the top ten bits of each element's float32, divided by `scale` first: int64 of shape (len(tensors), CODES).

    `tensors` are of one device and one dtype of `DTYPES`, none empty. No sync.
    """
    dense = [t if is_dense(t) else t.contiguous() for t in tensors]
    device = dense[0].device
    table = table_of(dense)
    counts = torch.zeros(len(dense), CODES, dtype=torch.int64, device=device)
    by = counts if scale is None else scale.to(device)
    arguments = pointers_of(dense), table.sizes, table.owners, table.chunks, by, counts
    constants = DTYPES[dense[0].dtype], scale is not None, table.chunk, BLOCK, CODES
    launch(_count, (table.programs, 1, 1), arguments, constants, warps=WARPS)
    return counts
