"""The slab: one flat buffer on the device that the probes write into, and the ring of host copies it leaves in.

Nothing here waits on the training thread. A step ends with one asynchronous copy of the slab into a free slot; the scribe
waits for the copy and reads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trackbridge.records import FloatArray


@dataclass(frozen=True, slots=True)
class Field:
    """A named run of `size` numbers. ``where="host"`` is for facts that the training thread knows without the device (was
    there a gradient?); they travel with the same slot. A `lasting` field is not reset at the end of a step. `over_ranks` says
    how the field of several ranks becomes one: see `trackbridge.probes.merge`."""

    name: str
    size: int
    where: Literal["device", "host"] = "device"
    lasting: bool = False
    over_ranks: str = "max"


class Slab:
    """All fields in one device tensor and one host array, both float64 (float32 on devices that have no float64).

    Counts stay exact past 2^24 and squares do not overflow; it is a few thousand numbers, so width costs nothing.
    """

    def __init__(self, fields: Iterable[Field], device: torch.device) -> None:
        self.fields = sorted(fields, key=lambda field: field.lasting)
        self._on_device, size, volatile = _lay_out(self.fields, "device")
        self._on_host, host_size, host_volatile = _lay_out(self.fields, "host")
        self.device = device
        self.tensor = torch.zeros(size, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        self.facts: FloatArray = np.zeros(host_size)
        behind = {name: slice(size + place.start, size + place.stop) for name, place in self._on_host.items()}
        self._places = {**self._on_device, **behind}  # in what `Slot.read` returns
        self._volatile = self.tensor[:volatile]
        self._volatile_facts = self.facts[:host_volatile]

    def device_view(self, name: str) -> Tensor:
        """The field's part of the device tensor, shape (size,); writes go to the slab."""
        return self.tensor[self._on_device[name]]

    def host_view(self, name: str) -> FloatArray:
        """The field's part of the host facts, shape (size,); writes go to the slab."""
        return self.facts[self._on_host[name]]

    def offset(self, name: str) -> int:
        """Where the field begins in `tensor`."""
        return int(self._on_device[name].start)

    def unpack(self, numbers: FloatArray) -> dict[str, FloatArray]:
        """The fields by name, as views of what `Slot.read` returned."""
        return {name: numbers[place] for name, place in self._places.items()}

    def part(self, numbers: FloatArray, name: str) -> FloatArray:
        """One of what `unpack` gives."""
        return numbers[self._places[name]]

    def reset(self) -> None:
        """Zero every field that is not lasting."""
        self._volatile.zero_()
        self._volatile_facts.fill(0.0)


class Slot:
    """One host copy of a slab. Made and recycled by `Ring`; `owner` is whoever can read its layout."""

    __slots__ = ("copy", "done", "facts", "keep", "owner", "step")

    def __init__(self, slab: Slab) -> None:
        pinned = slab.device.type == "cuda"
        with torch.inference_mode(False):  # it is written to again, outside of the mode that this may be in
            self.copy = torch.empty(slab.tensor.shape, dtype=slab.tensor.dtype, device="cpu", pin_memory=pinned)
        self.facts = np.empty_like(slab.facts)
        self.done: torch.cuda.Event | None = (
            torch.cuda.Event(blocking=True) if pinned else None  # type: ignore[no-untyped-call]
        )
        self.step = -1
        self.owner: Any = None
        self.keep: Any = None

    def wait(self) -> None:
        """Return when the copy has arrived. Releases the GIL; for the scribe's thread."""
        if self.done is not None:
            self.done.synchronize()

    def read(self) -> FloatArray:
        """Device numbers, then host facts, float64, copied: the slot may be recycled afterwards. Call after `wait`."""
        return np.concatenate((self.copy.numpy(), self.facts), dtype=np.float64)


RING_BYTES = 64 << 20
READY = 8


class Ring:
    """Slots between the training thread and the scribe. `take` and `give` may be called from different threads.

    At least `depth` of them, and as many as `RING_BYTES` hold: a loop of microsecond steps runs far ahead of the scribe for a
    moment, and memory is cheaper than a lost row. They are made when first needed.
    """

    def __init__(self, slab: Slab, depth: int) -> None:
        self._slab = slab
        self._unmade = max(depth, RING_BYTES // max(slab.tensor.nbytes + slab.facts.nbytes, 1024))
        self._free: deque[Slot] = deque()
        if slab.device.type == "cuda":  # pinning memory is slow: not in the middle of training, if it can be helped
            ready = min(READY, self._unmade)
            self._unmade -= ready
            self._free.extend(Slot(slab) for _ in range(ready))

    def take(self, step: int) -> Slot | None:
        """Start copying the slab into a free slot. None when the scribe still holds all of them."""
        slab = self._slab
        try:
            slot = self._free.popleft()
        except IndexError:
            if not self._unmade:
                return None
            self._unmade -= 1
            slot = Slot(slab)
        slot.step = step
        np.copyto(slot.facts, slab.facts)
        slot.copy.copy_(slab.tensor, non_blocking=True)
        if slot.done is not None:
            slot.done.record()
        return slot

    def give(self, slot: Slot) -> None:
        """Free a slot that has been read."""
        slot.owner = slot.keep = None
        self._free.append(slot)


def _lay_out(fields: Iterable[Field], where: str) -> tuple[dict[str, slice], int, int]:
    """Places of the fields that live `where`, their total size, and the size of the part that a reset clears."""
    places: dict[str, slice] = {}
    end = volatile = 0
    for field in _only(fields, where):
        if field.name in places:
            raise ValueError(f"two slab fields are named {field.name!r}")
        places[field.name] = slice(end, end + field.size)
        end += field.size
        if not field.lasting:
            volatile = end
    return places, end, volatile


def _only(fields: Iterable[Field], where: str) -> Iterator[Field]:
    return (field for field in fields if field.where == where)
