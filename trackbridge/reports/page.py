"""One self-contained HTML page about an anomaly: what happened, when, how bad, what moved first, what to do now, and the proof.

The page needs no network (its content policy forbids any), follows the reader's light or dark setting, and shows its first
screen without scripts. Charts are drawn by uPlot, which is part of the package (``assets/``, MIT licence).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbridge import names
from trackbridge.records import Anomaly, Hypothesis
from trackbridge.reports import wording

MAX_POINTS = 4000
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
Series = tuple[npt.NDArray[Any], npt.NDArray[np.float64]]


@dataclass(frozen=True)
class Table:
    """A titled table; cells are text or numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class PageData:
    """Everything a page shows, as plain data.

    `series` maps a name to (steps, values), two arrays of one length; the first are drawn large, in the given order.
    `anomalies` are the ones to mark, the page's subject first. `actions` are (what for, command or advice) pairs. `facts`
    is the small print: run, commit, hardware, tier of the capsule.
    """

    title: str
    series: Mapping[str, Series]
    anomalies: Sequence[Anomaly] = ()
    hypotheses: Sequence[Hypothesis] = ()
    actions: Sequence[tuple[str, str]] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    tables: Sequence[Table] = ()


def page(data: PageData) -> str:
    """The HTML document."""
    body = [
        _head(data),
        _summary(data),
        '<section><h2>Timeline</h2><div id="charts"><noscript>The charts need scripts.</noscript></div></section>',
        _movers(data.anomalies[0]) if data.anomalies else "",
        _hypotheses(data.hypotheses),
        *(_table(table) for table in data.tables),
        _all_anomalies(data.anomalies),
        _facts(data.facts),
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(data.title)}</title>",
            f"<style>{_asset('uPlot.min.css')}{_asset('page.css')}</style></head><body><main>",
            *body,
            "</main>",
            f'<script type="application/json" id="data">{_script_json(_charts(data))}</script>',
            f"<script>{_asset('uPlot.iife.min.js')}</script>",
            f"<script>{_asset('page.js')}</script>",
            "</body></html>",
        ]
    )


def decimate(steps: npt.NDArray[Any], values: npt.NDArray[np.float64], limit: int = MAX_POINTS) -> Series:
    """At most about `limit` of the points, every local extreme kept: each of `limit` / 2 buckets gives its least and its
    greatest finite value, and its first non-finite one if it has any."""
    if len(values) <= limit:
        return steps, values
    keep: set[int] = {0, len(values) - 1}
    for bucket in np.array_split(np.arange(len(values)), limit // 2):
        finite = np.isfinite(values[bucket])
        if finite.any():
            inside = bucket[finite]
            keep.add(int(inside[np.argmin(values[inside])]))
            keep.add(int(inside[np.argmax(values[inside])]))
        if not finite.all():
            keep.add(int(bucket[~finite][0]))
    index = np.array(sorted(keep))
    return steps[index], values[index]


def number(value: Any) -> str:
    """A number for a reader: four significant digits; text as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return str(value)
    if isinstance(value, (int, np.integer)):
        return str(value)
    if not math.isfinite(value):
        return {math.inf: "Inf", -math.inf: "-Inf"}.get(float(value), "NaN")
    return f"{value:.4g}"


def _head(data: PageData) -> str:
    first = data.anomalies[0] if data.anomalies else None
    badge = f'<span class="badge">{escape(first.kind)}</span>' if first else ""
    run = data.facts.get("run")
    return f"<header>{badge}<h1>{escape(data.title)}</h1><p class=run>{escape(str(run)) if run else ''}</p></header>"


def _summary(data: PageData) -> str:
    if not data.anomalies:
        return "<section class=summary><p>No anomaly was detected.</p></section>"
    a = data.anomalies[0]
    value = number(a.value) if math.isfinite(a.value) else f"not finite ({number(a.value)})"
    expected = f" where <b>{number(a.expected)}</b> was expected" if math.isfinite(a.expected) else ""
    what = f"<b>{escape(a.series)}</b> was <b>{value}</b>{expected}."
    when = f"From step <b>{a.onset}</b>, seen at step {a.step}"
    when += f" ({time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(a.time))})." if a.time else "."
    if a.recovered_after is not None:
        when += f" Back to normal after {wording.plural(a.recovered_after, 'step')}."
    else:
        when += " Not back to normal within this capsule."
    bad = f"<b>{a.score:.3g}</b> robust sigmas from what was expected." if math.isfinite(a.score) else "Not a finite number."
    peak = wording.peak(a)
    bad += f" {escape(peak.capitalize())}." if peak else ""
    moved = escape(wording.moved_first(a) or "nothing moved before it") + "."
    cells = [("What happened", what), ("When", when), ("How bad", bad), ("What moved first", moved)]
    grid = "".join(f"<div><h3>{title}</h3><p>{text}</p></div>" for title, text in cells)
    actions = "".join(
        f"<li>{escape(purpose)}<code>{escape(command)}</code></li>" if command else f"<li>{escape(purpose)}</li>"
        for purpose, command in data.actions
    )
    now = f"<div class=now><h3>What to do now</h3><ol>{actions}</ol></div>" if actions else ""
    return f"<section class=summary><div class=grid>{grid}</div>{now}</section>"


def _movers(anomaly: Anomaly) -> str:
    cascade = list(dict.fromkeys([*([anomaly.first_mover] if anomaly.first_mover else []), *anomaly.cascade]))
    if not cascade:
        return ""
    rows = [(series, step, _meaning(series)) for series, step in cascade]
    return _table(Table("What moved, in order", ("series", "step", "what it is"), rows))


def _meaning(series: str) -> str:
    metric = names.describe(series)
    return metric.meaning if metric else ""


def _hypotheses(hypotheses: Sequence[Hypothesis]) -> str:
    if not hypotheses:
        return ""
    items = []
    for rank, h in enumerate(wording.shown(hypotheses), 1):
        evidence = "".join(f'<li class="for">{escape(text)}</li>' for text in h.evidence_for)
        evidence += "".join(f'<li class="against">{escape(text)}</li>' for text in h.evidence_against)
        advice = f"<p class=advice>To test it: {escape(wording.how_to_test(h.intervention))}</p>" if h.intervention else ""
        items.append(f"<article><h3>{rank}. {escape(h.name)}</h3><ul>{evidence}</ul>{advice}</article>")
    return f"<section><h2>Hypotheses</h2><div class=hypotheses>{''.join(items)}</div></section>"


def _all_anomalies(anomalies: Sequence[Anomaly]) -> str:
    if len(anomalies) < 2:
        return ""
    rows = [(a.kind, a.series, a.onset, a.value, a.expected, wording.sigmas(a.score), wording.peak(a)) for a in anomalies]
    return _table(Table("All anomalies", ("kind", "series", "step", "value", "expected", "score", "peak"), rows))


def _facts(facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    items = "".join(f"<dt>{escape(str(key))}</dt><dd>{escape(number(value))}</dd>" for key, value in facts.items())
    return f"<section><h2>Facts</h2><dl>{items}</dl></section>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in table.rows)
    return (
        f"<section><h2>{escape(table.title)}</h2><div class=scroll><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _cell(cell: Any) -> str:
    numeric = isinstance(cell, (int, float, np.number)) and not isinstance(cell, bool)
    return f"<td{' class=n' if numeric else ''}>{escape(number(cell))}</td>"


def _charts(data: PageData) -> dict[str, Any]:
    """What ``page.js`` draws: finite values as numbers, a non-finite one as null and its step in `nonfinite`."""
    charts = []
    for name, series in data.series.items():
        steps, values = decimate(np.asarray(series[0]), np.asarray(series[1], dtype=np.float64))
        finite = np.isfinite(values)
        metric = names.describe(name)
        charts.append(
            {
                "name": name,
                "unit": metric.unit if metric else "",
                "steps": steps.tolist(),
                "values": [value if ok else None for value, ok in zip(values.tolist(), finite.tolist(), strict=True)],
                "nonfinite": steps[~finite].tolist(),
            }
        )
    marks = [
        {
            "from": a.onset,
            "to": a.onset + max(0, a.recovered_after - 1) if a.recovered_after is not None else a.step,
            "label": f"{a.kind} at {a.onset}",
        }
        for a in data.anomalies
    ]
    return {"charts": charts, "marks": marks}


def _script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (files("trackbridge.reports") / "assets" / name).read_text(encoding="utf-8")
