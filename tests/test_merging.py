"""Merging over ranks without a second process: the arithmetic, the wire, and a leader that nobody keeps waiting."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from tests.probes.kit import Lab
from trackbridge import exchange
from trackbridge.exchange import Exchange
from trackbridge.merging import Merger, Sender
from trackbridge.names import describe
from trackbridge.probes import moments
from trackbridge.probes.merge import _merge_moments, merge_ranks
from trackbridge.probes.session import Reading
from trackbridge.records import MicroBatch, Row, StepContext
from trackbridge.rowmaker import RowMaker
from trackbridge.shares import Share, by_name


def share(tokens: float = 0.0, broken: Any = False, **values: float) -> Share:
    names = {name.replace("__", "/"): value for name, value in values.items()}
    return Share(3, b"12345678", tokens, broken, tuple(names), np.array(list(names.values())), np.zeros(0))


# -- by name


def test_f8_the_loss_is_weighted_by_tokens() -> None:
    found = by_name([share(1, train__loss=9.0), share(99, train__loss=1.0)])
    assert found["train/loss"] == pytest.approx(1.08)
    assert (found["ranks/loss_min"], found["ranks/loss_max"], found["ranks/loss_max_rank"]) == (1.0, 9.0, 0.0)
    assert by_name([share(0, train__loss=9.0), share(99, train__loss=1.0)])["train/loss"] == 5.0, "not all say how many"


def test_f8_a_loss_that_only_the_last_rank_has() -> None:
    found = by_name([share(10, train__lr=0.1), share(10, train__lr=0.1), share(10, train__loss=2.5, train__lr=0.1)])
    assert found["train/loss"] == 2.5 and found["train/lr"] == 0.1
    assert "ranks/loss_max" not in found, "nothing to compare it with"


def test_e7_rates_are_per_device() -> None:
    """Sixteen ranks, eight of which share each sequence: a sum would be sixteen times the truth."""
    found = by_name([share(100, perf__mfu=0.4 + 0.01 * (rank % 2), perf__tokens_per_s=1000.0) for rank in range(16)])
    assert found["perf/mfu"] == pytest.approx(0.405) and found["perf/tokens_per_s"] == 1000.0


def test_one_ranks_nan_is_seen_and_named() -> None:
    found = by_name([share(1, train__loss=2.0), share(1, broken=True, train__loss=math.nan), share(1, train__loss=3.0)])
    assert math.isnan(found["train/loss"]) and math.isnan(found["ranks/loss_max"]) and found["ranks/loss_max_rank"] == 1.0
    assert (found["ranks/nonfinite"], found["ranks/nonfinite_rank"], found["ranks/loss_min"]) == (1.0, 1.0, 2.0)
    assert by_name([share(train__loss=1.0)] * 2)["ranks/nonfinite"] == 0.0


def test_a_straggler_is_named_though_all_steps_take_the_same_time() -> None:
    slow = share(perf__step_s=1.0, perf__backward_s=0.2, perf__optimizer_s=0.1)
    waiting = share(perf__step_s=1.0, perf__backward_s=0.7, perf__optimizer_s=0.1)
    found = by_name([waiting, slow, waiting])
    assert found["ranks/slowest"] == 1.0 and found["ranks/busy_s_max"] == pytest.approx(0.7) and found["perf/step_s"] == 1.0
    assert by_name([share(perf__step_s=1.0), share(perf__step_s=3.0)])["ranks/slowest"] == 1.0


def test_the_worst_sample_is_of_one_rank_and_losses_of_data_are_added() -> None:
    lost = {"trackbridge/rows_dropped": 2.0, "mem/allocated_bytes": 5.0}
    one = share(train__sample_loss_max=3.0, train__sample_loss_argmax=7.0, **lost)
    other = share(train__sample_loss_max=8.0, train__sample_loss_argmax=1.0, trackbridge__rows_dropped=2.0)
    found = by_name([one, other])
    assert (found["train/sample_loss_max"], found["train/sample_loss_argmax"]) == (8.0, 1.0)
    assert found["trackbridge/rows_dropped"] == 4.0 and found["mem/allocated_bytes"] == 5.0


def test_every_series_of_ours_is_described() -> None:
    found = by_name([share(broken=True, train__loss=1.0, perf__step_s=1.0)] * 2)
    assert all(describe(name) is not None for name in (*found, "trackbridge/rows_unmerged"))


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 10**9)), min_size=1, max_size=9))
def test_the_mean_lies_within_and_is_exact_where_all_agree(losses: list[tuple[float, int]]) -> None:
    found = by_name([share(tokens, train__loss=loss, train__x=loss) for loss, tokens in losses])
    values = np.array([loss for loss, _ in losses])
    low, high = values.min(), values.max()
    for name in ("train/loss", "train/x"):
        assert low - 1e-9 * abs(low) <= found[name] <= high + 1e-9 * abs(high)
    assert by_name([share(7, train__loss=losses[0][0])] * 3)["train/loss"] == losses[0][0]
    pooled = math.fsum(loss * tokens for loss, tokens in losses) / sum(tokens for _, tokens in losses)
    assert found["train/loss"] == pytest.approx(pooled, rel=1e-9, abs=1e-6)


# -- moments


@given(
    st.lists(st.lists(st.floats(-100, 100, width=32), min_size=0, max_size=12), min_size=1, max_size=5),
    st.sampled_from([0.0, 1000.0]),
)
def test_moments_of_ranks_are_those_of_all_their_elements(ranks: list[list[float]], offset: float) -> None:
    rows = np.zeros((len(ranks), moments.WIDTH))
    for row, values in zip(rows, ranks, strict=True):
        if values:
            moments.add_on_cpu(torch.tensor(values, dtype=torch.float64) + offset, row)
    merged = _merge_moments(rows)
    x = np.array([value for values in ranks for value in values]) + offset
    assert merged[moments.N] == len(x)
    if len(x):
        d = x - x.mean()
        assert merged[moments.MEAN] == pytest.approx(x.mean(), rel=1e-9, abs=1e-9)
        assert merged[moments.M2] == pytest.approx((d**2).sum(), rel=1e-6, abs=1e-6)
        assert merged[moments.M4] == pytest.approx((d**4).sum(), rel=1e-5, abs=1e-4)
        assert merged[moments.MAX] == np.abs(x).max()


# -- the wire


@given(st.lists(st.sampled_from([0.0, 1.5, math.nan, -math.inf, 5e-324]), max_size=40), st.integers(0, 2**53), st.booleans())
def test_a_share_survives_the_wire(numbers: list[float], step: int, broken: bool) -> None:
    sent = Share(step, b"layout..", 12.5, broken, ("train/loss", "perf/step_s"), np.array([math.nan, 1.0]), np.array(numbers))
    came = Share.unpack(sent.pack())
    assert (came.step, came.layout, came.tokens, came.broken, came.names) == (step, b"layout..", 12.5, broken, sent.names)
    for one, other in ((came.values, sent.values), (came.numbers, sent.numbers)):
        assert np.array_equal(one, other, equal_nan=True)
    assert len(sent.pack()) <= 100 + 8 * np.count_nonzero(numbers) + len(numbers)


@given(st.binary(max_size=80))
def test_what_is_no_share_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        Share.unpack(b"tbs1" + data)


# -- the leader, with a clock of our own


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class World:
    """Ranks of one run in this process, over one store. Each has watched a model of its own; nobody trains."""

    def __init__(self, size: int, wait: float = 10.0, store: Any = None) -> None:
        self.store = store or HashStore()
        self.clock = Clock()
        self.makers = [RowMaker(0) for _ in range(size)]
        exchanges = [Exchange(self.store, "r/0", rank, size) for rank in range(size)]
        self.leader = Merger(exchanges[0], self.makers[0], size, wait, strict=True, clock=self.clock, sleep=self.clock.sleep)
        self.others = [Sender(each) for each in exchanges[1:]]
        self.labs = [Lab(torch.nn.Linear(2, 2), sites=[]) for _ in range(size)]

    def reading(self, rank: int) -> Reading:
        slot = self.labs[rank].instruments.close(0)
        assert slot is not None
        return self.labs[rank].instruments.read(slot)

    def step(self, call: int, *ranks: int, step: int | None = None, loss: float | None = None) -> None:
        """The ranks that close call number `call`; rank r has a loss of r."""
        for rank in ranks:
            reading = self.reading(rank)
            host = {"train/loss": float(rank) if loss is None else loss, "train/lr": 0.1}
            row = self.makers[rank].own(call if step is None else step, 5.0, host, reading)
            if rank:
                self.others[rank - 1].send(call, row, reading, 1.0)
            else:
                self.leader.add(call, row, reading, 1.0, StepContext(-1, call, 0, {"torch": np.zeros(9)}, (MicroBatch(),)))

    def ready(self) -> list[Row]:
        return [done.row for done in self.leader.ready()]


def losses(rows: list[Row]) -> list[tuple[int, float | None, float | None]]:
    return [(row.step, row.get("train/loss"), row.get("ranks/merged")) for row in rows]


def test_rows_come_in_order_when_all_ranks_are_there() -> None:
    world = World(3)
    world.step(0, 0, 1)
    world.step(1, 0, 1)
    assert world.ready() == [] and world.leader.pause is not None
    world.clock.now += 1.0
    world.step(0, 2)
    world.step(1, 2)
    assert losses(world.ready()) == [(0, 1.0, 3.0), (1, 1.0, 3.0)]
    assert world.leader.pause is None


def test_a_context_that_waits_holds_neither_batches_nor_random_states() -> None:
    world = World(2)
    world.step(0, 0, 1)
    (done,) = world.leader.ready()
    assert done.context is not None and done.context.rng == {} and len(done.context.micro) == 1


def test_a_rank_that_never_comes_costs_the_bound_once(caplog: pytest.LogCaptureFixture) -> None:
    """A rank that died or lags: the row is written within the bound, unmerged, and says so; later ones wait less."""
    world = World(3, wait=10.0)
    world.step(0, 0, 1)
    world.clock.now += 9.9
    assert world.ready() == []
    world.clock.now += 0.2
    with caplog.at_level(logging.WARNING, "trackbridge"):
        (row,) = world.ready()
    assert losses([row]) == [(0, 0.0, 1.0)] and row.get("trackbridge/rows_unmerged") == 1.0
    assert "rank 2 did not send the numbers of step 0 within 10 s" in caplog.text
    world.step(1, 0, 1)
    world.clock.now += 1.1
    with caplog.at_level(logging.WARNING, "trackbridge"):
        assert losses(world.ready()) == [(1, 0.0, 1.0)]
    assert len(caplog.records) == 1, "said once"
    world.step(2, 0, 1, 2)
    world.clock.now += 0.2
    (row,) = world.ready()
    assert losses([row]) == [(2, 1.0, 3.0)] and row.get("trackbridge/rows_unmerged") == 2.0
    world.step(3, 0, 1)
    world.clock.now += 5.0
    assert world.ready() == [], "it had come again: the whole bound holds"


def test_one_ranks_loss_is_not_judged_by_the_band_of_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noisier. What is not finite is told all the same, and where it stays so the detector gets used to it."""
    monkeypatch.setattr("trackbridge.merging.USED_TO", 2)
    world = World(2, wait=0.0)
    judged = []
    for call, loss in enumerate((1.0, math.nan, 1.0)):
        world.step(call, 0, loss=loss)
        world.clock.now += 1.0
        (done,) = world.leader.ready()
        assert done.row.get("train/loss") is not None and done.judged.get("train/lr") == 0.1
        judged.append(done.judged.get("train/loss"))
    assert judged[0] is None and math.isnan(judged[1]) and judged[2] == 1.0


def test_a_step_that_a_rank_left_out_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """Its ring was full at that step; what it sent later says that nothing more will come."""
    world = World(2, wait=1000.0)
    world.step(0, 0)
    world.step(1, 0, 1)
    with caplog.at_level(logging.WARNING, "trackbridge"):
        assert losses(world.ready()) == [(0, 0.0, 1.0), (1, 0.5, 2.0)]
    assert "though those of a later one" in caplog.text


def test_a_rank_that_has_finished_with_fewer_steps_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """F6: one rank has one batch fewer at the end of the data."""
    world = World(3, wait=1000.0)
    world.step(0, 0, 1, 2)
    world.step(1, 0, 2)
    world.others[0].leave()
    before = world.clock.now
    with caplog.at_level(logging.WARNING, "trackbridge"):
        assert losses([done.row for done in world.leader.finish(1000.0)]) == [(0, 1.0, 3.0), (1, 0.0, 1.0)]
    assert world.clock.now - before < 1.0 and "rank 1 did not send the numbers of step 1, and will not" in caplog.text


def test_at_the_end_what_comes_in_time_is_merged_and_the_rest_is_written() -> None:
    world = World(2)
    world.step(0, 0, 1)
    world.step(1, 0)
    before = world.clock.now
    rows = [done.row for done in world.leader.finish(3.0)]
    assert losses(rows) == [(0, 0.5, 2.0), (1, 0.0, 1.0)] and 3.0 <= world.clock.now - before < 3.3
    world = World(2)
    world.step(0, 0)
    assert losses([done.row for done in world.leader.finish(0.0)]) == [(0, 0.0, 1.0)]


def test_before_detectors_are_saved_rows_are_waited_for_a_moment() -> None:
    world = World(2)
    world.step(0, 0)
    before = world.clock.now
    assert list(world.leader.settle(1.0)) == [] and world.clock.now - before < 1.2
    world.step(0, 1)
    assert len(list(world.leader.settle(1.0))) == 1


def test_more_is_not_held_back_than_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2)
    world.step(0, 0)
    monkeypatch.setattr("trackbridge.merging.WAITING_BYTES", 2 * world.leader._bytes)
    for call in (1, 2):
        world.step(call, 0)
    assert losses(world.ready()) == [(0, 0.0, 1.0)]


def test_ranks_that_count_steps_differently_are_not_merged(caplog: pytest.LogCaptureFixture) -> None:
    world = World(2)
    world.step(0, 0, step=7)
    world.step(0, 1, step=8)
    with caplog.at_level(logging.WARNING, "trackbridge"):
        assert losses(world.ready()) == [(7, 0.0, 1.0)]
    assert "the numbers of step 7 cannot be merged: other ranks call it 8" in caplog.text


def test_ranks_with_other_modules_merge_what_has_a_name(caplog: pytest.LogCaptureFixture) -> None:
    """Pipeline stages: the loss of all, layers of rank 0."""
    world = World(2)
    world.labs[1] = Lab(torch.nn.Linear(3, 2, bias=False), sites=[])
    world.step(0, 0, 1)
    with caplog.at_level(logging.WARNING, "trackbridge"):
        assert losses(world.ready()) == [(0, 0.5, 2.0)]
    assert "ranks watch different modules" in caplog.text


def test_a_store_that_fails_leaves_every_rank_on_its_own(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(HashStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer\nand a trace")

    world = World(2, store=Broken())
    for call in (0, 1):
        world.step(call, 0, 1)
        with caplog.at_level(logging.WARNING, "trackbridge"):
            assert losses(world.ready()) == [(call, 0.0, 1.0)]
    assert len(caplog.records) == 1 and "Connection reset by peer" in caplog.text and "trace" not in caplog.text
    world.leader.close()


def test_the_store_is_asked_less_often_while_nobody_comes() -> None:
    asked: list[list[str]] = []

    class Store(HashStore):
        def check(self, keys: list[str]) -> bool:
            asked.append(keys)
            return super().check(keys)

    world = World(2, store=Store(), wait=60.0)
    world.step(0, 0)
    for _ in range(5000):
        world.clock.now += 0.001
        assert world.ready() == []
    assert 50 <= len(asked) < 200, "thirty a second in the long run"


# -- what lies in the store


def keys(store: Any, count: int) -> list[int]:
    return [call for call in range(count) if store.check([f"trackbridge/r/0/step/{call}/1"])]


def test_what_lies_in_the_store_is_bounded_and_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "STORE_BYTES", 200_000)
    store = HashStore()
    leader, other = (Exchange(store, "r/0", rank, 2) for rank in range(2))
    for call in range(100):
        other.send(call, bytes(5_000))
    assert keys(store, 100) == list(range(80, 100))
    for call in range(100, 200):
        other.send(call, bytes(50_000))
    assert keys(store, 200) == list(range(196, 200)), "four all the same"
    assert leader.take(195) is None and leader.take(199) == [bytes(50_000)]
    leader.finish()
    other.finish()
    assert keys(store, 200) == []


def test_without_the_leaders_word_nothing_is_deleted() -> None:
    """It may still read."""
    store = HashStore()
    other = Exchange(store, "r/0", 1, 2)
    other.send(0, b"x")
    other.finish()
    other.send(1, b"x")
    assert keys(store, 2) == [0], "and nothing is sent any more"


def test_shards_that_some_ranks_hold_twice_are_counted_once() -> None:
    """HSDP on four ranks: two pieces, each on two of them; a parameter that all have; one that says nothing of its layout."""
    lab = Lab(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1, bias=False)), sites=[])
    slot = lab.instruments.close(0)
    assert slot is not None
    reading = lab.instruments.read(slot)
    ranks = np.repeat(reading.numbers[None], 4, axis=0)
    for rank, numbers in enumerate(ranks):
        of = reading.session.slab.unpack(numbers)
        of["grad_norm"][:] = [3.0 if rank < 2 else 4.0, 7.0, 1.0]
        of["grad_max"][:] = [1.0 + rank, 2.0, 1.0]
        of["grad_nonfinite"][:] = [rank // 2, 5.0, 1.0]
        of["grad_seen"][:] = 1.0
    merged = reading.session.slab.unpack(merge_ranks(reading.session.slab, np.array([2.0, 4.0, 0.0]), ranks))
    assert merged["grad_norm"][:2].tolist() == [5.0, 7.0]
    assert merged["grad_max"][:2].tolist() == [4.0, 2.0] and merged["grad_nonfinite"][:2].tolist() == [1.0, 5.0]
    assert merged["grad_seen"].tolist() == [1.0, 1.0, 0.0], "what nobody knows is taken out"
