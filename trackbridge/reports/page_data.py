"""What the page's scripts draw: series, histograms, panels, marks, as one JSON value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trackbridge import names, panels
from trackbridge.names import LOCAL, is_wide
from trackbridge.records import Anomaly
from trackbridge.reports.decimate import Span
from trackbridge.reports.embed import SeriesBlock
from trackbridge.reports.embed_histograms import histogram_block

if TYPE_CHECKING:
    from trackbridge.lab import Try
    from trackbridge.reports.page import PageData, Spike

FIRST = ("loss", "gradient-norm")
"""Panels that the timeline draws large."""
AROUND = 16
"""Steps on both sides of an anomaly of which every point is kept."""
LONGEST_WINDOW = 256
MARKS = 200
OWN = "Also recorded"
RECORDED = "recorded"
CURVES = 8
STATISTICS: Mapping[str, tuple[str, bool]] = {
    "layer/<parameter>/grad_norm": ("gradient norm", False),
    "layer/<parameter>/weight_norm": ("weight norm", False),
    "act/<module>/kurtosis": ("activation kurtosis", True),
    "layer/<parameter>/update_ratio": ("relative update", False),
    "layer/<parameter>/grad_max": ("largest gradient element", False),
    "act/<module>/channel_kurtosis": ("kurtosis over channels", False),
    "act/<module>/sampled_logit_max": ("largest attention logit of some queries", True),
    "act/<module>/max": ("largest activation", False),
    "act/<module>/rms": ("activation RMS", False),
    "act/<module>/std": ("activation standard deviation", False),
    "act/<module>/mean": ("activation mean", True),
    "layer/<parameter>/exp_avg_norm": ("first moment", False),
    "layer/<parameter>/exp_avg_sq_norm": ("second moment", False),
    "layer/<parameter>/weight_max": ("largest weight", False),
    "layer/<parameter>/weight_rms": ("weight RMS", False),
    "layer/<parameter>/grad_mean": ("gradient mean", True),
    "layer/<parameter>/grad_zeros": ("share of gradient elements that are 0", True),
    "layer/<parameter>/dead_rows": ("dead rows", True),
    "layer/<parameter>/grad_nonfinite": ("non-finite gradient elements", True),
    "layer/<parameter>/weight_nonfinite": ("non-finite weights", True),
    "act/<module>/nonfinite": ("non-finite activations", True),
    "router/<module>/load_max": ("largest share of an expert", False),
    "router/<module>/load_min": ("smallest share of an expert", True),
    "router/<module>/load_entropy": ("evenness of the experts' load", True),
    "expert/<module>/load_share": ("share of an expert", True),
}
"""The catalogue's families of layers in the order in which the page offers them: what a reader calls the statistic, and whether
it may be zero or negative, so that "times as large" would say nothing."""


def payload(data: PageData) -> tuple[dict[str, Any], list[str]]:
    """(what ``assets/page`` reads, sentences on what was left out or thinned)."""
    anomalies = data.anomalies
    block = SeriesBlock(windows=[window(anomaly) for anomaly in anomalies[:MARKS]])
    seen = {name: line for name, line in data.series.items() if not name.removesuffix(LOCAL).endswith("/checksum")}
    series = block.pack(seen)
    curves = {f"outcome-{place}": c for place, spike in enumerate(data.spikes) if (c := _outcomes(spike, data, block))}
    if data.rank_curves:
        curves["ranks"] = [{"label": name, "line": block.add(*pair)} for name, pair in data.rank_curves.items()]
    onset = anomalies[0].onset if anomalies else None
    histograms = histogram_block(data.histograms, onset)
    found = {
        "block": series,
        "panels": chosen(data.series, anomalies[0].series if anomalies else None),
        "marks": marks(anomalies),
        "subject": subject(anomalies[0]) if anomalies else None,
        "statistics": _statistics(seen),
        "histograms": histograms,
        "curves": curves,
        "live": None if data.live is None else {**data.live, "complete": not block.left_out},
    }
    return found, _notes(block, histograms)


def window(anomaly: Anomaly) -> Span:
    """The steps around an anomaly of which no point is left out."""
    first, last = span(anomaly)
    return first - AROUND, min(last, first + LONGEST_WINDOW) + AROUND


def span(anomaly: Anomaly) -> Span:
    """From the onset to the last step before it was over, or to where it was detected."""
    if anomaly.recovered_after is None:
        return anomaly.onset, max(anomaly.onset, anomaly.step)
    return anomaly.onset, anomaly.onset + max(0, anomaly.recovered_after - 1)


def marks(anomalies: Sequence[Anomaly]) -> list[dict[str, Any]]:
    """Bands in the charts, ascending. "rank": the place among the anomalies given, of which the first stay when there are very
    many."""
    found = [
        {"from": span(a)[0], "to": span(a)[1], "label": f"{a.what[:24]} at {a.onset}", "rank": rank}
        for rank, a in enumerate(anomalies[:MARKS])
    ]
    return sorted(found, key=lambda mark: (mark["from"], mark["to"]))


def subject(anomaly: Anomaly) -> dict[str, Any]:
    """Of the anomaly that the page is about: its steps, and the layer that moved first, if one did."""
    first, last = span(anomaly)
    movers = [anomaly.first_mover, *anomaly.cascade]
    layer = next((mover[0].rpartition("/")[0] for mover in movers if mover and is_wide(mover[0])), None)
    return {"from": first, "to": last, "layer": layer}


def chosen(series: Iterable[str], subject_series: str | None) -> list[dict[str, Any]]:
    """The panels that the series fill, in the order of `panels.PANELS`; what no panel draws comes last, one chart each."""
    there = list(series)
    found = [
        _panel(panel.title, panels.SECTIONS[panel.section], members, panel.id in FIRST, panel)
        for panel in panels.PANELS
        if panel.series and panel.view == "line" and (members := panel.members(there))
    ]
    if subject_series in there and not any(each["first"] and subject_series in each["series"] for each in found):
        found.insert(0, _panel(subject_series, "", [subject_series], True))
    drawn = {name for each in found for name in each["series"]}
    own = [name for name in there if name not in drawn and not is_wide(name)]
    return found + [_panel(name, OWN, [name], False) for name in own]


def _panel(title: str, group: str, members: list[str], first: bool, panel: panels.Panel | None = None) -> dict[str, Any]:
    metric = names.describe(members[0]) if panel is None else None
    return {
        "title": title[:120],
        "group": group,
        "series": members,
        "first": first,
        "view": "line",
        "unit": panel.unit if panel else metric.unit if metric else "",
        "scale": panel.scale if panel else None,
        "marked": panel.marked if panel else True,
    }


def _statistics(series: Iterable[str]) -> dict[str, dict[str, Any]]:
    """{"layer/grad_norm": {"title", "signed"}} for the statistics of layers that are there, in the order of `STATISTICS`."""
    order = list(STATISTICS)
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    for name in filter(is_wide, series):
        key = f"{name.partition('/')[0]}/{name.rpartition('/')[2]}"
        if key not in found:
            metric = names.describe(name)
            known = metric.meaning if metric else key.partition("/")[2]  # a page never fails for want of a title
            title, signed = STATISTICS.get(metric.name if metric else "", (known, True))
            of_a_shard = ", this rank's shards" if name.endswith(names.LOCAL) else ""
            place = order.index(metric.name) if metric and metric.name in STATISTICS else len(order)
            found[key] = place, {"title": f"{title}{of_a_shard}", "signed": signed}
    return {key: told for key, (_, told) in sorted(found.items(), key=lambda item: item[1][0])}


def _outcomes(spike: Spike, data: PageData, block: SeriesBlock) -> list[dict[str, Any]]:
    """Loss curves of counterfactuals beside the recorded one."""
    report = spike.counterfactuals
    if report is None:
        return []
    curves: list[dict[str, Any]] = []
    if report.series in data.series:
        steps, values = data.series[report.series]
        inside = (steps >= report.restart_step) & (steps <= report.last_step)
        curves.append({"label": RECORDED, "recorded": True, "line": block.add(steps[inside], values[inside])})
    for one in [t for t in (report.rerun, *report.tries) if t.ran][:CURVES]:
        curves.append({"label": one.name[:80], "recorded": False, "line": _with_gaps(one, block)})
    return curves


def _with_gaps(one: Try, block: SeriesBlock) -> list[Any]:
    """The loss of a counterfactual; a step that was left out is a gap, and not marked as one that was not finite."""
    pairs = dict(zip(one.steps, one.losses, strict=False))
    losses = {**dict.fromkeys(one.skipped, math.nan), **pairs}
    steps = sorted(losses)
    line = block.add(np.array(steps, np.int64), np.array([losses[step] for step in steps], np.float64))
    line[2] = [[step, step] for step in steps if step in pairs and not math.isfinite(losses[step])]
    return line


def _notes(block: SeriesBlock, histograms: dict[str, Any] | None) -> list[str]:
    found = []
    if block.decimated:
        found.append(
            f"Long series (up to {block.decimated:,} points) are thinned: of each stretch the least and the greatest value are "
            "kept, every step around an anomaly, and where a series is not finite."
        )
    if block.decimated and block.thinned:
        found.append(f"Around {block.thinned:,} of the milder anomalies only the extremes are kept, of some series.")
    if block.left_out:
        found.append(f"{block.left_out:,} series are not on this page; the run directory has them.")
    if histograms and any(histograms["left_out"].values()):
        left = histograms["left_out"]
        found.append(f"{left['steps']:,} steps and {left['tensors']:,} tensors of the histograms are not on this page.")
    return found
