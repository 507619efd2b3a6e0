"""The operation that a forward hook calls where there are no kernels: merge an output's moments into a row of the slab.

In eager code it is a plain function. Inside a `torch.compile` region it is one opaque operation that mutates the slab, so the
graph does not break; there, instead of a Python condition, an element of the slab says whether to measure, so that opening and
closing the gate never compiles anything again. On CUDA `observe_kernels` takes its place, in graphs `graph_kernels`.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from trackbridge.probes import moments


@cache
def observers() -> ModuleType | None:
    """The kernels for activations, where Triton works."""
    try:
        from trackbridge.probes import observe_kernels
    except ImportError:
        return None
    return observe_kernels


def observe(y: Tensor, slab: Tensor, offset: int, gate: int) -> None:
    """Merge `y` into ``slab[offset : offset + moments.WIDTH]`` if ``slab[gate]`` is set. No sync, no gradient."""
    row = slab[offset : offset + moments.WIDTH]
    if slab.device.type == "cpu":
        if slab[gate] > 0:
            moments.add_on_cpu(y, row.numpy())
        return
    added = row.clone()
    moments.add_on_device(y, added)
    row.copy_(torch.where(slab[gate] > 0, added, row))


@torch.library.custom_op("trackbridge::observe", mutates_args={"slab"})
def observe_compiled(y: Tensor, slab: Tensor, offset: int, gate: int) -> None:
    with torch.no_grad():
        observe(y, slab, offset, gate)


@observe_compiled.register_fake
def _(y: Tensor, slab: Tensor, offset: int, gate: int) -> None:
    return None
