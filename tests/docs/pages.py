"""The pages, their fenced blocks and their links. What a block's first line says decides what becomes of it:

``# NAME.py``                          a file that the page has the reader write
``# not run by the tests: REASON``     left out, and listed with its reason by pytest

Every other ``python``, ``bash`` and ``console`` block is run (tests/docs/test_blocks.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = ("python", "bash", "console")
SHOWN = ("text", "toml", "yaml", "json", "ini")
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```[ ]*$", re.M | re.S)
_LEFT_OUT = re.compile(r"# not run by the tests: (?P<reason>\S.*)")
_LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    body: str

    @property
    def left_out(self) -> str | None:
        """Why it is not run; None if it is."""
        found = _LEFT_OUT.match(self.body)
        return found["reason"] if found else None

    @property
    def file(self) -> str | None:
        found = re.match(r"# ([\w/-]+\.(?:py|yaml|toml))\n", self.body)
        return found[1] if found else None


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        indent = len(match["indent"])
        body = "".join(line[indent:] for line in match["body"].splitlines(keepends=True))
        found.append(Block(name(page), text.count("\n", 0, match.start()) + 1, match["language"].strip(), body))
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks and inline code."""
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text(encoding="utf-8")))


def links(page: Path) -> list[str]:
    return [match["target"] for match in _LINK.finditer(prose(page))]
