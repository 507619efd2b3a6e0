"""Gradient statistics of every parameter, of the gradient that the optimizer used: accumulated, unscaled, clipped.

Measured just before `optimizer.step` runs. A parameter without a gradient has no value. Non-finite elements are counted
before clipping where `clip_grad_norm_` is ours: afterwards one NaN has spread over every tensor. Where that was not possible
and every element of every gradient is non-finite, ``grad/unlocated`` says that the counts do not tell where it began.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from trackbridge import names
from trackbridge.config import ParametersConfig
from trackbridge.errors import Part, UsageError
from trackbridge.probes import reduce
from trackbridge.probes.base import BoolArray, Gate, OfGradients, Stats
from trackbridge.probes.layout import copies_of, world_size
from trackbridge.probes.rows import Rows, alike, parted, root_sum, with_gradients
from trackbridge.probes.subject import Members, Subject, local
from trackbridge.records import FloatArray
from trackbridge.slab import Field, Slab

MEASURED = ("grad_norm", "grad_max", "grad_nonfinite", "grad_sum", "grad_nonzero")
STATISTICS = ("grad_norm", "grad_max", "grad_nonfinite", "grad_mean", "grad_zeros")
TOTALS = (
    "grad/norm", "grad/norm_clipped", "grad/nonfinite", "grad/unlocated", "grad/zero", "grad/vanishing", "grad/missing",
)  # fmt: skip
ELEMENTS_EVERY = 10  # on the CPU, where they take four more passes
IDLE = -1.0  # while another one stepped
VANISHING = 1e-6  # RMS of a gradient relative to the median of all parameters
Scaling: TypeAlias = "tuple[list[int], list[Tensor], Any]"
_VERSION = attrgetter("_version")


class Scaled(NamedTuple):
    """Gradients that clipping measured, by row, and the versions they had then."""

    rows: list[int]
    gradients: list[Tensor]
    versions: list[int]

    def are(self, rows: list[int], gradients: list[Tensor]) -> bool:
        """True if `gradients` are all of these and nothing has written to them since."""
        return (
            rows == self.rows and all(map(is_, gradients, self.gradients)) and list(map(_VERSION, gradients)) == self.versions
        )


class GradientProbe(OfGradients):
    def __init__(self, subject: Subject, config: ParametersConfig, gate: Gate, part: Part) -> None:
        self._subject = subject
        self._every = config.gradients_every
        usual = ELEMENTS_EVERY if subject.device.type == "cpu" else 1
        self._elements_every = usual if config.elements_every is None else config.elements_every
        self._gate = gate
        self._part = part
        size = len(subject.parameters)
        self._scaled: list[Scaled] = []  # what clipping measured in this step
        self._before: list[tuple[list[int], Tensor | None]] = []  # what it counted; its total, if all of it is here
        self._looked: set[int] = set()  # at which optimizers, in this step
        self._owners = np.array(subject.owners, dtype=object)
        self._keys = tuple(subject.models)
        self.fields: tuple[Field, ...] = (
            Field("grad_norm", size, over_ranks="norm"),
            Field("grad_max", size),
            Field("grad_nonfinite", size, over_ranks="count"),
            Field("grad_sum", size, over_ranks="count"),
            Field("grad_nonzero", size, over_ranks="count"),
            Field("param_size", size, "host", over_ranks="count"),
            Field("grad_missing", size, "host"),  # an optimizer stepped without it
            Field("clip_norm", len(self._keys) + 1, over_ranks="clip"),  # of each model; the last of all models together
            Field("clip_copies", len(self._keys) + 1, "host"),
            Field("clip_seen", len(self._keys) + 1, "host"),
            Field("grad_seen", size, "host"),  # 1 + the place of the optimizer that used it
            Field("grad_held", size, "host"),  # likewise; what a total must cover. IDLE: of an optimizer that did not step
            Field("grad_counted", size, "host"),  # non-finite elements were counted before clipping
            Field("grad_elements", 1, "host"),  # this step has largest elements, sums and counts of zeros
        )
        self.series: tuple[str, ...] = (
            *TOTALS,
            *(names.layer(parameter, name) for name in STATISTICS for parameter in subject.names),
        )

    def attach(self, slab: Slab) -> None:
        self._all, self._fields = Rows(slab, *MEASURED), tuple(Rows(slab, name) for name in MEASURED)
        self._norm, self._nonfinite = self._fields[0], self._fields[2]
        self._elements = slab.host_view("grad_elements")
        self._missing = slab.host_view("grad_missing")
        self._whole: list[int] = []  # sizes that parameters had when those of this rank's shards were asked for
        self._sizes = np.zeros(0)
        self._size = slab.host_view("param_size")
        self._clip_norm = slab.device_view("clip_norm")
        self._clip_seen, self._clip_copies = slab.host_view("clip_seen"), slab.host_view("clip_copies")
        self._seen = slab.host_view("grad_seen")
        self._held, self._counted = slab.host_view("grad_held"), slab.host_view("grad_counted")

    def measure(self) -> None:
        """Note which parameters a total norm lacks: when only one of two optimizers stepped, there is none."""
        self._scaled.clear()
        self._before.clear()
        whole = list(map(Tensor.numel, self._subject.parameters))
        if whole != self._whole:  # a table of embeddings may get more rows
            self._whole = whole
            self._sizes = np.array([local(parameter).numel() for parameter in self._subject.parameters], np.float64)
        self._size[:] = self._sizes
        if 0 < len(self._looked) < len(self._subject.optimizers):
            for optimizer in self._subject.optimizers.values():
                if id(optimizer) not in self._looked:
                    members = zip(*self._subject.members(optimizer), strict=True)
                    self._held[[row for row, p in members if p.requires_grad and not self._held[row]]] = IDLE
        self._looked.clear()

    def detach(self) -> None:
        pass

    def clip(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None, model: str | None
    ) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_`, in the two halves torch makes it of: the total norm is torch's own; the
        multiplication is ours where `reduce.scalable`, which measures on the way, else torch does it after a look at the
        gradients."""
        if model is not None and model not in self._subject.models:
            raise UsageError(f"clip_grad_norm_(model={model!r}): watched models are {', '.join(self._subject.models)}")
        max_norm, norm_type = float(max_norm), float(norm_type)  # as torch does: "inf", or a tensor of one element
        chosen = self._subject.models if model is None else {model: self._subject.models[model]}
        parameters = list({id(p): p for module in chosen.values() for p in module.parameters()}.values())
        gradients = [p.grad for p in parameters if p.grad is not None]
        try:
            total = torch.nn.utils.get_total_norm(gradients, norm_type, error_if_nonfinite, foreach)
        except RuntimeError:
            with self._part:
                self._count(parameters, None)
            raise
        scaling: Scaling | None = None
        if self._part.alive and not self._gate.paused:
            with self._part:
                scaling = self._scale(parameters, gradients, max_norm, norm_type, total, foreach)
            with self._part:
                if scaling is not None:
                    self._keep(*scaling, total)
                place = len(self._keys) if model is None else self._keys.index(model)
                self._note(total, norm_type, parameters if scaling is None else None, place)
        if scaling is None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total, foreach)
        return total

    @torch.no_grad()
    def _scale(
        self,
        parameters: Sequence[Tensor],
        gradients: list[Tensor],
        max_norm: float,
        norm_type: float,
        total: Tensor,
        foreach: bool | None,
    ) -> Scaling | None:
        """Multiply the gradients as torch would, to the bit, and measure them on the way. None where that cannot be: then
        nothing was done. Nothing that may fail comes after the first multiplication."""
        if foreach is False or norm_type <= 0 or not self._gate.due(self._every, always=True):
            return None
        if len(gradients) != len(parameters):
            parameters = [parameter for parameter in parameters if parameter.grad is not None]
        rows = [row for row in self._subject.rows(parameters) if row is not None]
        if len(rows) != len(gradients):  # one that is not watched
            return None
        if not all(map(Tensor.numel, gradients)):
            rows, gradients = parted([(row, g) for row, g in zip(rows, gradients, strict=True) if g.numel()])
        if not reduce.scalable(gradients, total):
            return None
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        return rows, gradients, reduce.scale(gradients, factor, total, elements=self._with_elements())

    def _keep(self, rows: list[int], gradients: list[Tensor], partial: Any, total: Tensor) -> None:
        found = reduce.scaled_summary(partial)
        if len(found) == len(MEASURED):
            self._all.write(rows, found)
        else:
            self._norm.write(rows, found)
            self._nonfinite.write(rows, torch.zeros(len(rows), device="cpu"))  # `reduce.scalable`
        self._counted[rows] = 1.0
        self._before.append((rows, total))
        self._scaled.append(Scaled(rows, gradients, list(map(_VERSION, gradients))))

    @torch.no_grad()
    def _note(self, total: Tensor, norm_type: float, parameters: Sequence[Tensor] | None, place: int) -> None:
        """Keep the total, and count the non-finite elements of the gradients of `parameters` before they are scaled."""
        shard = getattr(total, "_local_tensor", total)
        if norm_type == 2.0:
            self._clip_norm[place].copy_(shard, non_blocking=True)
            self._clip_seen[place] = 1.0
            self._clip_copies[place] = copies_of(total) or world_size()
        if parameters is None:
            return
        whole = total if shard is total else None
        if shard.device.type != "cpu":  # to look at the total would be a sync: the device decides
            self._count(parameters, whole, shard)
        elif not math.isfinite(shard.item()):
            self._count(parameters, whole)

    @torch.no_grad()
    def _count(self, parameters: Sequence[Tensor], whole: Tensor | None, total: Tensor | None = None) -> None:
        """Count non-finite elements, none where `total` is finite."""
        for rows, gradients in self._gradients(parameters):
            self._nonfinite.write(rows, reduce.nonfinites(gradients, total))
            self._counted[rows] = 1.0
            self._before.append((rows, whole))

    def _gradients(self, parameters: Sequence[Tensor]) -> list[Members]:
        rows, gradients = with_gradients(self._subject.rows(parameters), parameters)
        return alike(*parted([(row, grad) for row, grad in zip(rows, gradients, strict=True) if row is not None]))

    @torch.no_grad()
    def _look(self, optimizer: Any) -> None:
        if not self._gate.due(self._every, always=True):
            return
        self._looked.add(id(optimizer))
        place, elements = 1.0 + self._subject.place(optimizer), self._with_elements()
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer that unscales inside `step`
        members = self._subject.members(optimizer)
        rows, gradients = with_gradients(*members)
        if len(rows) < len(members.rows):
            missing = zip(*members, strict=True)
            self._missing[[row for row, p in missing if p.grad is None and p.requires_grad]] = 1.0
        if scale is None:
            known, rows, gradients = self._known(rows, gradients)
            self._seen[known] = self._held[known] = place
        for some, group in alike(rows, gradients):
            self._write(some, reduce.summary(group, elements=elements), scale)
            self._seen[some] = self._held[some] = place

    def _known(self, rows: list[int], gradients: list[Tensor]) -> tuple[list[int], list[int], list[Tensor]]:
        """The rows of those that clipping has measured; rows and gradients of the others."""
        if any(scaled.are(rows, gradients) for scaled in self._scaled):  # as a rule: one clipping, one optimizer
            return rows, [], []
        then = {row: (g, version) for scaled in self._scaled for row, g, version in zip(*scaled, strict=True)}
        known, others = [], []
        for row, gradient in zip(rows, gradients, strict=True):
            of, version = then.get(row, (None, 0))
            if of is gradient and version == gradient._version:
                known.append(row)
            else:
                others.append((row, gradient))
        return known, *parted(others)

    def _with_elements(self) -> bool:
        due = self._gate.due(self._elements_every)
        self._elements[0] = float(due)
        return due

    def _write(self, rows: list[int], summary: reduce.Summary, scale: Tensor | None) -> None:
        for place, values in ((0, summary.norm), (1, summary.peak), (3, summary.total)):
            if values is not None:
                self._fields[place].write(rows, values if scale is None else values / scale)
        if summary.nonzero is not None:
            self._fields[4].write(rows, summary.nonzero)
        self._write_nonfinite(rows, summary.nonfinite)

    def _write_nonfinite(self, rows: list[int], now: Tensor) -> None:
        """Where clipping may have spread what is non-finite, what was counted before it stays. Where its total was finite there
        was nothing to spread, and what is there `now` has come since."""
        latest = {row: place for place, (some, _) in enumerate(self._before) for row in some}
        places = [latest.get(row) for row in rows]
        for place in set(places):
            here = [i for i, of in enumerate(places) if of == place]
            some, found = [rows[i] for i in here], now if len(here) == len(rows) else now[here]
            if place is not None:
                total = self._before[place][1]
                if total is None:
                    continue
                found = torch.where(total.to(found.device).isfinite(), found, self._nonfinite.read(some))
            self._nonfinite.write(some, found)

    def finalize(self, stats: Stats) -> tuple[FloatArray, BoolArray]:
        """An update that GradScaler's overflow check dropped has no norms: a scale that was tried is no spike. It keeps its
        counts of non-finite elements, which say where the overflow was.

        A norm of some of the optimizers is no total: in the next step it would be of others, and look like a spike. One that
        is not finite is told all the same: no other part can mend it."""
        used = stats["grad_seen"].astype(np.intp)
        overflow = stats["found_inf"] > 0
        seen = stepped = used > 0
        dropped = bool(overflow.any() or stats["scale_fell"][0] > 0)
        if overflow.any():
            seen = stepped & ~np.concatenate(([False], overflow))[used]
        before = stats["grad_counted"] > 0
        counted = stepped | before
        norm, peak, bad, added, nonzero = (stats[name] for name in MEASURED)
        size = np.maximum(stats["param_size"], 1.0)
        whole = not ((stats["grad_held"] > 0) & ~stepped).any()
        some = bool(seen.any()) and whole
        missing = float(((stats["grad_missing"] > 0) & ~stepped).sum())
        bads = float(bad[counted].sum())
        unlocated = bads > 0 and not (before | (bad < size))[counted].any()
        silent = seen & (norm == 0) & (peak == 0)
        elements = seen & bool(stats["grad_elements"][0])
        vanishing = _vanishing(norm / np.sqrt(size), seen & ~silent)
        given, used_norm, idle = self._before_clipping(stats, norm, seen), root_sum(norm, seen), stats["grad_held"] < 0
        totals = (
            given, used_norm, bads, unlocated, silent.sum(), vanishing, missing,
        )  # fmt: skip
        known = (
            (some or (bool((stats["clip_seen"] > 0).any()) and not dropped))
            and not (idle.any() and math.isfinite(given) and (idle & ~self._clipped(stats)).any()),
            some and not (idle.any() and math.isfinite(used_norm)),
            bool(counted.any()) and whole,
            bads > 0 and whole,
            some,
            some,
            (some or missing > 0) and whole and not dropped,
        )
        values = np.concatenate((totals, norm, peak, bad, added / size, 1.0 - nonzero / size))
        return values, np.concatenate((known, seen, elements, counted, elements, elements))

    def _clipped(self, stats: Stats) -> BoolArray:
        """The parameters whose norm `clip_grad_norm_` returned."""
        known = stats["clip_seen"] > 0
        clipped: BoolArray = np.isin(self._owners, [key for key, mine in zip(self._keys, known, strict=False) if mine])
        return clipped | bool(known[-1])

    def _before_clipping(self, stats: Stats, measured: FloatArray, seen: BoolArray) -> float:
        """What `clip_grad_norm_` returned where it was called, else what was measured; over several models the root sum."""
        clipped, known = stats["clip_norm"], stats["clip_seen"] > 0
        if known[-1]:
            return float(clipped[-1])
        parts = []
        for place, key in enumerate(self._keys):
            mine = seen & (self._owners == key)
            parts.append(clipped[place] if known[place] else root_sum(measured, mine))
        return math.hypot(*parts)


def _vanishing(rms: FloatArray, of: BoolArray) -> int:
    """How many gradients are tiny compared to the others."""
    found = rms[of & np.isfinite(rms)]
    if not len(found):
        return 0
    low, high = (len(found) - 1) // 2, len(found) // 2
    found.partition((low, high))
    usual = (found[low] + found[high]) / 2  # the median; `np.median` takes four times as long
    return int(np.count_nonzero(found < VANISHING * usual))
