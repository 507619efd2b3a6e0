"""How many ranks hold the same piece of each parameter: what a sum over ranks must be divided by.

1 for a shard that no other rank has, the number of ranks under plain data parallelism, something between for replicated
shards. 0 means unknown: such a parameter's statistics stay this rank's own and are in no total over ranks.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from torch import Tensor, nn

from trackbridge.probes.subject import Subject
from trackbridge.records import FloatArray


def parameter_copies(subject: Subject) -> FloatArray:
    """Copies of each parameter's piece, shape (P,)."""
    world = world_size()
    replicated = {id(p) for model in subject.models.values() for p in _replicated(model, world)} if world > 1 else set()

    def of(parameter: Tensor) -> float:
        return copies_of(parameter) or (float(world) if world == 1 or id(parameter) in replicated else 0.0)

    return np.array([of(parameter) for parameter in subject.parameters], dtype=np.float64)


def copies_of(tensor: Any) -> float:
    """Ranks that hold the same piece of a DTensor; 0 for any other tensor, which does not say."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return 0.0
    copies = world_size() / mesh.size()
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            copies *= mesh.size(dimension)
    return float(copies)


def world_size() -> int:
    dist = sys.modules.get("torch.distributed")
    return dist.get_world_size() if dist is not None and dist.is_available() and dist.is_initialized() else 1


def _replicated(model: nn.Module, world: int) -> list[Tensor]:
    """Plain parameters that DistributedDataParallel keeps equal on all ranks."""
    from torch.nn.parallel import DistributedDataParallel

    found: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and module.process_group.size() == world:
            apart = module.parameters_to_ignore
            found += [p for name, p in module.module.named_parameters() if name not in apart]
    return found
