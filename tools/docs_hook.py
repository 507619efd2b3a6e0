"""Fills the generated parts of the pages when the documentation is built: a hook of MkDocs."""

from __future__ import annotations

from typing import Any

from trackbridge import reference

GENERATED = {"settings": reference.settings_markdown, "metrics": reference.metrics_markdown}


def on_page_markdown(markdown: str, **_: Any) -> str:
    for name, make in GENERATED.items():
        mark = f"<!-- generated: {name} -->"
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return markdown
