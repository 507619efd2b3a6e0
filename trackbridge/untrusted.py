"""Reading a folder that a stranger made: every check comes before the bytes it protects are read.

Nothing here runs code from a file, follows a link, or allocates more than a stated bound. Each refusal is a `CapsuleError`
in one line. Used for capsules, which travel through trackers and e-mail.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trackbridge.errors import CapsuleError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

MiB = 1024 * 1024
GiB = 1024 * MiB

JSON_BYTES = 16 * MiB
JSON_DEPTH = 48
PARQUET_BYTES = 256 * MiB
PARQUET_CELLS = 50_000_000
FILES = 100_000
TOTAL_BYTES = 16 * GiB

# What a capsule may contain. A pickle has no place here under any name.
SUFFIXES = frozenset({".json", ".parquet", ".safetensors", ".md", ".html", ".png"})

_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_STRING = re.compile(r'"[^"]*"?')
_BRACKETS = re.compile(r"[\[\]{}]")


def check_path(path: str) -> None:
    """Refuse a relative path that could leave its folder, hide, or mean different things on different systems."""
    parts = path.split("/")
    if len(path) > 512 or len(parts) > 8 or not all(map(is_name, parts)):
        raise CapsuleError(f"unsafe path in the manifest: {path[:120]!r}")
    suffix = "." + parts[-1].rpartition(".")[2]
    if suffix not in SUFFIXES:
        raise CapsuleError(f"{path[:120]!r} is of a kind that does not belong in a capsule ({', '.join(sorted(SUFFIXES))} do)")


def is_name(text: str) -> bool:
    """Whether `text` can be one part of such a path."""
    return _PART.fullmatch(text) is not None and not text.endswith(".")


def regular_file(path: Path) -> int:
    """The size of `path` in bytes. Refuses links, pipes, devices and what is absent, without opening it."""
    try:
        info = os.lstat(path)
    except OSError as error:
        raise CapsuleError(f"{path.name} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(info.st_mode):
        raise CapsuleError(f"{path.name} is not a regular file (a link, a pipe or a device)")
    return info.st_size


def listing(folder: Path) -> dict[str, int]:
    """Every regular file under `folder` as {relative path: bytes}. Hidden files are left out (file managers leave them),
    links of any kind are refused, hidden or not."""
    found: dict[str, int] = {}
    waiting = [folder]
    while waiting:
        current = waiting.pop()
        with os.scandir(current) as entries:
            for entry in entries:
                name = Path(entry.path).relative_to(folder).as_posix()
                if entry.is_symlink():
                    raise CapsuleError(f"{name!r} is a symbolic link; a capsule holds only plain files")
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                else:
                    found[name] = regular_file(Path(entry.path))
                if len(found) + len(waiting) > FILES:
                    raise CapsuleError(f"more than {FILES} files in {folder.name!r}")
    return found


def digest(path: Path) -> str:
    """SHA-256 of a file in lower-case hex, read in pieces."""
    sha = hashlib.sha256()
    with path.open("rb") as handle:
        while piece := handle.read(MiB):
            sha.update(piece)
    return sha.hexdigest()


def read_json(path: Path, *, limit: int = JSON_BYTES) -> Any:
    """Strict JSON from `path`: bounded in bytes and depth, no NaN or Infinity, no number that overflows to one."""
    size = regular_file(path)
    if size > limit:
        raise CapsuleError(f"{path.name} has {size} bytes, more than the {limit} a JSON file here may have")
    with path.open("rb") as handle:
        data = handle.read(limit + 1)
    try:
        return parse_json(data.decode("utf-8"))
    except ValueError as error:
        raise CapsuleError(f"{path.name} is not valid JSON: {str(error)[:200]}") from None


def parse_json(text: str) -> Any:
    """Strict JSON from a string. Raises ValueError."""
    depth = deepest = 0
    # Escapes go first, so that no pattern has to try again from inside a string that never ends: the time is that of reading.
    for bracket in _BRACKETS.findall(_STRING.sub("", text.replace("\\\\", "").replace('\\"', ""))):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    if deepest > JSON_DEPTH:
        raise ValueError(f"nested {deepest} deep, more than {JSON_DEPTH}")
    return json.loads(text, parse_constant=_no_constant, parse_float=_finite)


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number overflows to infinity")
    return value


def read_parquet(path: Path) -> pa.Table:
    """A flat table of numbers, booleans and strings (strings dictionary-encoded) from `path`.

    Only Snappy or no compression is read: Snappy expands at most about 21 times, so the size of the file bounds what its
    pages can unpack to. Rows are bounded by the footer before the first page is read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = regular_file(path)
    if size > PARQUET_BYTES:
        raise CapsuleError(f"{path.name} has {size} bytes, more than the {PARQUET_BYTES} a table here may have")
    try:
        with pq.ParquetFile(path, thrift_string_size_limit=size, thrift_container_size_limit=size) as probe:
            meta, schema = probe.metadata, probe.schema_arrow
            if meta.num_rows * max(1, meta.num_columns) > PARQUET_CELLS:
                raise CapsuleError(f"{path.name} claims {meta.num_rows} rows of {meta.num_columns} columns: too many")
            strings = []
            for field in schema:
                kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
                if pa.types.is_string(kind):
                    strings.append(field.name)
                elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
                    raise CapsuleError(f"{path.name}: column {field.name[:80]!r} has type {field.type}, which is not read")
            for group in range(meta.num_row_groups):
                for column in range(meta.num_columns):
                    codec = meta.row_group(group).column(column).compression
                    if codec not in ("SNAPPY", "UNCOMPRESSED"):
                        raise CapsuleError(f"{path.name} is compressed with {codec}; only Snappy is read")
        with pq.ParquetFile(path, read_dictionary=strings) as file:
            return file.read(use_threads=False).replace_schema_metadata(None)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CapsuleError(f"{path.name} is not a readable Parquet file: {str(error).splitlines()[0][:200]}") from None


def read_safetensors(path: Path, names: Mapping[str, str] | None = None) -> dict[str, np.ndarray]:
    """Arrays of a safetensors file: all, or those in `names` renamed as {name in the file: new name}."""
    from safetensors import SafetensorError, safe_open

    size = regular_file(path)
    try:
        with safe_open(path, framework="np") as file:
            if names is None:
                names = {name: name for name in file.keys()}  # noqa: SIM118 - not a mapping
            arrays = {new: file.get_tensor(name) for name, new in names.items()}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CapsuleError(f"{path.name} ({size} bytes) is not a readable safetensors file: {str(error)[:200]}") from None
    return arrays


def safetensors_header(path: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the arrays in a safetensors file, and its metadata."""
    from safetensors import SafetensorError, safe_open

    regular_file(path)
    try:
        with safe_open(path, framework="np") as file:
            return list(file.keys()), dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError) as error:
        raise CapsuleError(f"{path.name} is not a readable safetensors file: {str(error)[:200]}") from None
