"""Where a run came from: code, packages, hardware, and the switches that change floating-point results.

`collect` is called once, at the first `watch`, on the user's thread, and takes a fraction of a second. Everything in it is
JSON. What cannot be found out is absent. Secrets are redacted; of the environment only variables that matter to numerics
are read.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import psutil

from trackbridge import redact
from trackbridge._version import __version__

DIFF_BYTES = 256 * 1024
_ENVIRONMENT = (
    "CUBLAS_", "CUDA_", "CUDNN_", "KMP_", "MKL_", "NCCL_", "NVIDIA_TF32_OVERRIDE", "OMP_", "OPENBLAS_", "PYTHONHASHSEED",
    "TORCH_", "TORCHINDUCTOR_", "TRITON_", "XLA_", "ACCELERATE_", "WORLD_SIZE",
)  # fmt: skip


def collect(directory: str | Path = ".") -> dict[str, Any]:
    """Facts about code, packages, hardware and flags. `directory` is where git is asked."""
    facts: dict[str, Any] = {
        "trackbridge": __version__,
        "python": platform.python_version(),
        "command": redact.text(shlex.join(sys.argv)),
        "packages": packages(),
        "hardware": hardware(),
        "environment": environment(),
    }
    sections = {"git": git(directory), "torch": torch_flags()}
    return facts | {name: found for name, found in sections.items() if found}


def git(directory: str | Path = ".") -> dict[str, Any]:
    """Commit, branch, remote and uncommitted diff (cut at `DIFF_BYTES`) of the repository around `directory`."""

    def ask(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(directory), *words],
                capture_output=True, timeout=5, check=True, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.decode("utf-8", "replace").strip()

    commit = ask("rev-parse", "HEAD")
    if commit is None:
        return {}
    facts: dict[str, Any] = {"commit": commit}
    branch, remote, diff = ask("branch", "--show-current"), ask("remote", "get-url", "origin"), ask("diff", "HEAD")
    if branch:
        facts["branch"] = branch
    if remote:
        facts["remote"] = redact.text(remote)
    if diff:
        facts["diff"] = redact.text(diff[:DIFF_BYTES])
        facts["diff_cut"] = len(diff) > DIFF_BYTES
    facts["dirty"] = bool(diff)
    return facts


def packages() -> dict[str, str]:
    """Installed distributions by name."""
    found: dict[str, str] = {}
    for distribution in distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(name.lower(), distribution.version)
    return dict(sorted(found.items()))


def hardware() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_count": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        facts["gpus"] = [
            {"name": p.name, "memory_bytes": p.total_memory, "capability": f"{p.major}.{p.minor}"}
            for p in (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
        ]
    return facts


def torch_flags() -> dict[str, Any]:
    """The switches of torch that change results or speed; empty when torch is not imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "num_threads": torch.get_num_threads(),
        "num_interop_threads": torch.get_num_interop_threads(),
        "default_dtype": str(torch.get_default_dtype()),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        "matmul_allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def environment() -> dict[str, str]:
    """Variables that matter to numerics, secrets excluded."""
    return {name: redact.text(value) for name, value in sorted(os.environ.items()) if name.startswith(_ENVIRONMENT)}


def differences(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """What differs between two provenances, as (dotted name, recorded, now), the most telling first.

    Only facts that can change a result are compared: not the command line, the diff's text or memory sizes.
    """
    rank = ("torch.", "hardware.gpus", "hardware.cpu", "environment.", "python", "git.commit", "git.dirty", "packages.")
    ignored = {"command", "git.diff", "git.diff_cut", "git.branch", "git.remote", "hardware.memory_bytes", "hardware.system"}
    a, b = dict(_flat(recorded)), dict(_flat(now))
    found = [
        (name, a.get(name), b.get(name)) for name in a.keys() | b.keys() if a.get(name) != b.get(name) and name not in ignored
    ]
    place = {prefix: index for index, prefix in enumerate(rank)}

    def order(item: tuple[str, Any, Any]) -> tuple[int, str]:
        return min((at for prefix, at in place.items() if item[0].startswith(prefix)), default=len(rank)), item[0]

    return sorted(found, key=order)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()
