"""What Accelerate and trainers that are built on it have in common."""

from __future__ import annotations

from typing import Any

from accelerate.utils import DistributedType
from torch.optim import Optimizer

_PLAIN = {DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU}


def torch_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer that steps, in accelerate's wrapper."""
    while hasattr(optimizer, "gradient_state"):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]


def clips_by_torch(accelerator: Any) -> bool:
    """Whether ``accelerator.clip_grad_norm_`` is torch's function, after the gradients were unscaled."""
    return accelerator.distributed_type in _PLAIN
