"""The trackers' own servers, on the loopback, with what the demo delivered."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ADDRESS = re.compile(r"http://(?:127\.0\.0\.1|localhost):(\d+)")


@contextmanager
def tensorboard(demo: Path) -> Iterator[str]:
    """TensorBoard on the demo's event files, through its Python reader, which keeps every point."""
    command = ["tensorboard.main", "--logdir", str(demo / "tensorboard"), "--port", "0", "--host", "127.0.0.1"]
    with _serving([*command, "--load_fast=false", "--samples_per_plugin", "scalars=1000000"], {}) as url:
        yield url


@contextmanager
def mlflow(demo: Path) -> Iterator[str]:
    """MLflow's server and interface on the demo's store."""
    store = f"sqlite:///{(demo / 'mlflow.db').absolute()}"
    command = [
        "mlflow",
        "server",
        "--backend-store-uri",
        store,
        "--workers",
        "1",
        "--host",
        "127.0.0.1",
        "--port",
        _free_port(),
    ]
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
    with _serving(command, quiet) as url:
        yield url


@contextmanager
def _serving(module: Sequence[str], variables: Mapping[str, str]) -> Iterator[str]:
    """The address that a server prints, once it does."""
    process = subprocess.Popen(
        [sys.executable, "-m", *module],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **variables},
        start_new_session=True,
    )
    assert process.stdout is not None
    told = []
    try:
        for line in process.stdout:
            told.append(line)
            found = ADDRESS.search(line)
            if found:
                yield f"http://127.0.0.1:{found[1]}"
                return
        raise AssertionError(f"{module[0]} ended before it served: {''.join(told)[-2000:]}")
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.stdout.close()
        process.wait(timeout=60)


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
