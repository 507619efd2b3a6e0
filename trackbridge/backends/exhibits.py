"""What of an artifact is to be looked at, not only kept: its pictures, its tables, its post-mortem, its page.

A capsule, or any artifact, may hold ``pictures/*.png``, ``tables/*.json``, ``post-mortem.md`` and ``report.html``. Trackers
show them in views of their own, pictures under the same names for every capsule, so that a slider goes from one to the next.
The folder ``views`` of a run directory has the same form and shows the run as a whole.
"""

from __future__ import annotations

import json
from pathlib import Path

PICTURES, TABLES, POST_MORTEM, PAGE = "pictures", "tables", "post-mortem", "report.html"
MADE = "made.json"
_LARGEST = 4 << 20
_LARGEST_PAGE = 32 << 20
_PNG = b"\x89PNG\r\n\x1a\n"


def of(folder: Path) -> tuple[dict[str, str], dict[str, bytes]]:
    """(texts, pictures) of the artifact at `folder`: Markdown by name, and PNG files by names such as
    ``pictures/gradient-map``. What is too large to show is left out."""
    texts: dict[str, str] = {}
    written = folder / f"{POST_MORTEM}.md"
    if _showable(written):
        texts[POST_MORTEM] = written.read_text(encoding="utf-8", errors="replace")
    drawn = {path.stem: path.read_bytes() for path in sorted(folder.glob(f"{PICTURES}/*.png")) if _showable(path)}
    return texts, {f"{PICTURES}/{name}": data for name, data in drawn.items() if data.startswith(_PNG)}


def page(folder: Path) -> Path | None:
    """The HTML page of the artifact at `folder`, None without one."""
    found = folder / PAGE
    return found if _showable(found, _LARGEST_PAGE) else None


def tables(folder: Path) -> list[str]:
    """Relative paths of the tables of the artifact at `folder`: JSON with columns and data."""
    return [f"{TABLES}/{path.name}" for path in sorted(folder.glob(f"{TABLES}/*.json")) if _showable(path)]


def made(views: Path) -> int:
    """The journal's end when `RunDirectory.views` was made, -1 if it was not."""
    try:
        return int(json.loads((views / MADE).read_bytes())["seq"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def _showable(path: Path, most: int | None = None) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size <= (most or _LARGEST)
