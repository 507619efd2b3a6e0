"""torch, the GPU as it sees it, and whether a replay can be exact on it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from trackbridge.cli.common import size
from trackbridge.cli.doctor.finding import Finding
from trackbridge.cli.doctor.software import installed


def look() -> Iterator[Finding]:
    if installed("torch") is None:
        advice = "recording and replay need it: pip install 'trackbridge[torch]'; sync, pull and show do without"
        yield Finding("torch", "note", "not installed", advice)
        return
    import torch

    from trackbridge import provenance

    flags = provenance.torch_flags()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    where = f"CUDA {flags['cuda']}" if flags["cuda"] else "built for the CPU"
    yield Finding("torch", "ok", f"{flags['version']}, {where}, {flags['num_threads']} threads")
    if not gpus:
        yield _no_gpu(flags)
        yield Finding("determinism", "ok", "CPU kernels repeat bit for bit with the same number of threads")
        return
    for index in range(gpus):
        yield _gpu(index, torch.cuda.get_device_properties(index))
    yield _triton()
    yield _determinism(flags)


def _no_gpu(flags: Mapping[str, Any]) -> Finding:
    if shutil.which("nvidia-smi") is None:
        return Finding("GPU", "ok", f"none; CPU with {flags['cpu_capability']}")
    if not flags["cuda"]:
        advice = "this torch is a CPU build: install the one for your CUDA version"
        return Finding("GPU", "note", "the NVIDIA driver is here, but torch was built without CUDA", advice)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return Finding(
            "GPU", "note", f"CUDA_VISIBLE_DEVICES={hidden!r} leaves none", "unset it, or name a device that is there"
        )
    advice = "`nvidia-smi` says what the driver supports; a torch built for a newer CUDA than that sees no device"
    return Finding("GPU", "note", "the NVIDIA driver is here, but torch sees no device", advice)


def _gpu(index: int, device: Any) -> Finding:
    import torch

    from trackbridge.flops.peaks import peak_of

    free, total = torch.cuda.mem_get_info(index)
    found = f"{device.name}, capability {device.major}.{device.minor}, {size(free)} of {size(total)} free"
    if peak_of(device.name) is None:
        advice = "no perf/mfu without it: give the datasheet's dense rate as perf={'peak_flops': ...}"
        return Finding(f"GPU {index}", "note", f"{found}; its peak FLOP/s are not in the table", advice)
    return Finding(f"GPU {index}", "ok", found)


def _triton() -> Finding:
    found = installed("triton") or installed("pytorch-triton")
    if found:
        return Finding("triton", "ok", f"{found}: one pass over activations and gradients")
    return Finding(
        "triton", "note", "not installed: statistics on the GPU take torch's own, slower kernels", "pip install triton"
    )


def _determinism(flags: Mapping[str, Any]) -> Finding:
    if flags["deterministic_algorithms"] and "CUBLAS_WORKSPACE_CONFIG" in os.environ:
        return Finding("determinism", "ok", "deterministic algorithms, CUBLAS_WORKSPACE_CONFIG set")
    lacks = [] if "CUBLAS_WORKSPACE_CONFIG" in os.environ else ["set CUBLAS_WORKSPACE_CONFIG=:4096:8"]
    lacks.append("call torch.use_deterministic_algorithms(True) in the training script")
    advice = f"a replay is within noise, perhaps not exact: for bit-exact ones {' and '.join(lacks)}"
    return Finding("determinism", "note", "torch's defaults: some CUDA kernels do not repeat bit for bit", advice)
