"""Which capsules a tracker holds, which of them a reference means, and how one of them gets here.

A capsule is brought file by file, each checked against the digest in its manifest. What an interrupted try has brought is not
fetched again. Names and sizes are looked at before a byte is.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trackbridge import untrusted
from trackbridge.errors import CapsuleError, ReferenceNotFoundError, UsageError

MANIFEST = "manifest.json"
_LARGEST_MANIFEST = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class HeldCapsule:
    """A capsule in a tracker: `run` says which run it belongs to, `where` is the tracker's way to address it, `created` is
    seconds since the epoch."""

    step: int
    created: float
    run: str
    where: str


def read_manifest(path: Path, *, run: str, where: str) -> HeldCapsule | None:
    """What the manifest at `path` says, or None if it is not a capsule's. Trusts nothing: a capsule is verified on load."""
    try:
        if path.is_symlink() or path.stat().st_size > _LARGEST_MANIFEST:
            return None
        manifest = json.loads(path.read_bytes())
        if "format_version" not in manifest:
            return None
        return HeldCapsule(int(manifest["step"]), float(manifest.get("created") or 0.0), run, where)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def choose(held: Sequence[HeldCapsule], step: int | None, place: str) -> HeldCapsule:
    """The capsule of `step`, or the newest. Raises `ReferenceNotFoundError` saying what there is, `UsageError` when `step`
    means capsules of several runs."""
    if not held:
        raise ReferenceNotFoundError(f"{place} holds no spike capsule")
    matching = [capsule for capsule in held if step is None or capsule.step == step]
    if not matching:
        steps = sorted({capsule.step for capsule in held})
        there = ", ".join(map(str, steps[:20])) + (", ..." if len(steps) > 20 else "")
        raise ReferenceNotFoundError(f"{place} holds no capsule of step {step}; it has steps {there}")
    runs = sorted({capsule.run for capsule in matching})
    if step is not None and len(runs) > 1:
        raise UsageError(f"several runs in {place} have a capsule of step {step}; name one of them: {', '.join(runs[:8])}")
    return max(matching, key=lambda capsule: (capsule.created, capsule.step))


def place(source: Path, destination: Path) -> Path:
    """Move the folder `source` to `destination` in one rename. An older copy of a capsule there is replaced; anything else
    there is a `UsageError`."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    if destination.exists():
        if not (destination / MANIFEST).is_file() and any(destination.iterdir()):
            shutil.rmtree(source)
            raise UsageError(f"{destination} exists and is not a capsule; choose another destination")
        old = destination.with_name(f".{destination.name}.{uuid.uuid4().hex}")
        destination.rename(old)
        source.rename(destination)
        shutil.rmtree(old)
    else:
        source.rename(destination)
    return destination


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a capsule in a tracker: its path in the capsule, its size as the tracker tells it (None: it does not), and how
    to write it to a path here."""

    name: str
    bytes: int | None
    get: Callable[[Path], object]


def bring(files: Sequence[RemoteFile], destination: Path, what: str, *, max_bytes: int = untrusted.TOTAL_BYTES) -> Path:
    """Fetch `files` into the folder `destination`, which appears when all are there. Until then they are in the folder
    ``.<name>.part`` beside it, from where the next call goes on.

    Raises `CapsuleError` for a path that leaves the folder or a file of no known kind, for more than `max_bytes` in all, and
    for a file that is not what the manifest says; `what` names the capsule.
    """
    wanted = sorted((file for file in files if not _hidden(file.name)), key=lambda file: file.name != MANIFEST)
    for file in wanted:
        untrusted.check_path(file.name)
    if len(wanted) > untrusted.FILES or sum(file.bytes or 0 for file in wanted) > max_bytes:
        raise CapsuleError(
            f"{what} claims more than the limit of {max_bytes} bytes or {untrusted.FILES} files; max_bytes= raises it"
        )
    part = destination.with_name(f".{destination.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    listed: dict[str, tuple[str, int]] = {}
    total = 0
    for file in wanted:
        target = part / file.name
        if file.name == MANIFEST or not _is(target, listed.get(file.name)):
            target.parent.mkdir(parents=True, exist_ok=True)
            coming = target.with_name(f".{target.name}.coming")
            coming.unlink(missing_ok=True)
            file.get(coming)
            coming.replace(target)
        total += untrusted.regular_file(target)
        if total > max_bytes:
            raise CapsuleError(f"{what} has more than the limit of {max_bytes} bytes; max_bytes= raises it")
        if file.name == MANIFEST:
            listed = _listed(target)
        elif file.name in listed and not _is(target, listed[file.name]):
            target.unlink()
            raise CapsuleError(f"{file.name} of {what} does not match its digest: damaged or altered")
    names = {file.name for file in wanted}
    for path in [path for path in part.rglob("*") if path.is_file() and path.relative_to(part).as_posix() not in names]:
        path.unlink()  # of an older version of the capsule
    return place(part, destination)


def _hidden(name: str) -> bool:
    """File managers leave such files; nobody reads them."""
    return any(part.startswith(".") and part not in (".", "..") for part in name.split("/"))


def _listed(manifest: Path) -> dict[str, tuple[str, int]]:
    """{path: (SHA-256, bytes)} as the manifest says; empty when it says nothing that can be read: `load` will tell."""
    try:
        files = untrusted.read_json(manifest)["files"]
        return {str(name): (str(entry["sha256"]), int(entry["bytes"])) for name, entry in files.items()}
    except (CapsuleError, KeyError, TypeError, ValueError, AttributeError):
        return {}


def _is(path: Path, entry: tuple[str, int] | None) -> bool:
    """Whether the file at `path` is the one that the manifest lists."""
    return entry is not None and path.is_file() and path.stat().st_size == entry[1] and untrusted.digest(path) == entry[0]
