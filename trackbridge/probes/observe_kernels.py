# mypy: disable-error-code="untyped-decorator,no-untyped-def,attr-defined"
# ruff: noqa: N803, N806
"""Triton kernels for activations: one pass over a tensor adds its moments to a site's cells; at the end of a step the cells
become a row of the slab. Imported only where CUDA and Triton are.

A site has one cell for every program that may read it. A program merges what it read into its own cell, always the same part
of a tensor of the same size, so nothing waits for anything, several calls of a module in one step add up, and the same data
gives the same bits. Elements are shifted by the mean of a program's first block and scaled by its size, so neither a large
mean nor a large or tiny range costs digits; from a program's sums onward everything is float64.

Blocks are read from the end of the tensor to its beginning: what was written last is still in the cache, and so is then the
beginning, which the next layer reads first.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from trackbridge.probes.kernels import is_dense, power_of_two
from trackbridge.probes.launch import launch

READABLE = (torch.float32, torch.bfloat16, torch.float16)
FIELDS = 8  # as the columns of `moments`
ROWS = 512  # vectors in a block
WARPS = 8
PER_MULTIPROCESSOR = 4  # programs at once


@triton.jit
def _add4(a1, a2, a3, a4, b1, b2, b3, b4):
    return a1 + b1, a2 + b2, a3 + b3, a4 + b4


@triton.jit
def _powers(x, shift, inverse, s1, s2, s3, s4):
    """Add the powers of a block's deviations to one sum for each vector."""
    d = (x - shift) * inverse
    q = d * d
    return s1 + tl.sum(d, 1), s2 + tl.sum(q, 1), s3 + tl.sum(q * d, 1), s4 + tl.sum(q * q, 1)


@triton.jit
def _deposit(cell, PROGRAMS: tl.constexpr, nb, mean_b, m2b, m3b, m4b, largest, bads, fires):
    """Merge moments of a part, float64, into a cell: see `moments.merge`."""
    na = tl.load(cell)
    mean_a = tl.load(cell + PROGRAMS)
    m2a = tl.load(cell + 2 * PROGRAMS)
    m3a = tl.load(cell + 3 * PROGRAMS)
    m4a = tl.load(cell + 4 * PROGRAMS)
    gap = mean_b - mean_a
    g = gap / tl.maximum(na + nb, 1.0)
    product = na * nb
    tl.store(cell, na + nb)
    tl.store(cell + PROGRAMS, mean_a + g * nb)
    tl.store(cell + 2 * PROGRAMS, m2a + m2b + gap * g * product)
    tl.store(cell + 3 * PROGRAMS, m3a + m3b + gap * g * g * product * (na - nb) + 3 * g * (na * m2b - nb * m2a))
    tl.store(
        cell + 4 * PROGRAMS,
        m4a
        + m4b
        + gap * g * g * g * product * (na * na - product + nb * nb)
        + 6 * g * g * (na * na * m2b + nb * nb * m2a)
        + 4 * g * (na * m3b - nb * m3a),
    )
    tl.store(cell + 5 * PROGRAMS, tl.maximum(tl.load(cell + 5 * PROGRAMS), largest))
    tl.store(cell + 6 * PROGRAMS, tl.load(cell + 6 * PROGRAMS) + bads)
    tl.store(cell + 7 * PROGRAMS, tl.load(cell + 7 * PROGRAMS) + fires)


@triton.jit
def observe_part(
    y, cells, slab, n, site, gate, program, programs,
    FIELDS: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Merge every `programs`-th block of a tensor of `n` elements into a cell of the site. Programs may be more than blocks."""
    BLOCK: tl.constexpr = ROWS * VECTOR
    if (tl.load(slab + gate) > 0) & (program < tl.cdiv(n, BLOCK)):
        lane = tl.arange(0, ROWS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
        last = tl.cdiv(n, BLOCK) - 1 - program  # the block at the end may be short
        count = last // programs + 1
        room = tl.minimum(n - last.to(tl.int64) * BLOCK, BLOCK).to(tl.int32)

        inside = lane < room
        x = tl.load(y + last.to(tl.int64) * BLOCK + lane, mask=inside, other=0.0).to(tl.float32)
        s1 = tl.zeros([ROWS], tl.float32)
        s2 = tl.zeros([ROWS], tl.float32)
        s3 = tl.zeros([ROWS], tl.float32)
        s4 = tl.zeros([ROWS], tl.float32)
        largest = tl.max(tl.abs(x), 1)
        shift = tl.sum(tl.sum(x, 1), 0) / room.to(tl.float32)
        scale = power_of_two(tl.max(largest, 0) + tl.abs(shift))
        inverse = 1.0 / scale
        x = tl.where(inside, x, shift)
        for i in range(1, count):
            ahead = tl.load(y + (last - i * programs).to(tl.int64) * BLOCK + lane).to(tl.float32)
            s1, s2, s3, s4 = _powers(x, shift, inverse, s1, s2, s3, s4)
            largest = tl.maximum(largest, tl.max(tl.abs(ahead), 1))
            x = ahead
        s1, s2, s3, s4 = _powers(x, shift, inverse, s1, s2, s3, s4)

        r1, r2, r3, r4 = tl.reduce((s1, s2, s3, s4), 0, _add4)
        bads = 0.0
        if (tl.abs(r2) < float("inf")) == 0:  # a NaN or infinity among the data, or an overflow: look again
            bad = tl.zeros([ROWS], tl.int32)
            for i in range(count):
                at = (last - i * programs).to(tl.int64) * BLOCK + lane
                x = tl.load(y + at, mask=at < n, other=0.0).to(tl.float32)
                bad += tl.sum(tl.where(tl.abs(x) < float("inf"), 0, 1), 1)
            bads = tl.sum(bad, 0).to(tl.float32)
        c = count.to(tl.float64) * BLOCK - (BLOCK - room)
        t1 = r1.to(tl.float64)
        t2 = r2.to(tl.float64)
        t3 = r3.to(tl.float64)
        t4 = r4.to(tl.float64)
        m = t1 / c
        size = scale.to(tl.float64)
        size2 = size * size
        _deposit(
            cells + site * (FIELDS * PROGRAMS) + program,
            PROGRAMS,
            c,
            shift.to(tl.float64) + m * size,
            tl.maximum(t2 - m * t1, 0.0, propagate_nan=tl.PropagateNan.ALL) * size2,
            (t3 - 3 * m * t2 + 2 * m * m * t1) * size2 * size,
            (t4 - 4 * m * t3 + 6 * m * m * t2 - 3 * m * m * m * t1) * size2 * size2,
            tl.max(largest, 0).to(tl.float64),
            bads.to(tl.float64),
            1.0,
        )


@triton.jit
def observe_all(
    y, cells, slab, n, site, gate, FIELDS: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr, VECTOR: tl.constexpr
):
    observe_part(y, cells, slab, n, site, gate, tl.program_id(0), tl.num_programs(0), FIELDS, PROGRAMS, ROWS, VECTOR)


@triton.jit
def _collect(cells, row, FIELDS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """One program for each site: merge its cells into its row of the slab, and empty them."""
    site = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < PROGRAMS
    cell = cells + site.to(tl.int64) * FIELDS * PROGRAMS + at
    row += site * FIELDS
    fires = tl.max(tl.load(cell + 7 * PROGRAMS, mask=inside, other=0.0), 0)
    if fires > 0:
        c = tl.load(cell, mask=inside, other=0.0)
        mean = tl.load(cell + PROGRAMS, mask=inside, other=0.0)
        m2 = tl.load(cell + 2 * PROGRAMS, mask=inside, other=0.0)
        m3 = tl.load(cell + 3 * PROGRAMS, mask=inside, other=0.0)
        m4 = tl.load(cell + 4 * PROGRAMS, mask=inside, other=0.0)
        largest = tl.max(tl.load(cell + 5 * PROGRAMS, mask=inside, other=0.0), 0)
        bads = tl.sum(tl.load(cell + 6 * PROGRAMS, mask=inside, other=0.0), 0)
        nb = tl.sum(c, 0)
        mean_b = tl.sum(c * mean, 0) / tl.maximum(nb, 1.0)
        d = tl.where(c > 0, mean - mean_b, 0.0)
        d2 = d * d
        zero = tl.zeros([BLOCK], tl.float64)
        m2b, m3b, m4b, _ = tl.reduce(
            (m2 + c * d2, m3 + 3 * d * m2 + c * d2 * d, m4 + 4 * d * m3 + 6 * d2 * m2 + c * d2 * d2, zero), 0, _add4
        )
        _deposit(row, 1, nb, mean_b, m2b, m3b, m4b, largest, bads, fires)
        for field in tl.static_range(FIELDS):
            tl.store(cell + field * PROGRAMS, zero, mask=inside)


def cells_for(sites: int, device: torch.device) -> Tensor:
    """Empty cells of `sites` sites, float64, shape (sites, FIELDS, programs). Their address never changes."""
    cells = torch.zeros(sites, FIELDS, _wave(device), dtype=torch.float64, device=device)
    torch._dynamo.mark_static_address(cells)
    return cells


def observe(y: Tensor, cells: Tensor, slab: Tensor, site: int, gate: int) -> None:
    """Merge the moments of `y` into the cells of `site` if ``slab[gate]`` is set."""
    if not is_dense(y):
        y = y.contiguous()
    programs, vector = cells.shape[2], 16 // y.element_size()
    grid = programs_for(y, cells), 1, 1
    launch(observe_all, grid, (y, cells, slab, y.numel(), site, gate), (FIELDS, programs, ROWS, vector), warps=WARPS)


def programs_for(y: Tensor, cells: Tensor) -> int:
    """Programs that read `y`, the same for all tensors of its size."""
    block = ROWS * (16 // y.element_size())
    return min(-(-y.numel() // block), cells.shape[2])


def collect(cells: Tensor, slab: Tensor, offset: int) -> None:
    """Merge the cells of all sites into their rows of `slab`, from `offset`, and empty them."""
    programs = cells.shape[2]
    constants = FIELDS, programs, triton.next_power_of_2(programs)
    launch(_collect, (len(cells), 1, 1), (cells, slab[offset:]), constants, warps=WARPS)


@cache
def _wave(device: torch.device) -> int:
    """Programs that a device runs at once, so that none waits for another to end."""
    processors: int = torch.cuda.get_device_properties(device).multi_processor_count
    return PER_MULTIPROCESSOR * processors
