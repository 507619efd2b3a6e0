"""What a user may pass as a number: floats, anything float() takes, and tensors of one element, which are not read."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any

from torch import Tensor

from trackbridge.errors import UsageError
from trackbridge.names import legal


def scalar(what: str, value: Any) -> Tensor | float:
    """A detached 0-d tensor or a float. Raises `UsageError` for anything else."""
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return value.detach().reshape(())
        shape = tuple(value.shape)
        raise UsageError(f"{what} must be a scalar, got a tensor of shape {shape}: pass {what}.mean() or .sum()")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{what} must be a number or a 0-d tensor, got {type(value).__name__}") from None


def count(what: str, value: Any) -> float | None:
    """A host number of tokens or samples, None if not given. Raises `UsageError`; a tensor on a device is not waited for."""
    if value is None:
        return None
    if isinstance(value, Tensor) and value.is_cuda:
        raise UsageError(f"{what} must be a number on the host, such as batch.numel(), not a tensor on {value.device}")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"{what} must be a number, got {type(value).__name__}") from None


def whole(what: str, value: Any) -> int:
    """A step number. Raises `UsageError`."""
    try:
        return index(value)
    except TypeError:
        raise UsageError(f"{what} must be a whole number, got {type(value).__name__}") from None


def losses(loss: Any) -> dict[str, Tensor | float]:
    """Series of a loss as `Run.step` takes it: ``train/loss``, and ``train/loss/<part>`` where it is given in parts."""
    if loss is None:
        return {}
    if not isinstance(loss, Mapping):
        return {"train/loss": scalar("loss", loss)}
    parts = {str(name): scalar(f"loss[{name!r}]", value) for name, value in loss.items()}
    found = {f"train/loss/{legal(name)}": value for name, value in parts.items() if name != "loss"}
    if parts:
        found["train/loss"] = parts["loss"] if "loss" in parts else _total(parts)
    return found


def _total(parts: Mapping[str, Tensor | float]) -> Tensor | float:
    try:
        return sum(parts.values())
    except RuntimeError as error:  # on several devices
        raise UsageError(
            f"the parts of the loss cannot be added ({str(error).splitlines()[0]}); give their total as 'loss'"
        ) from None
