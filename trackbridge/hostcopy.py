"""Copies of tensors in host memory, made without waiting for a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Leaf: TypeAlias = "npt.NDArray[Any] | Tensor"

_ALIGN = 64


@dataclass(frozen=True, slots=True, eq=False)
class HostCopy:
    """Leaves in host memory. Those that came from a CUDA device hold their values only after `wait`."""

    leaves: dict[str, Leaf]
    events: list[Any] = field(default_factory=list)

    def wait(self) -> None:
        """Block until every copy has arrived; other threads run meanwhile."""
        for event in self.events:
            event.synchronize()


def copy(leaves: Mapping[str, Leaf], memory: Tensor | None = None) -> HostCopy:
    """Copy `leaves`, contiguous. CPU leaves are copied before this returns; CUDA leaves are queued on their device's
    current stream, into pinned memory: what is queued there later cannot change the copy. `memory` (uint8, at least
    `nbytes(leaves)` long, pinned if a leaf is on CUDA) holds the tensors if given."""
    copies: dict[str, Leaf] = {}
    devices: set[torch.device] = set()
    offset = 0
    for name, leaf in leaves.items():
        if isinstance(leaf, np.ndarray):
            copies[name] = leaf.copy()
            continue
        cuda = leaf.is_cuda
        if memory is None or leaf.numel() == 0:
            place = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu", pin_memory=cuda and leaf.numel() > 0)
        else:
            place = memory[offset : offset + leaf.nbytes].view(leaf.dtype).view(leaf.shape)
            offset += _padded(leaf.nbytes)
        place.copy_(leaf, non_blocking=cuda)
        copies[name] = place
        if cuda:
            devices.add(leaf.device)
    events = []
    for device in devices:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return HostCopy(copies, events)


def nbytes(leaves: Mapping[str, Leaf]) -> int:
    """Bytes of host memory that the tensors among `leaves` take in `copy`."""
    return sum(_padded(leaf.nbytes) for leaf in leaves.values() if isinstance(leaf, Tensor))


def capturing() -> bool:
    """True while a CUDA graph is being captured on this thread's stream: then nothing may be recorded."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
