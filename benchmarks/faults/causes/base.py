"""What an injected fault is."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.faults.tasks import Task
from benchmarks.faults.trial import Injection


class Fault(Injection):
    sizes: ClassVar[tuple[float, ...]] = (1.0,)
    second_sizes: ClassVar[tuple[float, ...]] = (1.0,)
    lr: ClassVar[float] = 1.0
    gradual = False
    """The cause grows over `span` steps before it shows in the loss: it has precursors."""

    @classmethod
    def fits(cls, task: Task) -> bool:
        return True


def with_tokens(task: Task) -> bool:
    return task.tokens


def replaced(value: Tensor, where: Tensor, by: Tensor) -> Tensor:
    return torch.where(where, by, value)
