"""The stream policy: what a tracker is given of the journal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trackbridge import names
from trackbridge.config import StreamConfig
from trackbridge.records import Anomaly, Params, Record, Row, RunEnd, Schema
from trackbridge.stream import AROUND, Stream, with_lag

WIDE = Schema(
    ("train/loss", "layer/a/grad_norm", "layer/b/grad_norm", "act/h.0/kurtosis", "act/h.1/kurtosis", "act/h.0/nonfinite",
     "act/h.1/nonfinite", "act/h.0/max")
)  # fmt: skip
LOSS = Schema(("train/loss",))


def row(seq: int, step: int, *values: float, schema: Schema = LOSS, attempt: int = 0, kind: Any = "step") -> Row:
    return Row(seq, step, 0.0, attempt, schema, np.array(values or (float(step),)), kind)


def anomaly(seq: int, step: int, *, onset: int | None = None, score: float = 9.0, attempt: int = 0) -> Anomaly:
    known = step if onset is None else onset
    return Anomaly(f"a{step}", "spike", step, known, 1.0, "train/loss", 1.0, 0.0, score, attempt=attempt, seq=seq)


def sent(config: StreamConfig, records: list[Record]) -> list[Record]:
    stream = Stream(config)
    return [*stream.push(records), *stream.finish()]


def values(record: Record) -> dict[str, float]:
    assert isinstance(record, Row)
    return dict(record.items())


@pytest.mark.parametrize(
    ("layers", "wide"),
    [
        ("summary", set()),
        ("blocks", {n for n in WIDE.names if n.startswith("act/")}),
        ("all", {n for n in WIDE.names if names.is_wide(n)}),
    ],
)
def test_wide_series_and_their_extrema(layers: Any, wide: set[str]) -> None:
    (out,) = sent(StreamConfig(layers=layers), [row(7, 3, 2.5, 1.0, 4.0, 8.0, math.nan, 1.0, 2.0, 5.0, schema=WIDE, attempt=2)])
    got = values(out)
    assert {name for name in got if names.is_wide(name)} == wide
    assert got["train/loss"] == 2.5
    assert got["layers/grad_norm_max"] == 4.0
    assert got["layers/kurtosis_max"] == 8.0  # a NaN does not hide the others
    assert got["layers/act_nonfinite"] == 3.0
    assert got["layers/act_max"] == 5.0
    assert "layers/update_ratio_max" not in got
    assert (got["trackbridge/step"], got["trackbridge/seq"], got["trackbridge/attempt"]) == (3.0, 7.0, 2.0)
    assert ("nonfinite/act/h.1/kurtosis" in got) == (layers != "summary")
    assert isinstance(out, Row)
    assert (out.seq, out.step, out.attempt, out.kind) == (7, 3, 2, "step")


@pytest.mark.parametrize("layers", ["summary", "blocks", "all"])
def test_the_users_own_series_are_sent_whatever_they_are_called(layers: Any) -> None:
    own = Schema(("layer/3/entropy", "expert/acc", "act/mine", "router/x", "mine/x"))
    (out,) = sent(StreamConfig(layers=layers), [row(1, 1, 1.0, 2.0, 3.0, 4.0, 5.0, schema=own, kind="log")])
    assert {name: values(out)[name] for name in own.names} == dict(zip(own.names, (1.0, 2.0, 3.0, 4.0, 5.0), strict=True))


def test_every_series_added_is_in_the_catalogue() -> None:
    (out,) = sent(StreamConfig(), [row(0, 0, math.inf, 1.0, 4.0, 8.0, 1.0, 1.0, 2.0, 5.0, schema=WIDE)])
    assert isinstance(out, Row)
    assert [name for name in with_lag(out, 3).schema.names if names.describe(name) is None] == []
    assert with_lag(out, 3).get("trackbridge/lag_rows") == 3.0


def test_non_finite_values_are_sent_and_counted() -> None:
    out = [
        values(r)["train/loss"] for r in sent(StreamConfig(), [row(i, i, x) for i, x in enumerate([1.0, math.nan, -math.inf])])
    ]
    assert out[0] == 1.0 and math.isnan(out[1]) and out[2] == -math.inf
    counted = [values(r).get("nonfinite/train/loss") for r in sent(StreamConfig(), [row(0, 0, 1.0), row(1, 1, math.nan)])]
    assert counted == [None, 1.0]


def test_an_anomaly_marks_the_row_of_its_step() -> None:
    records = [row(0, 0), row(1, 1), anomaly(2, 1, score=12.0), anomaly(3, 1, score=5.0), row(4, 2), row(5, 3), anomaly(6, 3)]
    records[3] = records[3].updated(id="second")  # type: ignore[union-attr]
    again = records[2].updated(seq=7, recovered_after=2)  # type: ignore[union-attr]
    out = sent(StreamConfig(), [*records, again, row(8, 4)])
    marks = {r.step: (r.get("anomaly/score"), r.get("anomaly/count")) for r in out if isinstance(r, Row)}
    assert marks == {0: (None, None), 1: (12.0, 2.0), 2: (None, None), 3: (9.0, 3.0), 4: (None, None)}
    assert [r.seq for r in out] == list(range(9))
    assert sum(isinstance(r, Anomaly) for r in out) == 4


def test_a_row_waits_for_its_anomaly_but_not_for_ever() -> None:
    stream = Stream(StreamConfig())
    assert stream.push([row(0, 0)]) == []
    assert stream.decided == -1
    assert [r.seq for r in stream.settle()] == [0]
    assert stream.decided == 0
    late = stream.push([anomaly(1, 0), row(2, 1), Params(3, 0.0, {})])
    assert [type(r).__name__ for r in late] == ["Anomaly", "Row", "Params"]
    assert values(late[1])["anomaly/score"] == 9.0  # the next row carries it


def test_counting_goes_on_after_a_restart() -> None:
    stream = Stream(StreamConfig(), after=10, known=[anomaly(3, 1), anomaly(4, 2)])
    out = [*stream.push([row(11, 5), anomaly(12, 5)]), *stream.finish()]
    assert values(out[0])["anomaly/count"] == 3.0
    assert "anomaly/score" not in values([*stream.push([row(13, 6)]), *stream.finish()][0])


def test_every_nth_row_and_all_around_an_anomaly() -> None:
    records: list[Record] = []
    for step in range(300):
        records.append(row(len(records), step))
        if step == 151:
            records.append(anomaly(len(records), 151, onset=150))
    records.append(row(len(records), 299, 1.0, schema=Schema(("eval/loss",)), kind="log"))
    out = sent(StreamConfig(every=50), records)
    got = [r.step for r in out if isinstance(r, Row) and r.kind == "step"]
    assert got == sorted({*range(0, 300, 50), *range(150 - AROUND, 151 + AROUND + 1)})
    assert [r.step for r in out if isinstance(r, Row) and r.kind == "log"] == [299]


def test_rows_left_out_are_decided_too() -> None:
    stream = Stream(StreamConfig(every=10))
    out = stream.push([row(step, step) for step in range(30)])
    assert [r.step for r in out if isinstance(r, Row)] == [0, 10]
    assert stream.decided == 17  # later ones may still be near an anomaly
    assert stream.push([RunEnd(30, 0.0, "finished")]) == []
    assert [r.seq for r in stream.finish()] == [20, 30]
    assert stream.decided == 30


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 12), st.sampled_from(["summary", "blocks", "all"]))
def test_whatever_the_batches_the_same_comes_out(data: st.DataObject, every: int, layers: Any) -> None:
    """In order, each record at most once, nothing but sparse rows left out, independent of how reading was cut up."""
    records: list[Record] = []
    attempt = step = 0
    for _ in range(data.draw(st.integers(0, 40))):
        what = data.draw(st.sampled_from(["row", "row", "row", "log", "anomaly", "params", "resume"]))
        seq = len(records)
        if what == "row":
            wide = data.draw(st.booleans())
            records.append(row(seq, step, *([1.0] * 8 if wide else [math.nan]), schema=WIDE if wide else LOSS, attempt=attempt))
            step += 1
        elif what == "log":
            records.append(row(seq, step, attempt=attempt, kind="log"))
        elif what == "anomaly" and step:
            records.append(anomaly(seq, step - 1, attempt=attempt))
        elif what == "params":
            records.append(Params(seq, 0.0, {}))
        elif what == "resume":
            records.append(RunEnd(seq, 0.0, "killed", attempt))
            attempt, step = attempt + 1, max(step - 5, 0)
    config = StreamConfig(every=every, layers=layers)
    whole = sent(config, records)
    stream = Stream(config)
    pieces: list[Record] = []
    at = 0
    while at < len(records):
        size = data.draw(st.integers(1, 7))
        pieces += stream.push(records[at : at + size])
        assert all(r.seq <= stream.decided for r in pieces)
        at += size
    pieces += stream.finish()
    assert [r.seq for r in pieces] == [r.seq for r in whole] == sorted({r.seq for r in whole})
    assert stream.decided == len(records) - 1
    for a, b in zip(pieces, whole, strict=True):
        if isinstance(a, Row) and isinstance(b, Row):
            assert a.schema.names == b.schema.names
            assert len(set(a.schema.names)) == len(a.schema.names)
            np.testing.assert_array_equal(a.values, b.values)
    left_out = {r.seq for r in records} - {r.seq for r in whole}
    assert all(isinstance(r, Row) and r.kind == "step" and r.step % every for r in records if r.seq in left_out)
