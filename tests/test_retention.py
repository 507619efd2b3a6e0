"""Retention: a journal within its budget, with every extremum, anomaly and artifact still in it, beside a tailing reader."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trackbridge import retention
from trackbridge.config import JournalConfig
from trackbridge.journal import JournalReader, JournalWriter, codec, segments, thin
from trackbridge.records import Anomaly, Artifact, Params, Record, Row, RunEnd, Schema
from trackbridge.rundir import Attempt, RunDirectory, RunFile
from trackbridge.shipping.cursor import Cursor

NAMES = tuple(f"s/{i}" for i in range(40))
EVERY = Schema(NAMES)
SOME = Schema(NAMES[:25])
SEGMENT = 1 << 16


def rows(steps: range, seed: int = 0, attempt: int = 0) -> list[Row]:
    rng = np.random.default_rng(seed)
    made = []
    for step in steps:
        schema = EVERY if step % 10 == 0 else SOME
        values = rng.normal(size=len(schema.names))
        if step % 97 == 5:
            values[3] = (math.nan, math.inf, -math.inf)[step % 3]
        made.append(Row(-1, step, float(step), attempt, schema, values))
    return made


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    life = Attempt(number=0, start_step=0, time=0.0, pid=1, host="h")
    made.write(RunFile(project="p", run_id="run", name="n", created=0.0, attempts=[life]))
    return made


def write(directory: RunDirectory, records: list[Record], **more: Any) -> JournalWriter:
    journal = JournalWriter(directory.rows(), segment_bytes=SEGMENT, fsync_seconds=1e9, **more)
    for record in records:
        journal.append(record)
    return journal


def policy(budget: int, full: int = 0) -> JournalConfig:
    return JournalConfig.model_construct(budget_bytes=budget, full_resolution_steps=full)


def everything(directory: RunDirectory) -> list[Record]:
    reader = JournalReader(directory.rows())
    found = reader.read()
    assert not reader.damage, str(reader.damage)
    seqs = [record.seq for record in found]
    assert seqs == sorted(set(seqs))
    return found


def points(records: list[Record]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for record in records:
        if isinstance(record, Row):
            for name, value in record.items():
                found.setdefault(name, {})[record.step] = value
    return found


def within(left: dict[int, float], series: dict[int, float]) -> bool:
    """Every value of `left` is one of `series`, to the bit."""
    return all(step in series and np.array_equal([value], [series[step]], equal_nan=True) for step, value in left.items())


def spike(step: int, onset: int | None = None, attempt: int = 0) -> Anomaly:
    return Anomaly(
        f"a{step}", "spike", step, step if onset is None else onset, 1.0, "s/0", 9.0, 1.0, 9.0, attempt=attempt, time=1.0
    )


def size(directory: RunDirectory) -> int:
    return sum(path.stat().st_size for path in directory.rows().iterdir())


def test_the_budget_is_kept_and_what_matters_is_still_there(directory: RunDirectory) -> None:
    made = rows(range(3000))
    records: list[Record] = []
    for row in made:
        records.append(row)
        if row.step == 700:
            records += [spike(700, 698), Artifact(-1, 700, 1.0, "spike-700", "spike-capsule", "capsules/spike-700")]
    records.append(Params(-1, 1.0, {"a": 1}))
    write(directory, records)
    whole, before = points(everything(directory)), size(directory)
    done = retention.fit(directory, settings=policy(before // 4))
    assert done.segments > 5 and done.rows > 1000 and not done.over and done.undelivered == 0
    assert size(directory) <= before // 4
    after = everything(directory)
    left = points(after)
    for name, series in whole.items():
        assert within(left[name], series), "a value that was never recorded"
        finite = {step: value for step, value in series.items() if math.isfinite(value)}
        for extreme in (min, max):
            step = extreme(finite, key=lambda step: finite[step])
            assert left[name][step] == finite[step]
        assert max(left[name]) == max(series)
    assert any(not math.isfinite(value) for value in left["s/3"].values())
    around = range(698 - retention.AROUND, 700 + retention.AROUND + 1)
    kept = {row.step: row for row in after if isinstance(row, Row)}
    assert all(len(kept[step].values) == len(made[step].values) for step in around)
    assert [type(record) for record in after if not isinstance(record, Row)] == [Anomaly, Artifact, Params]
    newest = [row for row in made if row.step >= 2990]
    assert all(np.array_equal(kept[row.step].values, row.values, equal_nan=True) for row in newest)


def test_nothing_is_thinned_before_the_budget_is_reached(directory: RunDirectory) -> None:
    write(directory, rows(range(500)))  # type: ignore[arg-type]
    done = retention.fit(directory, settings=policy(size(directory)))
    assert (done.segments, done.rows) == (0, 0)


def test_what_is_oldest_goes_first_and_the_window_stays_as_long_as_it_can(directory: RunDirectory) -> None:
    write(directory, rows(range(2000)))  # type: ignore[arg-type]
    retention.fit(directory, settings=policy(int(size(directory) * 0.75), full=800))
    kept = [row for row in everything(directory) if isinstance(row, Row)]
    whole = {row.step for row in kept if len(row.values) >= 25}
    assert set(range(1200, 2000)) <= whole
    assert not set(range(100, 200)) <= whole
    # with a budget that the window alone does not fit, it goes as well
    done = retention.fit(directory, settings=policy(size(directory) // 2, full=10_000))
    assert size(directory) <= done.bytes and not done.over


def test_what_a_tracker_lacks_goes_last_and_is_counted(directory: RunDirectory) -> None:
    file = directory.read()
    directory.write(file.model_copy(update={"backends": [{"kind": "slow"}, {"kind": "quick"}]}))
    write(directory, rows(range(2000)))  # type: ignore[arg-type]
    Cursor("quick", seq=1999).save(directory)
    Cursor("slow", seq=999).save(directory)
    before = size(directory)
    done = retention.fit(directory, settings=policy(int(before * 0.75)))
    assert done.undelivered == 0 and done.segments > 0
    tail = [row for row in JournalReader(directory.rows(), after=999).read() if isinstance(row, Row)]
    assert [row.step for row in tail] == list(range(1000, 2000)) and all(len(row.values) >= 25 for row in tail)
    done = retention.fit(directory, settings=policy(before // 2))
    assert done.undelivered > 0
    assert size(directory) <= before // 2


def test_a_reader_in_the_middle_of_a_segment_goes_on_in_its_successor(directory: RunDirectory) -> None:
    write(directory, rows(range(1500)))  # type: ignore[arg-type]
    reader = JournalReader(directory.rows())
    first = reader.read(limit=30)  # in the middle of the first segment
    fresh = JournalReader(directory.rows())
    fresh.read(limit=30)
    retention.fit(directory, settings=policy(1 << 18))
    rest = reader.read()
    assert not reader.damage
    assert [r.seq for r in first] == list(range(30))
    assert [r.seq for r in rest] == [r.seq for r in everything(directory) if r.seq >= 30]
    assert rest[-1].seq == 1499


@pytest.mark.parametrize("when", ["before the rename", "before the unlink"])
def test_killed_in_the_middle(directory: RunDirectory, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no instant is a value there twice or gone; the next pass cleans up."""
    write(directory, [*rows(range(2000)), RunEnd(-1, 1.0, "finished")])
    before = points(everything(directory))

    class KilledError(Exception):
        pass

    def die(*_: object, **__: object) -> None:
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(retention.os if when == "before the rename" else Path, "fsync" if "rename" in when else "unlink", die)
        with pytest.raises(KilledError):
            retention.fit(directory, settings=policy(1 << 17))
    (directory.rank(0) / "retention.claim").unlink(missing_ok=True)  # its owner is dead; here it is us
    now = points(everything(directory))
    assert all(within(now[name], before[name]) for name in before)
    retention.fit(directory, settings=policy(1 << 17))
    assert len(segments.files(directory.rows())) == len(segments.listing(directory.rows()))
    assert not list(directory.rows().glob(".*"))


def test_a_damaged_segment_is_left_alone(directory: RunDirectory) -> None:
    write(directory, rows(range(2000)))  # type: ignore[arg-type]
    victim = segments.listing(directory.rows())[1].path
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 0xFF
    victim.write_bytes(data)
    retention.fit(directory, settings=policy(1 << 17))
    assert victim.read_bytes() == data


def test_thinning_goes_on_with_what_was_thinned(directory: RunDirectory) -> None:
    made = rows(range(6000))
    write(directory, made)  # type: ignore[arg-type]
    whole = points(list(made))
    for budget in (1 << 19, 1 << 18, 1 << 17):
        retention.fit(directory, settings=policy(budget))
    levels = {segment.level for segment in segments.listing(directory.rows())}
    assert max(levels) >= 2
    left = points(everything(directory))
    for name, series in whole.items():
        finite = {step: value for step, value in series.items() if math.isfinite(value)}
        assert max(left[name][s] for s in left[name] if math.isfinite(left[name][s])) == max(finite.values())


def test_a_resumed_writer_numbers_on(directory: RunDirectory) -> None:
    write(directory, rows(range(2000))).close()  # type: ignore[arg-type]
    retention.fit(directory, settings=policy(1 << 17))
    assert write(directory, []).append(RunEnd(-1, 1.0, "finished")) == 2000


def test_as_a_process_and_in_the_trainer(directory: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    budget = JournalConfig(budget_bytes=1 << 18, full_resolution_steps=0)
    file = directory.read()
    directory.write(
        file.model_copy(update={"settings": {"journal": budget.model_dump()}, "backends": [{"kind": "never"}]})
    )
    retainer = retention.Retainer(directory, 0, budget)
    write(directory, rows(range(2000)), on_closed=retainer.closed)  # type: ignore[arg-type]
    retainer.closed()
    with retainer._busy:  # until it is done
        pass
    retainer.closed()
    with retainer._busy:
        pass
    assert size(directory) <= 1 << 18
    assert retainer.thinned > 0
    assert "rows that a tracker still lacks were thinned" in caplog.text
    answer = subprocess.run(
        [sys.executable, "-m", "trackbridge.retention", str(directory.path)], capture_output=True, text=True, check=True
    )
    assert json.loads(answer.stdout)["over"] is False


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_stretch_keeps_the_ends_of_every_series(data: st.DataObject) -> None:
    numbers = st.floats(width=64, allow_nan=True, allow_infinity=True)
    made: list[Row] = []
    for step in range(data.draw(st.integers(3, 20))):
        names = data.draw(st.lists(st.sampled_from("abcde"), unique=True, max_size=5))
        values = np.array([data.draw(numbers) for _ in names], np.float64)
        kind: Any = data.draw(st.sampled_from(["step", "log"]))
        made.append(Row(step, step, 0.5 * step, 1, Schema(tuple(names)), values, kind))
    stretch = thin.Stretch()
    for row in made:
        stretch.add(row)
    schema, packed = stretch.packed()
    back = thin.rows(codec.encode_schema(schema)[0] + packed, schema)
    by_seq = {row.seq: row for row in made}
    for row in back:
        assert (row.step, row.time, row.attempt, row.kind) == (row.seq, 0.5 * row.seq, 1, by_seq[row.seq].kind)
        for name, value in row.items():
            assert np.float64(value).tobytes() == np.float64(by_seq[row.seq].get(name)).tobytes()
    for name in "abcde":
        given_ = [row.get(name) for row in made if row.get(name) is not None]
        left = [row.get(name) for row in back if row.get(name) is not None]
        assert len(left) <= 4
        if given_:
            assert np.array_equal(left[-1:], given_[-1:], equal_nan=True)
        finite = [value for value in given_ if value is not None and math.isfinite(value)]
        kept = [value for value in left if value is not None and math.isfinite(value)]
        if finite:
            assert (min(kept), max(kept)) == (min(finite), max(finite))
        assert (len(finite) < len(given_)) == (len(kept) < len(left))
