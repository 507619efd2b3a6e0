"""Steps whose update `run.guard` left out while they were recorded: a replay leaves it out as well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trackbridge.guard import DROPPED, HELD


class RecordedGuard:
    """Stands for `run.guard` in the step function of a replay, as `trackbridge.replay.guard`: it answers as the guard did then.

    A step function needs it only where more than the optimizer's step depends on the answer (a scheduler that rests too); that
    the optimizer does not step is seen to anyway.
    """

    def __init__(self) -> None:
        self._held = False

    def ok(self, loss: Tensor | float, grad_norm: Tensor | float | None = None) -> bool:
        """Whether the update was applied when the step under way was recorded."""
        return not self._held

    def protect(self, optimizer: Optimizer, loss: Tensor, grad_norm: Tensor | None = None) -> None:
        """Nothing: the recorded flag is set by the replay."""

    @contextmanager
    def as_recorded(self, recorded: Mapping[str, float], optimizers: Mapping[str, Optimizer]) -> Iterator[None]:
        """Inside, no optimizer steps where the guard left out the update of the step whose series are `recorded`."""
        if recorded.get(HELD, 0.0) > 0:
            self._held = True
            try:
                with _still(optimizers):
                    yield
            finally:
                self._held = False
        elif recorded.get(DROPPED, 0.0) > 0:
            with _dropping(optimizers):
                yield
        else:
            yield


guard = RecordedGuard()


@contextmanager
def _still(optimizers: Mapping[str, Optimizer]) -> Iterator[None]:
    """``optimizer.step()`` does nothing."""
    own = [(vars(optimizer), vars(optimizer).get("step")) for optimizer in optimizers.values()]  # a scheduler wraps it there

    def rest(*_: Any, **__: Any) -> None:
        return None

    rest._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler asks for it
    for attributes, _ in own:
        attributes["step"] = rest
    try:
        yield
    finally:
        for attributes, before in own:
            if before is None:
                del attributes["step"]
            else:
                attributes["step"] = before


@contextmanager
def _dropping(optimizers: Mapping[str, Optimizer]) -> Iterator[None]:
    """A fused optimizer's kernel runs and leaves everything as it is, as it did then."""

    def drop(optimizer: Any, *_: Any) -> None:
        first = next(parameter for group in optimizer.param_groups for parameter in group["params"])
        optimizer.found_inf = torch.ones((), device=first.device)

    def leave(optimizer: Any, *_: Any) -> None:
        if hasattr(optimizer, "found_inf"):
            del optimizer.found_inf

    handles = [optimizer.register_step_pre_hook(drop) for optimizer in optimizers.values()]
    handles += [optimizer.register_step_post_hook(leave) for optimizer in optimizers.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
