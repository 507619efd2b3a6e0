"""Acting on a training run, on purpose: what a counterfactual replay tries can be used live.

Nothing here is attached unless you do it. Everything works on the optimizer's own tensors, on their device, without a sync.

Sources: Huang et al., "SPAM: Spike-Aware Adam with Momentum Reset for Stable LLM Training" (arXiv:2501.06842).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trackbridge.errors import UsageError

THETA = 5000.0
RESET_EVERY = 500
WARMUP = 150

_ZERO_AT_FIRST = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer"})


@torch.no_grad()
def reset_momentum_(optimizer: Optimizer) -> int:
    """Forget the optimizer's moments and its step count, so that it goes on like a new one; returns for how many parameters.

    State tensors of Adam and SGD are set to zero where they are (step, first and second moment, momentum); the state of an
    optimizer that has others is dropped, and is made anew by its next step.
    """
    touched = 0
    for state in optimizer.state.values():
        if not state:
            continue
        touched += 1
        if state.keys() <= _ZERO_AT_FIRST:
            for key, value in state.items():
                state[key] = value.zero_() if isinstance(value, Tensor) else None if value is None else type(value)(0)
        else:
            state.clear()
    return touched


@torch.no_grad()
def clip_spikes_(optimizer: Optimizer, theta: float = THETA) -> Tensor | None:
    """Bring every gradient element g with ``g^2 > theta * V`` down to ``sign(g) * sqrt(theta * V)``, V being Adam's second
    moment of that element (arXiv:2501.06842, spike-aware clipping; theta = 5000 there).

    Elements without a second moment yet are left as they are, and so is what is not finite. Gradients that a fused optimizer
    gets scaled are compared scaled. Returns the count of clipped elements, an int64 tensor on the first gradient's device, None
    if there was nothing to compare with. No sync.
    """
    clipped: Tensor | None = None
    scale = getattr(optimizer, "grad_scale", None)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient, moment = parameter.grad, optimizer.state.get(parameter, {}).get("exp_avg_sq")
            if gradient is None or moment is None:
                continue
            bar = (moment * theta).sqrt_()
            if scale is not None:
                bar = bar * scale.to(bar.device)
            spikes = (gradient.abs() > bar) & (moment > 0) & gradient.isfinite()
            gradient.copy_(torch.where(spikes, gradient.sign() * bar.to(gradient.dtype), gradient))
            count = spikes.sum()
            clipped = count if clipped is None else clipped + count.to(clipped.device)
    return clipped


class Spam:
    """The SPAM rule for a torch optimizer of the Adam family: spike-aware clipping before each step, moments forgotten every
    `reset_every` steps, and the learning rate brought back over `warmup` steps after each reset along half a cosine,
    ``lr * (1 - cos(pi * t / warmup)) / 2`` (arXiv:2501.06842, whose values are the defaults).

        with trackbridge.interventions.Spam(optimizer):
            ...                                # your loop as it is

    or `attach` and `detach`. It acts in hooks of the optimizer; the optimizer itself and the scheduler are not replaced: the
    learning rate is lowered for the time of the step only. Put `state_dict()` into your checkpoint.

    Attributes: steps (since the first), resets, clipped (elements so far; a tensor on the device, None before the first step).
    """

    def __init__(
        self, optimizer: Optimizer, *, theta: float = THETA, reset_every: int = RESET_EVERY, warmup: int = WARMUP
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise UsageError(f"Spam takes a torch optimizer, not a {type(optimizer).__name__}")
        if theta <= 0 or reset_every < 0 or warmup < 0:
            raise UsageError("Spam needs theta > 0, reset_every >= 0 (0: never) and warmup >= 0")
        self.steps = 0
        self.resets = 0
        self.clipped: Tensor | None = None
        self._optimizer = optimizer
        self._theta, self._every, self._warmup = theta, reset_every, warmup
        self._since: int | None = None  # steps since the latest reset
        self._rates: list[Any] = []
        self._handles: list[Any] = []

    def attach(self) -> Spam:
        """Act from now on."""
        if not self._handles:
            self._handles = [
                self._optimizer.register_step_pre_hook(lambda *_: self.before_step()),
                self._optimizer.register_step_post_hook(lambda *_: self.after_step()),
            ]
        return self

    def detach(self) -> None:
        """Act no more. The moments stay as they are."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> Spam:
        return self.attach()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.detach()

    def reset(self) -> int:
        """Forget the moments now and warm up again; returns for how many parameters there were any."""
        self.resets += 1
        self._since = 0
        return reset_momentum_(self._optimizer)

    def factor(self) -> float:
        """What the learning rate is multiplied by in the coming step."""
        if self._since is None or self._since >= self._warmup:
            return 1.0
        return (1.0 - math.cos(math.pi * (self._since + 1) / self._warmup)) / 2

    def before_step(self) -> None:
        """What happens just before the optimizer steps; `attach` calls it for you."""
        if self._every and self.steps and self.steps % self._every == 0:
            self.reset()
        count = clip_spikes_(self._optimizer, self._theta)
        if count is not None:
            self.clipped = count if self.clipped is None else self.clipped + count
        factor = self.factor()
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        if factor != 1.0:
            for group in self._optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def after_step(self) -> None:
        """What happens when it has stepped; `attach` calls it for you."""
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        self.steps += 1
        if self._since is not None:
            self._since += 1

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"steps": self.steps, "resets": self.resets, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.resets, self._since = int(state["steps"]), int(state["resets"]), state["since"]
