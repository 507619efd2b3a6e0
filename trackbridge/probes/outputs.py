"""What a module returned: the tensor in it that stands for its activation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

DEPTH = 4


def first_tensor(output: Any) -> Tensor | None:
    """The first real floating-point tensor with at least one dimension in a tensor, tuple, list, mapping or dataclass.

    A scalar (a loss beside the hidden state) is taken only when there is nothing else; None, integers and empty tensors are
    passed over.
    """
    if isinstance(output, Tensor):
        return output if output.is_floating_point() and output.numel() else None
    scalar = None
    for tensor in tensors(output):
        if tensor.is_floating_point() and tensor.numel():
            if tensor.dim():
                return tensor
            scalar = tensor if scalar is None else scalar
    return scalar


def elements(tensor: Tensor) -> Tensor | None:
    """`tensor`, or the values of a jagged one; None for nested tensors of the old layout, which have no single shape, and for
    sparse ones."""
    if not tensor.is_nested:
        return tensor if tensor.layout is torch.strided else None
    return tensor.values() if tensor.layout is torch.jagged else None


def tensors(output: Any, depth: int = DEPTH) -> Iterator[Tensor]:
    """Every tensor in a nested output, in order."""
    if isinstance(output, Tensor):
        yield output
    elif depth:
        parts: Any = ()
        if isinstance(output, (tuple, list)):
            parts = output
        elif isinstance(output, Mapping):
            parts = output.values()
        elif dataclasses.is_dataclass(output) and not isinstance(output, type):
            parts = (getattr(output, field.name, None) for field in dataclasses.fields(output))
        for part in parts:
            yield from tensors(part, depth - 1)
