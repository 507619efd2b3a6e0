"""Our own copy of what the user logs: it stays until the tracker has it.

The caller waits for as little as can be. Small files are copied at once. A large one is hard-linked into the run directory,
which takes microseconds and holds it even if it is deleted or replaced; a thread then copies it. Where links are impossible
(another disk) the thread copies from where the file is. If it was written to *in place* meanwhile, that is seen and said.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import queue
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trackbridge.errors import UsageError
from trackbridge.records import Artifact
from trackbridge.rundir import RunDirectory, storable

logger = logging.getLogger("trackbridge")

_ILLEGAL = re.compile(r"[^A-Za-z0-9._-]+")
_LABEL = 96  # characters of an artifact's name, before its step: trackers take 128
_INCOMING = ".incoming"
_SMALL = 1 << 20  # bytes of a file that is copied on the caller's thread
_AT_ONCE = 4 << 20  # bytes that are, of one artifact
_LINKED = 10_000  # files of a folder that are copied or linked there


@dataclass(frozen=True, slots=True)
class _File:
    source: Path  # a copy or link of ours, or the user's own file
    target: Path
    size: int
    changed: int  # nanoseconds


class Keeper:
    """`keep` on the training thread, the copying on a thread of its own; `kept` is called there with each artifact."""

    def __init__(self, directory: RunDirectory, kept: Callable[[Artifact], None]) -> None:
        self._directory = directory
        self._kept = kept
        self._jobs: queue.SimpleQueue[tuple[Artifact, Path, list[_File]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._numbers = itertools.count()
        self._names: set[str] = set()
        self._open = 0  # jobs that are not done
        self._done = threading.Condition()

    def keep(self, path: Path, *, kind: str, name: str | None, step: int) -> None:
        """Take the file or folder `path` as it is now. Raises `UsageError` if it cannot be read."""
        label = _ILLEGAL.sub("-", name or path.name).strip(".-")[:_LABEL] or "artifact"
        folder = self._folder(f"{label}-{step}")
        aside = self._directory.artifacts / _INCOMING / f"{os.getpid()}-{next(self._numbers)}"
        try:
            files = list(self._take(path, folder, aside))
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise UsageError(f"cannot log artifact {path}: {error.strerror or error}") from None
        relative = folder.relative_to(self._directory.path).as_posix()
        artifact = Artifact(-1, step, time.time(), folder.name, kind, relative)
        with self._done:
            self._open += 1
        self._jobs.put((artifact, aside, files))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="trackbridge-keep", daemon=True)
            self._thread.start()

    def wait(self, timeout: float) -> bool:
        """Until everything taken so far is copied, at most `timeout` seconds. False if something is not."""
        with self._done:
            return self._done.wait_for(lambda: self._open == 0, timeout)

    def _folder(self, label: str) -> Path:
        for number in itertools.count():
            name = label if number == 0 else f"{label}-{number}"
            if name not in self._names and not (self._directory.artifacts / name).exists():
                self._names.add(name)
                return self._directory.artifacts / name
        raise AssertionError("unreachable")

    def _take(self, path: Path, folder: Path, aside: Path) -> Iterator[_File]:
        found = [path] if not path.is_dir() else (p for p in sorted(path.rglob("*")) if p.is_file())
        room = _AT_ONCE
        for number, file in enumerate(found):
            relative = storable(file.relative_to(path).as_posix()) if file != path else _ILLEGAL.sub("-", path.name) or "file"
            status = file.stat()  # of what a link leads to, as the copy will be
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is neither a file nor a folder")  # to open a pipe is to wait for ever
            with file.open("rb"):
                pass  # may it be read at all? Better asked here than found out by the thread
            source = file.absolute()
            if number < _LINKED:
                aside.mkdir(parents=True, exist_ok=True)
                try:
                    if status.st_size <= min(_SMALL, room):
                        room -= status.st_size
                        shutil.copy2(file, aside / str(number))
                    else:
                        os.link(file.resolve(), aside / str(number))
                    source = aside / str(number)
                except OSError:
                    pass  # another disk, or a full one: the thread will see
            yield _File(source, folder / relative, status.st_size, status.st_mtime_ns)

    # the thread

    def _work(self) -> None:
        while True:
            artifact, aside, files = self._jobs.get()
            folder = self._directory.path / artifact.path
            try:
                self._copy(artifact, folder, files)
                self._kept(artifact)
            except OSError as error:
                shutil.rmtree(folder, ignore_errors=True)
                logger.error("trackbridge: artifact %s is lost: %s", artifact.name, error.strerror or error)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
                with self._done:
                    self._open -= 1
                    self._done.notify_all()

    def _copy(self, artifact: Artifact, folder: Path, files: list[_File]) -> None:
        """Into a hidden folder first, so that nobody sees half an artifact."""
        part = folder.with_name(f".{folder.name}.part")
        part.mkdir(parents=True)
        for file in files:
            copy = part / file.target.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file.source, copy)
            with copy.open("rb") as handle:
                os.fsync(handle.fileno())
            status = file.source.stat()
            if (status.st_size, status.st_mtime_ns) != (file.size, file.changed):
                logger.warning("trackbridge: %s of artifact %s was written to while it was copied", copy.name, artifact.name)
        part.rename(folder)
