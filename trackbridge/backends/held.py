"""Which capsules a tracker holds, and which of them a reference means."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trackbridge.errors import ReferenceNotFoundError, UsageError

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


def staging(destination: Path) -> Path:
    """A fresh folder name beside `destination`, so that `place` is one rename."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    return destination.with_name(f".{destination.name}.{uuid.uuid4().hex}")
