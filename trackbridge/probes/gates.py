"""Which kinds of activation statistics the current step has: for eager hooks on the host, for graphs on the device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from trackbridge.config import ActivationsConfig
from trackbridge.errors import Part
from trackbridge.probes.base import Gate
from trackbridge.probes.forward_hooks import Valve
from trackbridge.slab import Field, Slab

OUTPUTS, CHANNELS, LOGITS, ALWAYS = range(4)
KINDS = 3
"""Elements of the field on the device; the last one stays open."""


class Gates:
    """`due`: by kind, whether the current step has it; `opened`: whether it had at any moment of the step; `closed`: a backward
    pass is under way. The valves say the same to hooks. On the device the kinds are elements of one field, set in one
    operation, without a sync."""

    FIELD = "activations_gate"

    def __init__(self, config: ActivationsConfig, gate: Gate, part: Part) -> None:
        self._gate = gate
        self._every = (config.every, config.channels_every, config.attention_every)
        self.due = [False] * KINDS
        self.opened = [False] * KINDS
        self.closed = False
        self.valves = [Valve(part) for _ in range(KINDS)]
        self.field = Field(self.FIELD, KINDS + 1, lasting=True)

    def bind(self, slab: Slab) -> None:
        view = slab.device_view(self.FIELD)
        view.fill_(1.0)
        switches = view[:KINDS]
        states = torch.tensor(list(itertools.product((0.0, 1.0), repeat=KINDS)), dtype=view.dtype, device="cpu").to(view.device)
        self._states: list[Any] = list(states)
        self._write: Callable[[Any], object] = switches.copy_
        if view.device.type == "cpu":  # through numpy, which takes a tenth of the time
            self._states, self._write = list(states.numpy()), partial(np.copyto, switches.numpy())
        self._told = len(self._states) - 1

    def update(self) -> None:
        """The step, or a pause, has begun or ended."""
        due = self._gate.due
        every, channels_every, logits_every = self._every
        outputs = due(every)
        self.due = [outputs, outputs and due(channels_every), due(logits_every)]
        for kind, now in enumerate(self.due):
            if now:
                self.opened[kind] = True
            self.valves[kind].due = now
        self.set()

    def set(self, *, closed: bool = False) -> None:
        """Tell compiled regions; `closed` to all kinds."""
        self.closed = closed
        outputs, channels, logits = self.due
        number = 0 if closed else outputs << 2 | channels << 1 | logits
        if number != self._told:
            self._told = number
            self._write(self._states[number])

    def end(self) -> None:
        """The step's measurements have been collected."""
        self.opened = [False] * KINDS

    def shut(self) -> None:
        for valve in self.valves:
            valve.alive = False
