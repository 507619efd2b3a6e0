"""The user's objects, built anew as at training time, and the recorded state put into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trackbridge import names
from trackbridge.errors import UsageError
from trackbridge.hooks import unwrapped
from trackbridge.records import MicroBatch
from trackbridge.watched import named


@dataclass
class Rebuilt:
    """What `build()` returns when there is more than a model, an optimizer and a step.

    Args:
        model: what `run.watch` was given: a module, a list, or a mapping.
        optimizer: likewise.
        step: ``step(model, optimizer, batches, index) -> loss`` does one optimizer step; `batches` are its micro-batches,
            `index` the step's number. `model` and `optimizer` come as they were returned here.
        scaler: the `torch.amp.GradScaler`.
        state: further objects with `load_state_dict` under the names given to `run.watch(state=...)`.
        generators: random generators under the names given to `run.watch(generators=...)`.
        fetch: makes a batch again from its recorded identity (`sample_ids`, `epoch`, `index`), for a capsule without raw
            batches. The result is checked against the recorded fingerprint.
        checkpoint: loads your own checkpoint at a path into these objects, for a capsule without a snapshot whose run told of
            one (`run.checkpoint_saved`).
    """

    model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
    optimizer: Optimizer | Iterable[Optimizer] | Mapping[str, Optimizer]
    step: Callable[[Any, Any, list[Any], int], Any]
    scaler: Any = None
    state: Mapping[str, Any] = field(default_factory=dict)
    generators: Mapping[str, Any] = field(default_factory=dict)
    fetch: Callable[[MicroBatch], Any] | None = None
    checkpoint: Callable[[Path], object] | None = None

    @classmethod
    def of(cls, built: Any) -> Rebuilt:
        """What `build()` returned, as a `Rebuilt`. Raises `UsageError` when it is neither that nor a triple."""
        if isinstance(built, cls):
            rebuilt = built
        elif isinstance(built, tuple) and len(built) == 3:
            rebuilt = cls(*built)
        else:
            raise UsageError(
                f"build() returned a {type(built).__name__}; return (model, optimizer, step) or trackbridge.replay.Rebuilt(...)"
                "; for a framework what trackbridge.hf.rebuild(trainer), trackbridge.lightning.rebuild(module) or "
                "trackbridge.accelerate.rebuild(...) makes"
            )
        if not callable(rebuilt.step):
            raise UsageError(f"build() returned a {type(rebuilt.step).__name__} as the step; it must be callable")
        named("build()'s model", rebuilt.model, nn.Module)
        named("build()'s optimizer", rebuilt.optimizer, Optimizer)
        return rebuilt

    @property
    def models(self) -> dict[str, nn.Module]:
        return named("model", self.model, nn.Module)

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """Those that have hooks: the ones inside of a trainer's wrappers."""
        return {key: unwrapped(optimizer) for key, optimizer in named("optimizer", self.optimizer, Optimizer).items()}

    def restore(self, snapshot: Mapping[str, Any]) -> list[str]:
        """Put the recorded state into the objects. Returns what has no place here, in words; such a replay is incomplete.

        Raises `UsageError` when the model or the optimizer is not the recorded one.
        """
        models, optimizers = self.models, self.optimizers
        _same_keys("models", models, snapshot.get("models", {}))
        _same_keys("optimizers", optimizers, snapshot.get("optimizers", {}))
        for key, model in models.items():
            _load_model(model, snapshot["models"][key], f"model {key!r}" if key else "model")
            _load_buffers(model, snapshot.get("buffers", {}).get(key, {}))
        for key, optimizer in optimizers.items():
            _load_optimizer(optimizer, snapshot["optimizers"][key], f"optimizer {key!r}" if key else "optimizer")
        missing = []
        for name, state in snapshot.get("state", {}).items():
            if name in self.state:
                _load_state(self.state[name], state, f"state {name!r}")
            else:
                missing.append(f"state {name!r} was recorded; return it as Rebuilt(..., state={{{name!r}: ...}})")
        scaler = snapshot.get("scaler")
        if scaler and self.scaler is not None:
            _load_state(self.scaler, scaler, "scaler")
        elif scaler:
            missing.append("the loss scaler was recorded; return it as Rebuilt(..., scaler=...)")
        return missing


_SHAPED = {"exp_avg", "exp_avg_sq", "momentum_buffer"}
"""What every optimizer that has it keeps in the shape of its parameter."""


def _load_state(holder: Any, state: Any, what: str) -> None:
    try:
        holder.load_state_dict(state)
    except Exception as error:
        kind, words = type(holder).__name__, " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"build() returned a {what} ({kind}) that cannot take what was recorded: {words[:200]}") from error


def _same_keys(kind: str, here: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
    if recorded.keys() != here.keys():
        raise UsageError(f"build() returned the {kind} {_list(here)}; the recording watched {_list(recorded)}")


def _load_model(model: nn.Module, state: Mapping[str, Tensor], what: str) -> None:
    """Strictly; wrapper prefixes (compile, DDP, FSDP) may differ."""
    mine = {names.clean(name): name for name in model.state_dict()}
    theirs = {names.clean(name): name for name in state}
    missing, unexpected = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
    if missing or unexpected:
        said = [
            f"{word} {_some(found)}" for word, found in (("not recorded:", missing), ("recorded only:", unexpected)) if found
        ]
        raise UsageError(f"build() returned a {what} that is not the recorded one; {'; '.join(said)}")
    here = model.state_dict()
    try:
        model.load_state_dict({mine[clean]: like(here[mine[clean]], state[name]) for clean, name in theirs.items()})
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"build() returned a {what} that is not the recorded one: {reason[:300]}") from None


def like(here: Any, recorded: Any) -> Any:
    """A recorded shard as the DTensor that `here` is; anything else as it is. Raises `ValueError` when it is another shard."""
    if not hasattr(here, "to_local") or not isinstance(recorded, Tensor):
        return recorded
    from torch.distributed.tensor import DTensor

    own = here.to_local()
    if own.shape != recorded.shape:
        raise ValueError(
            f"this rank's shard has shape {tuple(own.shape)}, the recorded one {tuple(recorded.shape)}; shard it as then"
        )
    local = recorded.to(own.device, copy=True)
    return DTensor.from_local(local, here.device_mesh, here.placements, run_check=False, shape=here.shape, stride=here.stride())


@torch.no_grad()
def _load_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Buffers that a state dict leaves out."""
    here = {names.clean(name): buffer for name, buffer in model.named_buffers()}
    for name, value in buffers.items():
        buffer = here.get(names.clean(name))
        if buffer is None or buffer.shape != value.shape:
            raise UsageError(f"build() returned a model without the recorded buffer {name!r} of shape {tuple(value.shape)}")
        buffer.copy_(value)


@torch.no_grad()
def _load_optimizer(optimizer: Optimizer, state: Mapping[str, Any], what: str) -> None:
    """`load_state_dict`, and then every state tensor in its recorded dtype: torch casts them to the parameter's."""
    sizes = [len(group["params"]) for group in state["param_groups"]]
    if sizes != [len(group["params"]) for group in optimizer.param_groups]:
        here = [len(group["params"]) for group in optimizer.param_groups]
        raise UsageError(f"build() returned an {what} with groups of {here} parameters; recorded were {sizes}")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    recorded = _sharded(state, dict(zip(numbers, parameters, strict=True)))
    for parameter, moments in ((p, recorded["state"].get(number, {})) for number, p in zip(numbers, parameters, strict=True)):
        for key in _SHAPED & moments.keys():
            if moments[key].shape != parameter.shape:
                shapes = f"{tuple(moments[key].shape)} where the parameter has {tuple(parameter.shape)}"
                raise UsageError(f"build() returned an {what} with parameters in another order: the recorded {key} is {shapes}")
    kind = type(optimizer).__name__
    try:
        optimizer.load_state_dict(recorded)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"build() returned an {what} ({kind}) that cannot take the recorded state: {error!r:.200}") from None
    lacking = [key for key in optimizer.defaults if any(key not in group for group in optimizer.param_groups)]
    if lacking:
        raise UsageError(f"build() returned an {what} ({kind}) that is not the recorded one: no {lacking[0]} was recorded")
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in state["state"].get(number, {}).items():
            loaded = optimizer.state[parameter].get(key)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device, copy=True)


def _sharded(state: Mapping[str, Any], parameters: Mapping[Any, Any]) -> dict[str, Any]:
    """The state with what is shaped like a parameter's shard as a DTensor like the parameter (Adam's moments, momentum)."""
    of_each = dict(state["state"])
    for number, parameter in parameters.items():
        if hasattr(parameter, "to_local") and number in of_each:
            shape = parameter.to_local().shape
            of_each[number] = {
                key: like(parameter, value) if isinstance(value, Tensor) and value.dim() and value.shape == shape else value
                for key, value in of_each[number].items()
            }
    return {**state, "state": of_each}


def _list(keys: Mapping[str, Any]) -> str:
    return ", ".join(repr(key) for key in keys) or "none"


def _some(found: Sequence[str]) -> str:
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
