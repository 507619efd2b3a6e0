"""Copies of tensors in host memory, made without waiting for a device, and memory that such copies can be made into."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Leaf: TypeAlias = "npt.NDArray[Any] | Tensor"

REGION = 64 << 20
_ALIGN = 64
_streams: dict[torch.device, Any] = {}  # for copies beside training, one a device
Rest: TypeAlias = Callable[[float], None]
"""Called after launches had to wait, with the seconds for which they did."""


def _go_on(seconds: float) -> None:
    pass


@dataclass(frozen=True, slots=True, eq=False)
class HostCopy:
    """Leaves in host memory. Those that came from a CUDA device hold their values only after `wait`. `later` has, by device,
    the (place, leaf) that are copied on a stream of their own from `begin` on, `beside` the event behind those copies: it is
    among `events` too."""

    leaves: dict[str, Leaf]
    events: list[Any] = field(default_factory=list)
    later: dict[torch.device, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    beside: dict[torch.device, Any] = field(default_factory=dict)

    def wait(self) -> None:
        """Block until every copy has arrived; other threads run meanwhile."""
        for event in self.events:
            event.synchronize()

    def begin(self) -> None:
        """Queue the copies beside the current streams, behind what is queued there by now: small copies to the host that come
        later wait for these, for a device makes all of them in one engine, one after the other."""
        for device in list(self.later):
            self.beside[device] = event = _queue(device, self.later[device], _stream(device))
            self.events.append(event)
            del self.later[device]  # last: what an interrupt has cut short is queued again

    def fence(self) -> None:
        """What is queued on the current streams from here on runs after the copies beside them. The host waits for nothing."""
        self.begin()
        for device, event in self.beside.items():
            torch.cuda.current_stream(device).wait_event(event)


class HostMemory:
    """Host memory for the tensors of a snapshot, kept for the next one. With `locked` it is page-locked, region by region:
    locking a gigabyte in one call stops every kernel launch of the process for a second (measured on an H200), in regions
    of 64 MiB for 10 ms at most. `rest` is called after each with the seconds that it took, for launches to catch up; what it
    raises ends the making. A copy must not cross two locked regions, so each tensor lies in one."""

    def __init__(self, sizes: Sequence[int], *, locked: bool, rest: Rest = _go_on) -> None:
        self.locked = locked
        self.newest: HostCopy | None = None
        self.regions: list[Tensor] = []
        for size in _layout(sizes):
            region = torch.empty(size, dtype=torch.uint8, device="cpu")
            if locked:
                begun = time.perf_counter()
                _lock(region)
                rest(time.perf_counter() - begun)
            self.regions.append(region)

    def fits(self, sizes: Sequence[int], *, locked: bool) -> bool:
        return locked == self.locked and _layout(sizes) == [region.numel() for region in self.regions]

    def free(self, rest: Rest = _go_on) -> None:
        """Let go of the regions, once the newest copy has arrived: a device must not write into memory that is gone. To unlock
        one stops launches as well: `rest` as for making it."""
        if self.newest is not None:
            self.newest.wait()
            self.newest = None
        while self.regions:
            begun = time.perf_counter()
            self.regions.pop()
            rest(time.perf_counter() - begun)

    def places(self, sizes: Iterable[int]) -> Iterable[Tensor]:
        """A piece of a region for each size, in the order of `_layout`."""
        number = offset = 0
        for size in sizes:
            if offset + size > self.regions[number].numel():
                number, offset = number + 1, 0
            yield self.regions[number][offset : offset + size]
            offset += _padded(size)


def copy(leaves: Mapping[str, Leaf], memory: HostMemory | None = None, *, beside: Collection[str] = ()) -> HostCopy:
    """Copy `leaves`, contiguous. CPU leaves are copied before this returns; CUDA leaves are queued on their device's
    current stream, into pinned memory: what is queued there later cannot change the copy. `memory` (made for the `sizes`
    of these leaves) holds the tensors if given.

    CUDA leaves that `beside` names are copied on another stream, from `HostCopy.begin` on. They must stay as they are, and
    alive, until `HostCopy.fence`.
    """
    if memory is not None and memory.newest is not None:
        memory.newest.fence()  # it may be under way, where it turned out to be of no use
    copies: dict[str, Leaf] = {}
    current: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
    aside: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
    places = iter(memory.places(sizes(leaves))) if memory is not None else None
    for name, leaf in leaves.items():
        if isinstance(leaf, np.ndarray):
            copies[name] = leaf.copy()
            continue
        if places is None and leaf.is_cpu:
            copies[name] = leaf.detach().clone(memory_format=torch.contiguous_format)
            continue
        cuda = leaf.is_cuda
        if places is None or leaf.numel() == 0:
            place = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu", pin_memory=cuda and leaf.numel() > 0)
        else:
            place = next(places).view(leaf.dtype).view(leaf.shape)
        copies[name] = place
        if cuda:
            (aside if name in beside else current).setdefault(leaf.device, []).append((place, leaf))
        else:
            place.copy_(leaf)
    done = HostCopy(copies, [_queue(device, pairs) for device, pairs in current.items()], aside)
    if memory is not None:
        memory.newest = done
    return done


def _queue(device: torch.device, pairs: Iterable[tuple[Tensor, Tensor]], stream: Any = None) -> Any:
    """Copy (place, leaf) on `stream`, by default the device's current one. Returns the event behind the copies."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        places, leaves = zip(*pairs, strict=True)
        torch._foreach_copy_(places, leaves, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
    return event


def _stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]


def sizes(leaves: Mapping[str, Leaf]) -> list[int]:
    """The bytes of each tensor among `leaves` that takes any."""
    return [int(leaf.nbytes) for leaf in leaves.values() if isinstance(leaf, Tensor) and leaf.numel()]


def capturing() -> bool:
    """True while a CUDA graph is being captured on this thread's stream: then nothing may be recorded."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def _layout(sizes: Sequence[int]) -> list[int]:
    """Bytes of each region: tensors in order, a new region where the next tensor would pass `REGION`."""
    regions: list[int] = []
    for size in map(_padded, sizes):
        if regions and regions[-1] + size <= REGION:
            regions[-1] += size
        else:
            regions.append(size)
    return regions


def _lock(region: Tensor) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    region.zero_()  # touched pages lock five times faster
    torch.cuda.check_error(int(runtime.cudaHostRegister(region.data_ptr(), region.numel(), 0)))
    # At exit the process' memory goes as a whole; before, a region is unlocked before it is freed.
    weakref.finalize(region, runtime.cudaHostUnregister, region.data_ptr()).atexit = False


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
