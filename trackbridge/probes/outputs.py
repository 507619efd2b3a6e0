"""What a module returned: the tensor in it that stands for its activation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from trackbridge.probes.subject import PLAIN

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
    """`tensor`, the values of a jagged one, or this rank's shard of a DTensor; None for nested tensors of the old layout, which
    have no single shape, for sparse ones, and for others that are not `in_memory`."""
    if tensor.is_nested:
        return tensor.values() if tensor.layout is torch.jagged else None
    if tensor.layout is not torch.strided:
        return None
    return tensor if in_memory(tensor) else _shard(tensor)


def in_memory(tensor: Tensor) -> bool:
    """Whether `tensor`, not empty, has its elements in memory of its own, in one shape: not a meta or fake one, and no wrapper
    around other tensors, such as a DTensor, a nested, a masked or a quantized one."""
    kind = type(tensor)
    if kind in PLAIN:
        return not tensor.is_meta and not tensor.is_nested
    if hasattr(kind, "__tensor_flatten__") or hasattr(tensor, "fake_mode"):
        return False
    return torch.compiler.is_compiling() or tensor.data_ptr() != 0


def _shard(tensor: Any) -> Tensor | None:
    """What of a DTensor this rank has, where that is some of its tokens or all of it, but not some of its channels or parts of
    sums. Never in a graph."""
    if torch.compiler.is_compiling() or not hasattr(tensor, "_local_tensor"):
        return None
    shard: Tensor = tensor._local_tensor
    whole = all(each.is_replicate() or (each.is_shard() and each.dim < tensor.dim() - 1) for each in tensor.placements)
    return shard if whole and shard.numel() and in_memory(shard) else None


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
