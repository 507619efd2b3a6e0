"""One self-contained HTML page about a run or about one anomaly of it.

It opens from disk and asks for nothing: its content policy allows only the scripts and styles that are in it, by their digest.
It follows the reader's light or dark setting; its words and tables are there without scripts. What it needs lies in
``assets/``: uPlot (MIT licence) and the scripts and styles under ``assets/page/``.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from trackbridge.lab import CounterfactualReport, ReplayReport
from trackbridge.records import Anomaly, Histograms
from trackbridge.reports import page_data, page_sections
from trackbridge.reports.decimate import Series
from trackbridge.reports.markup import Table, text

SCRIPTS = (
    "util", "store", "view", "chart", "timeline", "heatmap", "histogram", "layers", "compare", "outcomes", "spikes", "live",
    "main",
)  # fmt: skip
STYLES = ("tokens", "layout", "parts")
_NOWHERE = "base-uri 'none'; form-action 'none'"  # what ``default-src`` does not cover


@dataclass(frozen=True)
class Spike:
    """An anomaly with what its inspector shows. `name` tells it from the others; `post_mortem` is Markdown; `tier` and
    `missing` are its capsule's, "" where there is none."""

    anomaly: Anomaly
    tables: Sequence[Table] = ()
    post_mortem: str = ""
    tier: str = ""
    missing: Sequence[str] = ()
    replay: ReplayReport | None = None
    counterfactuals: CounterfactualReport | None = None


@dataclass(frozen=True)
class PageData:
    """Everything a page shows, as plain data.

    `series` maps a name to (steps, values), two arrays of one length, steps ascending. `spikes`: the page's subject first;
    `marked` are anomalies that are only marked. `actions` are (what for, command or "") pairs, the first things to do first.
    `where` says whose run it is, `status` how it ended. `ranks` are tables, `rank_curves` {rank: series} of `rank_series`.
    `facts` and `tables` are the small print. `live`: {"after": seq} when a server answers for what comes later.
    """

    title: str
    series: Mapping[str, Series]
    where: str = ""
    status: str = ""
    spikes: Sequence[Spike] = ()
    marked: Sequence[Anomaly] = ()
    actions: Sequence[tuple[str, str]] = ()
    histograms: Sequence[Histograms] = ()
    ranks: Sequence[Table] = ()
    rank_curves: Mapping[str, Series] = field(default_factory=dict)
    rank_series: str = ""
    missing: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    live: Mapping[str, Any] | None = None

    @property
    def anomalies(self) -> list[Anomaly]:
        """All of them, the subject first."""
        return [*(spike.anomaly for spike in self.spikes), *self.marked]


def page(data: PageData) -> str:
    """The HTML document."""
    payload, notes = page_data.payload(data)
    style, script = _style(), _script()
    connect = "; connect-src 'self'" if data.live else ""
    policy = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; img-src data:{connect}; {_NOWHERE}"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{text(data.title, 200)}</title>",
            f"<style>{style}</style></head><body>",
            *page_sections.body(data, notes),
            f'<script type="application/json" id="data">{_script_json(payload)}</script>',
            f"<script>{script}</script>",
            "</body></html>",
        ]
    )


def _script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _digest(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


@cache
def _style() -> str:
    return "\n".join([_asset("uPlot.min.css"), *(_asset(f"page/{name}.css") for name in STYLES)])


@cache
def _script() -> str:
    own = "\n".join(_asset(f"page/{name}.js") for name in SCRIPTS)
    return f'{_asset("uPlot.iife.min.js")}\n(() => {{\n"use strict";\n{own}\n}})();\n'


def _asset(name: str) -> str:
    return (files("trackbridge.reports") / "assets" / name).read_text(encoding="utf-8")
