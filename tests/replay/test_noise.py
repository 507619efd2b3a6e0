"""Noise and faults told apart: by order of leaving, by size, by what has a size at all."""

from __future__ import annotations

import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import replays
from tests.replay import noise_kit
from trackbridge.capsule import SpikeCapsule
from trackbridge.replay import rerun, settings
from trackbridge.replay.compare import LOSS, Observation, family
from trackbridge.replay.engine import Replay
from trackbridge.replay.judge import Judgement, Ran, judge
from trackbridge.replay.noise import MOST, Noise, typical

ULP = 2.0**-23
LAYERS = [f"layer/{name}.weight/grad_norm" for name in "abcd"]
ROW = "embedding/hottest_row/embed"


def seen(loss: float, rates: float = 1e-3, **values: float) -> Observation:
    """One step: a loss of about 1, four layers of the same number, and what else is given."""
    every = dict.fromkeys(LAYERS, loss) | {name.replace("__", "/"): value for name, value in values.items()}
    return Observation(loss, 1e-7, every, frozenset(every), ({"train/lr": rates},))


def away(*ulps: float, start: int = 0) -> dict[int, Ran]:
    """A replay that is so many ULP from 1 at each step."""
    return {start + at: Ran(seen(1 + d * ULP), None, True) for at, d in enumerate(ulps)}


def recorded(history: dict[int, Ran]) -> dict[int, dict[str, float]]:
    return {step: {LOSS: ran.seen.loss, **ran.seen.rates[-1], **ran.seen.values} for step, ran in history.items()}


def judged(record: dict[int, Ran], *histories: dict[int, Ran]) -> Judgement:
    return judge(recorded(record), histories)


ONE_LEFT_LATER = (away(0, 0, 0, 0, 0), away(0, 0, 0, 0, 0), away(0, 0, 0, 30, 400))


def test_the_record_may_leave_first() -> None:
    """Where noise is rare, each of six healthy runs is as likely as the others to be the first that differs."""
    assert judged(away(0, 24, 300, 300, 300), *ONE_LEFT_LATER).verdict == "within-noise"


def test_but_not_by_more_than_a_replay_does_when_it_leaves() -> None:
    found = judged(away(0, 24_000, 24_000, 24_000, 24_000), *ONE_LEFT_LATER)
    assert found.verdict == "not-reproduced"
    assert "than the 3 replays differ from each other (at step 1: " in found.reason
    assert "is 2.4e+04 ULP from the nearest replay, and noise explains 1.98e+03" in found.reason


def test_nor_faster_afterwards() -> None:
    found = judged(away(0, 24, 300_000, 300_000, 300_000), *ONE_LEFT_LATER)
    assert found.verdict == "not-reproduced" and "at step 2: " in found.reason


def test_replays_that_agree_have_no_noise() -> None:
    found = judged(away(0, 1, 1), away(0, 0, 0), away(0, 0, 0))
    assert found.verdict == "not-reproduced" and not found.noisy
    assert "at step 1: while the replays agree with each other to the bit" in found.reason


def test_an_id_is_not_near_or_far() -> None:
    """Two rows of nearly the same gradient change places: the numbers say how nearly, the ids only that they did."""

    def run(loss: float, row: float) -> dict[int, Ran]:
        return {0: Ran(seen(loss, **{ROW.replace("/", "__"): row}), None, True)}

    calm = [run(1.0, 17.0), run(1.0 + 2 * ULP, 17.0), run(1.0 + 4 * ULP, 17.0)]
    found = judged(run(1.0 + 3 * ULP, 490.0), *calm)
    assert found.verdict == "within-noise" and found.noise_max_ulp == 4.0
    assert judged(run(1.0, 490.0), run(1.0, 17.0), run(1.0, 17.0)).verdict == "not-reproduced", "without noise, as any number"
    assert judged(run(1.0, 490.0), run(1.0, 17.0), run(1.0, 400.0)).verdict == "within-noise", "equal rows, any order"


def test_a_learning_rate_is_never_noise() -> None:
    histories = [away(0, d, d) for d in (1, 2, 3, 4, 5)]
    record = recorded(away(0, 3, 3))
    assert judge(record, histories).verdict == "within-noise"
    record[1]["train/lr"] = 1e-3 * (1 + 1e-6)
    found = judge(record, histories)
    assert found.verdict == "not-reproduced" and "train/lr is" in found.reason and "noise explains 0" in found.reason


def test_what_is_measured_seldom_counts_at_its_next_measurement() -> None:
    """Weights every other step: the record left a step before the replays did, and its weights are measured the sooner."""
    name = "layer/a.weight/weight_norm"

    def run(*ulps: float) -> dict[int, Ran]:
        steps = {}
        for at, d in enumerate(ulps):
            weights = {name.replace("/", "__"): 1 + 100 * d * ULP} if at % 2 == 0 else {}
            steps[at] = Ran(seen(1 + d * ULP, **weights), None, True)
        return steps

    record = run(0, 3, 3, 3, 3)
    assert judged(record, run(0, 0, 0, 0, 0), run(0, 0, 0, 3, 3)).verdict == "within-noise"


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20), st.integers(0, 30))
def test_the_typical_distance_is_between_none_and_the_largest(distances: list[float], equal: int) -> None:
    found = typical(distances, len(distances) + equal)
    assert -1e-6 <= found <= max(distances) * (1 + 1e-9) + 1e-6
    assert typical([float("inf")], 100) < 1.0, "one that is absent is not typical"


@given(st.lists(st.lists(st.sampled_from([0.0, 0.0, 1.0, 50.0, 1e4]), min_size=6, max_size=6), min_size=2, max_size=4))
def test_bounds_grow_with_steps_and_with_age(ways: list[list[float]]) -> None:
    noise = Noise([[ran.seen for ran in away(*way).values()] for way in ways])
    kind = family(LAYERS[0])
    table = [[noise.bounds(place, age).families[kind] for age in range(6)] for place in range(6)]
    for place in range(6):
        assert table[place] == sorted(table[place])
        assert [row[place] for row in table] == sorted(row[place] for row in table)
    assert table[5][0] == max(max(noise.at(place).get(LAYERS[0], 0.0) for place in range(6)), 0.0)


# -- the random state after a step


def left_otherwise(compiled: bool, loss: float = 1.0) -> dict[int, Ran]:
    return {step: Ran(seen(loss), None, step != 0, compiled and step == 0) for step in range(3)}


def test_a_step_that_compiled_is_said_to_have() -> None:
    plain, compiled = (judged(away(0, 0, 0), left_otherwise(how), left_otherwise(how)) for how in (False, True))
    assert plain.verdict == compiled.verdict == "not-reproduced"
    words = "every compared number of steps 0 to 2 is the recorded one, but step 0 left another random state behind than it did"
    assert plain.reason.startswith(words) and "compiler" not in plain.reason
    assert compiled.reason.startswith(words) and "torch's compiler was at work in that step" in compiled.reason


def test_noise_is_not_called_the_recorded_number() -> None:
    found = judged(away(0, 1, 1), left_otherwise(False), left_otherwise(False, 1 + 2 * ULP))
    assert found.verdict == "not-reproduced" and found.reason.startswith("the numbers of steps 0 to 2 differ from")


# -- a training with additions in random order


def test_replays_that_differ_are_followed_by_more(capsule: SpikeCapsule) -> None:
    ran: set[int] = set()
    report = rerun(capsule, noise_kit.build(1.0, random.Random(3)), on_step=lambda run, step, last: ran.add(run))
    assert report.runs == MOST == len(ran) and all(len(step.losses) == MOST for step in report.steps)


@pytest.mark.parametrize("chance", [1.0, 0.2])
def test_a_healthy_recording_and_a_flipped_bit(capsule: SpikeCapsule, chance: float) -> None:
    """Each replay in turn is taken for the record: one draw of the same noise. One exponent bit of a weight is none."""

    order = random.Random(5)

    def draw(seed: int | None = None) -> dict[int, Ran]:
        flip = partial(noise_kit.flip_a_bit, at=replays.BAD, generator=random.Random(seed), bits=range(27, 29))
        with settings.kept():
            return Replay(capsule, noise_kit.build(chance, order, None if seed is None else flip), 0, None, None).run(0)

    healthy = [draw() for _ in range(MOST + 1)]
    for number, record in enumerate(healthy):
        found = judged(record, *healthy[:number], *healthy[number + 1 :])
        assert found.verdict in ("within-noise", "exact"), found.reason
    for seed in range(3):
        assert judged(draw(seed), *healthy[:MOST]).verdict == "not-reproduced"
