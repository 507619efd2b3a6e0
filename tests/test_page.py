"""The local page: what it says, that thinning loses nothing that matters, that it is bounded, and that text stays text."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.capsules import make
from trackbridge import capsule as capsules
from trackbridge import histograms
from trackbridge.answers import amount
from trackbridge.lab import CounterfactualReport, ReplayReport, Trend, Try
from trackbridge.names import CATALOGUE, is_wide
from trackbridge.records import Anomaly, Histograms, Hypothesis
from trackbridge.reports import embed
from trackbridge.reports.decimate import decimate, nonfinite_spans
from trackbridge.reports.embed import SeriesBlock
from trackbridge.reports.embed_histograms import histogram_block
from trackbridge.reports.markup import Table, markdown
from trackbridge.reports.page import PageData, Spike, page
from trackbridge.reports.page_data import STATISTICS
from trackbridge.reports.spike import spike_page

SPIKE = Anomaly(
    id="a", kind="spike", step=161, onset=160, severity=0.9, series="train/loss", value=6.69, expected=2.44, score=41.2,
    first_mover=("grad/norm", 159), cascade=(("grad/norm", 159), ("train/loss", 160)), recovered_after=3, time=1.7e9,
    hypotheses=(Hypothesis("corrupt-batch", ("entropy 7.9 bits",), ("gone in 3 steps",), "skip-batch"),),
)  # fmt: skip


def made(**changes: Any) -> PageData:
    steps = np.arange(220)
    loss = np.full(220, 2.4)
    loss[160:163] = 6.7
    norm = np.full(220, 1.0)
    norm[160] = np.nan
    given: dict[str, Any] = {
        "title": "Spike at step 160",
        "series": {"train/loss": (steps, loss), "grad/norm": (steps, norm), "layer/head.weight/grad_norm": (steps, norm * 2)},
        "spikes": (Spike(SPIKE),),
        "actions": [("Run it again", "trackbridge replay . --build mine:build")],
        "tables": [Table("Batches", ("step", "ids"), [(160, "1, 2")])],
    }
    return PageData(**{**given, **changes})


def block(html: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert found
    return json.loads(found[1])


def unpack(packed: dict[str, Any], name: str) -> tuple[np.ndarray, np.ndarray, list[list[int]]]:
    """A series as the page's scripts decode it."""
    grid, values, bad = packed["series"][name]
    entry = packed["grids"][grid]
    if "all" in entry:
        steps = np.frombuffer(base64.b64decode(entry["all"]), "<f8")
    else:
        steps = entry["first"] + np.append(0, np.cumsum(np.frombuffer(base64.b64decode(entry["gaps"]), "<u2").astype(np.int64)))
    return steps, np.frombuffer(base64.b64decode(values), "<f4"), bad


def words(html: str) -> str:
    """What a reader without scripts sees."""
    shown = html[html.index("<body>") : html.index('<script type="application/json"')]
    return " ".join(re.sub(r"<[^>]+>", " ", shown).split())


def told(anomaly: Anomaly) -> str:
    return words(page(made(spikes=(Spike(anomaly),))))


# -- what it says


def test_the_five_questions_are_answered_in_order_and_without_scripts() -> None:
    first = words(page(made())).partition("Layers that changed most")[0]
    questions = ("What happened", "When", "How bad", "What moved first", "What to do now")
    places = [first.index(question) for question in questions]
    assert places == sorted(places)
    for said in ("6.69", "2.44", "From step 160 , seen at step 161", "after 3 steps", "41.2 sigma", "grad/norm at step 159"):
        assert said in first
    assert "trackbridge replay . --build mine:build" in first


def test_when_nothing_was_before_the_loss_the_page_says_so() -> None:
    first = (("act/body/rms", 160), ("train/loss", 160))
    tied = SPIKE.updated(first_mover=first[0], cascade=first)
    assert "Nothing before the loss itself (all at step 160)" in told(tied)
    own = SPIKE.updated(first_mover=first[1], cascade=(first[1], ("grad/norm", 161)))
    assert "Nothing before the loss itself (at step 160)" in told(own)


def test_layers_that_moved_together_are_one_link_of_the_cascade() -> None:
    many = tuple((f"layer/blocks.{k}.weight/grad_norm", 160) for k in range(20))
    said = told(SPIKE.updated(first_mover=("grad/norm", 159), cascade=(("grad/norm", 159), *many, ("train/loss", 161))))
    assert "grad_norm of 20 layers" in said and "blocks.11.weight and 8 more" in said
    assert said.index("step 159 grad/norm") < said.index("grad_norm of 20 layers") < said.index("step 161 train/loss")


def test_values_have_their_units() -> None:
    memory = SPIKE.updated(series="mem/allocated_bytes", kind="memory", value=42.9e9, expected=8.0e8)
    assert "mem/allocated_bytes was 42.9 GB where 800 MB was expected" in told(memory)
    assert "perf/step_s was 0.4 s where 0.2 s was expected" in told(
        SPIKE.updated(series="perf/step_s", value=0.4, expected=0.2)
    )
    assert [amount(value, "host/rss_bytes") for value in (0.0, 999.0, 1e20)] == ["0 B", "999 B", "1e+08 TB"]


def test_a_nan_is_not_finite_and_has_no_sigmas() -> None:
    said = told(SPIKE.updated(kind="nonfinite", value=float("nan"), score=float("inf")))
    assert "not finite" in said and "Not a finite number" in said and "sigma" not in said


def test_numbers_and_plurals_are_for_readers() -> None:
    said = told(SPIKE.updated(score=40.3065, recovered_after=1, notes=("peak 7.69 (40 sigma) at step 161",)))
    assert "40.3 sigma" in said and "after 1 step." in said and "Peak 7.69 (40 sigma) at step 161" in said
    assert "Not back to normal so far" in told(SPIKE.updated(recovered_after=None))


def test_unknown_is_shown_only_where_it_leads() -> None:
    known, unknown = Hypothesis("rare-token", ("new",), (), "skip-batch"), Hypothesis("unknown", ("thin",), (), "rerun")
    assert "unknown" not in told(SPIKE.updated(hypotheses=(known, unknown)))
    said = told(SPIKE.updated(hypotheses=(unknown, known)))
    assert "1. unknown" in said and "replay with the suspected batch left out (--try skip-batch)" in said


def test_a_page_without_anomalies_answers_them_too() -> None:
    said = words(page(made(spikes=(), status="finished")))
    for answer in ("Nothing left its usual band.", "Steps 0 to 219 were recorded. Finished.", "it began at 2.4"):
        assert answer in said


def test_tier_and_what_is_missing_are_on_it(tmp_path: Path) -> None:
    capsule = capsules.load(make(tmp_path / "spike-13", local=True))
    said = words(spike_page(capsule))
    assert f"Tier {capsule.tier}" in said
    bare = capsule.model_copy(update={"missing": ["parameter snapshot: none was kept"]})
    bare._path = capsule.path
    assert "parameter snapshot: none was kept" in words(spike_page(bare))


def test_replays_and_counterfactuals_are_ranked_and_lead_to_what_to_do(tmp_path: Path) -> None:
    def a_try(name: str, rank: int | None, outcome: Any, losses: tuple[float, ...] = (2.0, 2.1)) -> Try:
        return Try(name=name, what=f"{name} from step 12 on", outcome=outcome, rank=rank, steps=(12, 13), losses=losses)

    report = CounterfactualReport(
        run="r", anomaly_id="a", anomaly_step=13, onset=12, series="train/loss", restart_step=10, last_step=15, guilty=(12,),
        verdict="exact", trend=Trend(level=2, slope=0, sigma=0.1, first=10, last=11), rerun=a_try("rerun", None, "remains"),
        tries=(a_try("skip-batch", 1, "prevented"), a_try("clip=1.0", 2, "remains", (9.0, float("nan")))),
    )  # fmt: skip
    replay = ReplayReport(verdict="exact", reason="all equal", run="r", anomaly_step=13, restart_step=10, last_step=15)
    html = page(made(spikes=(Spike(SPIKE, replay=replay, counterfactuals=report),)))
    said = words(html)
    assert said.index("skip-batch") < said.index("clip=1.0") and "Replay of steps 10 to 15: exact" in said
    curves = block(html)["curves"]["outcome-0"]
    assert [curve["label"] for curve in curves] == ["recorded", "rerun", "skip-batch", "clip=1.0"]
    assert curves[-1]["line"][2] == [[13, 13]], "a step that was not finite is marked"


# -- what is drawn


def test_a_non_finite_value_is_a_gap_with_a_mark() -> None:
    steps, values, bad = unpack(block(page(made()))["block"], "grad/norm")
    assert np.isnan(values[steps == 160]) and bad == [[160, 160]]


def test_every_series_is_in_a_panel_and_the_subject_is_drawn_large() -> None:
    steps = np.arange(3)
    series = {name: (steps, np.ones(3)) for name in ("mine/accuracy", "train/loss", "perf/step_s", "layer/a/grad_norm")}
    panels = block(page(made(series=series)))["panels"]
    assert {name for panel in panels for name in panel["series"]} == set(series)
    odd = block(page(made(series=series, spikes=(Spike(SPIKE.updated(series="mine/accuracy")),))))["panels"]
    assert odd[0]["series"] == ["mine/accuracy"] and odd[0]["first"]


def test_anomalies_are_marked_from_onset_to_their_end() -> None:
    late = SPIKE.updated(id="b", onset=200, step=205, recovered_after=None)
    data = block(page(made(marked=(late,))))
    assert [(mark["from"], mark["to"]) for mark in data["marks"]] == [(160, 162), (200, 205)]
    assert [mark["rank"] for mark in data["marks"]] == [0, 1]
    assert data["subject"]["from"] == 160


def test_every_statistic_of_the_catalogue_has_a_name_for_readers() -> None:
    shown = {metric.name for metric in CATALOGUE if is_wide(metric.name)}
    assert set(STATISTICS) == shown - {"layer/<parameter>/checksum"}  # a number that says nothing but "equal"
    steps = np.arange(3)
    given = ("act/b/kurtosis", "layer/a/mine", "layer/a/grad_norm_local", "layer/a/grad_norm")
    found = block(page(made(series={name: (steps, np.ones(3)) for name in given})))["statistics"]
    assert list(found) == ["layer/grad_norm_local", "layer/grad_norm", "act/kurtosis", "layer/mine"]
    assert found["layer/grad_norm"] == {"title": "gradient norm", "signed": False} and found["act/kurtosis"]["signed"]
    assert found["layer/grad_norm_local"] == {"title": "gradient norm, this rank's shards", "signed": False}


def test_a_page_that_follows_knows_whether_it_has_every_series() -> None:
    steps = np.arange(3)
    for name, complete in (("mine/accuracy", True), ("x" * 500, False)):
        data = block(page(made(series={name: (steps, np.ones(3))}, live={"after": 7})))
        assert data["live"] == {"after": 7, "complete": complete}


# -- thinning


@st.composite
def recorded(draw: st.DrawFn) -> list[float]:
    """Values of a long series, a share of them not finite, with a few drawn ones of any kind among them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = rng.normal(size=draw(st.integers(1, 3000)))
    values[rng.random(len(values)) < draw(st.sampled_from([0.0, 0.01, 0.5]))] = np.nan
    odd = draw(st.lists(st.floats(width=32), max_size=min(20, len(values))))
    values[rng.choice(len(values), len(odd), replace=False)] = odd
    return [float(value) for value in values]


values_of_any_kind = recorded()


@given(values_of_any_kind, st.integers(4, 200), st.lists(st.tuples(st.integers(-50, 3000), st.integers(0, 60)), max_size=3))
def test_thinning_keeps_extremes_windows_and_says_non_finite(
    values: list[float], limit: int, places: list[tuple[int, int]]
) -> None:
    steps, given = np.arange(len(values)) * 3, np.array(values)
    windows = [(start, start + length) for start, length in places]
    kept_steps, kept = decimate(steps, given, limit, windows)
    assert np.array_equal(kept, given[kept_steps // 3], equal_nan=True)
    assert (np.diff(kept_steps) > 0).all()
    finite = given[np.isfinite(given)]
    if len(finite):
        assert kept[np.isfinite(kept)].max() == finite.max()
        assert kept[np.isfinite(kept)].min() == finite.min()
    assert np.isfinite(given).all() == np.isfinite(kept).all()
    for first, last in windows:
        inside = steps[(steps >= first) & (steps <= last)]
        assert np.isin(inside, kept_steps).all()
    most = sum(length + 1 for _, length in places)
    assert len(kept) <= max(limit, 3 * (limit // 2) + 2) + most


@given(values_of_any_kind, st.integers(2, 40))
def test_every_bucket_keeps_its_extremes(values: list[float], buckets: int) -> None:
    """Between any two kept points there is nothing above or below both ends of their bucket."""
    given = np.array(values)
    kept, _ = decimate(np.arange(len(given)), given, 2 * buckets)
    if len(given) > 2 * buckets:
        width = -(-len(given) // buckets)
        for start in range(0, len(given), width):
            part = given[start : start + width]
            mine = given[kept[(kept >= start) & (kept < start + width)]]
            if np.isfinite(part).any():
                assert np.nanmax(mine[np.isfinite(mine)]) == part[np.isfinite(part)].max()
                assert np.nanmin(mine[np.isfinite(mine)]) == part[np.isfinite(part)].min()


@given(values_of_any_kind, st.integers(2, 30))
def test_no_non_finite_step_is_outside_a_span(values: list[float], limit: int) -> None:
    given, steps = np.array(values), np.arange(len(values)) + 7
    spans = nonfinite_spans(steps, given, limit)
    covered = np.zeros(len(given), bool)
    for first, last in spans:
        covered |= (steps >= first) & (steps <= last)
    bad = ~np.isfinite(given)
    assert covered[bad].all() and len(spans) <= limit
    exact = nonfinite_spans(steps, given, 10**6)
    assert sum(last - first + 1 for first, last in exact) == bad.sum()
    if len(exact) <= limit:
        assert spans == exact


def test_what_a_page_carries_is_what_was_recorded() -> None:
    rng = np.random.default_rng(0)
    steps = np.cumsum(rng.integers(1, 5, 300))
    far = np.append(np.arange(10), [10**7, 2**40])
    series = {"a": (steps, rng.normal(size=300)), "b": (far, np.array([1e300, -1e300, np.inf, *np.ones(9)]))}
    packed = SeriesBlock().pack(series)
    for name, (given_steps, numbers) in series.items():
        got_steps, got, bad = unpack(packed, name)
        assert np.array_equal(got_steps, given_steps)
        assert np.allclose(got[np.isfinite(got)], np.clip(numbers[np.isfinite(numbers)], -3.4e38, 3.4e38), rtol=1e-3)
        assert (len(bad) > 0) == (not np.isfinite(numbers).all())


def test_equal_steps_are_carried_once() -> None:
    steps = np.arange(50)
    packed = SeriesBlock().pack({f"layer/{k}/grad_norm": (steps.copy(), np.ones(50)) for k in range(20)})
    assert len(packed["grids"]) == 1


def test_flickering_infinities_and_endless_names_are_bounded_too() -> None:
    steps = np.arange(20_000)
    flicker = np.where(steps % 2, 1.0, np.inf)
    found = SeriesBlock()
    packed = found.pack({"a": (steps, flicker), "layer/a/grad_norm": (steps, flicker), "x" * 10**6: (steps, flicker)})
    assert found.left_out == 1 and len(json.dumps(packed)) < 200_000
    for name in packed["series"]:
        _, _, bad = unpack(packed, name)
        assert bad[0][0] == 0 and bad[-1][1] == 19_998, "none is outside a span"


@pytest.mark.parametrize("count", [20, 2000])
def test_the_size_of_a_page_is_bounded(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed, "ALL_WIDE_POINTS", 60_000)  # the bound is what is tested, not its size
    steps = np.arange(3000)
    values = np.random.default_rng(1).normal(size=3000)
    series = {f"layer/{k}/grad_norm": (steps, values) for k in range(count)}
    windows = [(100 * k, 100 * k + 40) for k in range(25)]
    found = SeriesBlock(windows)
    packed = found.pack(series)
    points = sum(len(base64.b64decode(text)) // 4 for _, text, _ in packed["series"].values())
    assert points <= 2.6 * 60_000
    assert found.left_out == max(0, count - 60_000 // embed.LEAST_POINTS)
    assert found.decimated == 3000
    for name in packed["series"]:
        kept, _, _ = unpack(packed, name)
        assert np.isin(np.arange(0, 41), kept).all(), "the first window is whole in every series"


# -- histograms


def some_histograms(steps: int, tensors: int) -> list[Histograms]:
    rng = np.random.default_rng(2)
    names = tuple(f"layer/{k}/weight" for k in range(tensors))
    found = []
    for step in range(0, steps * 10, 10):
        counts = np.stack(
            [histograms.count(rng.normal(scale=1 + (k == 3 and step >= 50) * 9, size=400)) for k in range(tensors)]
        )
        found.append(Histograms(step, step, 0.0, 0, names, counts, np.ones(tensors)))
    return found


def counts_of(packed: dict[str, Any], place: int, name: str) -> np.ndarray:
    raw, at = np.frombuffer(base64.b64decode(packed["counts"][place]), "<u4"), 0
    for each in packed["names"]:
        first, length = int(raw[at]), int(raw[at + 1])
        if each == name:
            counts = np.zeros(packed["bins"], np.int64)
            counts[first : first + length] = raw[at + 2 : at + 2 + length]
            return counts
        at += 2 + length
    raise KeyError(name)


def test_histograms_arrive_to_the_count() -> None:
    records = some_histograms(6, 4)
    packed = histogram_block(records, 50)
    assert packed is not None and packed["steps"] == [0, 10, 20, 30, 40, 50]
    for place, record in enumerate(records):
        for name in record.names:
            assert np.array_equal(counts_of(packed, place, name), record.get(name))
    assert histogram_block([], None) is None


def test_too_many_histograms_lose_far_steps_then_still_tensors() -> None:
    records = some_histograms(40, 8)
    packed = histogram_block(records, 50, max_bytes=30_000)
    assert packed is not None
    assert {0, 40, 50, 390} <= set(packed["steps"]) and len(packed["names"]) < 8
    assert "layer/3/weight" in packed["names"], "the tensor that changed at the onset stays"
    assert sum(len(base64.b64decode(text)) for text in packed["counts"]) <= 1.6 * 30_000
    assert packed["left_out"]["steps"] + len(packed["steps"]) == 40


# -- safety


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"' onload=alert(3) "


class Elements(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def hostile() -> PageData:
    steps, values = np.arange(3), np.array([1.0, np.nan, np.inf])
    a = SPIKE.updated(
        kind=EVIL, series=EVIL, first_mover=(EVIL, 1), cascade=((EVIL, 1), (EVIL * 50, 2)), notes=(f"peak {EVIL}",),
        hypotheses=(Hypothesis(EVIL, (EVIL,), (EVIL,), EVIL),), value=float("nan"),
    )  # fmt: skip
    post_mortem = f"# {EVIL}\n\n[x](javascript:alert(1)) ![y](http://h/z)\n\n<script>alert(4)</script>"
    layers = Table(EVIL, (EVIL,), [(f"layer/{EVIL}",)], layers=True)
    return made(
        title=EVIL * 30,
        where=EVIL,
        status=EVIL,
        series={EVIL: (steps, values), f"layer/{EVIL}/{EVIL}": (steps, values)},
        spikes=(Spike(a, tables=[layers], post_mortem=post_mortem, tier=EVIL, missing=[EVIL]),),
        marked=(a,),
        actions=[(EVIL, EVIL)],
        facts={EVIL: EVIL * 1000},
        missing=[EVIL],
        tables=[Table(EVIL, (EVIL,), [(EVIL,)])],
    )


def test_hostile_text_stays_text() -> None:
    html = page(hostile())
    elements = Elements(html).found
    assert [tag for tag, _ in elements].count("script") == 2, "the data and the page's own"
    assert not {"img", "iframe", "a"} & {tag for tag, a in elements if tag != "a" or not (a["href"] or "").startswith("#")}
    assert not [name for _, attributes in elements for name in attributes if name.startswith("on")]
    assert len(html) < 400_000, "a very long string is cut"


def test_the_policy_lets_only_the_pages_own_scripts_and_styles_run() -> None:
    html = page(made())
    (policy,) = [a["content"] or "" for tag, a in Elements(html).found if a.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "connect-src" not in policy
    assert "base-uri 'none'" in policy and "form-action 'none'" in policy, "default-src does not cover them"
    assert not [a for _, a in Elements(html).found if "style" in a]
    assert "http://" not in re.sub(r"<script>.*?</script>", "", html, flags=re.S)


def test_markdown_has_tables_and_no_links() -> None:
    html = markdown("# Title\n\n| a | b |\n|---|---|\n| 1 | <b>2</b> |\n\n[x](http://example.org) ![y](http://example.org/z)\n")
    assert "<h3>Title</h3>" in html and "<td>1</td>" in html and "&lt;b&gt;" in html
    assert "<a" not in html and "<img" not in html


def test_a_capsules_page_holds_no_raw_batch(tmp_path: Path) -> None:
    html = spike_page(capsules.load(make(tmp_path / "spike-13")))
    assert "a secret sentence" not in html
