# mypy: disable-error-code="untyped-decorator,no-untyped-def,attr-defined"
# ruff: noqa: N803
"""Triton kernels for the kurtosis over channels (`channels`). Imported only where CUDA and Triton are.

Programs stand in a grid of blocks of columns by groups of rows; each adds the squares it read to cells of its own (float32),
always the same ones for outputs of one width, so nothing waits, no atomics are needed and the same data give the same bits. One
program for each site makes a number of its cells at the end of the step, in float64, and empties them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from trackbridge.probes.launch import launch

COLUMNS = 128  # channels of one program
ROWS = 128  # tokens it reads at once
PROGRAMS = 264  # for one output, about
WARPS = 8
CELLS = PROGRAMS * COLUMNS  # of a site, enough for every width
WIDEST = CELLS
LEAST: tl.constexpr = tl.constexpr(1e-30)


@triton.jit
def add_block(
    x, cells, widths, slab, rows, width, site, gate, column, group, groups,
    CELLS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add the squares of one block of columns, and of every `groups`-th block of rows, to their cells."""
    if tl.load(slab + gate) > 0:
        at = column * COLUMNS + tl.arange(0, COLUMNS)
        inside = at < width
        total = tl.zeros([COLUMNS], tl.float32)
        for begin in range(group * ROWS, rows, groups * ROWS):
            row = begin + tl.arange(0, ROWS)
            place = row.to(tl.int64)[:, None] * width + at[None, :]
            part = tl.load(x + place, mask=(row < rows)[:, None] & inside[None, :], other=0.0).to(tl.float32)
            total += tl.sum(part * part, 0)
        cell = cells + site * CELLS + group * width + at
        tl.store(cell, tl.load(cell, mask=inside, other=0.0) + total, mask=inside)
        if column + group == 0:
            tl.store(widths + site, width)


@triton.jit
def add_all(x, cells, widths, slab, rows, width, site, gate, CELLS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    column, group = tl.program_id(0), tl.program_id(1)
    add_block(x, cells, widths, slab, rows, width, site, gate, column, group, tl.num_programs(1), CELLS, COLUMNS, ROWS)


@triton.jit
def _collect(
    cells, widths, out, CELLS: tl.constexpr, COLUMNS: tl.constexpr, PROGRAMS: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each site."""
    site = tl.program_id(0)
    width = tl.load(widths + site)
    if width == 0:
        tl.store(out + site, 0.0)
    else:
        groups = tl.maximum(PROGRAMS // tl.cdiv(width, COLUMNS), 1)
        first = tl.zeros([BLOCK], tl.float64)
        second = tl.zeros([BLOCK], tl.float64)
        for begin in range(0, width, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            square = tl.zeros([BLOCK], tl.float64)
            for start in range(0, groups, GROUPS):
                group = start + tl.arange(0, GROUPS)
                place = cells + site.to(tl.int64) * CELLS + group[:, None] * width + at[None, :]
                inside = (group < groups)[:, None] & (at < width)[None, :]
                square += tl.sum(tl.load(place, mask=inside, other=0.0).to(tl.float64), 0)
                tl.store(place, tl.zeros([GROUPS, BLOCK], tl.float32), mask=inside)
            first += square
            second += square * square
        total = tl.sum(first, 0)
        value = width * tl.sum(second, 0) / (total * total)
        fine = (total > LEAST * width) & (value < float("inf"))
        tl.store(out + site, tl.where(fine, value, 0.0))
        tl.store(widths + site, 0)


class Cells:
    """As `channels.Channels`, on CUDA. Its addresses never change."""

    def __init__(self, sites: int, device: torch.device) -> None:
        self.cells = torch.zeros(sites, CELLS, dtype=torch.float32, device=device)
        self.widths = torch.zeros(sites, dtype=torch.int32, device=device)
        torch._dynamo.mark_static_address(self.cells)
        torch._dynamo.mark_static_address(self.widths)

    def add(self, x: Tensor, slab: Tensor, site: int, gate: int) -> None:
        """Add `x`, shape (tokens, channels), to a site if ``slab[gate]`` is set."""
        if self.takes(x):
            x = x.contiguous()
            arguments = x, self.cells, self.widths, slab, *x.shape, site, gate
            launch(add_all, grid_for(x), arguments, (CELLS, COLUMNS, ROWS), warps=WARPS)

    def trace(self, x: Tensor, slab: Tensor, site: int, gate: int) -> None:
        """`add` as an operation of a graph."""
        if self.takes(x):
            torch.ops.trackbridge.channels_triton(x, self.cells, self.widths, slab, site, gate)

    def takes(self, x: Tensor) -> bool:
        return x.is_cuda and x.shape[1] <= WIDEST

    def collect(self, slab: Tensor, offset: int) -> None:
        """The kurtosis of each site to ``slab[offset + site]``, 0 where there is none; cells are emptied."""
        constants = CELLS, COLUMNS, PROGRAMS, 16, 256
        launch(_collect, (len(self.cells), 1, 1), (self.cells, self.widths, slab[offset:]), constants, warps=WARPS)


@triton_op("trackbridge::channels_triton", mutates_args={"cells", "widths"})
def channels_graph(x: Tensor, cells: Tensor, widths: Tensor, slab: Tensor, site: int, gate: int) -> None:
    """Add the squares of `x`, shape (tokens, channels), to `site` if ``slab[gate]`` is set."""
    x = x.contiguous()
    wrap_triton(add_all)[grid_for(x)](
        x, cells, widths, slab, x.shape[0], x.shape[1], site, gate,
        CELLS=CELLS, COLUMNS=COLUMNS, ROWS=ROWS, num_warps=WARPS,
    )  # fmt: skip


def grid_for(x: Tensor) -> tuple[int, int, int]:
    """Blocks of columns by groups of rows. The groups depend on the width only: what they add lies in the same cells."""
    columns = triton.cdiv(x.shape[1], COLUMNS)
    return columns, max(PROGRAMS // columns, 1), 1
