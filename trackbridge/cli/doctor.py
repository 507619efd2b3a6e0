"""``trackbridge doctor``: is this machine ready to record, ship and replay? Each finding says what to do about it."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import typer

from trackbridge._version import __version__
from trackbridge.cli.common import Json, console, emit, plain, size

EXTRAS = {
    "wandb": "wandb",
    "mlflow": "mlflow",
    "tensorboard": "tensorboard",
    "prometheus-client": "prometheus",
    "wandb-workspaces": "reports",
}
LOW_DISK = 5e9
PATIENCE_S = 3.0


@dataclass(frozen=True)
class Finding:
    """`state`: "ok", "note" (works, but you should know) or "problem". `advice` is what to do, empty when nothing."""

    what: str
    state: Literal["ok", "note", "problem"]
    found: str
    advice: str = ""


def doctor(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="The folder of run folders.")] = Path("runs"),
    json: Json = False,
) -> None:
    """Look at this machine: versions, trackers, determinism, disk. Exit status 1 if there is a problem."""
    with console(stderr=True).status("Looking ..."):
        findings = [*_python(), *_torch(), *_extras(), *_trackers(), *_folder(folder)]
    if json:
        emit([asdict(finding) for finding in findings])
    else:
        show(findings)
    if any(finding.state == "problem" for finding in findings):
        raise typer.Exit(1)


def show(findings: list[Finding]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    signs = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[red]problem[/]"}
    for finding in findings:
        advice = f"\n[dim]{plain(finding.advice)}[/]" if finding.advice else ""
        table.add_row(signs[finding.state], finding.what, f"{plain(finding.found)}{advice}")
    console().print(table)


def _python() -> Iterator[Finding]:
    yield Finding("trackbridge", "ok", f"{__version__} with Python {platform.python_version()}, {sys.executable}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    advice = "" if cores > 1 else "trackers are served by one child process: with one core it shares the trainer's"
    yield Finding("cores", "ok" if cores > 1 else "note", str(cores), advice)


def _torch() -> Iterator[Finding]:
    if _version("torch") is None:
        advice = "recording and replay need it: pip install 'trackbridge[torch]'; sync, pull and show do without"
        yield Finding("torch", "note", "not installed", advice)
        return
    import torch

    from trackbridge import provenance

    flags = provenance.torch_flags()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    where = f"{gpus} CUDA device{'s' * (gpus != 1)}" if gpus else f"CPU ({flags['cpu_capability']})"
    yield Finding("torch", "ok", f"{flags['version']}, {where}, {flags['num_threads']} threads")
    if not gpus:
        yield Finding("determinism", "ok", "CPU kernels repeat bit for bit with the same number of threads")
    elif flags["deterministic_algorithms"] and "CUBLAS_WORKSPACE_CONFIG" in os.environ:
        yield Finding("determinism", "ok", "deterministic algorithms, CUBLAS_WORKSPACE_CONFIG set")
    else:
        advice = (
            "a replay is within noise, perhaps not exact: for bit-exact ones set CUBLAS_WORKSPACE_CONFIG=:4096:8 and call "
            "torch.use_deterministic_algorithms(True) in the training script"
        )
        yield Finding("determinism", "note", "torch's defaults: some CUDA kernels do not repeat bit for bit", advice)


def _extras() -> Iterator[Finding]:
    for package, extra in EXTRAS.items():
        found = _version(package)
        advice = "" if found else f"to use it: pip install 'trackbridge[{extra}]'"
        yield Finding(package, "ok" if found else "note", found or "not installed", advice)


def _trackers() -> Iterator[Finding]:
    if _version("mlflow"):
        yield _mlflow(os.environ.get("MLFLOW_TRACKING_URI", ""))
    if _version("wandb"):
        yield _wandb(os.environ.get("WANDB_MODE", ""), os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))


def _mlflow(uri: str) -> Finding:
    if not uri:
        return Finding("MLflow store", "ok", "MLFLOW_TRACKING_URI is not set: mlflow.db in the working directory")
    if not uri.startswith(("http://", "https://")):
        return Finding("MLflow store", "ok", uri)
    return _server("MLflow server", uri, "rows wait in the journal; start the server, or correct MLFLOW_TRACKING_URI")


def _wandb(mode: str, url: str) -> Finding:
    if mode in ("offline", "disabled"):
        return Finding("W&B", "ok", f"WANDB_MODE={mode}")
    return _server("W&B server", url, "rows wait in the journal until it answers; WANDB_MODE=offline writes files instead")


def _server(what: str, url: str, advice: str) -> Finding:
    """Whether something listens at `url`; sends nothing."""
    from trackbridge import redact

    parts = urlsplit(url)
    shown = redact.text(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), PATIENCE_S).close()
    except (OSError, ValueError) as error:
        return Finding(what, "note", f"{shown} does not answer: {getattr(error, 'strerror', None) or error}", advice)
    return Finding(what, "ok", f"{shown} answers")


def _folder(folder: Path) -> Iterator[Finding]:
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    runs = len(list(folder.glob("*/run.json")))
    if not os.access(there, os.W_OK):
        advice = "pass dir= a folder you can write to, or set TRACKBRIDGE_DIR"
        yield Finding("run folder", "problem", f"{there} cannot be written", advice)
    else:
        yield Finding("run folder", "ok", f"{folder.absolute()}: {runs} run{'s' * (runs != 1)}")
    free = shutil.disk_usage(there).free
    low = free < LOW_DISK
    advice = "journal, snapshots and capsules go here; free some space or lower recorder.context_bytes" if low else ""
    yield Finding("disk", "note" if low else "ok", f"{size(free)} free", advice)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
