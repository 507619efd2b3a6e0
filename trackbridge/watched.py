"""What the user watches: named, checked, described; and closing steps for a loop that is not to be changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from trackbridge.errors import Part, UsageError
from trackbridge.hooks import Inert, attribute, takes_hooks, unwrapped

T = TypeVar("T")


def named(what: str, given: T | Iterable[T] | Mapping[str, T], kind: type[T]) -> dict[str, T]:
    """One object becomes ``{"": object}``, several (a list, a trainer's container of optimizers) ``{"0": ..., "1": ...}``, a
    mapping stays. Raises `UsageError`."""
    found: dict[str, Any]
    if isinstance(given, Mapping):
        found = {str(name): item for name, item in given.items()}
    elif (parts := _parts(given, kind)) is not None:
        found = {str(index): item for index, item in enumerate(parts)} if len(parts) != 1 else {"": parts[0]}
    elif isinstance(given, kind):
        found = {"": given}
    else:
        raise UsageError(f"{what} must be a {kind.__name__}, a list or a mapping of them, not {type(given).__name__}")
    for name, item in found.items():
        if not isinstance(item, kind):
            raise UsageError(f"{what} {name!r} must be a {kind.__name__}, not {type(item).__name__}")
    return found


def _parts(given: Any, kind: type[Any]) -> list[Any] | None:
    """What `given` holds, in its order; None if it is one object, or nothing that can be gone through again in the same order.

    An optimizer that is iterable is a container: it may well be an `Optimizer` itself, for its hooks, but its `state` is empty
    and what a replay must restore is in its members. A module that is iterable (`nn.Sequential`) is one model.
    """
    if isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        return list(given)
    if isinstance(given, (Iterator, Set)) or not isinstance(given, Iterable):
        return None
    if isinstance(given, kind) and not isinstance(given, Optimizer):
        return None
    parts = list(given)
    return parts if parts and all(isinstance(part, kind) and part is not given for part in parts) else None


def check(
    models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], *, scaler: Any, state: Any, auto_step: bool
) -> None:
    """Raise `UsageError` for what cannot be watched. Arguments as of `Run.watch`; models and optimizers as from `named`."""
    if not models:
        raise UsageError("watch needs a model: an empty list or mapping has none")
    for module in models.values():
        if not takes_hooks(module):
            raise UsageError("a ScriptModule takes no hooks: do without torch.jit.script, or script parts of the model only")
        parameters = list(module.parameters())
        if any(isinstance(parameter, UninitializedParameter) for parameter in parameters):
            raise UsageError("the model has lazy parameters: run one forward pass before watch")
        if parameters and all(parameter.is_meta for parameter in parameters):
            raise UsageError("the model is on the meta device: give it memory (to_empty, or load its weights) before watch")
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise UsageError(f"scaler must be a torch.amp.GradScaler, not {type(scaler).__name__}")
    if state is not None and not isinstance(state, Mapping):
        raise UsageError(f"state must be a mapping of names to objects with state_dict, not {type(state).__name__}")
    for name, value in (state or {}).items():
        if not hasattr(value, "state_dict"):
            raise UsageError(f"state[{name!r}] has no state_dict(); pass objects that have one")
    if auto_step and not optimizers:
        raise UsageError("auto_step=True needs the optimizer: watch(model, optimizer, auto_step=True)")


def left_behind(
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    now: Mapping[str, nn.Module],
    optimizers_now: Mapping[str, Optimizer],
) -> list[str]:
    """The classes of models and optimizers that a second `watch` watches no more, though they could be: a model that is no part
    of the new ones (in a wrapper or as the same module with new parameters it is), an optimizer of parameters that are still
    watched and have no other."""
    watched = {id(p) for module in now.values() for p in module.parameters()}
    trained = {id(p) for optimizer in optimizers_now.values() for p in _of(optimizer)}
    gone: list[Any] = [
        module
        for module in models.values()
        if all(module is not other for other in now.values()) and watched.isdisjoint(map(id, module.parameters()))
    ]
    gone += [o for o in optimizers.values() if watched.intersection(map(id, _of(o))) and trained.isdisjoint(map(id, _of(o)))]
    return [type(one).__name__ for one in gone]


def _of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def device_of(models: Mapping[str, nn.Module]) -> torch.device:
    """Where the first of their parameters is; the CPU if there is none."""
    return next((p.device for module in models.values() for p in module.parameters()), torch.device("cpu"))


def hyperparameters(models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """What the watched objects say of themselves, as JSON: the optimizers' classes and options (but the learning rate, which is
    a series), the models' dropout and how many modules of which class they have. A diagnosis compares it between attempts."""
    facts: dict[str, Any] = {"optimizer": {}, "model": {}}
    for key, optimizer in optimizers.items():
        own: dict[str, Any] = {"class": type(optimizer).__name__}
        facts["optimizer"][key or "optimizer"] = own
        for number, group in enumerate(optimizer.param_groups):
            plain = {k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr") and _plain(v)}
            plain["parameters"] = len(group["params"])
            own[f"group {number}"] = plain
    for key, model in models.items():
        modules = list(model.modules())
        classes = [type(module).__name__ for module in modules]
        drops = sorted({float(p) for module in modules if isinstance(p := attribute(module, "p"), (int, float))})
        facts["model"][key or "model"] = {
            "modules": {name: classes.count(name) for name in sorted(set(classes))},
            "dropout": drops,
            "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        }
    return facts


def _plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, (bool, int, float, str))
        or (isinstance(value, (tuple, list)) and all(isinstance(item, (bool, int, float, str)) for item in value))
    )


class AutoStep:
    """Closes the step when the last optimizer steps; takes the batch from the model's inputs and the loss from its output.

    The loss is the output itself when it is a scalar, its ``loss`` attribute or item, or the first element of a tuple when
    that is a scalar; otherwise the step has no loss. With gradient accumulation it is the last micro-batch's: use `Run.micro`
    there. Inside a compiled region nothing is seen, and a step that a GradScaler skips is not closed.
    """

    def __init__(
        self,
        close: Callable[[Tensor | None, Any], None],
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        part: Part,
    ) -> None:
        self._close = close
        self._part = part
        self._loss: Tensor | None = None
        self._batch: Any = None
        root = next(iter(models.values()))
        last = unwrapped(list(optimizers.values())[-1])
        self._handles = [
            root.register_forward_pre_hook(_Before(self, root), with_kwargs=True),
            root.register_forward_hook(_After(self, root)),
            last.register_step_post_hook(_Stepped(self)),
        ]

    def remove(self) -> None:
        self._loss = self._batch = None
        for handle in self._handles:
            handle.remove()

    def before(self, batch: Any) -> None:
        self._batch = batch

    def after(self, output: Any) -> None:
        with self._part:
            self._loss = loss_of(output)

    def stepped(self) -> None:
        loss, batch, self._loss, self._batch = self._loss, self._batch, None, None
        self._close(loss, batch)


class _Hook(Inert):
    """Of one model only: silent in its copies and while torch.compile traces."""

    def __init__(self, auto: AutoStep, model: nn.Module) -> None:
        self.auto = auto
        self.model = id(model)

    def sees(self, module: nn.Module) -> bool:
        return not torch.compiler.is_compiling() and id(module) == self.model and module.training and torch.is_grad_enabled()


class _Before(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.sees(module):
            self.auto.before({"args": args, "kwargs": kwargs})


class _After(_Hook):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.sees(module):
            self.auto.after(output)


class _Stepped(Inert):
    def __init__(self, auto: AutoStep) -> None:
        self.auto = auto

    def __call__(self, *_: Any) -> None:
        self.auto.stepped()


def loss_of(output: Any) -> Tensor | None:
    """The scalar loss in a model's output, or None."""
    candidates = [output, getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    if isinstance(output, (tuple, list)) and output:
        candidates.append(output[0])
    return next((item.detach() for item in candidates if isinstance(item, Tensor) and item.numel() == 1), None)
