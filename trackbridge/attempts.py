"""Starting or resuming a run: its id, its directory, its attempt number, agreed across ranks."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trackbridge import redact
from trackbridge.backends.base import BackendConfig
from trackbridge.config import TrackbridgeConfig
from trackbridge.errors import ConfigError
from trackbridge.history import runs
from trackbridge.liveness import trainer_alive
from trackbridge.ranks import Ranks
from trackbridge.records import RunInfo
from trackbridge.rundir import Attempt, RunDirectory, RunFile, dumps


def begin(
    settings: TrackbridgeConfig, ranks: Ranks, backends: Sequence[BackendConfig], config: Mapping[str, Any]
) -> tuple[RunDirectory, RunInfo]:
    """Create or find the run directory and write ``run.json`` (leader). Raises `ConfigError` with the fix."""
    agreed = _lead(settings, ranks, backends, config) if ranks.leader else None
    words = json.loads(ranks.agree(agreed) or "")
    directory = RunDirectory(Path(settings.dir) / words["id"])
    if not ranks.leader and not directory.file.exists():
        _create(directory)  # another host without a shared disk
    info = RunInfo(
        project=settings.project,
        run_id=words["id"],
        name=settings.name or words["id"],
        directory=str(directory.path),
        attempt=words["attempt"],
        start_step=words["start_step"],
        created=words["created"],
        tags=settings.tags,
        group=settings.group,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    return directory, info


def _lead(settings: TrackbridgeConfig, ranks: Ranks, backends: Sequence[BackendConfig], config: Mapping[str, Any]) -> str:
    run_id = settings.id or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    if not run_id.replace("-", "").replace("_", "").replace(".", "").isalnum() or run_id.startswith("."):
        raise ConfigError(f"run id {run_id!r} may only have letters, digits, '-', '_' and '.'")
    directory = RunDirectory(Path(settings.dir) / run_id)
    try:
        exists = directory.file.exists()
    except (OSError, ValueError) as error:  # a name too long, a NUL
        raise ConfigError(f"dir={str(settings.dir)[:80]!r} cannot be a folder: {_why(error)}; pass another") from None
    if exists and settings.resume == "never":
        raise ConfigError(f"run {run_id!r} exists in {directory.path}: pass resume='auto' to go on with it, or another id")
    if not exists and settings.resume == "must":
        raise ConfigError(f"there is no run {settings.id!r} in {Path(settings.dir).absolute()} to resume; pass its id and dir")
    _create(directory)
    file = directory.read() if exists else None
    summary = runs(directory.path)[0] if exists else None
    if file and summary and summary.status == "running" and trainer_alive(file.attempts[-1]):
        raise ConfigError(
            f"run {run_id!r} is being recorded by process {file.attempts[-1].pid} of this host: "
            "finish it there first, or pass another id"
        )
    now = time.time()
    attempt = Attempt(
        number=file.attempts[-1].number + 1 if file and file.attempts else 0,
        start_step=summary.step + 1 if summary else 0,
        time=now,
        pid=os.getpid(),
        host=socket.gethostname(),
        world_size=ranks.world_size,
    )
    given = {backend.kind for backend in backends}
    earlier = [backend for backend in (file.backends if file else ()) if backend.get("kind") not in given]  # still owed rows
    try:
        directory.write(
            RunFile(
                project=settings.project,
                run_id=run_id,
                name=settings.name or (file.name if file else run_id),
                created=file.created if file else now,
                tags=settings.tags,
                group=settings.group,
                attempts=[*(file.attempts if file else ()), attempt],
                backends=[*earlier, *(backend.model_dump(mode="json") for backend in backends)],
                settings=settings.model_dump(mode="json", exclude={"backend"}),
                config=json.loads(dumps(redact.tree(dict(config)))),
            )
        )
    except OSError as error:  # a full disk
        raise _cannot_write(directory, error) from None
    return json.dumps(
        {"id": run_id, "attempt": attempt.number, "start_step": attempt.start_step, "created": file.created if file else now}
    )


def _create(directory: RunDirectory) -> None:
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        probe = directory.path / f".write-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except (OSError, ValueError) as error:
        raise _cannot_write(directory, error) from None


def _cannot_write(directory: RunDirectory, error: Exception) -> ConfigError:
    return ConfigError(f"cannot write to {directory.path}: {_why(error)}; pass dir= a folder you can write to")


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
