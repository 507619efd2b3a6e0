"""The slab: one flat buffer on the device that the probes write into, and the ring of host copies it leaves in.

Nothing here waits on the training thread. A step ends with one asynchronous copy of the slab into a free slot; the scribe
waits for the copy and reads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
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

    Counts stay exact past 2^24 and squares do not overflow; it is a few thousand numbers, so width costs nothing. On the CPU
    both are parts of one array, `whole`, so that a step ends with one copy and one fill.
    """

    def __init__(self, fields: Iterable[Field], device: torch.device) -> None:
        self.fields = sorted(fields, key=lambda field: field.lasting)
        host = [field for field in reversed(self.fields) if field.where == "host"]
        self._on_host, facts = _lay_out(host)
        self._on_device, size = _lay_out(field for field in self.fields if field.where == "device")
        self.device = device
        self.whole: FloatArray | None = np.zeros(facts + size) if device.type == "cpu" else None
        if self.whole is not None:
            self.facts, self.tensor = self.whole[:facts], torch.from_numpy(self.whole[facts:])
        else:
            self.facts = np.zeros(facts)
            self.tensor = torch.zeros(size, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        behind = {name: slice(facts + place.start, facts + place.stop) for name, place in self._on_device.items()}
        self._places = {**self._on_host, **behind}  # in what `Slot.read` returns
        lasting = {where: sum(f.size for f in self.fields if f.lasting and f.where == where) for where in ("host", "device")}
        self._volatile_facts = self.facts[lasting["host"] :]
        self._volatile = self.tensor[: size - lasting["device"]]
        self._volatile_whole = None if self.whole is None else self.whole[lasting["host"] : facts + size - lasting["device"]]

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
        if self._volatile_whole is not None:
            self._volatile_whole.fill(0.0)
        else:
            self._volatile.zero_()
            self._volatile_facts.fill(0.0)


class Slot:
    """One host copy of a slab. Made and recycled by `Ring`; `owner` is whoever can read its layout."""

    __slots__ = ("done", "facts", "keep", "owner", "step", "tensor", "whole")

    def __init__(self, slab: Slab) -> None:
        pinned = slab.device.type == "cuda"
        self.whole = None if slab.whole is None else np.empty_like(slab.whole)
        if self.whole is None:
            with torch.inference_mode(False):  # it is written to again, outside of the mode that this may be in
                self.tensor = torch.empty(slab.tensor.shape, dtype=slab.tensor.dtype, device="cpu", pin_memory=pinned)
            self.facts = np.empty_like(slab.facts)
        self.done: torch.cuda.Event | None = (
            torch.cuda.Event(blocking=True) if pinned else None  # type: ignore[no-untyped-call]
        )
        self.step = -1
        self.owner: Any = None
        self.keep: Any = None

    def copy(self, slab: Slab) -> None:
        """Start copying `slab`, as it is now."""
        if slab.whole is not None:
            np.copyto(self.whole, slab.whole)  # type: ignore[arg-type]
            return
        np.copyto(self.facts, slab.facts)
        self.tensor.copy_(slab.tensor, non_blocking=True)
        if self.done is not None:
            self.done.record(torch.cuda.current_stream(slab.device))

    def wait(self) -> None:
        """Return when the copy has arrived. Releases the GIL; for the scribe's thread."""
        if self.done is not None:
            self.done.synchronize()

    def read(self) -> FloatArray:
        """Host facts, then device numbers, float64, copied: the slot may be recycled afterwards. Call after `wait`."""
        if self.whole is not None:
            return np.array(self.whole)
        return np.concatenate((self.facts, self.tensor.numpy()), dtype=np.float64)


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
        slot.copy(slab)
        return slot

    def give(self, slot: Slot) -> None:
        """Free a slot that has been read."""
        slot.owner = slot.keep = None
        self._free.append(slot)


def _lay_out(fields: Iterable[Field]) -> tuple[dict[str, slice], int]:
    """The places of `fields`, one behind the other, and their total size."""
    places: dict[str, slice] = {}
    end = 0
    for field in fields:
        if field.name in places:
            raise ValueError(f"two slab fields are named {field.name!r}")
        places[field.name] = slice(end, end + field.size)
        end += field.size
    return places, end
