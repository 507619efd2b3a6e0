"""Acting on the step under way, because you said so: leave out an update, warn, raise, stop, or ask for a rollback.

    if run.guard.ok(loss):                    # one host sync, and with several ranks one collective
        optimizer.step()

    run.guard.protect(optimizer, loss)        # a fused optimizer: no host sync; the device drops the update itself
    optimizer.step()

A step is flagged when its loss (or gradient norm) is not finite, or above the detector's band by more than `guard.threshold`
sigmas. Each rank judges its own loss by its own past, and all act on what any of them found, so that none runs away from the
others. `guard` in the settings says what happens then (`trackbridge.config.GuardConfig`).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from trackbridge.config import DetectionConfig, GuardConfig
from trackbridge.detectors.band import BandDetector
from trackbridge.errors import GuardError, UsageError
from trackbridge.hooks import unwrapped
from trackbridge.ranks import Ranks

logger = logging.getLogger("trackbridge")

HELD = "guard/held"
DROPPED = "guard/dropped"
FLAGGED = "guard/flagged"
SERIES = ("train/loss", "grad/norm")
LAG = 4
"""`protect` learns from losses of this many calls ago: their copies have arrived, so that it does not wait for the device. A
fixed number, so that every rank knows the same."""


class Guard:
    """One per run, as `run.guard`.

    Attributes:
        flagged: steps that were out of band so far. held: updates left out.
        consecutive: flagged steps in a row until now.
        wants_rollback: more than `max_consecutive` were: go back to a clean checkpoint (`trackbridge.rollback(run.dir)`), and
            say so with `rolled_back`.
        stopped: with action "stop", leave the loop.
        rollbacks: how often you went back since the last recovery.
    """

    def __init__(
        self,
        config: GuardConfig,
        detection: DetectionConfig,
        tell: Callable[[str, Tensor | float], None] = lambda name, value: None,
    ) -> None:
        self.flagged = 0
        self.held = 0
        self.consecutive = 0
        self.rollbacks = 0
        self.wants_rollback = False
        self.stopped = False
        self._config = config
        self._tell = tell
        self._detector = BandDetector(detection.model_copy(update={"threshold": config.threshold}))
        self._detector.bind(SERIES)
        self._calls = 0
        self._calm = 0  # steps in a row that were not flagged
        self._group: Any = None
        self._flags: dict[int, Tensor] = {}  # of the next update, by optimizer
        self._late: deque[tuple[Tensor, Any]] = deque()
        self._hooked: dict[int, Any] = {}

    # -- deciding on the host

    def ok(self, loss: Tensor | float, grad_norm: Tensor | float | None = None) -> bool:
        """Whether to apply this step's update; the same answer on every rank. Call it once a step, on all ranks or on none.

        Waits for `loss` to be computed, and with several ranks for the others. With action "warn" the answer is always True.

        Raises:
            GuardError: with action "raise" when the step is flagged; too many rollbacks; a rank did not call within
                `guard.timeout` seconds.
        """
        values = [_number(loss), math.nan if grad_norm is None else _number(grad_norm)]
        bad = self._agreed(self._judge(values, [True, grad_norm is not None]))
        hold = bad and self._config.action in ("skip", "stop")
        self._tell(HELD, float(hold))
        if hold:
            self.held += 1
        self._take_note(bad, values[0])
        self._tell(FLAGGED, float(self.flagged))
        return not hold

    def _judge(self, values: list[float], present: list[bool]) -> bool:
        """Whether these are out of band; they teach the band if not."""
        verdicts = self._detector.update(self._calls, np.array(values), np.array(present))
        self._calls += 1
        return any(verdict.kind in ("spike", "nonfinite") for verdict in verdicts)

    def _agreed(self, bad: bool) -> bool:
        """`bad` on any rank."""
        if Ranks.current().world_size == 1:
            return bad
        found = torch.tensor([float(bad)], device="cpu")
        try:
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=self._private_group())
        except RuntimeError as error:
            raise GuardError(
                f"not every rank called run.guard within {self._config.timeout:g} s: call it once a step on all of them, and "
                f"give them equally many batches ({str(error).splitlines()[0][:120]})"
            ) from None
        return bool(found[0] > 0)

    def _private_group(self) -> Any:
        """A gloo group of our own, with a time limit; made at the first call, which every rank makes."""
        if self._group is None:
            if not torch.distributed.is_initialized():
                raise UsageError("run.guard on several ranks needs torch.distributed: call init_process_group first")
            limit = timedelta(seconds=self._config.timeout)
            self._group = torch.distributed.new_group(backend="gloo", timeout=limit)
        return self._group

    # -- deciding on the device

    def protect(self, optimizer: Optimizer, loss: Tensor, grad_norm: Tensor | None = None) -> None:
        """Have the fused `optimizer` drop its next update if this step is flagged: its kernel reads ``found_inf`` and leaves
        parameters, moments and step count as they are. Call it before each step, on all ranks or on none.

        No host sync: the band is that of `LAG` steps ago, and so is what the counts know. With several ranks the flag is
        combined on the device (one collective of the training's own group). Action "warn" only counts; "raise" and "stop" drop
        the update, and take effect `LAG` calls later.

        Raises `UsageError` for an optimizer that is not fused, `GuardError` as `ok` does.
        """
        optimizer = unwrapped(optimizer)
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            kind = type(optimizer).__name__
            raise UsageError(f"guard.protect needs a fused optimizer: {kind}(..., fused=True); or use guard.ok(loss)")
        if not isinstance(loss, Tensor):
            raise UsageError("guard.protect takes the loss as a tensor; for a number use ok()")
        self._catch_up()
        with torch.no_grad():
            given = [v.detach().reshape(()).float() for v in (loss, grad_norm) if v is not None]
            # Bars are compared with as Python numbers: to send them to the device as a tensor would wait for it.
            outside = [~(v.isfinite() & (v <= bar)) for v, bar in zip(given, self._detector.upper(), strict=False)]
            bad = torch.stack(outside).any().float()
            if Ranks.current().world_size > 1:
                torch.distributed.all_reduce(bad, torch.distributed.ReduceOp.MAX)
            self._late.append(_sent(torch.stack([*given, bad])))
            flag = torch.zeros_like(bad) if self._config.action == "warn" else bad
        self._flags[id(optimizer)] = flag
        self._tell(DROPPED, flag)
        optimizer.found_inf = flag  # type: ignore[attr-defined]
        self._hook(optimizer)

    def _catch_up(self) -> None:
        """Learn from the call of `LAG` calls ago."""
        if len(self._late) < LAG:
            return
        copy, event = self._late.popleft()
        if event is not None:
            event.synchronize()
        *values, bad = copy.tolist()
        present = [True, len(values) > 1]
        self._judge([*values, math.nan][:2], present)
        if bad and self._config.action != "warn":
            self.held += 1
        self._take_note(bool(bad), values[0])

    def _hook(self, optimizer: Optimizer) -> None:
        """A gradient scaler brings its own ``found_inf`` just before the step: then both count. Ours goes after the step."""
        if id(optimizer) in self._hooked:
            return

        def join(it: Any, *_: Any) -> None:
            theirs, flag = getattr(it, "found_inf", None), self._flags.get(id(it))
            if flag is not None and theirs is not None and theirs is not flag:
                it.found_inf = torch.maximum(theirs.float(), flag.to(theirs.device))

        def leave(it: Any, *_: Any) -> None:
            flag = self._flags.pop(id(it), None)
            if flag is not None and getattr(it, "found_inf", None) is flag:
                del it.found_inf

        handle = optimizer.register_step_pre_hook(join)
        hooks: Any = optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(handle.id, last=False)  # before whoever measures found_inf
        self._hooked[id(optimizer)] = (handle, optimizer.register_step_post_hook(leave))

    def detach(self) -> None:
        """Remove the hooks of `protect`."""
        for handles in self._hooked.values():
            for handle in handles:
                handle.remove()
        self._hooked.clear()

    # -- what follows

    def _take_note(self, bad: bool, loss: float) -> None:
        config = self._config
        if not bad:
            self.consecutive = 0
            self._calm += 1
            if self._calm >= config.patience:
                self.rollbacks = 0
            return
        self.flagged += 1
        self.consecutive += 1
        self._calm = 0
        if self.consecutive == 1:
            logger.warning("trackbridge: the guard flagged a step (loss %g, call %d): %s", loss, self._calls, config.action)
        if config.action == "raise":
            raise GuardError(f"the loss is {loss:g}, out of its band, and guard.action is 'raise'")
        self.stopped = self.stopped or config.action == "stop"
        if self.consecutive > config.max_consecutive and not self.wants_rollback:
            self.wants_rollback = True
            logger.warning(
                "trackbridge: %d flagged steps in a row: go back to a clean checkpoint (trackbridge rollback RUN names it) and "
                "call run.guard.rolled_back()",
                self.consecutive,
            )

    def rolled_back(self) -> None:
        """You went back to a checkpoint. Raises `GuardError` when that was more often than `guard.max_rollbacks` times since
        the last `guard.patience` steps in a row that were in band: the cause is still there."""
        self.wants_rollback = False
        self.consecutive = self._calm = 0
        self._late.clear()
        self.rollbacks += 1
        if self.rollbacks > self._config.max_rollbacks:
            raise GuardError(
                f"gone back {self.rollbacks} times without {self._config.patience} good steps in between: something else must "
                "change (trackbridge replay REF --try all)"
            )

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; part of `run.state_dict`."""
        return {
            "flagged": self.flagged,
            "held": self.held,
            "rollbacks": self.rollbacks,
            "calls": self._calls,
            "detector": self._detector.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. What was counted since it was made (in a process that rolls back) stays counted."""
        self.flagged = max(self.flagged, int(state["flagged"]))
        self.held = max(self.held, int(state["held"]))
        self.rollbacks = max(self.rollbacks, int(state["rollbacks"]))
        self._calls = int(state["calls"])
        self._detector.load_state_dict(state["detector"])
        self._late.clear()


def _number(value: Tensor | float) -> float:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise UsageError(f"run.guard takes a real scalar, not a {value.dtype} tensor of shape {tuple(value.shape)}")
        return float(value.detach())
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"run.guard takes a scalar, not a {type(value).__name__}") from None


def _sent(values: Tensor) -> tuple[Tensor, Any]:
    """(copy on the host, the event after which it is there)."""
    if not values.is_cuda:
        return values.clone(), None
    copy = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
    copy.copy_(values, non_blocking=True)
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(values.device))
    return copy, event
