# mypy: disable-error-code="untyped-decorator,no-untyped-def,attr-defined"
# ruff: noqa: N803
"""Triton kernels: one pass over the data, straight into the slab. Imported only where CUDA and Triton are.

`observe` reads one activation once and merges its moments into a row of the slab; `summarise` reads many tensors in one
launch and gives each one's norm, largest element and count of non-finite elements. In both, every program leaves a partial
result and the last one to arrive combines them, in a fixed order and in float64: the same data gives the same bits. Elements
are shifted by the mean of a program's first block and scaled by its size, so neither a large mean nor a large or tiny range
costs digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

BLOCK = 2048
WARPS = 8
PROGRAMS = 512  # at most, for one activation
CHUNK = 1 << 16  # elements of a tensor that one program of `summarise` reads
PARTIALS = 7  # n, mean, M2, M3, M4, largest, non-finite


@triton.jit
def _power_of_two(size):
    """A power of two near `size`, 1 for 0; within what float32 can be divided by."""
    exponent = tl.floor(tl.log2(tl.maximum(size, 1e-30)))
    return tl.where(size > 0, tl.exp2(tl.minimum(exponent, 100.0)), 1.0)


@triton.jit
def _add4(a1, a2, a3, a4, b1, b2, b3, b4):
    return a1 + b1, a2 + b2, a3 + b3, a4 + b4


@triton.jit
def _observe(y, slab, scratch, counter, n, offset, gate, blocks, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr):
    if tl.load(slab + gate) > 0:
        program = tl.program_id(0)
        programs = tl.num_programs(0)
        lane = tl.arange(0, BLOCK)
        begin = program.to(tl.int64) * (blocks * BLOCK)
        length = tl.minimum(n - begin, blocks * BLOCK).to(tl.int32)
        data = y + begin

        inside = lane < length
        x = tl.load(data + lane, mask=inside, other=0.0).to(tl.float32)
        shift = tl.sum(x, 0) / tl.minimum(length, BLOCK).to(tl.float32)
        scale = _power_of_two(tl.max(tl.where(inside, tl.abs(x - shift), 0.0), 0))
        inverse = 1.0 / scale

        s1 = tl.zeros([BLOCK], tl.float32)
        s2 = tl.zeros([BLOCK], tl.float32)
        s3 = tl.zeros([BLOCK], tl.float32)
        s4 = tl.zeros([BLOCK], tl.float32)
        largest = tl.zeros([BLOCK], tl.float32)
        whole = length // BLOCK
        for block in tl.range(0, whole, num_stages=4):
            x = tl.load(data + block * BLOCK + lane).to(tl.float32)
            d = (x - shift) * inverse
            q = d * d
            s1 += d
            s2 += q
            s3 += q * d
            s4 += q * q
            largest = tl.maximum(largest, tl.abs(x))
        if whole * BLOCK < length:
            inside = whole * BLOCK + lane < length
            x = tl.load(data + whole * BLOCK + lane, mask=inside, other=0.0).to(tl.float32)
            d = tl.where(inside, (x - shift) * inverse, 0.0)
            q = d * d
            s1 += d
            s2 += q
            s3 += q * d
            s4 += q * q
            largest = tl.maximum(largest, tl.abs(x))

        c = length.to(tl.float64)
        r1, r2, r3, r4 = tl.reduce((s1, s2, s3, s4), 0, _add4)
        t1 = r1.to(tl.float64)
        t2 = r2.to(tl.float64)
        t3 = r3.to(tl.float64)
        t4 = r4.to(tl.float64)
        bads = 0.0
        if (tl.abs(t2) < float("inf")) == 0:  # a NaN or infinity among the data, or an overflow: look again
            bad = tl.zeros([BLOCK], tl.int32)
            for block in range(tl.cdiv(length, BLOCK)):
                at = block * BLOCK + lane
                x = tl.load(data + at, mask=at < length, other=0.0).to(tl.float32)
                bad += tl.where(tl.abs(x) < float("inf"), 0, 1)
            bads = tl.sum(bad, 0).to(tl.float32)
        m = t1 / c
        size = scale.to(tl.float64)
        place = scratch + program
        tl.store(place, c)
        tl.store(place + PROGRAMS, shift.to(tl.float64) + m * size)
        tl.store(place + 2 * PROGRAMS, tl.maximum(t2 - m * t1, 0.0, propagate_nan=tl.PropagateNan.ALL) * size * size)
        tl.store(place + 3 * PROGRAMS, (t3 - 3 * m * t2 + 2 * m * m * t1) * size * size * size)
        tl.store(place + 4 * PROGRAMS, (t4 - 4 * m * t3 + 6 * m * m * t2 - 3 * m * m * m * t1) * size * size * size * size)
        tl.store(place + 5 * PROGRAMS, tl.max(largest, 0).to(tl.float64))
        tl.store(place + 6 * PROGRAMS, bads.to(tl.float64))
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel") == programs - 1:
            _combine(slab + offset, scratch, programs, PROGRAMS)
            tl.store(counter, 0)


@triton.jit
def _combine(row, scratch, programs, PROGRAMS: tl.constexpr):
    """Merge the partial moments of all programs, and then what the row holds already."""
    at = tl.arange(0, PROGRAMS)
    inside = at < programs
    place = scratch + at
    c = tl.load(place, mask=inside, other=0.0, volatile=True)
    mean = tl.load(place + PROGRAMS, mask=inside, other=0.0, volatile=True)
    m2 = tl.load(place + 2 * PROGRAMS, mask=inside, other=0.0, volatile=True)
    m3 = tl.load(place + 3 * PROGRAMS, mask=inside, other=0.0, volatile=True)
    m4 = tl.load(place + 4 * PROGRAMS, mask=inside, other=0.0, volatile=True)
    largest = tl.load(place + 5 * PROGRAMS, mask=inside, other=0.0, volatile=True)
    bad = tl.load(place + 6 * PROGRAMS, mask=inside, other=0.0, volatile=True)

    nb = tl.sum(c, 0)
    mean_b = tl.sum(c * mean, 0) / tl.maximum(nb, 1.0)
    d = tl.where(c > 0, mean - mean_b, 0.0)
    d2 = d * d
    m2b, m3b, m4b, bads = tl.reduce(
        (m2 + c * d2, m3 + 3 * d * m2 + c * d2 * d, m4 + 4 * d * m3 + 6 * d2 * m2 + c * d2 * d2, bad), 0, _add4
    )

    na = tl.load(row)
    mean_a = tl.load(row + 1)
    m2a = tl.load(row + 2)
    m3a = tl.load(row + 3)
    m4a = tl.load(row + 4)
    whole = tl.maximum(na + nb, 1.0)
    gap = mean_b - mean_a
    g = gap / whole
    product = na * nb
    tl.store(row, na + nb)
    tl.store(row + 1, mean_a + g * nb)
    tl.store(row + 2, m2a + m2b + gap * g * product)
    tl.store(row + 3, m3a + m3b + gap * g * g * product * (na - nb) + 3 * g * (na * m2b - nb * m2a))
    tl.store(
        row + 4,
        m4a
        + m4b
        + gap * g * g * g * product * (na * na - product + nb * nb)
        + 6 * g * g * (na * na * m2b + nb * nb * m2a)
        + 4 * g * (na * m3b - nb * m3a),
    )
    tl.store(row + 5, tl.maximum(tl.load(row + 5), tl.max(largest, 0)))
    tl.store(row + 6, tl.load(row + 6) + bads)
    tl.store(row + 7, tl.load(row + 7) + 1.0)


@triton.jit
def _summarise(
    pointers, others, sizes, owners, chunks, firsts, counts, partials, counters, result, total,
    tensors, programs, GATED: tl.constexpr, DTYPE: tl.constexpr, OLD: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if GATED:  # noqa: SIM102 - the one is known when compiling, the other is not
        if tl.abs(tl.load(total)) < float("inf"):
            return
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    begin = tl.load(chunks + program).to(tl.int64) * CHUNK
    length = tl.minimum(tl.load(sizes + tensor) - begin, CHUNK).to(tl.int32)
    data = tl.load(pointers + tensor).to(tl.pointer_type(DTYPE)) + begin
    old = tl.load(others + tensor).to(tl.pointer_type(DTYPE)) + begin
    if ALIGNED:
        data = tl.multiple_of(data, 16)
        old = tl.multiple_of(old, 16)
    lane = tl.arange(0, BLOCK)

    inside = lane < length
    x = tl.load(data + lane, mask=inside, other=0.0).to(tl.float32)
    scale = _power_of_two(tl.max(tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0), 0))
    inverse = 1.0 / scale

    squares = tl.zeros([BLOCK], tl.float32)
    moved = tl.zeros([BLOCK], tl.float32)
    largest = tl.zeros([BLOCK], tl.float32)
    whole = length // BLOCK
    for block in tl.range(0, whole, num_stages=3):
        at = block * BLOCK + lane
        x = tl.load(data + at).to(tl.float32)
        scaled = x * inverse
        squares += scaled * scaled
        largest = tl.maximum(largest, tl.abs(x))
        if OLD:
            d = (x - tl.load(old + at).to(tl.float32)) * inverse
            moved += d * d
    if whole * BLOCK < length:
        at = whole * BLOCK + lane
        inside = at < length
        x = tl.load(data + at, mask=inside, other=0.0).to(tl.float32)
        scaled = x * inverse
        squares += scaled * scaled
        largest = tl.maximum(largest, tl.abs(x))
        if OLD:
            d = (x - tl.load(old + at, mask=inside, other=0.0).to(tl.float32)) * inverse
            moved += d * d

    total = tl.sum(squares, 0).to(tl.float64)
    size2 = scale.to(tl.float64) * scale.to(tl.float64)
    place = partials + program
    tl.store(place, total * size2)
    if OLD:
        tl.store(place + programs, tl.sum(moved, 0).to(tl.float64) * size2)
    else:
        peak = tl.max(largest, 0)
        bads = 0
        if (total < float("inf")) == 0:  # a NaN or infinity among the data, or an overflow: look again
            bad = tl.zeros([BLOCK], tl.int32)
            nan = tl.zeros([BLOCK], tl.int32)
            for block in range(tl.cdiv(length, BLOCK)):
                at = block * BLOCK + lane
                x = tl.load(data + at, mask=at < length, other=0.0).to(tl.float32)
                bad += tl.where(tl.abs(x) < float("inf"), 0, 1)
                nan += tl.where(x == x, 0, 1)
            bads = tl.sum(bad, 0)
            if tl.sum(nan, 0) > 0:
                peak = float("nan")
        tl.store(place + programs, peak.to(tl.float64))
        tl.store(place + 2 * programs, bads.to(tl.float64))
    tl.debug_barrier()
    count = tl.load(counts + tensor)
    if tl.atomic_add(counters + tensor, 1, sem="acq_rel") == count - 1:
        first = tl.load(firsts + tensor)
        a = tl.zeros([BLOCK], tl.float64)
        b = tl.zeros([BLOCK], tl.float64)
        c = tl.zeros([BLOCK], tl.float64)
        hidden = tl.zeros([BLOCK], tl.int32)
        for start in range(0, count, BLOCK):
            which = start + lane
            inside = which < count
            part = partials + first + which
            a += tl.load(part, mask=inside, other=0.0, volatile=True)
            second = tl.load(part + programs, mask=inside, other=0.0, volatile=True)
            if OLD:
                b += second
            else:
                known = second == second
                hidden += tl.where(known, 0, 1)
                b = tl.maximum(b, tl.where(known, second, 0.0))
                c += tl.load(part + 2 * programs, mask=inside, other=0.0, volatile=True)
        tl.store(result + tensor, tl.sqrt(tl.sum(a, 0)))
        if OLD:
            tl.store(result + tensors + tensor, tl.sqrt(tl.sum(b, 0)))
        else:
            tl.store(result + tensors + tensor, tl.where(tl.sum(hidden, 0) > 0, float("nan"), tl.max(b, 0)))
            tl.store(result + 2 * tensors + tensor, tl.sum(c, 0))
        tl.store(counters + tensor, 0)


DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_scratch: dict[torch.device, tuple[Tensor, Tensor]] = {}


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)


def scratch_on(device: torch.device) -> tuple[Tensor, Tensor]:
    """Partial results and the arrival counter of `observe`. One per device: the kernels of a step run one after the other."""
    if device not in _scratch:
        _scratch[device] = (
            torch.empty(PARTIALS * PROGRAMS, dtype=torch.float64, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )
        for buffer in _scratch[device]:
            torch._dynamo.mark_static_address(buffer)  # as the slab's
    return _scratch[device]


def observe(y: Tensor, slab: Tensor, offset: int, gate: int) -> None:
    """Merge the moments of `y` into ``slab[offset : offset + 8]`` if ``slab[gate]`` is set."""
    n = y.numel()
    if not torch.ops.aten.is_non_overlapping_and_dense(y):
        y = y.contiguous()
    scratch, counter = scratch_on(slab.device)
    blocks, programs = _grid(n, slab.device)
    with _on(slab.device):
        _observe[(programs,)](
            y, slab, scratch, counter, n, offset, gate, blocks, BLOCK=BLOCK, PROGRAMS=PROGRAMS, num_warps=WARPS
        )


@triton_op("trackbridge::observe_triton", mutates_args={"slab", "scratch", "counter"})
def observe_traced(y: Tensor, slab: Tensor, scratch: Tensor, counter: Tensor, offset: int, gate: int) -> None:
    n = y.numel()
    blocks, programs = _grid(n, slab.device)
    wrap_triton(_observe)[(programs,)](
        y.contiguous(), slab, scratch, counter, n, offset, gate, blocks, BLOCK=BLOCK, PROGRAMS=PROGRAMS, num_warps=WARPS
    )


def _grid(n: int, device: torch.device) -> tuple[int, int]:
    """Blocks for each program, and programs: at most one wave, so that no program waits for another to end."""
    blocks = max(4, triton.cdiv(n, BLOCK * _one_wave(device)))
    return blocks, triton.cdiv(n, BLOCK * blocks)


@cache
def _one_wave(device: torch.device) -> int:
    """Programs of `observe` that a device runs at once: three per multiprocessor by their registers."""
    return min(PROGRAMS, 3 * torch.cuda.get_device_properties(device).multi_processor_count)


class Table:
    """Which program reads which part of which tensor: fixed by the sizes of the tensors."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        counts = [triton.cdiv(size, CHUNK) for size in sizes]
        firsts = np.concatenate(([0], np.cumsum(counts)))
        self.programs = int(firsts[-1])
        self.tensors = len(sizes)
        self.sizes = _upload(sizes, torch.int64, device)
        self.owners = _upload(np.repeat(np.arange(len(sizes)), counts), torch.int32, device)
        self.chunks = _upload(np.concatenate([np.arange(count) for count in counts]), torch.int32, device)
        self.firsts = _upload(firsts[:-1], torch.int32, device)
        self.counts = _upload(counts, torch.int32, device)
        self.partials = torch.empty(3 * self.programs, dtype=torch.float64, device=device)
        self.counters = torch.zeros(self.tensors, dtype=torch.int32, device=device)


@lru_cache(maxsize=64)
def _table(sizes: tuple[int, ...], device: torch.device) -> Table:
    return Table(sizes, device)


@lru_cache(maxsize=64)
def _pointers(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    return _upload(pointers, torch.int64, device)


def _upload(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """To the device without waiting for it."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def summarise(tensors: Sequence[Tensor], old: Sequence[Tensor] | None = None, *, unless_finite: Tensor | None = None) -> Tensor:
    """One pass over `tensors`, of one device and one dtype of `DTYPES`, none empty. Float64, without a sync.

    Shape (3, k): norms, largest absolute elements (NaN where there is a NaN), counts of non-finite elements. With `old`,
    tensors of the same shapes, (2, k): norms, norms of the differences. Where `unless_finite`, one element on the device, is
    finite, nothing is read and all is 0.
    """
    dense = [t if torch.ops.aten.is_non_overlapping_and_dense(t) else t.contiguous() for t in tensors]
    device = dense[0].device
    table = _table(tuple(t.numel() for t in dense), device)
    data = tuple(t.data_ptr() for t in dense)
    others = tuple(t.data_ptr() for t in old) if old is not None else data
    gated = unless_finite is not None
    result = (torch.zeros if gated else torch.empty)(
        (3 if old is None else 2, table.tensors), dtype=torch.float64, device=device
    )
    with _on(device):
        _summarise[(table.programs,)](
            _pointers(data, device), _pointers(others, device), table.sizes, table.owners, table.chunks, table.firsts,
            table.counts, table.partials, table.counters, result,
            unless_finite if gated else result, table.tensors, table.programs, GATED=gated, DTYPE=DTYPES[dense[0].dtype],
            OLD=old is not None, ALIGNED=all(pointer % 16 == 0 for pointer in (*data, *others)), CHUNK=CHUNK, BLOCK=BLOCK,
            num_warps=WARPS,
        )  # fmt: skip
    return result
