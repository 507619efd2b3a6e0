"""Copying an artifact folder so that it is there whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from trackbridge.backends.held import RemoteFile

MANIFEST = "manifest.json"
_PIECE = 1024 * 1024


def files(source: Path) -> Iterator[tuple[str, Path]]:
    """(relative path, file) of an artifact, which is a file or a folder; a manifest comes last, so that its presence says
    the rest is there. Raises `FileNotFoundError` if there is nothing."""
    if source.is_file():
        yield source.name, source
        return
    if not source.is_dir():
        raise FileNotFoundError(2, "no such artifact", str(source))
    found = sorted(path for path in source.rglob("*") if path.is_file())
    for path in sorted(found, key=lambda path: path.relative_to(source).as_posix() == MANIFEST):
        yield path.relative_to(source).as_posix(), path


def deliver(source: Path, target: Path, *, deadline: float) -> None:
    """Make the folder `target` a checked copy of `source`, replacing what was there in one rename.

    Raises `TimeoutError` when `deadline` (monotonic seconds) passes between two files; the next call goes on from there, and
    each call copies at least one.
    """
    wanted = dict(files(source))
    if _holds(target, wanted):
        return
    part = target.with_name(f".{target.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    copied = 0
    for name, path in wanted.items():
        if _same(path, part / name):
            continue
        if copied and time.monotonic() > deadline:
            raise TimeoutError(f"copying {source.name} takes longer than the time given; it goes on at the next try")
        _copy_checked(path, part / name)
        copied += 1
    for path in [path for path in part.rglob("*") if path.is_file() and path.relative_to(part).as_posix() not in wanted]:
        path.unlink()
    if target.exists():
        shutil.rmtree(target)
    part.rename(target)


def _holds(target: Path, wanted: dict[str, Path]) -> bool:
    if not target.is_dir():
        return False
    there = dict(files(target))
    return there.keys() == wanted.keys() and all(_same(path, there[name]) for name, path in wanted.items())


def plain(source: Path) -> list[RemoteFile]:
    """The regular files of a folder, to be brought elsewhere; links are left out."""
    return [
        RemoteFile(name, path.stat().st_size, partial(_copy_checked, path))
        for name, path in files(source)
        if not path.is_symlink()
    ]


def digest(path: Path) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as handle:
        while piece := handle.read(_PIECE):
            sha.update(piece)
    return sha.hexdigest()


def _same(path: Path, other: Path) -> bool:
    try:
        return path.stat().st_size == other.stat().st_size and digest(path) == digest(other)
    except OSError:
        return False


def _copy_checked(path: Path, target: Path) -> None:
    """Copy one file to disk and read the copy back: a full or failing disk is found now, not at the replay."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    sha = hashlib.sha256()
    with path.open("rb") as reader, temporary.open("wb") as writer:
        while piece := reader.read(_PIECE):
            sha.update(piece)
            writer.write(piece)
        writer.flush()
        os.fsync(writer.fileno())
    if digest(temporary) != sha.hexdigest():
        temporary.unlink()
        raise OSError(5, "the copy differs from the original", str(target))
    temporary.replace(target)
