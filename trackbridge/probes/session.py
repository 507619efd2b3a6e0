"""One `attach`: the probes, the slab and the ring that belong together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trackbridge.config import ActivationsConfig, ParametersConfig
from trackbridge.errors import Part
from trackbridge.hooks import has_closure
from trackbridge.names import LAYER
from trackbridge.probes import dead_rows, gradients, weights
from trackbridge.probes.activations import ActivationProbe
from trackbridge.probes.base import AroundUpdate, BoolArray, Ending, Gate, Probe, Stats, UpdateProbe
from trackbridge.probes.checksums import ChecksumProbe
from trackbridge.probes.dead_rows import DeadRowProbe
from trackbridge.probes.embeddings import EmbeddingProbe
from trackbridge.probes.gradients import GradientProbe
from trackbridge.probes.histograms import HistogramProbe, RawHistograms
from trackbridge.probes.layout import parameter_copies, world_size
from trackbridge.probes.merge import merge_ranks
from trackbridge.probes.phases import PhaseProbe
from trackbridge.probes.rates import learning_rates
from trackbridge.probes.scalars import ScalarProbe
from trackbridge.probes.subject import Subject
from trackbridge.probes.updates import UpdateCountProbe
from trackbridge.probes.weights import WeightProbe
from trackbridge.records import FloatArray
from trackbridge.slab import Ring, Slab, Slot

PARAMETER_TOTALS = frozenset((*gradients.TOTALS, *weights.TOTALS, dead_rows.TOTAL))


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """The sufficient statistics of one step on one rank. `numbers`, float64, is what ranks exchange; its length is the same
    on every rank that watches the same models. `histograms` are those of this rank, on steps that have them."""

    session: Session
    numbers: FloatArray
    histograms: RawHistograms | None = None

    def values(self) -> tuple[FloatArray, BoolArray]:
        """Values and presence, both of shape (len(series),)."""
        return self.session.finalize(self.numbers)

    def share(self) -> FloatArray:
        """The numbers that other ranks lack: shape (len(session.shared),)."""
        return self.numbers[self.session.shared]

    def merged(self, ranks: Sequence[FloatArray]) -> Reading:
        """The reading of all ranks together, from the `numbers` of each (this one's among them), in float64."""
        return self._of(merge_ranks(self.session.slab, self.session.copies, np.stack(ranks)))

    def merged_with(self, shares: Sequence[FloatArray]) -> Reading:
        """The same from what the other ranks `share`: what is not in it is what this rank has, too."""
        session = self.session
        ranks = np.repeat(self.numbers[None], 1 + len(shares), axis=0)
        ranks[1:, session.shared] = shares
        return self._of(merge_ranks(session.slab, session.copies, ranks, session.shared))

    def apart(self, shares: Sequence[FloatArray]) -> dict[str, tuple[int, ...]]:
        """The parameters of which ranks that hold the whole have other bits, and the ranks whose bits most others do not have
        (none where no value is the most frequent)."""
        session = self.session
        places = session.slab.unpack(np.arange(len(self.numbers), dtype=np.float64))["checksum"].astype(np.intp)
        ranks = np.repeat(self.numbers[None], 1 + len(shares), axis=0)
        ranks[1:, session.shared] = shares
        found = {}
        for row in np.flatnonzero((session.copies == len(ranks)) & (ranks[:, places] != ranks[0, places]).any(0)).tolist():
            bits, counts = np.unique(ranks[:, places[row]], return_counts=True)
            usual = bits[counts.argmax()] if (counts == counts.max()).sum() == 1 else None
            others = np.flatnonzero(ranks[:, places[row]] != usual) if usual is not None else np.zeros(0, np.intp)
            found[session.subject.names[row]] = tuple(others.tolist())
        return found

    def _of(self, numbers: FloatArray) -> Reading:
        return Reading(self.session, numbers, self.histograms)


class Session:
    """Probes on one set of models and optimizers. The scalar probe is the run's own and outlives sessions."""

    def __init__(
        self,
        subject: Subject,
        parameters: ParametersConfig,
        activations: ActivationsConfig,
        scalars: ScalarProbe,
        gate: Gate,
        *,
        slots: int,
        strict: bool,
    ) -> None:
        def part(name: str) -> Part:
            return Part(f"the {name} probe", strict=strict, timer=gate.timer)

        gradient, phase, activation = part("gradient"), part("phase"), part("activation")
        weight, update = part("weight"), part("update count")
        self.subject = subject
        self.scalars = scalars
        self.gradients = GradientProbe(subject, parameters, gate, gradient)
        self.embeddings = EmbeddingProbe(subject, activations, gate)
        self.updates = UpdateCountProbe(subject)
        self.activations = ActivationProbe(subject, activations, gate, activation)
        self.phases = PhaseProbe(subject, gate, phase, self.activations.backward)
        weight_probe = WeightProbe(subject, parameters, gate)
        rows, checksums = DeadRowProbe(subject, parameters, gate), ChecksumProbe(subject, parameters, gate)
        of_updates: list[tuple[UpdateProbe, Part]] = [
            (self.gradients, gradient),
            (self.embeddings, part("embedding")),
            (weight_probe, weight),
            (self.updates, update),
            (self.phases, phase),
            (rows, part("dead row")),
            (checksums, part("checksum")),
        ]
        self._probes: list[tuple[Probe, Part]] = [*of_updates, (self.activations, activation), (scalars, part("scalar"))]
        self._ending: list[tuple[Ending, Part]] = [
            (self.gradients, gradient),
            (weight_probe, weight),
            (self.updates, update),
            (self.phases, phase),
            (self.activations, activation),
        ]
        self._updating = part("update")
        self.copies = parameter_copies(subject)
        self.histograms = HistogramProbe(subject, parameters, gate, self.copies)
        self._histograms_part = part("histogram")
        self._around: list[tuple[AroundUpdate, Part]] = [(self.histograms, self._histograms_part), *of_updates]
        self.slab = Slab((field for probe, _ in self._probes for field in probe.fields), subject.device)
        self._ring = Ring(self.slab, slots)
        self._fixed = tuple(name for probe, _ in self._probes[:-1] for name in probe.series)
        self._series = self._fixed
        self.local_series = self._local_series()
        of_parameters = (self.gradients, weight_probe, rows, checksums)
        self.shared = self._shared(by_series=(self.updates, self.phases, scalars), of_parameters=of_parameters)
        self._readings = {part.name: Part(f"{part.name}'s numbers", strict=strict) for _, part in self._probes}
        self._activations_part = activation
        self._handles: list[Any] = []
        self._rates: dict[str, float] = {}  # of this step's updates: a scheduler may come before its close
        self._under_way: dict[int, int] = {}  # a class that calls its base's `step` has torch call the hooks for each of them

    @property
    def series(self) -> tuple[str, ...]:
        scalars = self.scalars.series
        if len(self._series) != len(self._fixed) + len(scalars):
            self._series = (*self._fixed, *scalars)
        return self._series

    def attach(self, earlier: Session | None) -> None:
        """Install every hook; counts, and what was told of the step under way, go on from an `earlier` session."""
        for probe, _ in self._probes:
            probe.attach(self.slab)
        if earlier is not None:
            self.updates.go_on_from(earlier.slab)
            self.scalars.go_on_from(earlier.slab)
        # never traced: a compiled `optimizer.step` breaks its graph around hooks anyway
        before, after = torch.compiler.disable(self._before_update), torch.compiler.disable(self._after_update)  # type: ignore[no-untyped-call]
        for optimizer in self.subject.optimizers.values():
            self._handles += [
                optimizer.register_step_pre_hook(before),
                optimizer.register_step_post_hook(after),
            ]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for probe, _ in self._probes:
            probe.detach()
        self.histograms.detach()
        self.subject.release()

    def lr(self) -> dict[str, float]:
        """The learning rates that this step's updates were made with; the present ones of an optimizer that did not step."""
        if self._rates and len(self.subject.optimizers) == 1:
            return self._rates
        return learning_rates(self.subject.optimizers) | self._rates

    def close(self, step: int) -> Slot | None:
        for probe, part in self._ending:
            part.run(probe.measure)
        self._rates = {}
        held = counts = None
        if self._activations_part.alive:
            with self._activations_part:
                held = self.activations.take()  # before the slab is copied: it may measure by itself
        slot = self._ring.take(step)
        intervals = self.phases.take()
        if self._histograms_part.alive:
            with self._histograms_part:
                counts = self.histograms.take()
        if slot is not None:
            slot.owner, slot.keep = self, (intervals, held, counts)
        elif held is not None:
            held.give_back()
        self.slab.reset()
        self._under_way.clear()
        return slot

    def read(self, slot: Slot) -> Reading:
        slot.wait()
        intervals, held, counts = slot.keep
        reading = Reading(self, slot.read(), counts)
        self.phases.read(intervals, self.slab.part(reading.numbers, "phase_s"))
        if held is not None:  # the hooks' part, though on the scribe's thread: where this fails they have nothing to copy for
            self._activations_part.run(self.activations.read, held, self.slab.part(reading.numbers, "activations"))
        self._ring.give(slot)
        return reading

    def finalize(self, numbers: FloatArray) -> tuple[FloatArray, BoolArray]:
        """Values and presence of every series; those of a probe that breaks here are absent, and the others stay."""
        stats = self.slab.unpack(numbers)
        found = [self._finalized(probe, part, stats) for probe, part in self._probes]
        return np.concatenate([values for values, _ in found]), np.concatenate([present for _, present in found])

    def _finalized(self, probe: Probe, part: Part, stats: Stats) -> tuple[FloatArray, BoolArray]:
        reading = self._readings[part.name]  # on the scribe's thread: nobody's expense
        if part.alive and reading.alive:
            with reading:
                return probe.finalize(stats)
        return np.zeros(len(probe.series)), np.zeros(len(probe.series), dtype=bool)

    def _local_series(self) -> frozenset[str]:
        parts = self.copies != world_size()
        if not parts.any():
            return frozenset()
        local = {name for name, part in zip(self.subject.names, parts, strict=True) if part}
        return frozenset(self.embeddings.of_parameters(np.flatnonzero(parts).tolist())) | frozenset(
            name
            for name in self._fixed
            if name in PARAMETER_TOTALS or (name.startswith(LAYER) and name[len(LAYER) :].rpartition("/")[0] in local)
        )

    @cached_property
    def layout(self) -> bytes:
        """Eight bytes that are equal on ranks whose numbers can be merged: the same fields of the same series."""
        fields = [f"{field.name} {field.size} {field.over_ranks}" for field in self.slab.fields]
        text = "\n".join((*fields, *self._fixed)).encode()
        return hashlib.blake2b(text + self.shared.tobytes(), digest_size=8).digest()

    def _shared(self, by_series: Sequence[Probe], of_parameters: Sequence[Probe]) -> npt.NDArray[np.int64]:
        """Places of the numbers that ranks exchange. Left out is what every rank has, the statistics of parameters that each of
        them holds whole, and the probes whose series are merged by their names."""
        chosen = np.zeros(len(self.slab.tensor) + len(self.slab.facts))
        of = self.slab.unpack(chosen)
        parts = self.copies != world_size()
        for probe, _ in self._probes:
            for field in () if probe in by_series else probe.fields:
                replicas = probe in of_parameters and field.size == len(parts) and field.over_ranks != "equal"
                if field.over_ranks == "clip" or field.name.startswith("clip_"):
                    of[field.name][:] = parts.any()
                elif not field.lasting:
                    of[field.name][:] = parts if replicas else 1.0
        return np.flatnonzero(chosen)

    def _before_update(self, optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        depth = self._under_way[id(optimizer)] = self._under_way.get(id(optimizer), 0) + 1
        if depth > 1:
            return
        closure = has_closure(args, kwargs)
        with self._updating:
            for probe, part in self._around:
                part.run(probe.before_update, optimizer, closure=closure)

    def _after_update(self, optimizer: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        depth = self._under_way[id(optimizer)] = self._under_way.get(id(optimizer), 1) - 1
        if depth > 0:
            return
        closure = has_closure(args, kwargs)
        with self._updating:
            self._rates |= learning_rates(self.subject.optimizers, of=optimizer)
            for probe, part in reversed(self._around):
                part.run(probe.after_update, optimizer, closure=closure)
