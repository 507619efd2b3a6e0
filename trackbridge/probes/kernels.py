# mypy: disable-error-code="untyped-decorator,no-untyped-def,attr-defined"
# ruff: noqa: N803, N806
"""Triton kernels for lists of tensors: one pass gives each one's norm, largest element, count of non-finite elements, sum and
count of elements that are not 0. Imported only where CUDA and Triton are.

`summarise` only reads; `scale` multiplies the tensors as clipping does, and looks at them on the way. Every
program leaves a partial result and a second kernel combines those of a tensor, in a fixed order and in float64: the same data
gives the same bits. Squares are summed in float32; a part whose squares may not fit there is read once more, scaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from trackbridge.probes.launch import launch

CHUNK = 1 << 15  # elements of a tensor that one program reads
ROWS = 512  # vectors in a block
WARPS = 8
SMALL: tl.constexpr = tl.constexpr(1e-15)  # squares of elements below this may be lost in float32


@triton.jit
def power_of_two(size):
    """A power of two near `size`, 1 for 0; within what float32 can be divided by."""
    exponent = tl.floor(tl.log2(tl.maximum(size, 1e-30)))
    return tl.where(size > 0, tl.exp2(tl.minimum(exponent, 100.0)), 1.0)


@triton.jit
def _finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _carefully(data, length, ROWS: tl.constexpr, VECTOR: tl.constexpr):
    """Squared norm of `data`, scaled; counts of non-finite elements and of NaN; the sum."""
    lane = tl.arange(0, ROWS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    size = tl.zeros([ROWS], tl.float32)
    bad = tl.zeros([ROWS], tl.int32)
    nan = tl.zeros([ROWS], tl.int32)
    for begin in range(0, length, ROWS * VECTOR):
        inside = begin + lane < length
        x = tl.load(data + begin + lane, mask=inside, other=0.0).to(tl.float32)
        size = tl.maximum(size, tl.max(tl.where(_finite(x), tl.abs(x), 0.0), 1))
        bad += tl.sum(tl.where(_finite(x), 0, 1), 1)
        nan += tl.sum(tl.where(x == x, 0, 1), 1)
    scale = power_of_two(tl.max(size, 0))
    squares = tl.zeros([ROWS], tl.float32)
    added = tl.zeros([ROWS], tl.float32)
    for begin in range(0, length, ROWS * VECTOR):
        inside = begin + lane < length
        scaled = tl.load(data + begin + lane, mask=inside, other=0.0).to(tl.float32) / scale
        squares += tl.sum(scaled * scaled, 1)
        added += tl.sum(scaled, 1)
    scale64 = scale.to(tl.float64)
    return (
        tl.sum(squares, 0).to(tl.float64) * scale64 * scale64,
        tl.sum(bad, 0),
        tl.sum(nan, 0),
        tl.sum(added, 0).to(tl.float64) * scale64,
    )


@triton.jit
def _summarise(
    pointers, sizes, owners, chunks, partials, factor, total, programs,
    DTYPE: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One chunk. Partial results: squared norm; largest element; count of non-finite elements; sum; count of elements that are
    not 0.

    GATED: nothing is read where `total` is finite. SCALED: the tensor is multiplied by `factor`; the results are those of the
    product, but the count is of the elements before it, and they are looked at only where `total` is not finite.
    """
    BLOCK: tl.constexpr = ROWS * VECTOR
    program = tl.program_id(0)
    fine = True
    if GATED or SCALED:
        fine = _finite(tl.load(total).to(tl.float32))
    if GATED:  # noqa: SIM102 - the one is known when compiling, the other is not
        if fine:
            for field in tl.static_range(5):
                tl.store(partials + field * programs + program, 0.0)
            return
    tensor = tl.load(owners + program)
    begin = tl.load(chunks + program).to(tl.int64) * CHUNK
    length = tl.minimum(tl.load(sizes + tensor) - begin, CHUNK).to(tl.int32)
    data = tl.load(pointers + tensor).to(tl.pointer_type(DTYPE)) + begin
    if ALIGNED:
        data = tl.multiple_of(data, 16)
    lane = tl.arange(0, ROWS)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]

    by = 1.0
    bads = 0
    if SCALED:
        by = tl.load(factor).to(tl.float32)
        if not fine:
            _, bads, _, _ = _carefully(data, length, ROWS, VECTOR)
            tl.debug_barrier()
    changes = by != 1.0

    squares = tl.zeros([ROWS], tl.float32)
    largest = tl.zeros([ROWS], tl.float32)
    added = tl.zeros([ROWS, VECTOR], tl.float32)  # to sum what was just loaded fails in Triton 3.6's compiler
    nonzero = tl.zeros([ROWS], tl.int32)
    whole = length // BLOCK
    for block in range(whole):
        at = block * BLOCK + lane
        x = tl.load(data + at).to(tl.float32)
        if SCALED:
            product = (x * by).to(DTYPE)
            if changes:
                tl.store(data + at, product)
            x = product.to(tl.float32)
        squares += tl.sum(x * x, 1)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
        added += x
        nonzero += tl.sum(tl.where(x == 0, 0, 1), 1)
    if whole * BLOCK < length:
        at = whole * BLOCK + lane
        inside = at < length
        x = tl.load(data + at, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            product = (x * by).to(DTYPE)
            if changes:
                tl.store(data + at, product, mask=inside)
            x = tl.where(inside, product.to(tl.float32), 0.0)
        squares += tl.sum(x * x, 1)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
        added += x
        nonzero += tl.sum(tl.where(x == 0, 0, 1), 1)

    square = tl.sum(squares, 0).to(tl.float64)
    largest_of_all = tl.max(largest, 0)
    risky = (square < float("inf")) == 0
    if largest_of_all < SMALL and largest_of_all > 0:
        risky = True
    peak = largest_of_all.to(tl.float64)
    sum_of_all = tl.sum(tl.sum(added, 1).to(tl.float64), 0)
    if risky:
        tl.debug_barrier()
        square, bad, nan, sum_of_all = _carefully(data, length, ROWS, VECTOR)
        peak = tl.where(nan > 0, float("nan"), peak)
        if not SCALED:
            bads = bad
    tl.store(partials + program, square)
    tl.store(partials + programs + program, peak)
    tl.store(partials + 2 * programs + program, bads.to(tl.float64))
    tl.store(partials + 3 * programs + program, sum_of_all)
    tl.store(partials + 4 * programs + program, tl.sum(nonzero, 0).to(tl.float64))


@triton.jit
def _combine(firsts, counts, partials, result, tensors, programs, BLOCK: tl.constexpr):
    """One program for each tensor, always in the same order."""
    tensor = tl.program_id(0)
    count = tl.load(counts + tensor)
    place = partials + tl.load(firsts + tensor)
    squares = tl.zeros([BLOCK], tl.float64)
    largest = tl.zeros([BLOCK], tl.float64)
    bad = tl.zeros([BLOCK], tl.float64)
    added = tl.zeros([BLOCK], tl.float64)
    nonzero = tl.zeros([BLOCK], tl.float64)
    hidden = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        which = start + tl.arange(0, BLOCK)
        inside = which < count
        squares += tl.load(place + which, mask=inside, other=0.0)
        peak = tl.load(place + programs + which, mask=inside, other=0.0)
        hidden += tl.where(peak == peak, 0, 1)
        largest = tl.maximum(largest, tl.where(peak == peak, peak, 0.0))
        bad += tl.load(place + 2 * programs + which, mask=inside, other=0.0)
        added += tl.load(place + 3 * programs + which, mask=inside, other=0.0)
        nonzero += tl.load(place + 4 * programs + which, mask=inside, other=0.0)
    tl.store(result + tensor, tl.sqrt(tl.sum(squares, 0)))
    tl.store(result + tensors + tensor, tl.where(tl.sum(hidden, 0) > 0, float("nan"), tl.max(largest, 0)))
    tl.store(result + 2 * tensors + tensor, tl.sum(bad, 0))
    tl.store(result + 3 * tensors + tensor, tl.sum(added, 0))
    tl.store(result + 4 * tensors + tensor, tl.sum(nonzero, 0))


@triton.jit
def _checksum(pointers, sizes, owners, chunks, sums, WORD: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """One chunk's part of a checksum: see `checksums`. Integers add up to the same in any order."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    begin = tl.load(chunks + program).to(tl.int64) * CHUNK
    length = tl.minimum(tl.load(sizes + tensor) - begin, CHUNK).to(tl.int32)
    data = tl.load(pointers + tensor).to(tl.pointer_type(WORD)) + begin
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        word = tl.load(data + at, mask=at < length, other=0).to(tl.int64)
        total += word * (2 * (begin + at) + 1)
    tl.atomic_add(sums + tensor, tl.sum(total, 0))


@triton.jit
def _dead_rows(
    pointers, quiet, heights, widths, owners, blocks, dead, after,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some rows of one matrix, read until each has shown an element that is not 0."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    height = tl.load(heights + tensor)
    width = tl.load(widths + tensor)
    row = tl.load(blocks + program) * ROWS + tl.arange(0, ROWS)
    inside = row < height
    data = tl.load(pointers + tensor).to(tl.pointer_type(DTYPE)) + row.to(tl.int64)[:, None] * width
    alive = tl.zeros([ROWS], tl.int32)
    begin = 0
    waiting = 1
    while (begin < width) & (waiting > 0):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(data + at[None, :], mask=inside[:, None] & (at < width)[None, :], other=0.0).to(tl.float32)
        alive = tl.maximum(alive, tl.max(tl.where(x == 0, 0, 1), 1))
        waiting = tl.sum(tl.where(inside & (alive == 0), 1, 0), 0)
        begin += BLOCK
    counter = tl.load(quiet + tensor).to(tl.pointer_type(tl.int32)) + row
    looks = tl.where(alive > 0, 0, tl.load(counter, mask=inside, other=0) + 1)
    tl.store(counter, looks, mask=inside)
    tl.atomic_add(dead + tensor, tl.sum(tl.where(inside & (looks >= after), 1, 0), 0).to(tl.float64))


DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def is_dense(tensor: Tensor) -> bool:
    """True if its elements fill its memory, in whatever order."""
    return tensor.is_contiguous() or bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


class Table:
    """Which program reads which part of which tensor: fixed by the sizes of the tensors. And what the programs found."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        counts = [triton.cdiv(size, CHUNK) for size in sizes]
        firsts = np.concatenate(([0], np.cumsum(counts)))
        self.programs = int(firsts[-1])
        self.tensors = len(sizes)
        self.sizes = upload(sizes, torch.int64, device)
        self.owners = upload(np.repeat(np.arange(len(sizes)), counts), torch.int32, device)
        self.chunks = upload(np.concatenate([np.arange(count) for count in counts]), torch.int32, device)
        self.firsts = upload(firsts[:-1], torch.int32, device)
        self.counts = upload(counts, torch.int32, device)
        self.partials = torch.empty(5 * self.programs, dtype=torch.float64, device=device)
        self.chunk = CHUNK


@lru_cache(maxsize=64)
def _table(sizes: tuple[int, ...], device: torch.device) -> Table:
    return Table(sizes, device)


def table_of(tensors: Sequence[Tensor]) -> Table:
    return _table(tuple([tensor.numel() for tensor in tensors]), tensors[0].device)


@lru_cache(maxsize=64)
def _pointers(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    return upload(pointers, torch.int64, device)


def pointers_of(tensors: Sequence[Tensor]) -> Tensor:
    """Their addresses, on their device."""
    return _pointers(tuple([tensor.data_ptr() for tensor in tensors]), tensors[0].device)


def upload(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """To the device without waiting for it."""
    host = torch.as_tensor(values, dtype=dtype, device="cpu")
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def summarise(tensors: Sequence[Tensor], *, unless_finite: Tensor | None = None) -> Tensor:
    """One pass over `tensors`, of one device and one dtype of `DTYPES`, none empty. Float64, without a sync.

    Shape (5, k): norms, largest absolute elements (NaN where there is a NaN), counts of non-finite elements, sums, counts of
    elements that are not 0. Where `unless_finite`, one element on the device, is finite, nothing is read and all is 0.
    """
    dense = [t if is_dense(t) else t.contiguous() for t in tensors]
    return combine(_launch(dense, total=unless_finite, gated=unless_finite is not None))


def scale(tensors: Sequence[Tensor], factor: Tensor, total: Tensor) -> Table:
    """Multiply dense `tensors` in place by `factor`, one element on their device. `combine` then gives, shape (5, k), what
    `summarise` does of the products, but counts of the non-finite elements before, which are looked for only where `total`,
    one element, is not finite.

    Elements are rounded once, as by `torch._foreach_mul_`: the same bits. Where the factor is 1 nothing is written.
    """
    return _launch(tensors, factor=factor, total=total)


def _launch(
    tensors: Sequence[Tensor],
    *,
    factor: Tensor | None = None,
    total: Tensor | None = None,
    gated: bool = False,
) -> Table:
    device, dtype = tensors[0].device, tensors[0].dtype
    table = table_of(tensors)
    data = tuple([t.data_ptr() for t in tensors])
    partials = table.partials
    aligned = not any(pointer % 16 for pointer in data)
    arguments = (
        _pointers(data, device), table.sizes, table.owners, table.chunks, partials,
        partials if factor is None else factor, partials if total is None else total, table.programs,
    )  # fmt: skip
    constants = (
        DTYPES[dtype], gated, factor is not None, aligned, CHUNK, ROWS, 16 // tensors[0].element_size(),
    )  # fmt: skip
    launch(_summarise, (table.programs, 1, 1), arguments, constants, warps=WARPS)
    return table


def combine(table: Table) -> Tensor:
    """What the last pass found, float64, shape (5, k)."""
    result = torch.empty(5, table.tensors, dtype=torch.float64, device=table.partials.device)
    arguments = table.firsts, table.counts, table.partials, result, table.tensors, table.programs
    launch(_combine, (table.tensors, 1, 1), arguments, (1024,), warps=8)
    return result


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """`trackbridge.probes.checksums.checksums` of tensors of one dtype of `DTYPES`. Float64 (k,), without a sync."""
    tensors = [tensor.contiguous() for tensor in tensors]  # in logical order
    table = table_of(tensors)
    sums = torch.zeros(table.tensors, dtype=torch.int64, device=table.partials.device)
    word = tl.uint32 if tensors[0].element_size() == 4 else tl.uint16
    arguments = pointers_of(tensors), table.sizes, table.owners, table.chunks, sums
    launch(_checksum, (table.programs, 1, 1), arguments, (word, CHUNK, 4096), warps=WARPS)
    return (sums & ((1 << 53) - 1)).double()


MATRIX_ROWS = 64  # rows of a matrix that one program looks at
MATRIX_BLOCK = 32  # elements of each that it reads at once


class Matrices:
    """Which program looks at which rows of which matrix: fixed by their shapes."""

    def __init__(self, shapes: Sequence[tuple[int, int]], device: torch.device) -> None:
        counts = [triton.cdiv(height, MATRIX_ROWS) for height, _ in shapes]
        self.programs = sum(counts)
        self.heights = upload([height for height, _ in shapes], torch.int32, device)
        self.widths = upload([width for _, width in shapes], torch.int32, device)
        self.owners = upload(np.repeat(np.arange(len(shapes)), counts), torch.int32, device)
        self.blocks = upload(np.concatenate([np.arange(count) for count in counts]), torch.int32, device)


@lru_cache(maxsize=64)
def _matrices(shapes: tuple[tuple[int, int], ...], device: torch.device) -> Matrices:
    return Matrices(shapes, device)


def dead_rows(gradients: Sequence[Tensor], quiet: Sequence[Tensor], after: int) -> Tensor:
    """`trackbridge.probes.dead_rows.dead_rows` of gradients of one dtype of `DTYPES`. Float64 (k,), without a sync."""
    gradients = [gradient.contiguous() for gradient in gradients]
    device = gradients[0].device
    matrices = _matrices(tuple((g.shape[0], g.numel() // g.shape[0]) for g in gradients), device)
    dead = torch.zeros(len(gradients), dtype=torch.float64, device=device)
    arguments = (
        pointers_of(gradients), pointers_of(quiet), matrices.heights, matrices.widths, matrices.owners, matrices.blocks,
        dead, after,
    )  # fmt: skip
    launch(_dead_rows, (matrices.programs, 1, 1), arguments, (DTYPES[gradients[0].dtype], MATRIX_ROWS, MATRIX_BLOCK), warps=4)
    return dead
