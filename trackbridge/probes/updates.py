"""Updates applied and skipped, and GradScaler's scale.

An unfused optimizer is not called at all when GradScaler finds an overflow; what shows it without a sync is that the scale
fell while an optimizer did not step. How often it fell says how many of a critic's several updates in one step were dropped.
A fused one is called, with `found_inf` on the device, and drops the update itself.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from trackbridge.probes.base import BoolArray, Stats
from trackbridge.probes.subject import Subject
from trackbridge.records import FloatArray
from trackbridge.slab import Field, Slab


class UpdateCountProbe:
    series: tuple[str, ...] = ("optim/applied", "optim/skipped", "train/loss_scale")

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.fields: tuple[Field, ...] = (
            Field("found_inf", len(subject.optimizers)),
            Field("scale", 1),
            Field("scale_fell", 1),
            Field("scale_seen", 1, "host"),
            Field("stepped", len(subject.optimizers), "host"),
            Field("scale_before", 1, lasting=True),
            Field("overflows", 1, lasting=True),  # of calls that a fused optimizer dropped
            Field("falls", 1, lasting=True),  # of the scale, without a call
            Field("calls", 1, "host", lasting=True),
            Field("declined", 1, "host", lasting=True),
        )

    def attach(self, slab: Slab) -> None:
        self._found_inf, self._scale, self._fell = (slab.device_view(name) for name in ("found_inf", "scale", "scale_fell"))
        self._before, self._overflows, self._falls = (slab.device_view(name) for name in ("scale_before", "overflows", "falls"))
        self._scale_seen, self._stepped = slab.host_view("scale_seen"), slab.host_view("stepped")
        self._calls, self._declined = slab.host_view("calls"), slab.host_view("declined")
        self._updates, self._fused = 0, False  # calls in this step, and whether one of them drops updates itself
        scaler = self._subject.scaler
        if scaler is not None:
            current = getattr(scaler, "_scale", None)
            if current is None:
                self._before.fill_(float(getattr(scaler, "_init_scale", 0.0)))
            else:
                self._before.copy_(current)

    def go_on_from(self, slab: Slab) -> None:
        """Take over the counts of an earlier session."""
        self._overflows.copy_(slab.device_view("overflows"))
        self._falls.copy_(slab.device_view("falls"))
        self._calls[:] = slab.host_view("calls")
        self._declined[:] = slab.host_view("declined")

    def decline(self) -> None:
        """The user did not step on purpose."""
        self._declined += 1

    def before_update(self, optimizer: Any, *, closure: bool) -> None:
        found = getattr(optimizer, "found_inf", None)
        if found is not None:
            self._fused = True
            place = self._subject.place(optimizer)
            with torch.no_grad():
                self._found_inf[place].copy_(found.reshape(()), non_blocking=True)
                self._overflows.add_(self._found_inf[place] > 0)

    def after_update(self, optimizer: Any, *, closure: bool) -> None:
        self._calls += 1
        self._updates += 1
        self._stepped[self._subject.place(optimizer)] = 1.0

    @torch.no_grad()
    def measure(self) -> None:
        updates, self._updates = self._updates, 0
        fused, self._fused = self._fused, False
        scaler = self._subject.scaler
        scale = getattr(scaler, "_scale", None)
        if scale is None:
            return
        self._scale.copy_(scale, non_blocking=True)
        self._scale_seen[0] = 1.0
        if not self._stepped.all():
            torch.lt(self._scale, self._before, out=self._fell)
        if not fused and updates != len(self._stepped):
            backoff = getattr(scaler, "get_backoff_factor", lambda: 0.5)()
            times = (self._scale / self._before).log2_().div_(math.log2(backoff))
            self._falls.add_(times.round_().nan_to_num_(0.0, 1.0, 0.0).clamp_(min=0.0))
        elif not self._stepped.all():
            self._falls.add_(self._fell)
        self._before.copy_(self._scale)

    def detach(self) -> None:
        pass

    def finalize(self, stats: Stats) -> tuple[FloatArray, BoolArray]:
        overflows, falls = stats["overflows"][0], stats["falls"][0]
        applied = stats["calls"][0] - overflows
        skipped = overflows + falls + stats["declined"][0]
        some = len(stats["stepped"]) > 0
        return np.array([applied, skipped, stats["scale"][0]]), np.array([some, some, stats["scale_seen"][0] > 0])
