"""The journal: exact round trips, whatever is damaged, torn, full, deleted or still being written."""

from __future__ import annotations

import itertools
import math
import random
import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from tests.disk import full_disk
from trackbridge.errors import TrackbridgeError, UsageError
from trackbridge.journal import JournalReader, JournalWriter
from trackbridge.journal.codec import decode, encode
from trackbridge.records import (
    Anomaly,
    Artifact,
    Hypothesis,
    MicroBatch,
    Params,
    Record,
    Row,
    RunEnd,
    Schema,
    StepContext,
)

NOT_ASKED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
FEW = settings(max_examples=40, deadline=None, suppress_health_check=NOT_ASKED)
LOSS = Schema(("train/loss", "grad/norm"))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def writer(directory: Path, **given: Any) -> JournalWriter:
    return JournalWriter(directory, **{"segment_bytes": 1 << 20, "fsync_seconds": 1e9, **given})


def row(step: int, *values: float, schema: Schema = LOSS, attempt: int = 0) -> Row:
    data = np.array(values or (float(step), step / 2.0))
    return Row(-1, step, 1000.0 + step, attempt, schema, data)


def anomaly(step: int, **given: Any) -> Anomaly:
    given = {"value": math.nan, "expected": 2.0, "score": math.inf, **given}
    return Anomaly(f"a{step}", "spike", step, step - 1, 3.0, "train/loss", **given)


def fill(directory: Path, count: int, **given: Any) -> None:
    journal = writer(directory, **given)
    for step in range(count):
        assert journal.append(row(step)) == step
    journal.close()


def steps(records: list[Record]) -> list[int]:
    return [record.step for record in records if isinstance(record, Row)]


def same(a: Any, b: Any) -> bool:
    """Equality to the bit, arrays and NaN payloads included."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if hasattr(a, "__dataclass_fields__"):
        names = (name for name in a.__dataclass_fields__ if name != "seq")
        return type(a) is type(b) and all(same(getattr(a, n), getattr(b, n)) for n in names)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(type(a) is type(b) and a == b)


# -- strategies

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
number = st.floats(allow_nan=True, allow_infinity=True)
integer = st.integers(-(2**62), 2**62)
step_number = st.integers(0, 2**60)
json_value = st.recursive(
    st.none() | st.booleans() | integer | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
json_object = st.dictionaries(text, json_value, max_size=3)
arrays = npst.arrays(
    st.sampled_from([np.dtype(k) for k in ("u1", "i8", "f4", "f8", "f2", "?", "u4", ">i2", "U3")]),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
array_dicts = st.dictionaries(text, arrays, max_size=3)
micro_batches = st.builds(
    MicroBatch,
    loader=st.none() | integer,
    sample_ids=st.none() | st.lists(integer | text, max_size=3).map(tuple),
    fingerprint=st.none() | text,
    tokens=json_object,
    rng=st.none() | array_dicts,
    skeleton=json_value,
    tensors=st.none() | array_dicts,
    why_no_tensors=st.none() | text,
)
anomalies = st.builds(
    Anomaly,
    text, st.sampled_from(["spike", "nonfinite"]), step_number, step_number, number, text, number, number, number,
    first_mover=st.none() | st.tuples(text, integer),
    cascade=st.lists(st.tuples(text, integer), max_size=3).map(tuple),
    recovered_after=st.none() | integer,
    ranks=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    hypotheses=st.lists(
        st.builds(Hypothesis, text, st.tuples(text), st.tuples(text, text), of_batch=st.tuples(text)), max_size=2
    ).map(tuple),
    capsule=st.none() | text,
    time=number,
    notes=st.lists(text, max_size=2).map(tuple),
    terms=text,
    value_step=st.none() | integer,
)  # fmt: skip


@st.composite
def rows(draw: st.DrawFn) -> Row:
    names = tuple(draw(st.lists(text, max_size=6, unique=True)))
    values = draw(npst.arrays("f8", len(names), elements=npst.from_dtype(np.dtype("f8"))))
    kind = draw(st.sampled_from(["step", "log"]))
    return Row(-1, draw(step_number), draw(number), draw(st.integers(0, 99)), Schema(names), values, kind)  # type: ignore[arg-type]


any_record = st.one_of(
    rows(),
    anomalies,
    st.builds(Artifact, st.just(-1), step_number, number, text, text, text, json_object),
    st.builds(Params, st.just(-1), number, json_object),
    st.builds(RunEnd, st.just(-1), number, st.sampled_from(["finished", "failed", "killed"]), st.integers(0, 9),
              st.none() | text),
    st.builds(StepContext, st.just(-1), step_number, st.integers(0, 9), array_dicts,
              st.lists(micro_batches, max_size=2).map(tuple), st.lists(text, max_size=2).map(tuple)),
)  # fmt: skip


# -- round trip


@FEW
@given(st.lists(any_record, max_size=12))
def test_every_kind_of_record_comes_back_to_the_bit(tmp_path_factory: Any, records: list[Record]) -> None:
    directory = tmp_path_factory.mktemp("journal")
    journal = writer(directory, segment_bytes=4096)
    assert [journal.append(record) for record in records] == list(range(len(records)))
    journal.close()
    reader = JournalReader(directory)
    back = reader.read()
    assert [record.seq for record in back] == list(range(len(records)))
    assert all(same(a, b) for a, b in zip(records, back, strict=True))
    assert not reader.damage


@pytest.mark.parametrize("key", [b"", b'"of_what": [1], '])
def test_a_hypothesis_of_a_version_before_or_after_is_read(key: bytes) -> None:
    found = Anomaly("a", "spike", 1, 1, 0.5, "train/loss", 2.0, 1.0, 9.0, hypotheses=(Hypothesis("x", ("why",)),), seq=0)
    kind, payload = encode(found)
    text = payload[4:].replace(b'"intervention": null, "of_batch": []', key + b'"intervention": null')
    assert text != payload[4:] and decode(kind, 0, 1, struct.pack("<I", len(text)) + text) == found


def test_nan_payload_and_infinities_are_exact(tmp_path: Path) -> None:
    bits = np.array([0x7FF8000000000123, 0xFFF8000000000001, 0x7FF0000000000000, 0x8000000000000000, 1], dtype=np.uint64)
    names = Schema(tuple("abcde"))
    journal = writer(tmp_path)
    journal.append(row(0, *bits.view(np.float64), schema=names))
    journal.close()
    (back,) = JournalReader(tmp_path).read()
    assert isinstance(back, Row)
    assert back.values.view(np.uint64).tolist() == bits.tolist()


def test_equal_schemas_are_one_object_across_segments(tmp_path: Path) -> None:
    fill(tmp_path, 300, segment_bytes=4096)
    assert len(list(tmp_path.iterdir())) > 3
    assert len({id(r.schema) for r in JournalReader(tmp_path).read() if isinstance(r, Row)}) == 1


def test_each_segment_can_be_read_alone(tmp_path: Path) -> None:
    fill(tmp_path, 300, segment_bytes=4096)
    *others, last = sorted(tmp_path.iterdir())
    for path in others:
        path.unlink()
    reader = JournalReader(tmp_path)
    assert steps(reader.read())[-1] == 299
    assert not reader.damage
    assert last.exists()


def test_objects_are_refused_when_written_and_nothing_else_suffers(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    journal.append(row(0))
    with pytest.raises(TypeError, match="dtype object"):
        journal.append(StepContext(-1, 1, 0, {"python": np.array([{}], dtype=object)}))
    with pytest.raises(ValueError, match="2 names"):
        journal.append(row(1, 1.0))
    assert journal.append(row(1)) == 1
    assert steps(JournalReader(tmp_path).read()) == [0, 1]


# -- positions


@FEW
@given(st.integers(-1, 320), st.integers(1, 50))
def test_reading_after_a_cursor_in_batches(tmp_path_factory: Any, after: int, limit: int) -> None:
    directory = tmp_path_factory.getbasetemp() / "cursor"
    if not directory.exists():
        fill(directory, 300, segment_bytes=4096)
    reader = JournalReader(directory, after)
    got = []
    while batch := reader.read(limit):
        assert len(batch) <= limit
        got += steps(batch)
    assert got == list(range(after + 1, 300))
    assert not reader.damage


def test_narrowed_to_kinds_and_steps(tmp_path: Path) -> None:
    journal = writer(tmp_path, segment_bytes=4096)
    for step in range(100):
        journal.append(row(step))
        if step % 10 == 0:
            journal.append(anomaly(step))
    journal.close()
    found = JournalReader(tmp_path, kinds=(Anomaly,)).read()
    assert [a.step for a in found if isinstance(a, Anomaly)] == list(range(0, 100, 10))
    narrowed = JournalReader(tmp_path, steps=range(40, 43))
    assert [type(r).__name__ for r in narrowed.read()] == ["Row", "Anomaly", "Row", "Row"]
    assert not narrowed.damage


# -- damage


def test_a_torn_tail_waits_and_truncation_anywhere_loses_only_what_is_cut(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    fill(whole, 6)
    (segment,) = whole.iterdir()
    data = segment.read_bytes()
    complete = [len(data) - (6 - n) * (len(data) - _end_of_first(data)) // 5 for n in range(1, 7)]
    cut = tmp_path / "cut"
    cut.mkdir()
    for size in range(len(data)):
        path = cut / segment.name
        path.write_bytes(data[:size])
        reader = JournalReader(cut)
        assert steps(reader.read()) == list(range(sum(end <= size for end in complete)))
        assert not reader.damage  # it may still be written
        path.write_bytes(data)
        assert len(steps(reader.read())) == 6 - sum(end <= size for end in complete)
        assert not reader.damage


def _end_of_first(data: bytes) -> int:
    """Offset behind the first row: six equal rows follow the segment's header and one schema."""
    marker = data[12:20]
    places = [at for at in range(len(data)) if data.startswith(marker, at)][1:]
    return places[2]  # schema, row 0, row 1


def test_a_torn_tail_before_a_later_segment_is_damage(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    (segment,) = tmp_path.iterdir()
    segment.write_bytes(segment.read_bytes()[:-3])
    journal = writer(tmp_path)
    assert journal.next_seq == 5  # number 4 was given out, so it is not given again
    journal.append(row(5))
    reader = JournalReader(tmp_path)
    assert steps(reader.read()) == [0, 1, 2, 3, 5]
    assert reader.damage.records_lost == 1
    assert 0 < reader.damage.bytes_skipped < 100
    assert "1 record lost" in str(reader.damage)
    assert segment.name in str(reader.damage)


@settings(max_examples=150, deadline=None, suppress_health_check=NOT_ASKED)
@given(st.data())
def test_flipped_bytes_cost_what_they_hit_and_nothing_more(tmp_path_factory: Any, data: st.DataObject) -> None:
    """Against the original bytes: a row survives if no byte of it changed. (The schema is repeated in other segments.)"""
    root = tmp_path_factory.getbasetemp() / "flips"
    if not root.exists():
        fill(root, 120, segment_bytes=4096)
    directory = tmp_path_factory.mktemp("flipped")
    hit: set[int] = set()
    sealed = sorted(root.iterdir())
    for path in sealed:
        raw = bytearray(path.read_bytes())
        if path != sealed[-1]:
            for at in data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=3, unique=True), label=path.name):
                raw[at] ^= data.draw(st.integers(1, 255), label="bits")
                hit.update(_row_at(path, at))
        (directory / path.name).write_bytes(raw)
    reader = JournalReader(directory)
    assert steps(reader.read()) == [step for step in range(120) if step not in hit]
    assert reader.damage.records_lost == len(hit)


def _row_at(path: Path, at: int) -> list[int]:
    """The step of the row that lies over byte `at` of an undamaged segment; none for headers and schemas."""
    data = path.read_bytes()
    marker = data[12:20]
    places = [*(p for p in range(24, len(data)) if data.startswith(marker, p)), len(data)]
    for start, end in itertools.pairwise(places):
        if start <= at < end and data[start + 8] == 2:
            return [struct.unpack_from("<q", data, start + 24)[0]]
    return []


def test_a_journal_inside_a_batch_is_not_mistaken_for_the_journal(tmp_path: Path) -> None:
    """Damage makes the reader look for the next entry: the tensors of a step may hold bytes of another journal."""
    fill(tmp_path / "inner", 3)
    (inner,) = (tmp_path / "inner").iterdir()
    tensors = {"x": np.frombuffer(inner.read_bytes(), np.uint8)}
    outer = tmp_path / "outer"
    journal = writer(outer)
    journal.append(StepContext(-1, 7, 0, {}, (MicroBatch(skeleton="x", tensors=tensors),)))
    journal.append(StepContext(-1, 8, 0, {}))
    journal.close()
    (path,) = outer.iterdir()
    raw = bytearray(path.read_bytes())
    raw[24 + 16] ^= 1  # the first entry's header
    path.write_bytes(raw)
    reader = JournalReader(outer)
    assert [type(r).__name__ + str(r.seq) for r in reader.read()] == ["StepContext1"]
    assert reader.damage.records_lost == 1


def test_damage_at_the_open_end_is_reported_once_something_follows(tmp_path: Path) -> None:
    journal = writer(tmp_path)
    for step in range(3):
        journal.append(row(step))
    (path,) = tmp_path.iterdir()
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    reader = JournalReader(tmp_path)
    assert steps(reader.read()) == [0, 1]
    assert not reader.damage
    assert reader.unread_bytes > 0
    journal.append(row(3))
    assert steps(reader.read()) == [3]
    assert reader.damage.records_lost == 1
    assert reader.unread_bytes == 0


def test_a_newer_format_is_refused_in_words(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    (path,) = tmp_path.iterdir()
    raw = bytearray(path.read_bytes())
    raw[8] = 9
    raw[20:24] = struct.pack("<I", zlib.crc32(raw[:20]))
    path.write_bytes(raw)
    with pytest.raises(TrackbridgeError, match=r"format 9.*upgrade"):
        JournalReader(tmp_path).read()


# -- while it is written


def test_reading_while_writing(tmp_path: Path) -> None:
    done = threading.Event()
    count = 3000

    def write() -> None:
        journal = writer(tmp_path, segment_bytes=8192)
        for step in range(count):
            journal.append(row(step) if step % 50 else anomaly(step))
        journal.close()
        done.set()

    thread = threading.Thread(target=write)
    reader = JournalReader(tmp_path)
    seqs: list[int] = []
    thread.start()
    while True:
        finished = done.is_set()
        seqs += [record.seq for record in reader.read(limit=17)]
        if finished and not (rest := reader.read()):
            break
        if finished:
            seqs += [record.seq for record in rest]
    thread.join()
    assert seqs == list(range(count))
    assert not reader.damage


@FEW
@given(st.lists(st.integers(1, 400), max_size=30))
def test_a_reader_sees_the_same_whatever_the_pieces_a_file_arrives_in(tmp_path_factory: Any, pieces: list[int]) -> None:
    source = tmp_path_factory.getbasetemp() / "pieces"
    if not source.exists():
        fill(source, 40)
    (segment,) = source.iterdir()
    data = segment.read_bytes()
    directory = tmp_path_factory.mktemp("arriving")
    reader = JournalReader(directory)
    got: list[int] = []
    with (directory / segment.name).open("wb", buffering=0) as file:
        at = 0
        for piece in [*pieces, len(data)]:
            file.write(data[at : at + piece])
            at += piece
            got += steps(reader.read())
    assert got == list(range(40))
    assert not reader.damage


def test_resume_goes_on_in_a_new_segment_with_the_next_number(tmp_path: Path) -> None:
    fill(tmp_path, 10)
    before = sorted(tmp_path.iterdir())
    first = before[0].read_bytes()
    journal = writer(tmp_path)
    assert journal.next_seq == 10
    assert journal.append(row(4, attempt=1)) == 10
    journal.close()
    assert writer(tmp_path, floor=20).append(row(5)) == 20
    assert before[0].read_bytes() == first
    reader = JournalReader(tmp_path)
    assert [r.seq for r in reader.read()] == [*range(11), 20]
    assert reader.damage.records_lost == 9  # a tracker knew more than the disk: those rows are gone


def test_a_writer_that_wrote_nothing_leaves_numbering_alone(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    for _ in range(3):
        writer(tmp_path).close()
    reader = JournalReader(tmp_path)
    assert len(reader.read()) == 3
    assert writer(tmp_path).append(row(3)) == 3
    assert steps(reader.read()) == [3]
    assert not reader.damage


# -- retention


def test_the_ring_keeps_its_budget_and_a_reader_calls_it_no_damage(tmp_path: Path) -> None:
    journal = writer(tmp_path, ring_bytes=64 << 10)
    reader = JournalReader(tmp_path)
    assert reader.read() == []
    for step in range(5000):
        journal.append(row(step))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 64 << 10
    got = steps(reader.read())
    assert got == list(range(got[0], 5000))
    assert got[0] > 0
    assert not reader.damage


def test_held_steps_outlive_the_ring(tmp_path: Path) -> None:
    journal = writer(tmp_path, ring_bytes=32 << 10)
    for step in range(1000):
        journal.append(row(step))
    journal.hold(990, 1400)
    journal.hold(2000, 4000)
    for step in range(1000, 4000):
        journal.append(row(step))
    assert steps(JournalReader(tmp_path, steps=range(990, 1401)).read()) == list(range(990, 1401))
    assert 1900 not in steps(JournalReader(tmp_path).read()), "what nobody holds goes, between what somebody does"
    journal.release(990, 1400)
    kept = steps(JournalReader(tmp_path).read())
    assert 990 not in kept
    assert kept[-2000:] == list(range(2000, 4000))
    journal.release(2000, 4000)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 32 << 10


def test_the_ring_is_kept_over_a_restart(tmp_path: Path) -> None:
    for start in (0, 3000):
        journal = writer(tmp_path, ring_bytes=32 << 10)
        for step in range(start, start + 3000):
            journal.append(row(step))
        journal.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 32 << 10
    assert steps(JournalReader(tmp_path).read())[-1] == 5999


# -- durability and trouble


def test_fsync_on_a_timer_and_at_once_for_what_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    journal = writer(tmp_path, fsync_seconds=5.0, clock=clock)
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", lambda handle: synced.append(handle))
    for second in range(11):
        clock.now = float(second)
        journal.append(row(second))
    assert len(synced) == 2
    journal.append(anomaly(11))
    assert len(synced) == 3
    journal.sync()
    assert len(synced) == 3  # nothing new
    journal.append(RunEnd(-1, 0.0, "finished"))
    assert len(synced) == 4


@pytest.mark.parametrize("start", [0, 3])
def test_a_full_disk_loses_rows_counts_them_and_keeps_anomalies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, start: int
) -> None:
    clock = Clock()
    journal = writer(tmp_path, clock=clock)
    for step in range(start):
        journal.append(row(step))
    with full_disk():
        for step in range(start, 8):
            clock.now += 0.7
            assert journal.append(row(step)) == -1
        assert journal.append(anomaly(8)) == -1
    assert len(caplog.records) == 1
    assert "training goes on" in caplog.text
    clock.now += 2
    assert journal.append(row(9)) == start + 1
    journal.close()
    assert journal.rows_lost == 8 - start
    reader = JournalReader(tmp_path)
    assert [type(r).__name__ for r in reader.read()] == ["Row"] * start + ["Anomaly", "Row"]
    assert not reader.damage
    assert len(list(tmp_path.iterdir())) <= 2


def test_half_a_record_is_taken_back_when_the_disk_is_full(tmp_path: Path) -> None:
    clock = Clock()
    journal = writer(tmp_path, clock=clock)
    for step in range(3):
        journal.append(row(step))
    (segment,) = tmp_path.iterdir()
    size = segment.stat().st_size
    with full_disk(room=size + 20):
        assert journal.append(row(3)) == -1
    assert segment.stat().st_size == size
    clock.now += 2
    assert journal.append(row(4)) == 3
    reader = JournalReader(tmp_path)
    assert steps(reader.read()) == [0, 1, 2, 4]
    assert not reader.damage


def test_what_was_kept_back_is_written_at_close(tmp_path: Path) -> None:
    journal = writer(tmp_path, clock=Clock())
    with full_disk():
        journal.append(RunEnd(-1, 0.0, "finished"))
    journal.close()
    journal.close()
    assert [type(r).__name__ for r in JournalReader(tmp_path).read()] == ["RunEnd"]
    assert journal.append(row(1)) == -1
    assert journal.rows_lost == 1


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot write a journal in .*; choose another dir="):
        writer(tmp_path / "file" / "rows")


def test_random_crashes_and_resumes_never_reuse_or_lose_a_number(tmp_path: Path) -> None:
    """Attempts that die without close, with the last bytes torn off at random."""
    rng = random.Random(5)
    delivered: dict[int, int] = {}
    reader = JournalReader(tmp_path)
    step = 0
    for _ in range(30):
        journal = writer(tmp_path, segment_bytes=4096)
        for _ in range(rng.randrange(1, 60)):
            journal.append(row(step))
            step += 1
            if rng.random() < 0.1:
                delivered.update((r.seq, r.step) for r in reader.read() if isinstance(r, Row))
        delivered.update((r.seq, r.step) for r in reader.read() if isinstance(r, Row))
        last = max(tmp_path.iterdir())
        torn = rng.randrange(0, 40)
        journal.append(row(step))  # the reader has not seen this one
        if torn:
            last = max(tmp_path.iterdir())
            size = last.stat().st_size
            with last.open("r+b") as file:
                file.truncate(size - min(torn, 40))
        step += 1
    fresh = {r.seq: r.step for r in JournalReader(tmp_path).read() if isinstance(r, Row)}
    delivered.update((r.seq, r.step) for r in reader.read() if isinstance(r, Row))
    assert fresh == delivered
    assert len(set(fresh.values())) == len(fresh)


@pytest.mark.parametrize("floor", range(14))
def test_no_floor_makes_a_number_given_out_twice(tmp_path: Path, floor: int) -> None:
    """A tracker's cursor usually lags behind the journal; it must not hide what the journal holds."""
    first = writer(tmp_path)
    for step in range(10):
        first.append(row(step))
    first.close()
    later = writer(tmp_path, floor=floor)
    assert later.append(row(10)) == max(10, floor)
    later.close()
    assert [record.seq for record in JournalReader(tmp_path).read()] == [*range(10), max(10, floor)]
