"""The W&B client in a child process of the shipper, which can be killed.

The wandb package keeps its state in the process (environment, exit hooks, one service for all runs) and its calls can block
for minutes when a server is away; its service process outlives its owner for a quarter of an hour, holding on to stdout. So
it gets a process of its own: every call has a time limit that is kept by killing the child and all its children, and when
the shipper dies the child sees the end of the pipe and cleans up after itself.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from trackbridge import children
from trackbridge.errors import CapsuleError, ReferenceNotFoundError, TrackbridgeError, UsageError

FORGET = (
    "WANDB_SERVICE", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH", "WANDB_RUN_ID", "WANDB_RUN_GROUP", "WANDB_NAME", "WANDB_NOTES",
    "WANDB_TAGS", "WANDB_JOB_TYPE", "WANDB_RESUME", "WANDB_DISABLED", "WANDB_MODE",
)  # fmt: skip
"""What describes a run the user started himself; ours is another one."""

_GO = {"GOGC": "800", "GOMEMLIMIT": "400MiB"}
"""For W&B's service, a Go program that allocates much and keeps little: it collects garbage more rarely, which is a quarter of
its work, but not beyond this memory."""


class ClientError(Exception):
    """The client answered with an error. `kind` is the name of the exception's class in the child."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def reason(error: Exception) -> str:
    """What the client said, as one line that names the fix where the matter is the key. The client's own advice is left out:
    it is of several lines, differs from version to version, and partly to call functions of the SDK."""
    said = (str(error).splitlines() or [""])[0]
    about = said.lower().replace("api_key", "api key")
    if "no api key" in about or "api key not configured" in about:
        return "no API key is configured; run: wandb login, or set WANDB_API_KEY"
    return f"{said}; check the key with: wandb login" if "api key" in about or "401" in about else said


def ours(error: ClientError) -> TrackbridgeError:
    """The client's error as one of ours: a reference to nothing, a wrong one, a bad capsule, or else its text."""
    known = {kind.__name__: kind for kind in (ReferenceNotFoundError, UsageError, CapsuleError)}
    said = reason(error)
    return known.get(error.kind, TrackbridgeError)(said if said.startswith("W&B") else f"W&B: {said}")


class Process:
    """One child. `folder` is where everything it writes goes: run files, staging, cache, its log ``client.log``. `base_url`:
    the server that ``wandb.Api`` asks there (None: W&B's own rule)."""

    def __init__(self, folder: Path, base_url: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        _kill_leftover(folder / _PIDS)
        ours, theirs = socket.socketpair()
        with theirs:
            server = {} if base_url is None else {"WANDB_BASE_URL": base_url}
            self._child = self._start(theirs, {**_environment(folder), **server})
        self._pipe = Connection(ours.detach())

    def _start(self, theirs: socket.socket, env: dict[str, str]) -> subprocess.Popen[bytes]:
        """A child that serves calls on `theirs`."""
        with (self._folder / "client.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", f"from trackbridge.backends.wandb_client import serve; serve({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Run a method of `wandb_client.Client` in the child. Raises `ClientError` when that failed, and `TimeoutError` when
        there was no answer in time or the child died: then it has been killed."""
        try:
            self._pipe.send((method, arguments))
            if not self._pipe.poll(max(timeout, 0.0)):
                raise TimeoutError(f"W&B's client did not answer {method!r} within {timeout:.0f} s")
            error, value = self._pipe.recv()
        except (EOFError, OSError) as trouble:
            self.kill()
            if isinstance(trouble, TimeoutError):
                raise
            raise TimeoutError(f"W&B's client process ended during {method!r}; see {self._folder / 'client.log'}") from None
        if error:
            raise ClientError(*value)
        return value

    def remember(self, pids: list[int]) -> None:
        """Note processes that must not outlive us, for the case that we are killed with the child: see `_kill_leftover`."""
        born = {pid: _born(pid) for pid in [self._child.pid, *pids]}
        (self._folder / _PIDS).write_text(json.dumps({"host": socket.gethostname(), "born": born}))

    def kill(self) -> None:
        """End the child and all its children now. Safe to call twice."""
        try:
            family = psutil.Process(self._child.pid).children(recursive=True)
        except psutil.Error:
            family = []
        self._child.kill()
        self._child.wait()
        _kill(family)
        self._pipe.close()
        _kill_leftover(self._folder / _PIDS)


_PIDS = "client.pids"


def _environment(folder: Path) -> dict[str, str]:
    """What the child finds around it: ours, without what describes a run that the user started."""
    env = {name: value for name, value in children.environment().items() if name not in FORGET}
    # Offline artifacts are staged in the data directory; in the home folder they would be lost when the run moves.
    env |= {"WANDB_DATA_DIR": str(folder / "data"), "WANDB_CACHE_DIR": str(folder / "cache"), "WANDB_SILENT": "true"}
    env.setdefault("WANDB_ERROR_REPORTING", "false")
    env.setdefault("WANDB_HTTP_TIMEOUT", "10")
    for name, text in _GO.items():
        env.setdefault(name, text)
    return env


def _born(pid: int) -> float | None:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def _kill_leftover(note: Path) -> None:
    """Kill what an earlier child left behind: its service would go on writing to the run beside ours."""
    try:
        noted = json.loads(note.read_text())
    except (OSError, ValueError):
        return
    if noted["host"] == socket.gethostname():
        alive = [
            psutil.Process(int(pid)) for pid, born in noted["born"].items() if born is not None and _born(int(pid)) == born
        ]
        _kill(alive)
    note.unlink(missing_ok=True)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.Error:
            pass
    deadline = time.monotonic() + 5.0
    while any(map(_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.005)


def _alive(process: psutil.Process) -> bool:
    """A zombie is dead, however long its parent takes to notice."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
