"""The page's words and tables, section by section: what is there without scripts. The scripts fill in the charts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from trackbridge import answers, names
from trackbridge.reports.markup import Table, bullets, definitions, inline, markdown, number, table, text

if TYPE_CHECKING:
    from trackbridge.records import Anomaly
    from trackbridge.reports.page import PageData, Spike

SECTIONS = {
    "timeline": "Timeline", "spike": "Anomaly", "layers": "Layers", "compare": "Compare steps", "outcomes": "Replays",
    "ranks": "Ranks", "record": "Record",
}  # fmt: skip
TIERS = {
    "explain": "the record can be read, but not run again",
    "re-feed": "the same batches can be fed again",
    "re-execute": "the bad steps can be run again from a snapshot",
}
_LONG = 14  # characters of a figure that is set smaller
_POST_MORTEM = 200_000
_LAYERS = 12  # of one link of the cascade, by name


def body(data: PageData, notes: Sequence[str]) -> Iterator[str]:
    """The elements of the document's body, without scripts. `notes` say what is thinned or left out."""
    yield head(data)
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title in SECTIONS.items())
    yield f'<nav aria-label="Sections"><div>{links}</div></nav><main>'
    yield questions(data)
    yield _section(
        "timeline",
        '<div id="charts"><noscript>The charts need scripts.</noscript></div><h3 id="changed">Layers that changed most</h3>'
        '<div id="heatmap"></div><h3>More charts</h3><div id="more"></div>',
    )
    yield spikes(data)
    yield _section("layers", '<div id="layer"></div>', "Layer by layer")
    yield _section("compare", '<div id="comparison"></div>', "Compare two steps")
    yield outcomes(data)
    yield ranks(data)
    yield record(data, notes)
    yield "</main><footer>Made by trackbridge. Everything this page shows is in this file; it asks for nothing else.</footer>"


def head(data: PageData) -> str:
    subject = data.anomalies[0] if data.anomalies else None
    badge = f"<span class=badge>{text(subject.what, 24)}</span>" if subject else '<span class="badge calm">calm</span>'
    tier = data.spikes[0].tier if data.spikes else ""
    chips = f'<span class=chip title="{text(TIERS.get(tier, ""))}">{text(tier)}</span>' if tier else ""
    if data.status:
        chips += f"<span class=chip>{text(data.status, 40)}</span>"
    if data.live:
        chips += '<span class=chip id="live" data-state="live">live</span><span class=off id="told" role=status></span>'
    where = f"<span>{text(data.where, 120)}</span>" if data.where else ""
    return f'<header id="head">{badge}<h1>{text(data.title, 200)}</h1><div class=where>{where}{chips}</div></header>'


def questions(data: PageData) -> str:
    """A newcomer's five questions, in their order, before anything else."""
    subject = data.anomalies[0] if data.anomalies else None
    told = _told(subject, len(data.anomalies)) if subject else _calm(data)
    cells = "".join(_cell(*each) for each in told)
    steps = "".join(f"<li>{text(purpose, 2000)}{_command(command)}</li>" for purpose, command in data.actions)
    now = f"<div class=now><h2 class=question>{answers.QUESTIONS[4]}</h2><ol>{steps}</ol></div>"
    calm = "" if subject else " class=calm"
    return f'<section id="answers"{calm} aria-label="The five questions"><div class=grid>{cells}</div>{now}</section>'


def _cell(question: str, figure: str, said: str) -> str:
    size = '"figure long"' if len(figure) > _LONG else "figure"
    return (
        f"<div><h2 class=question>{question}</h2><p class={size}>{text(figure, 80)}</p><p class=answer>{inline(said)}</p></div>"
    )


def _told(a: Anomaly, count: int) -> list[tuple[str, str, str]]:
    what, when, bad, first = answers.QUESTIONS[:4]
    moved = answers.moved_first(a)
    mover = a.first_mover[0] if a.first_mover else "–"
    more = f" The worst of {count:,} anomalies." if count > 1 else ""
    value = answers.amount(a.value, a.series) if math.isfinite(a.value) else number(a.value)
    return [
        (what, a.fault or value, answers.happened(a)),
        (when, f"step {a.onset:,}", answers.when(a)),
        (bad, answers.how_far(a), answers.how_bad(a) + more),
        (first, "nothing before it" if moved.startswith("nothing") else mover, answers.first(a)),
    ]


def _calm(data: PageData) -> list[tuple[str, str, str]]:
    what, when, bad, first = answers.QUESTIONS[:4]
    loss = next((data.series[name] for name in ("train/loss", *data.series) if name in data.series), None)
    if loss is None or not len(loss[0]):
        return [(what, "nothing", "No step was recorded."), (when, "–", ""), (bad, "–", ""), (first, "–", "")]
    name = "train/loss" if "train/loss" in data.series else next(iter(data.series))
    first_value, last_value = (float(loss[1][place]) for place in (0, -1))
    steps = f"Steps {int(loss[0][0]):,} to {int(loss[0][-1]):,} were recorded."
    return [
        (what, "no anomaly", "Nothing left its usual band."),
        (when, f"step {int(loss[0][-1]):,}", f"{steps} {data.status.capitalize()}." if data.status else steps),
        (bad, number(last_value), f"**{name}** is **{number(last_value)}**; it began at {number(first_value)}."),
        (first, "nothing", "No series left its band."),
    ]


def _command(command: str) -> str:
    return f"<pre data-copy>{text(command, 4000)}</pre>" if command else ""


def spikes(data: PageData) -> str:
    """The inspector of each anomaly that has one, and the list of all."""
    if not data.anomalies:
        return '<section id="spike" hidden></section>'
    choice = ""
    if len(data.spikes) > 1:
        options = "".join(f'<option value="{n}">{text(_name(s.anomaly), 120)}</option>' for n, s in enumerate(data.spikes))
        choice = (
            f'<div class=toolbar><label for="spike-choice">Anomaly</label><select id="spike-choice">{options}</select></div>'
        )
    inspected = "".join(f'<div data-spike="{n}">{_inspect(spike, n == 0)}</div>' for n, spike in enumerate(data.spikes))
    return _section("spike", choice + inspected + _all(data.anomalies), "What happened, in detail")


def _name(a: Anomaly) -> str:
    return f"{a.title} at step {a.onset}"


def _inspect(spike: Spike, first: bool) -> str:
    a = spike.anomaly
    moved = list(dict.fromkeys([*([a.first_mover] if a.first_mover else []), *a.cascade]))
    chain = "".join(_link(step, series) for step, series in _links(moved))
    cascade = f"<h3>The cascade: what left its band, in order</h3><ol class=cascade>{chain}</ol>" if chain else ""
    lacks = f"<h3>What this capsule lacks</h3>{bullets(spike.missing, 'missing')}" if spike.missing else ""
    tier = f"<p>Tier <b>{text(spike.tier)}</b>: {text(TIERS.get(spike.tier, ''))}.</p>" if spike.tier else ""
    written = ""
    if spike.post_mortem:
        opened = markdown(spike.post_mortem[:_POST_MORTEM])
        written = f"<details><summary>Post-mortem</summary><div class=post-mortem>{opened}</div></details>"
    tables = _tables(spike.tables)
    return f"{tier}{cascade}{_hypotheses(a)}{tables}{lacks}{written}"


def _links(moved: Sequence[tuple[str, int]]) -> Iterator[tuple[int, list[str]]]:
    """The cascade with the layers that left the band of one statistic at one step taken together."""

    def kind(each: tuple[str, int]) -> tuple[int, str]:
        series, step = each
        if not names.is_wide(series):
            return step, series
        return step, f"{series.partition('/')[0]}/{series.rpartition('/')[2]}"

    for (step, _), group in groupby(moved, key=kind):
        yield step, [series for series, _ in group]


def _link(step: int, series: Sequence[str]) -> str:
    metric = names.describe(series[0])
    meaning = text(metric.meaning) if metric else ""
    said = f"<b>{text(series[0])}</b> {meaning}"
    if len(series) > 1:
        statistic = series[0].rpartition("/")[2]
        layers = [name.partition("/")[2].rpartition("/")[0] for name in series[:_LAYERS]]
        more = f" and {len(series) - _LAYERS:,} more" if len(series) > _LAYERS else ""
        said = f"<b>{text(statistic)} of {len(series):,} layers</b> {meaning}: {text(', '.join(layers), 1000)}{more}"
    return f"<li><span class=step>step {step:,}</span><span>{said}</span></li>"


def _hypotheses(a: Anomaly) -> str:
    if not a.hypotheses:
        return ""
    items = []
    for rank, h in enumerate(answers.shown(a.hypotheses), 1):
        advice = f"<p class=advice>To test it: {text(answers.how_to_test(h.intervention), 2000)}.</p>" if h.intervention else ""
        speaks = bullets(h.evidence_for, "for") or "<p class=soft>Nothing speaks for it.</p>"
        against = bullets(h.evidence_against, "against") or "<p class=soft>Nothing speaks against it.</p>"
        items.append(f"<li><h4>{rank}. {text(h.name, 80)}</h4><div>{speaks}</div><div>{against}</div>{advice}</li>")
    return f"<h3>Hypotheses, with what speaks for (+) and against (−) each</h3><ol class=hypotheses>{''.join(items)}</ol>"


def _all(found: Sequence[Anomaly]) -> str:
    if len(found) < 2:
        return ""
    columns = ("onset", "kind", "series", "value", "expected", "how bad", "over after", "first hypothesis")
    rows = [
        (
            a.onset, a.what, a.series, "" if a.fault else a.value, "" if a.fault else a.expected, answers.how_far(a),
            "not so far" if a.recovered_after is None else answers.plural(a.recovered_after, "step"),
            a.hypotheses[0].name if a.hypotheses else "",
        )
        for a in sorted(found, key=lambda a: a.onset)[:500]
    ]  # fmt: skip
    return f"<div class=block>{table(Table(f'All {len(found):,} anomalies', columns, rows))}</div>"


def outcomes(data: PageData) -> str:
    """What replays and counterfactuals found."""
    parts = []
    for place, spike in enumerate(data.spikes):
        told = _replay(spike) + _counterfactuals(spike, place)
        if told and len(data.spikes) > 1:
            told = f"<h3>{text(_name(spike.anomaly), 120)}</h3>{told}"
        parts.append(told)
    return _section("outcomes", "".join(parts), "Replays and counterfactuals", hidden=not any(parts))


def _replay(spike: Spike) -> str:
    report = spike.replay
    if report is None:
        return ""
    rows = [
        (
            step.step,
            "" if step.loss_recorded is None else repr(step.loss_recorded),
            ", ".join(dict.fromkeys(map(repr, step.losses))),
            f"{step.compared - step.different} of {step.compared}",
        )
        for step in report.steps[:200]
    ]
    diverged = f"<p>First divergence: {text(report.first_divergence)}.</p>" if report.first_divergence else ""
    changed = Table(
        "What is different here", ("what", "recorded", "here"), [(d.name, d.recorded, d.now) for d in report.environment]
    )
    steps = Table("Step by step", ("step", "loss recorded", "loss replayed", "series equal"), rows)
    return (
        f"<p>Replay of steps {report.restart_step:,} to {report.last_step:,}: <b>{text(report.verdict)}</b>, "
        f"{text(report.reason)}.</p>{diverged}{bullets(report.missing)}{table(changed)}"
        f"<details><summary>Step by step</summary>{table(steps)}</details>"
    )


def _counterfactuals(spike: Spike, place: int) -> str:
    report = spike.counterfactuals
    if report is None:
        return ""
    columns = ("rank", "change", "outcome", "sigmas above the trend", "given up", "peak loss", "what was changed")
    rows = [
        (
            "–" if t.rank is None else t.rank,
            t.name,
            t.outcome,
            "" if t.distance is None else number(t.distance),
            f"{t.given_up:.0%}" if math.isfinite(t.given_up) else "",
            "" if t.peak is None else number(t.peak),
            t.reason or t.what,
        )
        for t in (*report.tries, report.rerun)
    ]
    caution = f"<p><b>{text(report.caution)}</b></p>" if report.caution else ""
    plot = f'<div data-curves="outcome-{place}" class=chart></div>'
    found = table(Table(f"What would have prevented the {report.series} anomaly at step {report.onset}", columns, rows))
    return f"{caution}{found}<h3>{text(report.series)} of each</h3>{plot}"


def ranks(data: PageData) -> str:
    """What each rank recorded, where more than one did."""
    tables = "".join(table(each) for each in data.ranks)
    plot = f'<h3>{text(data.rank_series)} by rank</h3><div data-curves="ranks" class=chart></div>' if data.rank_curves else ""
    return _section("ranks", tables + plot, hidden=not tables)


def record(data: PageData, notes: Sequence[str]) -> str:
    """The small print: what is missing, where it came from, how this page was made."""
    lacks = f"<h3>What is missing</h3>{bullets(data.missing, 'missing')}" if data.missing else ""
    made = f"<h3>On this page</h3>{bullets(notes)}" if notes else ""
    tables = _tables(data.tables)
    return _section("record", f"{definitions(data.facts.items())}{lacks}{tables}{made}")


def _tables(found: Sequence[Table]) -> str:
    return "".join(f"<div class=block>{table(each)}</div>" for each in found if each.rows)


def _section(name: str, inside: str, title: str = "", *, hidden: bool = False) -> str:
    heading = f"<h2 tabindex=-1>{title or SECTIONS[name]}</h2>"
    return f'<section id="{name}"{" hidden" if hidden else ""}>{heading}{inside}</section>'
