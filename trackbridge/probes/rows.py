"""Per-parameter statistics in the slab: one field per statistic, and a host field that says which were measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from trackbridge.probes.subject import PLAIN, Members, local
from trackbridge.slab import Slab


class Rows:
    """Writes values of some parameters to a field of the slab, or to several that lie side by side. On the CPU through numpy,
    elsewhere in one operation."""

    def __init__(self, slab: Slab, field: str, *more: str) -> None:
        self._view = slab.device_view(field)
        if more:
            begin, size = slab.offset(field), len(self._view)
            assert [slab.offset(name) for name in more] == [begin + size * place for place in range(1, 1 + len(more))]
            self._view = slab.tensor[begin : begin + size * (1 + len(more))].view(1 + len(more), size)
        self._array = self._view.numpy() if slab.device.type == "cpu" else None
        self._index: dict[tuple[int, ...], Tensor] = {}

    def write(self, rows: Sequence[int], values: Tensor) -> None:
        """`values`, shape (len(rows),) or (fields, len(rows)), to `rows`, in any order. Without a sync."""
        if self._array is not None:
            self._array[..., rows] = values.numpy(force=True)
        elif list(rows) == list(range(rows[0], rows[0] + len(rows))):  # not those of an optimizer with several groups
            self._view[..., rows[0] : rows[-1] + 1].copy_(values, non_blocking=True)
        else:
            self._view.index_copy_(-1, self._indices(tuple(rows)), values.to(self._view, non_blocking=True))

    def read(self, rows: Sequence[int]) -> Tensor:
        """What `write` has put there, a copy. Without a sync."""
        if self._array is not None:
            return torch.from_numpy(self._array[..., rows])
        return self._view.index_select(-1, self._indices(tuple(rows)))

    def _indices(self, rows: tuple[int, ...]) -> Tensor:
        if rows not in self._index:
            pinned = torch.tensor(rows, device="cpu", pin_memory=self._view.device.type == "cuda")
            self._index[rows] = pinned.to(self._view.device, non_blocking=True)
        return self._index[rows]


R = TypeVar("R", int, int | None)
_KIND = attrgetter("device", "dtype", "layout")


def alike(rows: Sequence[int], tensors: Sequence[Tensor]) -> list[Members]:
    """Rows and tensors grouped by device and dtype, ready for a multi-tensor operation; left out are complex ones and
    those without memory."""
    kinds = set(map(_KIND, tensors))
    if len(kinds) == 1 and set(map(type, tensors)).issubset(PLAIN):  # as a rule: and then without a look at each by itself
        device, dtype, layout = kinds.pop()
        if layout is torch.strided and dtype.is_floating_point and device.type != "meta" and all(map(Tensor.numel, tensors)):
            return [Members(list(rows), list(tensors))]
    return _sorted(zip(rows, tensors, strict=True))


def _sorted(pairs: Iterable[tuple[int, Tensor]]) -> list[Members]:
    groups: dict[tuple[torch.device, torch.dtype], Members] = {}
    last: tuple[torch.device, torch.dtype] | None = None
    rows: list[int] = []
    tensors: list[Tensor] = []
    for row, tensor in pairs:
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided:
            tensor = local(tensor)
        if tensor.is_meta or not tensor.numel():
            continue
        kind = tensor.device, tensor.dtype
        if kind != last:
            last = kind
            rows, tensors = groups.setdefault(kind, Members([], []))
        rows.append(row)
        tensors.append(tensor)
    return [group for (_, dtype), group in groups.items() if dtype.is_floating_point]


def with_gradients(rows: Sequence[R], parameters: Sequence[Tensor]) -> tuple[list[R], list[Tensor]]:
    """The gradients of those parameters that have one, and their rows."""
    gradients = [parameter.grad for parameter in parameters]
    if any(gradient is None for gradient in gradients):
        rows = [row for row, gradient in zip(rows, gradients, strict=True) if gradient is not None]
    return list(rows), [gradient for gradient in gradients if gradient is not None]


def parted(pairs: Sequence[tuple[int, Tensor]]) -> Members:
    """Rows and tensors side by side, of pairs of them."""
    return Members([row for row, _ in pairs], [tensor for _, tensor in pairs])


def root_sum(values: np.ndarray, present: np.ndarray) -> float:
    """L2 norm of the whole from the norms of its parts."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.sqrt(np.square(values[present]).sum()))
