"""The probes of one run and the slab they write into: what `run.py`, the scribe and a replay use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trackbridge.config import ActivationsConfig, ParametersConfig
from trackbridge.errors import Timer, UsageError
from trackbridge.probes.base import BoolArray, Gate
from trackbridge.probes.scalars import ScalarProbe
from trackbridge.probes.session import Reading, Session
from trackbridge.probes.subject import Subject
from trackbridge.records import FloatArray
from trackbridge.slab import Slot


class Instruments:
    """The probes of one run and the slab they write into: hooks on the training thread, arrays on the scribe's.

    Everything but `finalize` is for the training thread and waits for no device. Without `attach` only scalars are kept.
    """

    def __init__(
        self,
        parameters: ParametersConfig,
        activations: ActivationsConfig,
        *,
        slots: int = 64,
        strict: bool = False,
        timer: Timer | None = None,
    ) -> None:
        """`timer` is told when hooks of ours begin and end on the training thread."""
        self._parameters = parameters
        self._activations = activations
        self._slots = slots
        self._strict = strict
        self._gate = Gate()
        self._gate.timer = timer
        self._scalars = ScalarProbe()
        self._session: Session | None = None

    @property
    def series(self) -> tuple[str, ...]:
        """Every series that `finalize` can give, in its order. Fixed between attaches, but that `set` adds names at the end."""
        return self._live().series

    @property
    def local_series(self) -> frozenset[str]:
        """The series that, before ranks are merged, are of this rank's shards only; they must not be shown as global."""
        return self._live().local_series

    def attach(self, models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], scaler: Any = None) -> None:
        """Put the probes on. Keys prefix the names of several models ("g." ...); the key "" adds nothing.

        Again with the same objects changes nothing; with others, it replaces them. Raises `ConfigError` for a site pattern
        that matches no module.
        """
        session = self._session
        if session is not None and session.subject.is_of(models, optimizers, scaler):
            return
        before = self._session
        self._session = None
        if before is not None:
            before.detach()
        self._session = self._begin(Subject(models, optimizers, scaler), before)

    def detach(self) -> None:
        """Remove every hook and let go of models and optimizers. Slots in flight can still be finalized."""
        if self._session is not None:
            self._session.detach()
            self._session = None

    def set(self, name: str, value: Tensor) -> None:
        """Copy a tensor of one element into the slab as series `name` of this step."""
        session = self._session or self._live(value.device)
        session.scalars.set(name, value)

    def micro(self, loss: Tensor | float, tokens: Tensor | float | None, sample_loss: Tensor | None = None) -> None:
        """One micro-batch's mean loss, its weight in the step's mean (1 each when None), and its per-sample losses."""
        device = loss.device if isinstance(loss, Tensor) else torch.device("cpu")
        self._live(device).scalars.micro(loss, tokens, sample_loss)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        model: str | None = None,
    ) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` over the watched parameters, to the bit; the norm before clipping is recorded.

        Raises `UsageError` when nothing is watched or `model` is not the key of a watched model.
        """
        if self._session is None or not self._session.subject.models:
            raise UsageError("clip_grad_norm_ clips the watched parameters; call run.watch(model, optimizer) first")
        return self._session.gradients.clip(max_norm, norm_type, error_if_nonfinite, foreach, model)

    def skipped(self) -> None:
        """The user left out this step's update on purpose."""
        self._live().updates.decline()

    def lr(self) -> dict[str, float]:
        """``train/lr`` of the first parameter group and ``train/lr/<group>`` of the others, as host floats."""
        return self._session.lr() if self._session is not None else {}

    def pause(self) -> None:
        """Statistics off, until as many `resume`."""
        self._gate.paused += 1
        self._live().activations.gate()
        if self._gate.paused == 1:
            self._live().phases.pause()

    def resume(self) -> None:
        self._gate.paused = max(0, self._gate.paused - 1)
        self._live().activations.gate()
        if not self._gate.paused:
            self._live().phases.resume()

    def spent(self, step_s: float, fetch_s: float) -> None:
        """The wall time of the step that is about to be closed, and how much of it went into waiting for data: what the phases
        add up to."""
        self._live().phases.spent(step_s, fetch_s)

    def close(self, step: int) -> Slot | None:
        """The end of optimizer step `step`: start the copy of the slab to the host and reset it. None if no slot is free."""
        session = self._live()
        slot = session.close(step)
        self._gate.step = step + 1
        session.activations.gate()
        return slot

    def rarer(self, factor: int) -> None:
        """From the next step on, activations, weights, moments and histograms are taken `factor` times as rarely as set."""
        self._gate.rarer = factor

    def ask_histograms(self, step: int | None = None) -> None:
        """Histograms of `step`, of the next update when None, whatever their cadence. From any thread."""
        session = self._session
        if session is not None:
            session.histograms.ask(step)

    def finalize(self, slot: Slot) -> tuple[FloatArray, BoolArray]:
        """Wait for the copy (without the GIL) and return values, float64, and presence, both (len(series),). Frees the slot."""
        return self.read(slot).values()

    def read(self, slot: Slot) -> Reading:
        """`finalize` in two halves, for ranks that exchange their sufficient statistics in between. Frees the slot."""
        session: Session = slot.owner
        return session.read(slot)

    def _live(self, device: torch.device | None = None) -> Session:
        if self._session is None:
            subject = Subject({}, {})
            subject.device = device or subject.device
            self._session = self._begin(subject)
        return self._session

    def _begin(self, subject: Subject, before: Session | None = None) -> Session:
        with torch.inference_mode(False):  # what is made here is written to again, outside of the mode that this may be in
            session = Session(
                subject, self._parameters, self._activations, self._scalars, self._gate, slots=self._slots, strict=self._strict
            )
            try:
                session.attach(before)
            except BaseException:  # a module that takes no hooks
                session.detach()
                raise
        return session
