"""Text that may come from anywhere (names of series and layers, notes, errors, paths), for a reader that obeys some characters.

A terminal obeys control characters, Markdown its marks: what would be obeyed is shown instead.
"""

from __future__ import annotations

import re
from unicodedata import bidirectional, category

_TURNS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
# Marks that count wherever they stand; an underscore does not between letters, nor a bracket without an address behind it.
_MARKS = re.compile(r"[\\`*]|(?<![^\W_])_|_(?![^\W_])|(?<=\])[(\[]|~(?=~)")

_BLOCK = re.compile(r"^(\s*\d*)([#>]|[-+=.)](?=[-=\s]|$))")  # what would begin a heading, a list, a quotation, a line


def harmless(text: str) -> str:
    """`text` with what a terminal obeys instead of showing it (control characters, changes of direction) written as escapes."""
    return "".join(_escape(c) if c not in "\n\t" and _obeyed(c) else c for c in text)


def in_markdown(text: str) -> str:
    """`text` as one line of Markdown that shows it as it is: no mark of Markdown, no HTML, no line break, nothing that UTF-8
    lacks."""
    escaped = _BLOCK.sub(r"\1\\\2", _MARKS.sub(r"\\\g<0>", text))
    escaped = re.sub(r"&(?=#?\w+;)", "&amp;", escaped).replace("<", "&lt;")
    return "".join(_escape(c) if _obeyed(c) or category(c) in ("Zl", "Zp") else c for c in escaped)


def in_cell(text: str) -> str:
    """`text` for a cell of a Markdown table; its line breaks stay."""
    lines = (in_markdown(line) for line in text.replace("\r", "").split("\n"))
    return "<br>".join(lines).replace("|", "\\|")


def as_code(text: str) -> str:
    """`text` between backticks, more of them than it has in a row."""
    shown = "".join(_escape(c) if _obeyed(c) or category(c) in ("Zl", "Zp") else c for c in text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def _escape(character: str) -> str:
    return ascii(character)[1:-1]


def _obeyed(character: str) -> bool:
    return category(character) in ("Cc", "Cs") or bidirectional(character) in _TURNS
