"""The operation that a forward hook calls: merge an output's moments into a row of the slab.

In eager code it is a plain function. Inside a `torch.compile` region it is one opaque operation that mutates the slab, so the
graph does not break; there, instead of a Python condition, the last element of the slab says whether to measure, so that
opening and closing the gate never compiles anything again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trackbridge.probes import moments


def observe(y: Tensor, slab: Tensor, offset: int) -> None:
    """Merge `y` into ``slab[offset : offset + moments.WIDTH]``. No sync, no gradient."""
    if slab.device.type == "cpu":
        moments.add_on_cpu(y, slab.numpy()[offset : offset + moments.WIDTH])
    else:
        moments.add_on_device(y, slab[offset : offset + moments.WIDTH])


@torch.library.custom_op("trackbridge::observe", mutates_args={"slab"})
def observe_compiled(y: Tensor, slab: Tensor, offset: int, gate: int) -> None:
    if slab.device.type != "cpu" or (slab[gate] > 0 and torch._C._current_graph_task_id() < 0):
        with torch.no_grad():
            observe(y, slab, offset)


@observe_compiled.register_fake
def _(y: Tensor, slab: Tensor, offset: int, gate: int) -> None:
    return None
