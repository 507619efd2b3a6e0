"""Prebuilt views, one folder per tracker, as the tracker stores them. In the wheel this is ``trackbridge.dashboards``."""

from __future__ import annotations

from pathlib import Path


def path(name: str) -> Path:
    """The file `name`, such as ``wandb/spike-forensics.json``. Raises `FileNotFoundError` if there is no such view."""
    folder = Path(__file__).parent
    found = folder / name
    if not found.is_file():
        there = ", ".join(sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.json")))
        raise FileNotFoundError(f"no dashboard {name!r}; there: {there}")
    return found
