"""The changes that come with trackbridge. Each is a function ``(trial, value) -> sentence``, registered under its name in the
entry-point group ``trackbridge.interventions``; a third party's is registered in the same way and given the same `Trial`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trackbridge.errors import UsageError
from trackbridge.interventions import THETA, clip_spikes_, reset_momentum_
from trackbridge.replay import checkpoints
from trackbridge.replay.norms import whole
from trackbridge.replay.trial import NotRunnable, Trial

JUMP = 1.25
"""A learning rate that grows by more than this factor in one step, and more than usual, has jumped."""


def rerun(trial: Trial, value: str | None) -> str:
    """Nothing is changed."""
    return "nothing is changed"


def skip_batch(trial: Trial, value: str | None) -> str:
    """The suspected batches are not trained on; ``skip-batch=N``: N batches from the first suspected one on."""
    steps: Sequence[int] = trial.aimed or trial.guilty
    if value is not None:
        steps = range(steps[0], steps[0] + _whole("skip-batch", value))
    if steps[-1] >= trial.capsule.span[1]:
        raise NotRunnable(f"that leaves out all steps from {steps[0]} on: nothing of the window is left to judge by")
    for step in steps:
        trial.skip(step)
    trial.acted = len(steps)
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    return f"the batch{'es' if len(steps) > 1 else ''} of {which} left out"


def lower_lr(trial: Trial, value: str | None) -> str:
    """The learning rate times a factor, 0.5 by default."""
    factor = _number("lower-lr", value, 0.5)
    if not 0 <= factor < 1:
        raise UsageError(f"lower-lr={factor:g}: the factor must be from 0 up to, not including, 1")
    trial.scale_learning_rate(lambda: factor)
    return f"the learning rate times {factor:g} {_span(trial)}"


def hold_lr(trial: Trial, value: str | None) -> str:
    """The learning rate is not let above the one before its jump."""
    _none("hold-lr", value)
    record = {**trial.capsule.history, **trial.capsule.series()}
    rates = [(step, row["train/lr"]) for step, row in sorted(record.items()) if row.get("train/lr", 0.0) > 0]
    rates = [(step, rate) for step, rate in rates if step <= trial.guilty[-1]]
    grown = sorted(((b[1] / a[1], b[0], a[1]) for a, b in pairwise(rates)), reverse=True)
    usual = grown[1][0] if len(grown) > 1 else 1.0
    if not grown or grown[0][0] <= max(JUMP, 1.0 + 2 * (usual - 1.0)):
        raise NotRunnable("the recorded learning rate has no jump up to the onset")
    _, at, before = grown[0]

    def hold(optimizer: Optimizer) -> None:
        now = float(optimizer.param_groups[0]["lr"])
        factor[0] = min(1.0, before / now) if now > 0 else 1.0
        kept.extend(group["lr"] for group in optimizer.param_groups)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor[0]

    def restore(optimizer: Optimizer) -> None:
        for group, rate in zip(optimizer.param_groups, kept, strict=True):
            group["lr"] = rate
        kept.clear()

    factor, kept = [1.0], list[Any]()
    trial.start = max(trial.capsule.restart_step, min(at, trial.start))
    trial.before_update(hold, restore)  # what is taken away was never meant to be there: nothing is given up
    return f"the learning rate held at {before:.4g}, its value before it jumped at step {at}"


def warmup(trial: Trial, value: str | None) -> str:
    """The learning rate grows from nothing over N steps, 16 by default."""
    steps = _whole("warmup", value, 16)
    trial.scale_learning_rate(lambda: min(1.0, (trial.step - trial.start + 1) / steps))
    return f"the learning rate warmed up over {steps} steps from step {trial.start} on"


def clip(trial: Trial, value: str | None) -> str:
    """The gradient clipped to a norm, 1.0 by default, after whatever clipping your step does."""
    most = _number("clip", value, 1.0)
    if most <= 0:
        raise UsageError(f"clip={most:g}: the norm must be above 0")
    trial.acted = 0

    def lower(optimizer: Optimizer) -> None:
        scale = getattr(optimizer, "grad_scale", None)
        bar = most if scale is None else most * float(scale)
        norm = _norm(optimizer)
        if math.isfinite(norm) and norm > bar:
            for gradient in _gradients(optimizer):
                gradient.mul_(bar / norm)
            trial.acted = (trial.acted or 0) + 1
            trial.give_up(1.0 - bar / norm)

    trial.before_update(lower)
    return f"the gradient clipped to a norm of {most:g} {_span(trial)}"


def reset_momentum(trial: Trial, value: str | None) -> str:
    """The optimizer's moments are forgotten once."""
    _none("reset-momentum", value)
    trial.acted = 0

    def reset() -> None:
        if trial.step == trial.start:
            trial.acted = sum(map(reset_momentum_, trial.rebuilt.optimizers.values()))

    trial.before_step(reset)
    return f"the optimizer's moments forgotten before step {trial.start}"


def spam(trial: Trial, value: str | None) -> str:
    """The SPAM rule (arXiv:2501.06842): moments forgotten once, and gradient elements above sqrt(theta * second moment) brought
    down to it from then on; ``spam=THETA``."""
    theta = _number("spam", value, THETA)
    if theta <= 0:
        raise UsageError(f"spam={theta:g}: theta must be above 0")
    trial.before_step(lambda: _reset_at_start(trial))

    def lower(optimizer: Optimizer) -> None:
        before = _norm(optimizer)
        clip_spikes_(optimizer, theta)
        if math.isfinite(before) and before > 0:
            trial.give_up(1.0 - _norm(optimizer) / before)

    trial.before_update(lower)
    return f"moments forgotten before step {trial.start}, gradient spikes clipped at theta {theta:g} from then on"


def full_precision(trial: Trial, value: str | None) -> str:
    """Everything in float32: no autocast, and parameters, buffers, moments and inputs of lower precision cast up."""
    _none("full-precision", value)
    trial.start = trial.capsule.restart_step
    cast = sum(map(_to_float32, trial.rebuilt.models.values()))
    for optimizer in trial.rebuilt.optimizers.values():
        for state in optimizer.state.values():
            for key, tensor in state.items():
                if isinstance(tensor, Tensor) and _low(tensor):
                    state[key] = tensor.float()
    entered: list[bool] = []
    trial.during_steps(lambda: _no_autocast(entered))

    def check() -> None:
        if not cast and not any(entered):
            raise NotRunnable("nothing was computed in reduced precision: no autocast, no parameter below float32")

    trial.at_end(check)
    return "everything computed in float32 from the restart on"


def restore_optimizer(trial: Trial, value: str | None) -> str:
    """The optimizer's state of a checkpoint is put back at the restart; ``restore-optimizer=PATH``, by default of the newest
    checkpoint of the run that `run.checkpoint_saved` told of."""
    capsule = trial.capsule
    path = Path(value) if value is not None else checkpoints.newest_before(capsule)
    states = checkpoints.optimizer_states(path, trial.rebuilt.optimizers)
    for key, optimizer in trial.rebuilt.optimizers.items():
        now = optimizer.state_dict()["param_groups"]  # its own settings stay
        optimizer.load_state_dict({"state": states[key]["state"], "param_groups": now})
    return f"the optimizer's state of the checkpoint {path.name} put back before step {capsule.restart_step}"


# -- parts


def _reset_at_start(trial: Trial) -> None:
    if trial.step == trial.start:
        for optimizer in trial.rebuilt.optimizers.values():
            reset_momentum_(optimizer)


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _norm(optimizer: Optimizer) -> float:
    gradients = _gradients(optimizer)
    return whole(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0


def _span(trial: Trial) -> str:
    return f"from step {trial.start} " + ("on" if trial.last == trial.capsule.span[1] else f"to step {trial.last}")


def _none(name: str, value: str | None) -> None:
    if value is not None:
        raise UsageError(f"{name}={value}: {name} takes no value")


def _number(name: str, value: str | None, default: float) -> float:
    try:
        number = default if value is None else float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{name}={value}: not a number")
    return number


def _whole(name: str, value: str | None, default: int = 1) -> int:
    if value is not None and not (value.isdecimal() and 0 < int(value) < 10**6):
        raise UsageError(f"{name}={value}: not a whole number above 0")
    return default if value is None else int(value)


def _low(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype in (torch.float16, torch.bfloat16)


def _to_float32(model: nn.Module) -> int:
    """Cast what is below float32, and whatever comes in; returns how many tensors that were."""
    low = [tensor for tensors in (model.parameters(), model.buffers()) for tensor in tensors if _low(tensor)]
    for tensor in low:
        tensor.data = tensor.data.float()
    if low:
        model.register_forward_pre_hook(_inputs_up, with_kwargs=True)
    return len(low)


def _inputs_up(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(_up, args)), {key: _up(item) for key, item in kwargs.items()}


def _up(item: Any) -> Any:
    return item.float() if isinstance(item, Tensor) and _low(item) else item


@contextmanager
def _no_autocast(entered: list[bool]) -> Iterator[None]:
    """`torch.autocast` switches nothing on inside; `entered` gets whether it would have."""
    enter: Callable[[Any], Any] = torch.autocast.__enter__

    def off(self: Any) -> Any:
        entered.append(bool(self._enabled))
        wanted, self._enabled = self._enabled, False
        try:
            return enter(self)
        finally:
            self._enabled = wanted

    torch.autocast.__enter__ = off  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]
