"""A checksum of each parameter's bits, so that ranks which should hold the same can see that they do not.

    c = sum over i of (2 i + 1) w_i   modulo 2^53

w_i is the i-th element in logical order as an unsigned integer of its own size (an element of eight bytes is two words of four,
the lower one first). An odd weight is invertible modulo a power of two, so whatever changes in one word changes the sum: one
flipped bit always, and two words that were exchanged as a rule; any other damage goes unseen with a probability near 2^-53. As
in Fletcher's sum (J. G. Fletcher, "An Arithmetic Checksum for Serial Transmissions", 1982) the weight is the place. Integers
add up to the same whatever the order, on every device and with any number of threads; a float64 holds the result exactly.

Read on a cadence: silent corruption stays. Comparing is for whoever has the numbers of several ranks (`merge`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trackbridge import names
from trackbridge.config import ParametersConfig
from trackbridge.probes import cpu
from trackbridge.probes.base import BoolArray, Gate, Stats
from trackbridge.probes.reduce import kernels_for
from trackbridge.probes.rows import Rows, alike
from trackbridge.probes.subject import Subject
from trackbridge.records import FloatArray
from trackbridge.slab import Field, Slab

MODULUS = 1 << 53
CHUNK = 1 << 21  # words at once where there is no kernel
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_WEIGHTS = 2 * np.arange(cpu.PIECE, dtype=np.uint64) + np.uint64(1)


class ChecksumProbe:
    """Every parameter that an optimizer holds, frozen or not, after its step."""

    series: tuple[str, ...]

    def __init__(self, subject: Subject, config: ParametersConfig, gate: Gate) -> None:
        self._subject = subject
        self._every = config.checksums_every if subject.device.type != "mps" else 0  # its slab has no float64
        self._gate = gate
        size = len(subject.parameters)
        self.fields: tuple[Field, ...] = (
            Field("checksum", size, over_ranks="equal"),
            Field("checksum_seen", size, "host", over_ranks="told"),
            Field("checksum_differs", size, "host", lasting=True, over_ranks="told"),  # by `merge`
            Field("checksum_compared", 1, "host", lasting=True, over_ranks="told"),
        )
        self.series = ("param/replicas_differ", *(names.layer(parameter, "checksum") for parameter in subject.names))

    def attach(self, slab: Slab) -> None:
        self._sums, self._seen = Rows(slab, "checksum"), slab.host_view("checksum_seen")

    def before_update(self, optimizer: Any, *, closure: bool) -> None:
        pass

    @torch.no_grad()
    def after_update(self, optimizer: Any, *, closure: bool) -> None:
        if self._gate.due(self._every):
            for rows, tensors in alike(*self._subject.members(optimizer)):
                self._sums.write(rows, checksums(tensors))
                self._seen[rows] = 1.0

    def detach(self) -> None:
        pass

    def finalize(self, stats: Stats) -> tuple[FloatArray, BoolArray]:
        seen = stats["checksum_seen"] > 0
        differ = float(stats["checksum_differs"].sum())
        return np.concatenate(([differ], stats["checksum"])), np.concatenate((stats["checksum_compared"] > 0, seen))


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Of tensors of one device and dtype, none empty; float64 (k,) on that device. No sync."""
    first = tensors[0]
    if first.device.type == "cpu":
        return torch.tensor([float(_on_cpu(tensor)) for tensor in tensors], dtype=torch.float64, device="cpu")
    kernels = kernels_for(first)
    if kernels is not None:
        return kernels.checksums(tensors)  # type: ignore[no-any-return]
    return torch.stack([on_device(tensor) for tensor in tensors])


def _on_cpu(tensor: Tensor) -> int:
    words = _words(tensor).numpy()
    words = words.view(words.dtype.str.replace("i", "u"))
    total = 0
    for begin in range(0, len(words), cpu.PIECE):
        piece = words[begin : begin + cpu.PIECE].astype(np.uint64)
        total += int((piece * _WEIGHTS[: len(piece)]).sum(dtype=np.uint64)) + 2 * begin * int(piece.sum(dtype=np.uint64))
    return total % MODULUS


def on_device(tensor: Tensor) -> Tensor:
    """The same in plain torch operations: float64, one element, on the tensor's device."""
    words = _words(tensor)
    unsigned = (1 << 8 * words.element_size()) - 1
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for begin in range(0, len(words), CHUNK):
        piece = words[begin : begin + CHUNK].to(torch.int64) & unsigned
        total += (piece * torch.arange(2 * begin + 1, 2 * (begin + len(piece)), 2, device=words.device)).sum()
    return (total & (MODULUS - 1)).double()  # int64 wraps modulo 2^64


def _words(tensor: Tensor) -> Tensor:
    """Its elements in logical order as integers, shape (n,)."""
    return tensor.detach().reshape(-1).contiguous().view(_WORDS[tensor.element_size()])
