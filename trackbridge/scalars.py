"""What a user may pass as a number: floats, anything float() takes, and tensors of one element, which are not read."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any

import torch
from torch import Tensor

from trackbridge.errors import UsageError
from trackbridge.names import legal
from trackbridge.records import MAX_STEP


def scalar(what: str, value: Any) -> Tensor | float:
    """A detached 0-d tensor or a float. Raises `UsageError` for anything else."""
    if isinstance(value, Tensor):
        if value.is_meta or value.is_quantized or value.is_complex() or value.layout is not torch.strided:
            raise UsageError(f"{what} must be an ordinary real tensor, not {value.dtype} on {value.device} ({value.layout})")
        if value.numel() == 1:
            found = _here(what, value)
            found = found.detach() if found.requires_grad else found
            return found.reshape(()) if found.dim() else found
        shape = tuple(value.shape)
        raise UsageError(f"{what} must be a scalar, got a tensor of shape {shape}: pass {what}.mean() or .sum()")
    try:
        return float(value.item() if getattr(value, "size", None) == 1 and hasattr(value, "item") else value)
    except Exception as error:  # whatever a foreign object's __float__ does
        why = "is out of range" if isinstance(error, OverflowError) else f"got {type(value).__name__}"
        raise UsageError(f"{what} must be a number or a 0-d tensor, {why}") from None


def _here(what: str, value: Tensor) -> Tensor:
    """A DTensor's value where every rank has it; to make one whole would be a collective. Raises `UsageError`."""
    if type(value) is Tensor or not hasattr(value, "placements"):
        return value
    if not all(placement.is_replicate() for placement in value.placements):
        raise UsageError(f"{what} is spread over ranks ({value.placements[0]}): pass {what}.full_tensor()")
    return value._local_tensor  # type: ignore[attr-defined,no-any-return]


def of_samples(what: str, value: Any) -> Tensor | None:
    """A detached tensor with a number for each sample, None if not given. Raises `UsageError` for anything else."""
    if value is None:
        return None
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta or value.layout is not torch.strided:
        raise UsageError(f"{what} must be an ordinary floating-point tensor with one loss per sample")
    return _here(what, value).detach()


def count(what: str, value: Any) -> float | None:
    """A host number of tokens or samples, None if not given. Raises `UsageError`; a device is not waited for."""
    if value is None:
        return None
    if isinstance(value, Tensor) and value.device.type != "cpu":
        raise UsageError(f"{what} must be a number on the host, such as batch.numel(), not a tensor on {value.device}")
    try:
        return float(value)
    except Exception:
        raise UsageError(f"{what} must be a number, got {type(value).__name__}") from None


def whole(what: str, value: Any) -> int:
    """A step number. Raises `UsageError`."""
    try:
        number = index(value)
    except TypeError:
        raise UsageError(f"{what} must be a whole number, got {type(value).__name__}") from None
    if not 0 <= number < MAX_STEP:
        raise UsageError(f"{what} must lie between 0 and 2**53, got {number}")
    return number


def losses(loss: Any) -> dict[str, Tensor | float]:
    """Series of a loss as `Run.step` takes it: ``train/loss``, and ``train/loss/<part>`` where it is given in parts."""
    if loss is None:
        return {}
    if not isinstance(loss, Mapping):
        return {"train/loss": scalar("loss", loss)}
    parts = {str(name): scalar(f"loss[{name!r}]", value) for name, value in loss.items()}
    found = {"train/loss": parts["loss"] if "loss" in parts else _total(parts)} if parts else {}
    return found | {f"train/loss/{legal(name)}": value for name, value in parts.items() if name != "loss"}


def _total(parts: Mapping[str, Tensor | float]) -> Tensor | float:
    try:
        return sum(parts.values())
    except RuntimeError as error:  # on several devices
        raise UsageError(
            f"the parts of the loss cannot be added ({str(error).splitlines()[0]}); give their total as 'loss'"
        ) from None
