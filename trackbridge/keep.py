"""Our own copy of what the user logs: it stays until the tracker has it."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

from trackbridge.errors import UsageError
from trackbridge.records import Artifact
from trackbridge.rundir import RunDirectory

_ILLEGAL = re.compile(r"[^A-Za-z0-9._-]+")


def keep(path: Path, directory: RunDirectory, *, kind: str, name: str | None, step: int) -> Artifact:
    """Copy the file or folder `path` into the run directory. Raises `UsageError` if it cannot be read."""
    label = _ILLEGAL.sub("-", name or path.name).strip(".-") or "artifact"
    folder = directory.artifacts / f"{label}-{step}"
    number = 0
    while folder.exists():
        number += 1
        folder = directory.artifacts / f"{label}-{step}-{number}"
    try:
        if path.is_dir():
            shutil.copytree(path, folder)
        else:
            folder.mkdir(parents=True)
            shutil.copy2(path, folder / (_ILLEGAL.sub("-", path.name) or "file"))
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UsageError(f"cannot log artifact {path}: {error.strerror or error}") from None
    relative = folder.relative_to(directory.path).as_posix()
    return Artifact(-1, step, time.time(), folder.name, kind, relative)
