"""One fit of a `Trainer`, told to a `Run`: its batches before they are used, its losses, its clipping.

What no callback is told (the loss before it is divided for accumulation, the gradient before it is clipped, the sampler's
indices) comes from methods of this trainer's parts, replaced while it trains. Each does what it did; where ours fails, it goes
on alone.

| replaced | for |
|---|---|
| `Strategy.training_step` | the loss as the module returned it |
| `Precision.clip_grad_by_norm`, `clip_grad_by_value` | the gradient's norm before |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trackbridge.errors import Part
from trackbridge.hooks import Inert
from trackbridge.integrations.given import warn
from trackbridge.integrations.ids import SampleIds
from trackbridge.integrations.lightning.parts import optimizers_of, overrides, scaler_of, state_of, unscaled
from trackbridge.integrations.losses import Count, Losses, covers, scale_of, total_norm
from trackbridge.integrations.wires import Method, Wires
from trackbridge.run import Run
from trackbridge.watched import loss_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")


class Training:
    """The wires between one fit and one run, from its start until `close`. `tokens` and `samples` count a batch."""

    def __init__(self, trainer: Any, module: Any, run: Run, tokens: Count | None, samples: Count | None) -> None:
        self.run = run
        self._trainer = trainer
        self._module = module
        self._count = (tokens, samples)
        self._part = Part("the Lightning callback")
        self._batch: Any = None
        self._tokens = self._samples = 0  # of batches without a loss of their own
        self._updates = trainer.global_step
        self._stepped: set[str] = set()  # of the step under way: optimizers that really stepped
        self._norms: dict[str, Tensor] = {}
        self._through_forward = _may_pass_through_forward(trainer.strategy, module)
        watched = optimizers_of(trainer)
        self._keys = {id(optimizer): key for key, optimizer in watched.items()}
        self._losses = Losses(list(watched))
        model = trainer.strategy.model  # in DDP's wrapper, which says what is replicated
        run.watch(model, watched, scaler=scaler_of(trainer), state=state_of(trainer))
        self._parameters = list(module.parameters())
        self._handles = [
            optimizer.register_step_post_hook(lambda *_, key=key: self._stepped.add(key)) for key, optimizer in watched.items()
        ]
        self._wires = Wires()
        replace = self._wires.replace
        replace(trainer.strategy, "training_step", self._training_step)
        replace(trainer.precision_plugin, "clip_grad_by_norm", self._clipping_by_norm)
        replace(trainer.precision_plugin, "clip_grad_by_value", self._clipping_by_value)

    def close(self) -> None:
        """Every method is what it was."""
        self._wires.cut()
        if self._through_forward:
            vars(self._module).pop("forward", None)
        for handle in self._handles:
            handle.remove()
        self._batch = None

    # what the callback is told

    def batch_begins(self, batch: Any, index: int, ids: SampleIds | None, seconds: float) -> None:
        """`batch` is on its device, and nothing has used it."""
        if not self._part.alive:
            return
        with self._part:
            self._batch = batch
            found = ids.take(index) if ids is not None else None
            self.run.fetched(batch, epoch=self._trainer.current_epoch, index=index, sample_ids=found, seconds=seconds)

    def backward(self, loss: Tensor) -> None:
        """A loss is about to be back-propagated. Only manual optimization needs to know: there may be several, and none may be
        returned."""
        if self._part.alive and not self._module.automatic_optimization:
            with self._part:
                self._losses.backward(unscaled(self._trainer, loss))

    def before_update(self, optimizer: Any) -> None:
        """The gradient is complete, and in automatic optimization not yet clipped."""
        if not self._part.alive:
            return
        with self._part:
            key = self._key(optimizer)
            self._losses.update(key)
            if self._module.automatic_optimization and overrides(self._module, "configure_gradient_clipping"):
                self._measure(optimizer)

    def batch_ends(self) -> None:
        """Close the step if an optimizer was due in this batch."""
        self._batch = None
        if not self._part.alive:
            return
        with self._part:
            if self._trainer.global_step == self._updates:
                self.run.intake.fetching()
                return
            self._updates = self._trainer.global_step
            stepped, self._stepped = self._stepped, set()
            norms, self._norms = self._norms, {}
            norm = None
            if norms and norms.keys() == stepped:  # an update that the loss scaler dropped has no norm
                norm = next(iter(norms.values())) if len(norms) == 1 else torch.stack(list(norms.values())).norm()
            tokens, samples, self._tokens, self._samples = self._tokens, self._samples, 0, 0
            losses = self._losses.of_step()
            warn(self.run.step(losses, tokens=tokens or None, samples=samples or None, grad_norm=norm))
            if self.run.agree_to_stop():
                self._trainer.should_stop = True

    # what is replaced

    def _training_step(self, original: Method) -> Method:
        strategy, module = self._trainer.strategy, self._module

        def training_step(*args: Any, **kwargs: Any) -> Any:
            if self._through_forward:
                with strategy.precision_plugin.train_step_context():
                    output = strategy._forward_redirection(module, module, "training_step", *args, **kwargs)
            else:
                output = original(*args, **kwargs)
            if self._part.alive:
                with self._part:
                    self._returned(loss_of(output))
            return output

        return training_step

    def _returned(self, loss: Tensor | None) -> None:
        tokens, samples = (None if count is None else count(self._batch) for count in self._count)
        loss = self._losses.of_batch(loss)
        if loss is not None:
            self.run.micro(loss, tokens=tokens, samples=samples)
        else:
            self._tokens, self._samples = self._tokens + (tokens or 0), self._samples + (samples or 0)

    def _clipping_by_norm(self, original: Method) -> Method:
        def clip_grad_by_norm(optimizer: Any, clip_val: Any, *args: Any, **kwargs: Any) -> Any:
            ours = False
            if self._part.alive and not args and not kwargs:
                with self._part:
                    ours = self._covers_all(optimizer) and self._scale(optimizer) is None
            if ours:
                self.run.clip_grad_norm_(clip_val)
                return None
            self._measure(optimizer)
            return original(optimizer, clip_val, *args, **kwargs)

        return clip_grad_by_norm

    def _clipping_by_value(self, original: Method) -> Method:
        def clip_grad_by_value(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._measure(optimizer)
            return original(optimizer, *args, **kwargs)

        return clip_grad_by_value

    def _measure(self, optimizer: Any) -> None:
        if self._part.alive:
            with self._part:
                norm = total_norm(parameter for group in optimizer.param_groups for parameter in group["params"])
                if norm is not None:
                    scale = self._scale(optimizer)
                    self._norms[self._key(optimizer)] = norm if scale is None else norm / scale

    def _covers_all(self, optimizer: Any) -> bool:
        """Whether Lightning would call torch's function, for all that is watched."""
        plain = type(self._trainer.precision_plugin).clip_grad_by_norm.__module__.endswith("plugins.precision.precision")
        return plain and covers([p for group in optimizer.param_groups for p in group["params"]], self._parameters)

    def _scale(self, optimizer: Any) -> Tensor | None:
        """In manual optimization gradients are multiplied by it until Lightning unscales them in `step`."""
        return scale_of(scaler_of(self._trainer), getattr(optimizer, "optimizer", optimizer))

    def _key(self, optimizer: Any) -> str:
        return self._keys.get(id(getattr(optimizer, "optimizer", optimizer)), "")


def _may_pass_through_forward(strategy: Any, module: Any) -> bool:
    """Whether a module's `training_step` may be called through its ``forward``, as Lightning itself does under DDP: then the
    time of the forward and backward passes and their FLOPs are known although a `training_step` calls only submodules.

    Not where another strategy has its own way, where the module is compiled, where somebody else's hooks on it would be called
    that are not called otherwise, nor in manual optimization, where `training_step` is the backward pass as well.
    """
    return (
        module.automatic_optimization
        and strategy.model is module
        and type(strategy).training_step.__module__.endswith(".strategies.strategy")
        and "forward" not in vars(module)
        and getattr(module, "_compiler_ctx", None) is None
        and getattr(module, "_compiled_call_impl", None) is None
        and all(isinstance(hook, Inert) for name in _HOOKS for hook in getattr(module, name).values())
    )
