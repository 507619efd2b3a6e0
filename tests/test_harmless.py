"""Text from anywhere is shown by Markdown as it is, wherever an anomaly becomes Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from markdown_it import MarkdownIt

from trackbridge.backends import words
from trackbridge.harmless import as_code, in_cell, in_markdown
from trackbridge.records import Anomaly, Hypothesis
from trackbridge.reports import contents
from trackbridge.reports.markup import inline
from trackbridge.testing import anomaly

READER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
HOSTILE = (
    "a\n\n## 7. Fake", "<img src=x onerror=f()>", "x`rm -rf`x", "**bold** *slanted*", "[here](http://x)", "![i](http://x)",
    "_all_ of __it__", "~~gone~~", "a|b", "&lt;b&gt;", "\\*", "# heading", "- item", "1. item", "> said", "a\u2028b",
    "\ud800", "\x1b[2J", "\u202eback", "<!-- -->",
)  # fmt: skip
USUAL = (
    "layer/blocks.0.attn_q/grad_norm", "train/loss", "rule: perf/mfu < 0.3", "samples [1, 2] (3)", "a--b, -0.5, 12.5",
    "C:\\x\\new",
)  # fmt: skip


def seen(source: str) -> tuple[set[str], str]:
    """The tags that `source` makes, and the text that is shown."""
    html = READER.render(source)
    found = set(re.findall(r"<(\w+|!--)", html))
    bare = re.sub(r"<[^>]*>", "", html)
    return found, bare.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&").rstrip("\n")


def shown(name: str) -> str:
    """What a reader sees of it: what would be obeyed as an escape."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name)


@pytest.mark.parametrize("name", [*HOSTILE, *USUAL])
def test_markdown_shows_a_name_as_it_is(name: str) -> None:
    assert seen(in_markdown(name)) == ({"p"}, shown(name))
    assert seen(f"so {in_markdown(name)}") == ({"p"}, f"so {shown(name)}")
    assert seen(as_code(name)) == ({"p", "code"}, shown(name))
    in_markdown(name).encode(), as_code(name).encode()
    one = name.replace("\n", "")
    tags, said = seen(f"| a | b |\n|---|---|\n| {in_cell(one)} | 1 |")
    assert tags <= {"table", "thead", "tbody", "tr", "th", "td"} and said.split("\n\n")[-1].strip().startswith(shown(one))
    assert inline(f"**{in_markdown(one)}** was") == inline("**x** was").replace("x", inline(in_markdown(one)))


def named(name: str) -> Anomaly:
    """It is called `name` wherever a name, a note or evidence goes."""
    found = anomaly(0, 120)
    hypothesis = Hypothesis(name, (name,), (name,), name, (name,))
    return found.updated(
        series=name, notes=(name, f"peak {name}"), first_mover=(name, 118), cascade=((name, 118),), terms=name, kind=name,
        hypotheses=(hypothesis, Hypothesis("other", (name,), (name,), name)),
    )  # fmt: skip


def _tags(said: Callable[[Anomaly], str], name: str) -> list[str]:
    return [tag for tag in re.findall(r"<(\w+|!--)", READER.render(said(named(name)))) if tag != "br"]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("said", [words.anomaly_markdown, lambda found: contents.anomalies([found])])
def test_no_name_changes_the_page_of_an_anomaly(said: Callable[[Anomaly], str], name: str) -> None:
    said(named(name)).encode()
    assert _tags(said, name) == _tags(said, "plain"), said(named(name))
