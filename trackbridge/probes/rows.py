"""Per-parameter statistics in the slab: one field per statistic, and a host field that says which were measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from trackbridge.probes.subject import local
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
        elif all(row == place for place, row in enumerate(rows, rows[0])):  # not those of an optimizer with several groups
            self._view[..., rows[0] : rows[-1] + 1].copy_(values, non_blocking=True)
        else:
            self._view.index_copy_(-1, self._indices(tuple(rows)), values.to(self._view, non_blocking=True))

    def _indices(self, rows: tuple[int, ...]) -> Tensor:
        if rows not in self._index:
            pinned = torch.tensor(rows, device="cpu", pin_memory=self._view.device.type == "cuda")
            self._index[rows] = pinned.to(self._view.device, non_blocking=True)
        return self._index[rows]


PLAIN = (Tensor, Parameter)


def alike(pairs: Iterable[tuple[int, Tensor]]) -> list[tuple[list[int], list[Tensor]]]:
    """Rows and tensors grouped by device and dtype, ready for a multi-tensor operation; left out are complex ones and
    those without memory."""
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[Tensor]]] = {}
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
            rows, tensors = groups.setdefault(kind, ([], []))
        rows.append(row)
        tensors.append(tensor)
    return [group for (_, dtype), group in groups.items() if dtype.is_floating_point]


def root_sum(values: np.ndarray, present: np.ndarray) -> float:
    """L2 norm of the whole from the norms of its parts."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.sqrt(np.square(values[present]).sum()))
