"""Real text that is on every machine: the source files of the Python standard library, as bytes.

Two data sources come out of it: `text` windows for training and for the held-out loss, and `binary` windows, which are what a
careless file filter lets into a corpus: compiled ``.pyc`` files and zlib-compressed ones, made here from the same sources.
Everything is a function of the Python installation and the arguments; nothing is random and nothing is downloaded.
"""

from __future__ import annotations

import py_compile
import sysconfig
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"})
HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class Corpus:
    """Bytes of whole files, joined: `train` and `held_out` are text and share no file; `binary` is the bad data.

    `files` counts the files behind each."""

    train: Bytes
    held_out: Bytes
    binary: Bytes
    files: dict[str, int]


def source_files(root: Path | None = None) -> list[Path]:
    """The ``.py`` files of the standard library, by the checksum of their name: a fixed order that mixes the packages."""
    top = root or Path(sysconfig.get_paths()["stdlib"])
    found = [path for path in top.rglob("*.py") if not LEFT_OUT.intersection(path.relative_to(top).parts)]
    return sorted(found, key=lambda path: (_checksum(path, top), path))


def read(root: Path | None = None, *, binary_bytes: int = 1 << 17) -> Corpus:
    """The corpus; `binary` holds at least `binary_bytes` bytes if the sources are that large."""
    top = root or Path(sysconfig.get_paths()["stdlib"])
    files = source_files(top)
    held_out = [path for path in files if _checksum(path, top) % HELD_OUT_ONE_IN == 0]
    train = [path for path in files if _checksum(path, top) % HELD_OUT_ONE_IN != 0]
    bad: list[bytes] = []
    for content in _binaries(train):
        bad.append(content)
        if sum(map(len, bad)) >= binary_bytes:
            break
    return Corpus(
        train=_join([path.read_bytes() for path in train]),
        held_out=_join([path.read_bytes() for path in held_out]),
        binary=_join(bad),
        files={"train": len(train), "held_out": len(held_out), "binary": len(bad)},
    )


def _checksum(path: Path, top: Path) -> int:
    return zlib.crc32(path.relative_to(top).as_posix().encode())


def _binaries(sources: list[Path]) -> Iterator[bytes]:
    """Each source file as the interpreter's cache and as an archive would hold it: ``.pyc``, zlib, ``.pyc``, ..."""
    with tempfile.TemporaryDirectory() as folder:
        for number, path in enumerate(sources):
            if number % 2:
                yield zlib.compress(path.read_bytes())
                continue
            target = Path(folder) / "module.pyc"
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH  # no time stamp: equal sources, equal bytes
            try:
                py_compile.compile(str(path), cfile=str(target), dfile=path.name, doraise=True, invalidation_mode=mode)
            except py_compile.PyCompileError:
                continue
            yield target.read_bytes()


def _join(contents: list[bytes]) -> Bytes:
    return np.frombuffer(b"\n".join(contents), dtype=np.uint8)
