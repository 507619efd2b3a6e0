"""``perf/mfu`` and ``perf/hfu``: what the models' passes of a step cost, over what this device could have done in its time.

A pass of new shapes is left alone the first time (compilers and allocators are busy then) and counted the second; after that
its count is looked up. Numerator and denominator are this process' own: its shapes, its device.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from trackbridge import hostcopy
from trackbridge.clock import compiled_graphs
from trackbridge.config import PerfConfig
from trackbridge.errors import Part
from trackbridge.flops.counting import Counting, FlopCount, count_shapes
from trackbridge.flops.functions import Flops
from trackbridge.flops.peaks import Peak, peak_of
from trackbridge.hooks import Inert, in_backward, in_transform, take_off
from trackbridge.hostcopy import HostCopy
from trackbridge.probes.outputs import tensors

logger = logging.getLogger("trackbridge")

SHAPES = 4096
"""Different shapes of inputs whose counts are kept; passes of further ones are unknown."""


Share: TypeAlias = tuple[str, torch.dtype]
_LEARNS = attrgetter("requires_grad")


@dataclass
class Known:
    """The count of one shape: FLOPs of the model (``"model"``) and run again by checkpointing (``"again"``), by dtype.
    `copy` holds what still travels from the device; `selective`: what runs again is not known."""

    flops: dict[Share, float]
    selective: bool
    copy: HostCopy | None = None

    @classmethod
    def of(cls, found: FlopCount) -> Known:
        totals: dict[Share, Flops] = {("model", d): f + found.backward.get(d, 0.0) for d, f in found.forward.items()}
        totals |= {("again", dtype): flops for dtype, flops in (found.recomputed or {}).items()}
        on_device = {str(place): f for place, f in enumerate(totals.values()) if isinstance(f, Tensor)}
        flops = {part: math.nan if isinstance(f, Tensor) else f for part, f in totals.items()}
        return cls(flops, found.recomputed is None, hostcopy.copy(on_device) if on_device else None)

    def arrived(self) -> bool:
        """Fill in what has come from the device; False while it has not."""
        if self.copy is None:
            return True
        if not all(event.query() for event in self.copy.events):
            return False
        parts = list(self.flops)
        self.flops |= {parts[int(place)]: float(value) for place, value in self.copy.leaves.items()}
        self.copy = None
        return True


class Meter:
    """Counts the training passes of the watched models. On the training thread; never waits."""

    def __init__(self, config: PerfConfig, paused: Callable[[], bool], part: Part) -> None:
        self._config = config
        self._paused = paused
        self._part = part
        self._seen: set[Any] = set()
        self._known: dict[Any, Known | None] = {}  # None: cannot be counted
        self._passes: list[Any] = []
        self._running: tuple[Any, Counting] | None = None
        self._thread = 0  # in which that is
        self._parameters: list[list[Tensor]] = []  # of each model
        self._hidden = False  # a count was made on shapes: what a mask tensor hides is not known there
        self._inside: dict[tuple[int, int], int] = {}  # calls of each model under way, by thread and model
        self._handles: list[Any] = []
        self._peak: Peak | None = None
        self._device = ""
        self._summed: tuple[list[Any], tuple[dict[Share, float], bool]] | None = None  # the newest passes, and their sum
        self._told = False
        self._over = False
        self._complained = False

    def attach(self, models: Mapping[str, nn.Module], device: torch.device) -> None:
        self.detach()
        if device.type == "cuda":
            self._device = torch.cuda.get_device_name(device)
            self._peak = peak_of(self._device)
            if self._peak is None and self._config.peak_flops is None:
                logger.warning(
                    "trackbridge: no peak rate is known for %r, so there is no MFU; give it one with perf={'peak_flops': ...}",
                    self._device,
                )
        self._parameters = [list(model.parameters()) for model in models.values()]
        for number, model in enumerate(models.values()):
            self._handles += [
                model.register_forward_pre_hook(_Enter(self, number, model), with_kwargs=True),
                model.register_forward_hook(_Leave(self, number, model), with_kwargs=True, always_call=True),
            ]

    def detach(self) -> None:
        self._stop()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._parameters.clear()

    def entered(self, number: int, model: nn.Module, args: Any, kwargs: Any) -> None:
        place = threading.get_ident(), number
        self._inside[place] = self._inside.get(place, 0) + 1
        if self._inside[place] > 1:  # a model that calls itself: Lightning's `training_step` through `forward`
            return
        learns = bytes(map(_LEARNS, self._parameters[number]))  # a layer that is unfrozen later costs more from then on
        key = (number, _shapes(args, kwargs), learns)
        self._passes.append(key)
        if None in key[1]:
            self._unknown(key, TypeError("a nested tensor has no shape"))
        if key in self._known or self._running is not None or self._config.flops_per_token is not None:
            return
        if key not in self._seen:
            if len(self._seen) < SHAPES:
                self._seen.add(key)
            return
        if compiled_graphs():  # a mode of ours around what was compiled would have it compiled again
            try:
                self._known[key] = Known.of(count_shapes(model, args, kwargs, full_attention=self._config.full_attention))
                self._hidden = True
            except Exception as error:  # it needs values, or cannot be copied
                self._unknown(key, error)
            return
        self._running = key, Counting(full_attention=self._config.full_attention)
        self._thread = threading.get_ident()
        self._running[1].__enter__()  # type: ignore[no-untyped-call]

    def left(self, number: int, *, whole: bool) -> None:
        place = threading.get_ident(), number
        self._inside[place] = max(self._inside.get(place, 0) - 1, 0)
        if self._inside[place]:
            return
        running = self._stop()
        if running is None or not whole:
            return
        key, counting = running
        if counting.error is not None:
            self._unknown(key, counting.error)
        else:
            self._known[key] = Known.of(counting.found)

    def close(self, seconds: float, tokens: float | None, *, steady: bool) -> dict[str, float]:
        """The step ends: ``perf/flops_per_s``, and MFU and HFU where the device is known. Empty where a pass is unknown, and
        in a step that is not `steady`: the first one, one that compiled."""
        passes, self._passes = self._passes, []
        self._inside.clear()
        self._stop()  # a pass that was interrupted has left its mode on
        if not steady or seconds <= 0:
            return {}
        per_token = self._config.flops_per_token
        if per_token is not None:
            given: dict[Share, float] = {("model", torch.bfloat16): per_token * (tokens or 0.0)}
            found = (given, True) if tokens else None
        else:
            found = self._sum(passes)
        if found is None:
            return {}
        total, selective = found
        series = {"perf/flops_per_s": sum(flops for (kind, _), flops in total.items() if kind == "model") / seconds}
        ideal = self._ideal_s(total, "model")
        if ideal is None:
            return series
        series["perf/mfu"] = ideal / seconds
        again = self._ideal_s(total, "again")
        if again is not None and not selective:
            series["perf/hfu"] = (ideal + again) / seconds
        if series["perf/mfu"] > 1 and not self._over:
            self._over = True
            logger.warning(
                "trackbridge: MFU is %.0f%%: more than %s can do. The peak rate or the count is wrong; see docs/mfu.md",
                100 * series["perf/mfu"], self._device or "the device",
            )  # fmt: skip
        return series

    def convention(self) -> dict[str, Any] | None:
        """What the numbers mean, for the tracker; once, and only when there are some."""
        if self._told or not (any(self._known.values()) or self._config.flops_per_token):
            return None
        self._told = True
        return {
            "flops": "matrix products only, 2 per multiply-add; backward: one product for each input that needs a gradient",
            "attention": self._attention(),
            "mfu": "recomputation not counted", "hfu": "recomputation by activation checkpointing counted",
            "device": self._device or "unknown",
            "peak_flops": self._config.peak_flops or self._rates(),
            "source": "perf.peak_flops" if self._config.peak_flops else self._peak.source if self._peak else None,
        }  # fmt: skip

    def _attention(self) -> str:
        if self._config.full_attention:
            return "every (query, key) pair"
        return "the pairs that the mask shows" + ("; every pair where the mask is a tensor" if self._hidden else "")

    def _rates(self) -> dict[str, float]:
        kinds = {dtype for known in self._known.values() if known is not None for _, dtype in known.flops}
        rates = {str(dtype).removeprefix("torch."): self._rate(dtype) for dtype in kinds}
        return {name: rate for name, rate in rates.items() if rate}

    def _sum(self, passes: list[Any]) -> tuple[dict[Share, float], bool] | None:
        """FLOPs of all passes, and whether what runs again is known. None if a pass is unknown."""
        if self._summed is not None and self._summed[0] == passes:
            return self._summed[1]
        total: dict[Share, float] = {}
        selective = False
        for key in passes:
            known = self._known.get(key)
            if known is None or not known.arrived():
                return None
            selective |= known.selective
            for part, flops in known.flops.items():
                total[part] = total.get(part, 0.0) + flops
        if not total:
            return None
        self._summed = passes, (total, selective)
        return total, selective

    def _ideal_s(self, total: Mapping[Share, float], kind: str) -> float | None:
        """Seconds that the device would take at its peak; None if a rate is unknown."""
        seconds = 0.0
        for (which, dtype), flops in total.items():
            if which == kind:
                rate = self._rate(dtype)
                if rate is None:
                    return None
                seconds += flops / rate
        return seconds

    def _rate(self, dtype: torch.dtype) -> float | None:
        if self._config.peak_flops is not None:
            return self._config.peak_flops
        if self._peak is None:
            return None
        return self._peak.of(dtype, tf32=torch.get_float32_matmul_precision() != "highest")

    def _unknown(self, key: Any, error: Exception) -> None:
        self._known[key] = None
        if not self._complained:
            self._complained = True
            logger.warning(
                "trackbridge: the FLOPs of a forward pass could not be counted (%s: %s), so there is no MFU; "
                "give them with perf={'flops_per_token': ...}", type(error).__name__, str(error).split("\n")[0][:120],
            )  # fmt: skip

    def _stop(self) -> tuple[Any, Counting] | None:
        """End the count of this thread; that of another one goes on."""
        if self._running is None or self._thread != threading.get_ident():
            return None
        running, self._running = self._running, None
        take_off(running[1])
        return running


def _shapes(args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of the tensors of a call; None for a nested tensor, which has none."""
    return tuple(None if tensor.is_nested else tensor.shape for tensor in tensors((args, kwargs)))


class _Hook(Inert):
    def __init__(self, meter: Meter, number: int, model: nn.Module) -> None:
        self._meter = meter
        self._number = number
        self._model = id(model)

    def _live(self, module: nn.Module) -> bool:
        meter = self._meter
        return (
            not torch.compiler.is_compiling() and id(module) == self._model and meter._part.alive and not meter._paused()
            and module.training and torch.is_grad_enabled() and not in_backward() and not in_transform()
        )  # fmt: skip


class _Enter(_Hook):
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._live(module):
            with self._meter._part:
                self._meter.entered(self._number, module, args, kwargs)


class _Leave(_Hook):
    """Called after an exception as well, where `output` is None: a mode must not outlive the pass."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():  # before anything that a graph would be guarded on
            return
        meter = self._meter
        if self._live(module) or (id(module) == self._model and meter._running is not None):
            with meter._part:
                meter.left(self._number, whole=output is not None)
