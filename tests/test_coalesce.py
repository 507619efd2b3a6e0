"""What a budgeted tracker is sent: within its limits at any speed, no anomaly coalesced away, no extremum lost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trackbridge import names
from trackbridge.backends.mlflow import MlflowConfig
from trackbridge.backends.tensorboard import TensorboardConfig
from trackbridge.backends.wandb import WandbConfig
from trackbridge.coalesce import Budget
from trackbridge.config import StreamConfig
from trackbridge.records import Anomaly, Params, Record, Row, Schema
from trackbridge.stream import AROUND, Stream

NARROW = ("train/loss", "grad/norm", *(f"own/{i}" for i in range(40)))
LAYERS = tuple(f"layer/{i}.weight/{s}" for i in range(1000) for s in ("grad_norm", "grad_max", "grad_nonfinite"))
ACTS = tuple(f"act/h.{i}/{s}" for i in range(100) for s in ("mean", "std", "rms", "max", "kurtosis", "nonfinite"))
WIDE = Schema((*NARROW, *LAYERS, *ACTS))
WEIGHTS = Schema((*WIDE.names, *(f"layer/{i}.weight/weight_norm" for i in range(1000))))
SMALL = Schema(NARROW)
WANDB = Budget(1000, 100_000)
FAST = 1 / 50


def row(seq: int, step: int, loss: float = 1.0, *, schema: Schema = SMALL, each: float = FAST, attempt: int = 0) -> Row:
    values = np.full(len(schema.names), 0.5)
    values[0] = loss
    return Row(seq, step, 1000.0 + each * step, attempt, schema, values)


def anomaly(seq: int, step: int) -> Anomaly:
    return Anomaly(f"a{step}", "spike", step, step, 1.0, "train/loss", 9.0, 1.0, 9.0, seq=seq)


def sent(records: Iterable[Record], budget: Budget = WANDB, layers: Any = "blocks", **more: Any) -> list[Row]:
    stream = Stream(StreamConfig(layers=layers), budget=budget, starts={0: 0, 1: 0}, **more)
    return [r for r in [*stream.push(records), *stream.finish()] if isinstance(r, Row)]


@pytest.mark.parametrize("layers", ["summary", "blocks", "all"])
def test_fifty_steps_a_second_with_a_thousand_layers_stay_within_wandbs_limits(layers: Any) -> None:
    """In any minute: at most 1,000 rows and 100,000 values. The spike and what is around it arrive row by row."""
    spike = 7003

    def records() -> Iterable[Record]:
        seq = 0
        for step in range(9000):  # three minutes
            yield row(seq, step, 50.0 if step == spike else 1.0, schema=WEIGHTS if step % 10 == 0 else WIDE)
            seq += 1
            if step == spike:
                yield anomaly(seq, spike)
                seq += 1

    config = WandbConfig()
    out = sent(records(), Budget(config.rows_per_minute, config.values_per_minute), layers)
    times = np.array([r.time for r in out])
    sizes = np.array([len(r.values) for r in out])
    for begin in range(len(out)):
        minute = (times >= times[begin]) & (times < times[begin] + 60.0)
        assert minute.sum() <= 1000
        assert sizes[minute].sum() <= 100_000
    got = {r.step for r in out}
    assert set(range(spike - AROUND, spike + AROUND + 1)) <= got
    (peak,) = [r for r in out if r.step == spike]
    assert peak.get("train/loss") == 50.0 and peak.get("anomaly/score") == 9.0
    assert any(names.is_wide(name) for name in peak.schema.names) == (layers != "summary")
    late = [r for r in out if r.time > 1100.0]
    assert len(late) > 200, "the budget is there to be used"
    if layers != "summary":
        assert sum(any(names.is_wide(name) for name in r.schema.names) for r in late) >= 5


def test_a_short_run_and_a_slow_one_lose_nothing() -> None:
    assert len(sent(row(i, i, each=0.001) for i in range(300))) == 300
    assert len(sent(row(i, i, each=1.0) for i in range(2000))) == 2000


def test_a_tracker_without_a_limit_gets_everything() -> None:
    config = TensorboardConfig()
    out = sent((row(i, i, each=0.001) for i in range(3000)), Budget(config.rows_per_minute, config.values_per_minute))
    assert len(out) == 3000
    assert not any(name.startswith("coalesced/") for r in out for name in r.schema.names)
    assert MlflowConfig(tracking_uri="sqlite:////tmp/x.db").values_per_minute == 300_000


def test_a_coalesced_row_tells_of_all_it_stands_for() -> None:
    losses = {2003: 7.0, 2004: math.nan, 2005: math.inf, 2006: 0.25}
    out = sent(row(i, i, losses.get(i, 1.0), each=0.01) for i in range(2400))
    late = [r for r in out if r.step >= 1990]
    highs = [r.get("coalesced/max/train/loss") for r in late]
    lows = [r.get("coalesced/min/train/loss") for r in late]
    assert max(h for h in highs if h is not None) == 7.0
    assert min(x for x in lows if x is not None) == 0.25
    assert sum(r.get("nonfinite/train/loss") or 0 for r in late) == 2
    first = next(i for i, r in enumerate(out) if r.get("coalesced/rows") is not None)
    assert first + sum(int(r.get("coalesced/rows") or 1) for r in out[first:]) == 2400
    assert all(names.describe(name) or name.startswith("own/") for r in late for name in r.schema.names)


def test_the_row_with_the_most_series_is_chosen() -> None:
    more = Schema((*NARROW, "optim/update_ratio"))
    out = sent(row(i, i, schema=more if i % 20 == 0 else SMALL, each=0.015) for i in range(3000))
    late = [r for r in out if r.step > 1000]
    assert {r.step for r in late if r.get("optim/update_ratio") is not None} == set(range(1020, 3000, 20))


def test_user_rows_are_coalesced_by_themselves() -> None:
    """`run.log` every step beside `run.step`: both stay within the limit, and a rare one is never lost."""
    records: list[Record] = []
    for step in range(3000):
        records.append(row(len(records), step))
        what = Schema(("eval/rare",)) if step == 2500 else Schema(("mine",))
        records.append(Row(len(records), step, records[-1].time, 0, what, np.array([1.0 * step]), "log"))
    out = sent(records)
    assert len(out) <= 1500
    assert [r.get("eval/rare") for r in out if r.get("eval/rare") is not None] == [2500.0]
    assert [r.seq for r in out] == sorted({r.seq for r in out})
    assert max(r.get("mine") or 0 for r in out) == 2999.0


def test_many_modules_are_thinned_evenly() -> None:
    schema = Schema(tuple(f"act/h.{i}/{s}" for i in range(2000) for s in ("rms", "max")))
    (out,) = sent([row(0, 0, schema=schema)], Budget())
    wide = [name for name in out.schema.names if names.is_wide(name)]
    assert len(wide) == 1000
    modules = [int(name.split("/")[1].removeprefix("h.")) for name in wide[::2]]
    assert (modules[0], modules[-1]) == (0, 1999)
    assert max(np.diff(modules)) <= 5
    assert out.get("layers/act_max") == 0.5


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_restart_anywhere_gives_the_same_rows(data: st.DataObject) -> None:
    """From `before` of any row that is not delivered yet, the same rows come again; cutting up the reading changes nothing."""
    records: list[Record] = []
    step, each = 0, data.draw(st.sampled_from([0.01, 0.04, 0.2]))
    for _ in range(data.draw(st.integers(1, 60))):
        what = data.draw(st.sampled_from(["row", "row", "row", "row", "log", "anomaly", "params"]))
        seq = len(records)
        if what == "row":
            records.append(row(seq, step, each=each, schema=data.draw(st.sampled_from([SMALL, Schema(NARROW[:5])]))))
            step += 1
        elif what == "log":
            records.append(Row(seq, step, 1000.0 + each * step, 0, Schema(("mine",)), np.array([1.0]), "log"))
        elif what == "anomaly" and step:
            records.append(anomaly(seq, step - 1))
        else:
            records.append(Params(seq, 0.0, {}))
    budget = Budget(200, None)
    starts = {0: -100}  # long past the rows that are free

    def stream(after: int = -1) -> Stream:
        known = [r for r in records if isinstance(r, Anomaly) and r.seq <= after]
        return Stream(StreamConfig(), after=after, known=known, budget=budget, starts=starts)

    one = stream()
    whole = [*one.push(records), *one.finish()]
    assert one.decided == len(records) - 1
    seqs = [r.seq for r in whole]
    assert seqs == sorted(set(seqs))
    assert [r.seq for r in records if not isinstance(r, Row)] == [r.seq for r in whole if not isinstance(r, Row)]
    two = stream()
    pieces: list[Record] = []
    for record in records:
        pieces += two.push([record])
        low = [two.before.get(r.seq, r.seq - 1) for r in pieces]
        assert all(r.seq <= two.decided for r in pieces) and low == sorted(low)
    pieces += two.finish()
    assert [r.seq for r in pieces] == seqs
    at = data.draw(st.integers(0, len(whole)))
    after = two.decided if at == len(whole) else two.before.get(whole[at].seq, whole[at].seq - 1)
    again = stream(after)
    rest = [*again.push(records[after + 1 :]), *again.finish()]
    delivered = set(seqs[:at])
    assert [r.seq for r in rest if r.seq not in delivered] == seqs[at:]
    for a, b in zip([r for r in rest if r.seq not in delivered], whole[at:], strict=True):
        if isinstance(a, Row) and isinstance(b, Row):
            mine = {n: v for n, v in a.items() if not n.startswith("anomaly/")}
            theirs = {n: v for n, v in b.items() if not n.startswith("anomaly/")}
            assert mine == theirs
