"""What a probe is, and what the probes of one run share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from trackbridge.errors import Timer
from trackbridge.records import FloatArray
from trackbridge.slab import Field, Slab

BoolArray: TypeAlias = npt.NDArray[np.bool_]
Stats: TypeAlias = Mapping[str, FloatArray]


class Probe(Protocol):
    """Measures one kind of thing. `fields` is what it needs in the slab, `series` what it can give; both are fixed.

    `attach`, `detach` and the probe's hooks run on the training thread and never wait for the device. `finalize` runs on the
    scribe's thread and touches nothing but its argument.
    """

    @property
    def fields(self) -> tuple[Field, ...]: ...

    @property
    def series(self) -> tuple[str, ...]: ...

    def attach(self, slab: Slab) -> None:
        """Bind the fields and install the hooks."""

    def finalize(self, stats: Stats) -> tuple[FloatArray, BoolArray]:
        """Values and whether they are present, both of shape (len(series),). Values of absent series mean nothing."""

    def detach(self) -> None:
        """Remove the hooks and let go of models and optimizers. Safe to call twice."""


class Ending(Protocol):
    """A probe that has something to do at the end of a step, on the training thread as its hooks."""

    def measure(self) -> None:
        """The slab is about to be copied: write what the hooks have not written."""


class AroundUpdate(Protocol):
    """What looks at optimizer steps. Calls nest: `after_update` runs in the reverse order of `before_update`."""

    def before_update(self, optimizer: Any, *, closure: bool) -> None:
        """`optimizer.step` is about to run; with a `closure` the gradients do not exist yet."""

    def after_update(self, optimizer: Any, *, closure: bool) -> None:
        """`optimizer.step` has run."""


class OfGradients:
    """An `AroundUpdate` that looks at gradients: before the update, or after it where a closure makes them inside."""

    def before_update(self, optimizer: Any, *, closure: bool) -> None:
        if not closure:
            self._look(optimizer)

    def after_update(self, optimizer: Any, *, closure: bool) -> None:
        if closure:
            self._look(optimizer)

    def _look(self, optimizer: Any) -> None:
        raise NotImplementedError


class UpdateProbe(Probe, AroundUpdate, Protocol):
    """A probe that also looks at optimizer steps."""


class Gate:
    """Whether to measure: the one switch that all probes of a run look at."""

    __slots__ = ("paused", "rarer", "step", "timer")

    def __init__(self) -> None:
        self.paused = 0
        self.step: int | None = None
        self.rarer = 1  # factor on cadences: `trackbridge.overhead.Throttle`
        self.timer: Timer | None = None  # of what the probes do on the training thread

    def due(self, every: int, *, always: bool = False) -> bool:
        """True when a statistic of this cadence belongs into the current step. The first step after `watch` has them all.

        `always`: it is never taken more rarely, however much measuring costs.
        """
        if self.paused or every <= 0:
            return False
        return self.step is None or self.step % (every if always else every * self.rarer) == 0
