"""A scan as one HTML file: the curves as SVG, each anomaly a mark that says what it is. No script, no network."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

import numpy as np

from trackbridge.answers import how_far
from trackbridge.backends.words import anomaly_line
from trackbridge.records import Anomaly, FloatArray
from trackbridge.scan import Scan

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 1100, 300, 64, 24
_COLUMNS = 1000  # of the picture: each shows the least and the largest value of its stretch, so that no spike is lost
_CUT = 0.5  # share of the picture that the ordinary values get at least, however high a spike is

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
:root {{ color-scheme: light dark; --ink: #1c2430; --paper: #fff; --line: #2563a8; --rule: #c9d1db; --mark: #c2261f;
  --soft: #5b6675; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6eaf0; --paper: #14181e; --line: #7db3ec; --rule: #39424e;
  --mark: #ff7a70; --soft: #9aa5b4; }} }}
body {{ margin: 24px auto; max-width: 1140px; padding: 0 16px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums; }}
svg {{ width: 100%; height: auto; }} text {{ fill: var(--soft); font-size: 12px; }}
.curve {{ fill: none; stroke: var(--line); stroke-width: 1.2; }} .rule {{ stroke: var(--rule); }}
.mark {{ stroke: var(--mark); stroke-width: 1.5; }} .span {{ fill: var(--mark); opacity: .12; }}
table {{ border-collapse: collapse; }} td, th {{ padding: 2px 12px 2px 0; text-align: left; vertical-align: top; }}
th {{ color: var(--soft); font-weight: 500; }} .n {{ text-align: right; }}
</style></head><body>
<h1>{title}</h1><p>{summary}</p>{pictures}{table}
</body></html>
"""


def page(scan: Scan) -> str:
    """The page, as text."""
    pictures = _picture(scan, scan.loss, scan.columns["train/loss"])
    if scan.grad_norm is not None:
        pictures += _picture(scan, scan.grad_norm, scan.columns["grad/norm"])
    count = len(scan.anomalies)
    first, last = (int(scan.steps[0]), int(scan.steps[-1]))
    summary = f"{len(scan.steps):,} logged steps, {first:,} to {last:,}; {count} anomal{'y' if count == 1 else 'ies'}"
    return _PAGE.format(title=escape(scan.source), summary=summary, pictures=pictures, table=_table(scan.anomalies))


def _picture(scan: Scan, values: FloatArray, name: str) -> str:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return ""
    later = finite[len(finite) // 50 :]  # the first steps would flatten all else, and so would one huge spike
    low, high, usual = float(finite.min()), float(later.max()), float(np.percentile(later, 99.5))
    high = min(high, low + (usual - low) / _CUT) if usual > low else high
    high = high if high > low else low + 1.0
    first, last = float(scan.steps[0]), float(max(scan.steps[-1], scan.steps[0] + 1))

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT) * (step - first) / (last - first)

    def y(value: float) -> float:
        return (_HEIGHT - _BOTTOM) * (1 - (min(value, high) - low) / (high - low)) + 4

    parts = [
        f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{y(v) + 4:.1f}" text-anchor="end">{v:.4g}</text>'
        for v in np.linspace(low, high, 4)
    ]
    parts += [
        f'<text x="{x(s):.1f}" y="{_HEIGHT}" text-anchor="{anchor}">{s:,.0f}</text>'
        for s, anchor in ((first, "start"), ((first + last) / 2, "middle"), (last, "end"))
    ]
    parts += [_mark(a, x) for a in scan.anomalies]
    points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in thinned(scan.steps, values))
    parts.append(f'<polyline class="curve" points="{points}"/>')
    cut = f" (cut at {high:.4g})" if float(finite.max()) > high else ""
    return f'<h2>{escape(name)}{cut}</h2><svg viewBox="0 0 {_WIDTH} {_HEIGHT + 6}" role="img">{"".join(parts)}</svg>'


def _mark(anomaly: Anomaly, x: Callable[[float], float]) -> str:
    at = x(anomaly.onset)
    width = x(anomaly.onset + anomaly.recovered_after) - at if anomaly.recovered_after else 0.0
    says = f"<title>{escape(anomaly_line(anomaly))}</title>"
    top = _HEIGHT - _BOTTOM + 4
    return (
        f'<g>{says}<rect class="span" x="{at:.1f}" y="0" width="{max(width, 3):.1f}" height="{top}"/>'
        f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{top + 6}"/></g>'
    )


def thinned(steps: np.ndarray, values: FloatArray) -> list[tuple[float, float]]:
    """(step, value) of at most two points per column of the picture: the least and the largest finite value, in order."""
    known = np.isfinite(values)
    steps, values = steps[known].astype(float), values[known]
    if len(values) <= 2 * _COLUMNS:
        return list(zip(steps.tolist(), values.tolist(), strict=True))
    found = []
    for part in np.array_split(np.arange(len(values)), _COLUMNS):
        extremes = {int(part[np.argmin(values[part])]), int(part[np.argmax(values[part])])}
        found += [(float(steps[i]), float(values[i])) for i in sorted(extremes)]
    return found


def _table(anomalies: list[Anomaly]) -> str:
    if not anomalies:
        return ""
    head = "<tr><th>step<th>kind<th>series<th>value<th>expected<th>how far<th>over after</tr>"
    rows = [
        f'<tr><td class="n">{a.onset:,}<td>{escape(a.kind)}<td>{escape(a.series)}<td class="n">{a.value:.5g}'
        f'<td class="n">{a.expected:.5g}<td class="n">{escape(how_far(a))}'
        f"<td>{'not over' if a.recovered_after is None else f'{a.recovered_after} steps'}</tr>"
        for a in anomalies
    ]
    return f"<h2>Anomalies</h2><table>{head}{''.join(rows)}</table>"
