"""The switches of torch that change results: set as they were recorded for the time of a replay, and put back after it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from trackbridge.errors import UsageError

Switch = tuple[Callable[[], Any], Callable[[Any], None]]


def _attribute(owner: Any, name: str) -> Switch:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _deterministic(value: bool) -> None:
    torch.use_deterministic_algorithms(value, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())


# Under the names that `provenance.torch_flags` gives them.
SWITCHES: dict[str, Switch] = {
    "num_threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic_algorithms": (torch.are_deterministic_algorithms_enabled, _deterministic),
    "cudnn_deterministic": _attribute(torch.backends.cudnn, "deterministic"),
    "cudnn_benchmark": _attribute(torch.backends.cudnn, "benchmark"),
    "cudnn_allow_tf32": _attribute(torch.backends.cudnn, "allow_tf32"),
    "matmul_allow_tf32": _attribute(torch.backends.cuda.matmul, "allow_tf32"),
    "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
}


@contextmanager
def kept() -> Iterator[None]:
    """Every switch is as it was found when this ends."""
    found = {name: get() for name, (get, _) in SWITCHES.items()}
    try:
        yield
    finally:
        for name, value in found.items():
            get, put = SWITCHES[name]
            if get() != value:
                put(value)


def as_recorded(provenance: Mapping[str, Any], deterministic: bool | None) -> None:
    """Set the switches to what `provenance` says; `deterministic` overrides the recorded choice of algorithms."""
    wanted = dict(provenance.get("torch") or {})
    if deterministic is not None:
        wanted["deterministic_algorithms"] = deterministic
        if deterministic:
            wanted |= {"cudnn_deterministic": True, "cudnn_benchmark": False}
    for name, (get, put) in SWITCHES.items():
        if name in wanted and wanted[name] is not None and get() != wanted[name]:
            put(wanted[name])


def check_cublas(provenance: Mapping[str, Any], deterministic: bool | None) -> None:
    """Deterministic cuBLAS needs a variable that is read when CUDA starts. Raises `UsageError` before the first step."""
    asked = (
        deterministic if deterministic is not None else (provenance.get("torch") or {}).get("deterministic_algorithms", False)
    )
    recorded = (provenance.get("environment") or {}).get("CUBLAS_WORKSPACE_CONFIG")
    if asked and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        raise UsageError(
            "a deterministic replay on CUDA needs CUBLAS_WORKSPACE_CONFIG before Python starts; run: "
            f"export CUBLAS_WORKSPACE_CONFIG={recorded or ':4096:8'}"
        )
