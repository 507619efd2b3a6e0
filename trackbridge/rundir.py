"""The run directory: where things are in it, and ``run.json``, which says what the run is.

Everything that reads a run (history, seal, shipper, command line) starts here. ``run.json`` is replaced atomically and
holds no secret.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from trackbridge.errors import ReferenceNotFoundError, TrackbridgeError
from trackbridge.records import RunInfo


class Attempt(BaseModel):
    """One process life of a run. `pid` and `host` let a reader on the same host see whether the trainer is alive."""

    model_config = ConfigDict(extra="ignore")

    number: int
    start_step: int
    time: float
    pid: int
    host: str
    world_size: int = 1


class RunFile(BaseModel):
    """The content of ``run.json``. `config` is the user's own; `settings` ours; `backends` their configs as JSON."""

    model_config = ConfigDict(extra="ignore")

    format_version: int = 1
    project: str
    run_id: str
    name: str
    created: float
    tags: tuple[str, ...] = ()
    group: str | None = None
    attempts: list[Attempt] = []
    backends: list[dict[str, Any]] = []
    settings: dict[str, Any] = {}
    config: dict[str, Any] = {}


class RunDirectory:
    """Paths inside one run directory. Creates nothing by itself."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.file = self.path / "run.json"
        self.provenance = self.path / "provenance.json"
        self.capsules = self.path / "capsules"
        self.artifacts = self.path / "artifacts"
        self.views = self.path / "views"
        self.shipper = self.path / "shipper"

    def rank(self, rank: int) -> Path:
        return self.path / f"rank-{rank:04d}"

    def rows(self, rank: int = 0) -> Path:
        return self.rank(rank) / "rows"

    def contexts(self, rank: int = 0) -> Path:
        return self.rank(rank) / "contexts"

    def snapshots(self, rank: int = 0) -> Path:
        return self.rank(rank) / "snapshots"

    def pin(self, capsule: str, rank: int = 0) -> Path:
        """The receipt of a rank that it kept what the capsule (its folder's name) needs of it."""
        return self.rank(rank) / "pins" / f"{capsule}.json"

    def ranks(self) -> list[int]:
        """The ranks that have a folder here, ascending."""
        return sorted(int(p.name[5:]) for p in self.path.glob("rank-[0-9][0-9][0-9][0-9]*") if p.is_dir())

    def delivered(self) -> int:
        """The highest journal `seq` that any tracker's cursor says is delivered, -1 if there is none."""
        found = -1
        for cursor in self.shipper.glob("*.json"):
            try:
                found = max(found, int(json.loads(cursor.read_bytes())["seq"]))
            except (OSError, ValueError, KeyError, TypeError, OverflowError):
                continue  # a damaged cursor knows nothing
        return found

    def read(self) -> RunFile:
        """``run.json``. Raises `ReferenceNotFoundError` if this is no run directory, `TrackbridgeError` if it is damaged."""
        try:
            data = self.file.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise ReferenceNotFoundError(f"{self.path} is not a run directory: it has no run.json") from None
        try:
            file = RunFile.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise TrackbridgeError(f"{self.file} is damaged: {first['msg']}") from None
        if not file.attempts:
            raise TrackbridgeError(f"{self.file} is damaged: it tells of no attempt")
        return file

    def write(self, file: RunFile) -> None:
        write_atomic(self.file, dumps(file.model_dump(), indent=1).encode())

    def info(self, attempt: int = -1, *, rank: int = 0) -> RunInfo:
        """The run as a backend sees it; `attempt` indexes the attempts, the newest by default."""
        file = self.read()
        life = file.attempts[attempt]
        return RunInfo(
            project=file.project,
            run_id=file.run_id,
            name=file.name,
            directory=str(self.path),
            attempt=life.number,
            start_step=life.start_step,
            created=file.created,
            tags=file.tags,
            group=file.group,
            rank=rank,
            world_size=life.world_size,
        )


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` so that a reader or a crash sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # on a full disk half a file is in the way
        raise


def lock(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file or folder for this process, until it is closed. False if another has it, or locks are not to be had
    there."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except ImportError:  # pragma: no cover - no locks on this system: two processes at a time are on their own
        return True
    except OSError:
        return False
    return True


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """In `folder` one process at a time."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON that has a UTF-8 form: NaN and infinities become the strings "NaN", "Infinity", "-Infinity"; half a surrogate
    pair, as Python has it for odd bytes of file names, is spelled out; unknown objects become their repr."""
    return json.dumps(_plain(value), allow_nan=False, ensure_ascii=False, sort_keys=False, indent=indent)


def storable(text: str) -> str:
    """`text` as something that UTF-8 can hold: half a surrogate pair, which Python allows in a string, is spelled out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return storable(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        if value != value:
            return "NaN"
        return value if value not in (float("inf"), float("-inf")) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {storable(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return _plain(os.fspath(value))
    if hasattr(value, "item") and getattr(value, "size", 2) == 1:
        return _plain(value.item())
    return storable(repr(value))
