# mypy: disable-error-code="untyped-decorator,no-untyped-def"
# ruff: noqa: N803
"""A Triton kernel that gathers every k-th element of each of several tensors, or takes from them what was gathered before.
Imported only where CUDA and Triton are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from trackbridge.probes.kernels import DTYPES, pointers_of, upload
from trackbridge.probes.launch import launch

BLOCK = 1024


@triton.jit
def _gather(
    pointers, counts, intervals, firsts, owners, blocks, out, DTYPE: tl.constexpr, MINUS: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    tensor = tl.load(owners + program)
    at = tl.load(blocks + program).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(counts + tensor)
    data = tl.load(pointers + tensor).to(tl.pointer_type(DTYPE))
    x = tl.load(data + at * tl.load(intervals + tensor), mask=inside).to(tl.float32)
    places = out + tl.load(firsts + tensor) + at
    if MINUS:
        x -= tl.load(places, mask=inside)
    tl.store(places, x, mask=inside)


class Plan:
    """Which program gathers which part of which tensor's sample, and where it goes."""

    def __init__(self, counts: tuple[int, ...], intervals: tuple[int, ...], device: torch.device) -> None:
        programs = [triton.cdiv(count, BLOCK) for count in counts]
        self.programs = sum(programs)
        self.counts, self.intervals = upload(counts, torch.int64, device), upload(intervals, torch.int64, device)
        self.firsts = upload(np.cumsum([0, *counts[:-1]]), torch.int64, device)
        self.owners = upload(np.repeat(np.arange(len(counts)), programs), torch.int32, device)
        self.blocks = upload(np.concatenate([np.arange(count) for count in programs]), torch.int32, device)


@lru_cache(maxsize=64)
def _plan(counts: tuple[int, ...], intervals: tuple[int, ...], device: torch.device) -> Plan:
    return Plan(counts, intervals, device)


def gather(tensors: Sequence[Tensor], counts: tuple[int, ...], intervals: tuple[int, ...]) -> Tensor:
    """Of dense tensors of one dtype of `DTYPES` every `intervals[i]`-th element of the i-th in memory, `counts[i]` of them, one
    tensor after the other. Float32, without a sync."""
    out = torch.empty(sum(counts), dtype=torch.float32, device=tensors[0].device)
    _launch(tensors, counts, intervals, out, minus=False)
    return out


def subtract(tensors: Sequence[Tensor], counts: tuple[int, ...], intervals: tuple[int, ...], before: Tensor) -> None:
    """Put what `gather` would return, less `before`, in the place of `before`."""
    _launch(tensors, counts, intervals, before, minus=True)


def _launch(
    tensors: Sequence[Tensor], counts: tuple[int, ...], intervals: tuple[int, ...], out: Tensor, *, minus: bool
) -> None:
    plan = _plan(counts, intervals, out.device)
    arguments = pointers_of(tensors), plan.counts, plan.intervals, plan.firsts, plan.owners, plan.blocks, out
    launch(_gather, (plan.programs, 1, 1), arguments, (DTYPES[tensors[0].dtype], minus, BLOCK), warps=4)
