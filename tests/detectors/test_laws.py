"""The detector laws, as properties."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trackbridge.detectors.band import BandDetector
from trackbridge.detectors.base import Detector, Verdict
from trackbridge.detectors.reference import REFERENCES

NAMES = ("train/loss", "grad/norm", "layer/a.weight/grad_norm", "layer/b.weight/update_ratio", "act/block.0/kurtosis")
MAKERS = {"band": BandDetector, "olmo": REFERENCES["OLMo spike score, 6 sigma of 128"]}
VALUES = st.one_of(
    st.floats(-3, 10), st.floats(1e-6, 1e6), st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1e300, 2.0, 2.0, 2.0])
)


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """(values, present), each (steps, series): calm stretches with anything thrown in, and absent values."""
    steps = draw(st.integers(30, 90))
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    values = 2 + 0.05 * random.standard_normal((steps, len(NAMES)))
    for _ in range(draw(st.integers(0, 12))):
        values[draw(st.integers(0, steps - 1)), draw(st.integers(0, len(NAMES) - 1))] = draw(VALUES)
    present = random.random((steps, len(NAMES))) < draw(st.sampled_from([1.0, 0.7]))
    return values, present


def run(detector: Detector, values: np.ndarray, present: np.ndarray, start: int = 0) -> list[list[Verdict]]:
    return [list(detector.update(start + i, values[i], present[i])) for i in range(len(values))]


def key(names: tuple[str, ...], found: list[list[Verdict]]) -> list[set[tuple[object, ...]]]:
    return [{(names[v.index], v.kind, v.step, v.onset, repr(v.value), v.expected, v.score) for v in step} for step in found]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@settings(max_examples=20, deadline=None)
@given(data=tables())
def test_non_finite_is_always_a_verdict_and_never_enters_the_state(
    make: type[BandDetector], data: tuple[np.ndarray, np.ndarray]
) -> None:
    values, present = data
    detector = make()
    detector.bind(NAMES)
    for step, (row, here) in enumerate(zip(values, present, strict=True)):
        flagged = {v.index for v in detector.update(step, row, here) if v.kind == "nonfinite"}
        assert flagged == set(np.flatnonzero(here & ~np.isfinite(row)).tolist())
    assert np.isfinite(np.concatenate([np.ravel(v) for v in _numbers(detector.state_dict())])).all()


def _numbers(state: object) -> list[object]:
    if isinstance(state, dict):
        return [x for key, value in state.items() if key != "series" for x in _numbers(value)]
    return [np.array(state, float)]


@settings(max_examples=20, deadline=None)
@given(data=tables(), fill=st.sampled_from([math.nan, math.inf, -math.inf]), at=st.integers(0, 29))
def test_a_non_finite_value_changes_nothing_that_follows(data: tuple[np.ndarray, np.ndarray], fill: float, at: int) -> None:
    values, present = data
    without = present.copy()
    without[at] = False
    broken = values.copy()
    broken[at] = fill
    a, b = BandDetector(), BandDetector()
    a.bind(NAMES), b.bind(NAMES)
    run(a, values, without)
    run(b, broken, present)
    assert a.state_dict() == b.state_dict()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@settings(max_examples=12, deadline=None)
@given(data=tables(), order=st.permutations(range(len(NAMES))))
def test_permuting_series_permutes_verdicts(
    make: type[BandDetector], data: tuple[np.ndarray, np.ndarray], order: list[int]
) -> None:
    values, present = data
    a, b = make(), make()
    shuffled = tuple(NAMES[i] for i in order)
    a.bind(NAMES), b.bind(shuffled)
    assert key(NAMES, run(a, values, present)) == key(shuffled, run(b, values[:, order], present[:, order]))


def test_equal_series_are_judged_alike_wherever_they_stand() -> None:
    """With values from well above the bar to well below it."""
    names = tuple(f"train/loss/{i}" for i in range(5))
    sigmas = np.random.default_rng(0).standard_normal(1500)
    sigmas[250::25] = np.linspace(8, 3, 50)
    column = 2 + 0.05 * sigmas
    detector = BandDetector()
    detector.bind(names)
    steps = run(detector, np.repeat(column[:, None], 5, axis=1), np.ones((1500, 5), bool))
    assert all(len(step) in (0, 5) for step in steps) and 50 < sum(map(len, steps)) < 250
    state = detector.state_dict()
    assert all(len(set(state[name])) == 1 for name in BandDetector.FIRST)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@settings(max_examples=12, deadline=None)
@given(data=tables(), cut=st.integers(0, 30), order=st.permutations(range(len(NAMES))))
def test_resume_equals_no_resume(
    make: type[BandDetector], data: tuple[np.ndarray, np.ndarray], cut: int, order: list[int]
) -> None:
    values, present = data
    whole = make()
    whole.bind(NAMES)
    expected = key(NAMES, run(whole, values, present))[cut:]
    before = make()
    before.bind(NAMES)
    run(before, values[:cut], present[:cut])
    state = json.loads(json.dumps(before.state_dict(), allow_nan=False))
    same = make()
    same.load_state_dict(state)
    same.bind(NAMES)
    assert same.state_dict() == before.state_dict()  # nothing is lost, also what no verdict shows for long
    after = make()
    shuffled = tuple(NAMES[i] for i in order)
    after.load_state_dict(state)
    after.bind(shuffled)
    assert key(shuffled, run(after, values[cut:][:, order], present[cut:][:, order], cut)) == expected


@settings(max_examples=20, deadline=None)
@given(size=st.floats(0.5, 1e6), length=st.integers(1, 12), seed=st.integers(0, 1000))
def test_flagged_values_do_not_teach_the_baseline(size: float, length: int, seed: int) -> None:
    calm = 2 + 0.05 * np.random.default_rng(seed).standard_normal(300)
    detector = BandDetector()
    detector.bind(("train/loss",))
    here = np.ones(1, bool)
    for step, value in enumerate(calm):
        detector.update(step, np.array([value]), here)
    names = ("level", "calm", "scale", "steady", "tail", "slope")
    before = {name: getattr(detector, name).copy() for name in names}
    spike = 2 + size * (1 + 0.5 * (-1.0) ** np.arange(length))  # not settled, so not a new level
    for step, value in enumerate(spike, 300):
        assert [v.kind for v in detector.update(step, np.array([value]), here)] == ["spike"]
    assert all(getattr(detector, name) == before[name] for name in names)


@settings(max_examples=20, deadline=None)
@given(rise=st.floats(0.5, 1e4), seed=st.integers(0, 1000))
def test_a_lasting_new_level_is_one_shift_and_then_normal(rise: float, seed: int) -> None:
    curve = 2 + 0.05 * np.random.default_rng(seed).standard_normal(400)
    curve[200:] += rise
    detector = BandDetector()
    detector.bind(("train/loss",))
    kinds = [[v.kind for v in step] for step in run(detector, curve[:, None], np.ones((400, 1), bool))]
    flat = [kind for step in kinds[200:] for kind in step]
    assert flat.count("shift") == 1
    assert not any(kinds[200 + 3 * detector.settings.accept_after :])


def test_a_spike_does_not_raise_the_bar_for_the_next() -> None:
    curve = 2 + 0.05 * np.random.default_rng(4).standard_normal(600)
    curve[[300, 310]] = 1e6, 3.0
    scores = []
    for seen in (True, False):
        here = np.ones((600, 1), bool)
        here[300] = seen
        detector = BandDetector()
        detector.bind(("train/loss",))
        scores += [v.score for v in run(detector, curve[:, None], here)[310]]
    assert scores[0] == pytest.approx(scores[1], rel=0.01) and len(scores) == 2


def test_memory_is_constant_and_no_generator_is_drawn_from() -> None:
    detector = BandDetector()
    detector.bind(NAMES)
    values, present = np.full((4000, len(NAMES)), 2.0), np.ones((4000, len(NAMES)), bool)
    before = np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
    run(detector, values[:100], present[:100])
    size = len(json.dumps(detector.state_dict()))
    run(detector, values, present, 100)
    assert len(json.dumps(detector.state_dict())) < size + 200
    assert (np.random.get_state()[1] == before).all()  # type: ignore[index]


def test_duplicate_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unique"):
        BandDetector().bind(("train/loss", "train/loss"))


def test_array_strategies_cover_whole_tables() -> None:
    """A table of arbitrary floats must not raise or warn (warnings are errors here)."""

    @settings(max_examples=25, deadline=None)
    @given(hnp.arrays(np.float64, (40, len(NAMES)), elements=st.floats(allow_nan=True, allow_infinity=True, width=64)))
    def check(values: np.ndarray) -> None:
        detector = BandDetector()
        detector.bind(NAMES)
        run(detector, values, np.ones_like(values, bool))

    check()
