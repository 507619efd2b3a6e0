"""Histograms of gradients (before the update) and weights (after it), on a cadence and in the step after an anomaly.

Every element is counted by the top ten bits of its float32, which is exact and costs no comparison; `trackbridge.histograms`
folds these codes into the shared bins on the scribe's thread. On CUDA a kernel counts (`histogram_kernels`). Where there is
none, nothing waits either: torch's own `bincount` would look at the largest value, so elements are added up in many private
copies of the counts, which are then summed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trackbridge import histograms, hostcopy, names
from trackbridge.config import ParametersConfig
from trackbridge.histograms import CODES, GRAD, WEIGHT
from trackbridge.probes.base import Gate
from trackbridge.probes.layout import world_size
from trackbridge.probes.reduce import kernels_for
from trackbridge.probes.room import spare_bytes
from trackbridge.probes.rows import alike, with_gradients
from trackbridge.probes.subject import Members, Subject
from trackbridge.records import FloatArray, Histograms

logger = logging.getLogger("trackbridge")

CHUNK = 1 << 21  # elements counted at once on a GPU
_PER_ELEMENT = 32  # bytes of temporaries
_PRIVATE = 1 << 20  # counts in all private copies: 4 MiB
_CPU_CHUNK = 1 << 18  # elements: a chunk and its temporaries stay in the cache


@dataclass(frozen=True, slots=True, eq=False)
class RawHistograms:
    """Counts by code of one step, on their way to host memory: for each name in turn a row of CODES."""

    names: tuple[str, ...]
    copies: FloatArray
    counts: hostcopy.HostCopy

    def record(self, step: int, time: float, attempt: int) -> Histograms:
        """The journal's record, without its `seq`. Waits for the copy; for the scribe's thread."""
        self.counts.wait()
        codes = np.concatenate([np.asarray(part) for part in self.counts.leaves.values()])
        return Histograms(-1, step, time, attempt, self.names, histograms.fold(codes), self.copies)


class HistogramProbe:
    """Not in the slab: counts are integers, many, and rare. `copies`: how many ranks hold each parameter's piece."""

    def __init__(self, subject: Subject, config: ParametersConfig, gate: Gate, copies: FloatArray) -> None:
        self._subject = subject
        self._every = config.histograms_every
        self._gate = gate
        self._copies = copies
        self._suffix = ["" if copy == world_size() else names.LOCAL for copy in copies.tolist()]
        self._asked: int | None = None  # a step, -1 for any; by another thread
        self._measuring = False
        self._found: list[tuple[str, list[int], Tensor]] = []
        self._refused = False

    def ask(self, step: int | None = None) -> None:
        """Measure at `step`, or at the next update, whatever the cadence. From any thread. A step that is over is not waited
        for, and nothing happens where histograms are off."""
        self._asked = None if not self._every else -1 if step is None else step

    def before_update(self, optimizer: Any, *, closure: bool) -> None:
        asked = self._asked in (-1, self._gate.step) and self._asked is not None and not self._gate.paused
        if not (self._gate.due(self._every) or asked or self._measuring) or hostcopy.capturing():
            return
        self._measuring = True
        if asked:
            self._asked = None
        if not closure:
            self._gradients(optimizer)

    def after_update(self, optimizer: Any, *, closure: bool) -> None:
        if self._measuring:
            if closure:
                self._gradients(optimizer)
            self._count(WEIGHT, self._subject.members(optimizer))

    def take(self) -> RawHistograms | None:
        """What this step measured, None if nothing; the copy to the host is under way."""
        self._measuring = False
        found, self._found = self._found, []
        if not found:
            return None
        kinds = [(kind, row) for kind, rows, _ in found for row in rows]
        return RawHistograms(
            tuple(names.layer(self._subject.names[row], kind + self._suffix[row]) for kind, row in kinds),
            self._copies[[row for _, row in kinds]],
            hostcopy.copy({str(place): counts for place, (_, _, counts) in enumerate(found)}),
        )

    def detach(self) -> None:
        self._found = []

    def _gradients(self, optimizer: Any) -> None:
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer that unscales inside `step`
        self._count(GRAD, Members(*with_gradients(*self._subject.members(optimizer))), scale)

    @torch.no_grad()
    def _count(self, kind: str, members: Members, scale: Tensor | None = None) -> None:
        for rows, tensors in alike(*members):
            device = tensors[0].device
            if device.type == "cpu":
                counts = torch.from_numpy(np.stack([count_on_cpu(tensor, scale) for tensor in tensors]))
            elif kernels_for(tensors[0]) is not None:
                from trackbridge.probes import histogram_kernels

                counts = histogram_kernels.count(tensors, scale)
            else:
                largest = min(sum(tensor.numel() for tensor in tensors), CHUNK)
                if device.type == "cuda" and largest * _PER_ELEMENT > spare_bytes(device):
                    self._refuse(largest * _PER_ELEMENT)
                    continue
                counts = count_on_device(tensors, scale)
            self._found.append((kind, rows, counts))

    def _refuse(self, size: int) -> None:
        if not self._refused:
            self._refused = True
            logger.info("trackbridge: no histograms: the allocator has no %d idle bytes for them", size)


def count_on_cpu(tensor: Tensor, scale: Tensor | None = None) -> np.ndarray:
    """Counts by code, int64 of shape (CODES,)."""
    total = np.zeros(CODES, np.int64)
    for piece in torch.split(tensor.reshape(-1), _CPU_CHUNK):
        values = piece.float() if scale is None else piece.float() / scale.to(piece.device)
        total += np.bincount(values.numpy().view(np.uint32) >> 22, minlength=CODES)
    return total


def count_on_device(tensors: Sequence[Tensor], scale: Tensor | None = None) -> Tensor:
    """The same of several tensors of one device, int64 of shape (len(tensors), CODES), on that device. No sync.

    Small tensors are counted together, large ones piece by piece.
    """
    counts = torch.zeros(len(tensors), CODES, dtype=torch.int64, device=tensors[0].device)
    waiting: list[tuple[int, Tensor]] = []
    size = 0
    for row, tensor in enumerate(tensors):
        for piece in torch.split(tensor.reshape(-1), CHUNK):
            if size + piece.numel() > CHUNK:
                _add(counts, waiting, scale)
                waiting, size = [], 0
            waiting.append((row, piece))
            size += piece.numel()
    _add(counts, waiting, scale)
    return counts


def _add(counts: Tensor, pieces: Sequence[tuple[int, Tensor]], scale: Tensor | None) -> None:
    """Add the elements of `pieces`, of ascending rows, to their rows of `counts`."""
    device, first = counts.device, pieces[0][0]
    rows = pieces[-1][0] - first + 1
    values = torch.cat([piece for _, piece in pieces]).float()
    if scale is not None:
        values = values / scale.to(device)
    place = (values.view(torch.int32) >> 22 & (CODES - 1)).long()
    if rows > 1:
        sizes = torch.tensor([piece.numel() for _, piece in pieces], device="cpu", pin_memory=device.type == "cuda")
        which = torch.tensor([row - first for row, _ in pieces], device="cpu", pin_memory=device.type == "cuda")
        which, sizes = which.to(device, non_blocking=True), sizes.to(device, non_blocking=True)
        place += CODES * torch.repeat_interleave(which, sizes, output_size=len(values))
    private = max(1, _PRIVATE // (rows * CODES))  # neighbours count in different copies: no two wait for one address
    place += rows * CODES * (torch.arange(len(values), device=device) % private)
    spread = torch.zeros(private * rows * CODES, dtype=torch.int32, device=device)
    spread.scatter_add_(0, place, torch.ones(1, dtype=torch.int32, device=device).expand(len(values)))
    counts[first : first + rows] += spread.view(private, rows, CODES).sum(0)
