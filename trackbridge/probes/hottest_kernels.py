# mypy: disable-error-code="untyped-decorator,no-untyped-def,attr-defined"
# ruff: noqa: N803
"""Triton kernels that find the rows of a matrix with the largest norms. Imported only where CUDA and Triton are.

One pass over the matrix gives the norm of every row, and the largest of each group of rows; one program then takes the largest
group as often as rows are wanted, each time with the rows out that it has. Ties go to the smaller number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from trackbridge.probes.launch import launch

LEAST_GROUP = 16  # rows of one program
MOST_GROUPS = 8192
COLUMNS = 128


@triton.jit
def _norms(x, norms, peaks, rows, width, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    program = tl.program_id(0)
    row = program * GROUP + tl.arange(0, GROUP)
    total = tl.zeros([GROUP], tl.float64)
    for begin in range(0, width, COLUMNS):
        at = begin + tl.arange(0, COLUMNS)
        place = row.to(tl.int64)[:, None] * width + at[None, :]
        part = tl.load(x + place, mask=(row < rows)[:, None] & (at < width)[None, :], other=0.0)
        wide = part.to(tl.float64)  # the squares of float32 need a larger range than it has
        total += tl.sum(wide * wide, 1)
    total = tl.where(total == total, total, float("inf"))
    norm = tl.sqrt(total).to(tl.float32)
    tl.store(norms + row, norm, mask=row < rows)
    tl.store(peaks + program, tl.max(tl.where(row < rows, norm, -1.0), 0))


@triton.jit
def _largest(norms, peaks, out, rows, groups, COUNT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    group = tl.arange(0, GROUPS)
    peak = tl.load(peaks + group, mask=group < groups, other=-1.0)
    for place in range(COUNT):
        value = tl.max(peak, 0)
        best = tl.min(tl.where(peak == value, group, GROUPS), 0)
        row = best * GROUP + tl.arange(0, GROUP)
        norm = tl.load(norms + row, mask=row < rows, other=-1.0)
        chosen = tl.min(tl.where(norm == value, row, 2147483647), 0)
        there = value >= 0
        tl.store(out + place, tl.where(there, value, 0.0).to(tl.float64))
        tl.store(out + COUNT + place, tl.where(there, chosen, 0).to(tl.float64))
        left = tl.where(row == chosen, -1.0, norm)
        tl.store(norms + row, left, mask=row < rows)
        tl.debug_barrier()
        peak = tl.where(group == best, tl.max(left, 0), peak)


def hottest(x: Tensor, out: Tensor, count: int) -> None:
    """`embeddings.hottest` of a contiguous matrix. A row with a NaN or infinity has an infinite norm."""
    rows, width = x.shape
    group = LEAST_GROUP
    while triton.cdiv(rows, group) > MOST_GROUPS:
        group *= 2
    groups = triton.cdiv(rows, group)
    norms = torch.empty(rows, dtype=torch.float32, device=x.device)
    peaks = torch.empty(groups, dtype=torch.float32, device=x.device)
    launch(_norms, (groups, 1, 1), (x, norms, peaks, rows, width), (group, COLUMNS), warps=4)
    launch(_largest, (1, 1, 1), (norms, peaks, out, rows, groups), (count, group, triton.next_power_of_2(groups)), warps=8)
