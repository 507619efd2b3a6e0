"""What hooks on a user's modules and optimizers have in common: they are silent in copies and in calls that are no part of
training, and nothing that a module does when it is looked at breaks them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

_KEYS = torch._C._TorchDispatchModeKey
_transforms, _tracing = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_backward = torch._C._current_graph_task_id
_modes, _mode = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_mode


class Inert:
    """A hook that does nothing in copies: a pickle or deep copy of a watched model gets a no-op from the standard library.

    So a saved model loads where trackbridge is not installed, and a copy (an EMA, say) is not measured as the original.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # accepts any three arguments and returns None


def attribute(owner: Any, name: str) -> Any:
    """`owner.name`, None where there is none or where a property of the user's raises."""
    try:
        return getattr(owner, name, None)
    except Exception:
        return None


def takes_hooks(module: nn.Module) -> bool:
    """False for what `torch.jit.script` made."""
    traced = torch.jit.TopLevelTracedModule  # type: ignore[attr-defined]
    return not isinstance(module, torch.jit.ScriptModule) or isinstance(module, traced)


def unwrapped(optimizer: Any) -> Optimizer:
    """The torch optimizer inside a wrapper (Accelerate, Fabric): the one whose hooks fire."""
    while "_optimizer_step_pre_hooks" not in vars(optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]


def has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of `optimizer.step` makes its gradients inside. `args` are of the unbound method, the optimizer first."""
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None


def take_off(mode: TorchFunctionMode) -> None:
    """End `mode` for this thread, whatever modes lie above; nothing where it is not on. A forward pass that a KeyboardInterrupt
    ended has called no hook, and other threads have stacks of their own."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if mode in modes:
        place = modes.index(mode)
        for _ in modes[place:]:
            _pop_mode()  # type: ignore[no-untyped-call]
        for above in modes[place + 1 :]:
            _push_mode(above)  # type: ignore[no-untyped-call]


def in_export() -> bool:
    """True while `torch.export` traces: what it makes outlives the run.

    Not `torch.compiler.is_exporting()`: torch 2.6 has none, and before torch 2.13 the compiler takes it for True in every graph
    that it traces. The flag behind it is up in no strict export of torch 2.7; the hierarchy of modules is there in all of them.
    """
    tracing = sys.modules.get("torch.export._trace")
    flagged = getattr(torch.compiler, "_is_exporting_flag", False)
    return bool(flagged) or getattr(tracing, "_EXPORT_MODULE_HIERARCHY", None) is not None


# What `torch.compiler.assume_constant_result` does, without the seconds that it takes to import the compiler: graphs have the
# answer of the time they are traced, and no guard on what was looked at (one on `sys.modules` fails in torch 2.13).
in_export._dynamo_marked_constant = True  # type: ignore[attr-defined]


def in_backward() -> bool:
    """True inside a backward pass: recomputation of a checkpointed part, in both of its modes."""
    return bool(_backward() >= 0)


def in_transform() -> bool:
    """True while a function is transformed or traced, and not run for its numbers: inside torch.func (vmap, grad), where
    nothing outside may be written to, in `torch.jit.trace` and `make_fx`, and under a `FakeTensorMode` (export, estimates of
    memory)."""
    if _transforms() is not None or _tracing() is not None:
        return True
    return bool(_modes()) and (_mode(_KEYS.FAKE) is not None or _mode(_KEYS.PROXY) is not None)
