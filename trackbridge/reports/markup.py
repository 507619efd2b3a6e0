"""Pieces of HTML. Everything that comes from a run is text: it is escaped here and nowhere else."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape, unescape
from typing import Any

import numpy as np

LONGEST = 400
"""Characters of one cell, name or sentence; what a run calls its things has no bound of its own."""
MOST_ROWS = 500
SHORT = 24  # characters of a cell that is not broken into lines
_HEADINGS = 2  # levels that a Markdown text's headings go down, to fit under the page's own


@dataclass(frozen=True)
class Table:
    """A titled table; cells are text or numbers. `layers`: the first column names layers, such as ``layer/head.weight``."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    layers: bool = False


def text(value: Any, longest: int = LONGEST) -> str:
    """`value` as escaped text, cut in the middle when it is very long."""
    words = number(value)
    if len(words) > longest:
        words = f"{words[: longest // 2]} … {words[-longest // 2 :]}"
    return escape(words)


def number(value: Any) -> str:
    """A number for a reader: four significant digits; text as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return str(value)
    if isinstance(value, (int, np.integer)):
        return str(value)
    if not math.isfinite(value):
        return {math.inf: "Inf", -math.inf: "-Inf"}.get(float(value), "NaN")
    return f"{value:.4g}"


def table(found: Table) -> str:
    """An HTML table with its title as caption; "" without rows."""
    if not found.rows:
        return ""
    numeric = [_numeric(row) for row in found.rows]
    right = [all(flags[place] for flags in numeric) for place in range(len(found.columns))]
    head = "".join(
        f'<th scope="col"{" class=n" if r else ""}>{text(c)}</th>' for c, r in zip(found.columns, right, strict=True)
    )
    rows = "".join(f"<tr>{_cells(row, right, found.layers)}</tr>" for row in found.rows[:MOST_ROWS])
    title = text(found.title)
    return (
        f'<div class=scroll tabindex=0 role=region aria-label="{title}"><table><caption>{title}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _numeric(row: Sequence[Any]) -> list[bool]:
    return [isinstance(cell, (int, float, np.number)) and not isinstance(cell, bool) for cell in row]


def _cells(row: Sequence[Any], right: Sequence[bool], layers: bool) -> str:
    pairs = enumerate(zip(row, right, strict=True))
    return "".join(_cell(cell, numeric, layers and place == 0) for place, (cell, numeric) in pairs)


def _cell(cell: Any, right: bool, layer: bool) -> str:
    if layer:
        return f'<td data-layer="{text(cell)}">{text(str(cell).partition("/")[2])}</td>'
    name = "n" if right else "s" if len(str(cell)) <= SHORT else ""
    return f"<td{f' class={name}' if name else ''}>{text(cell)}</td>"


def definitions(facts: Iterable[tuple[str, Any]]) -> str:
    """A list of terms with their values."""
    return f"<dl>{''.join(f'<dt>{text(key)}</dt><dd>{text(value)}</dd>' for key, value in facts)}</dl>"


def bullets(items: Sequence[str], name: str = "") -> str:
    """An unordered list, "" without items."""
    if not items:
        return ""
    return f"<ul{f' class={name}' if name else ''}>{''.join(f'<li>{text(item, 2000)}</li>' for item in items)}</ul>"


def inline(sentence: str) -> str:
    """Text with ``**bold**`` and `` `code` `` in it, as `trackbridge.answers` writes it. Words keep together what they mean."""
    parts = re.split(r"(\*\*(?:\\.|[^\\*])+\*\*|(?<!\\)`[^`]+`)", sentence[:2000])
    return "".join(_part(part) for part in parts)


def _part(part: str) -> str:
    if len(part) > 2 and part[0] == part[-1] == "`":
        return f"<code>{text(part[1:-1], 2000)}</code>"
    bold = len(part) > 4 and part.startswith("**")
    shown = text(unescape(re.sub(r"\\([\\`*_(\[~])", r"\1", part[2:-2] if bold else part)), 2000)
    return f"<b>{shown}</b>" if bold else shown


def markdown(source: str) -> str:
    """Markdown as HTML, without links, images or HTML of its own: a post-mortem that a stranger wrote stays text."""
    from markdown_it import MarkdownIt

    reader = MarkdownIt("commonmark", {"html": False}).enable("table").disable(["link", "image", "autolink", "reference"])
    tokens = reader.parse(source)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(6, int(token.tag[1]) + _HEADINGS)}"
    return str(reader.renderer.render(tokens, reader.options, {}))
