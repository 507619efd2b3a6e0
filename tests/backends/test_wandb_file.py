"""The reader of W&B run files: whole, while they grow, cut off anywhere, and with damaged bytes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wandb_kit import QuickConfig

from trackbridge.backends import wandb_file
from trackbridge.backends.wandb_rows import key, original
from trackbridge.errors import ReferenceNotFoundError, TrackbridgeError
from trackbridge.names import SEQ
from trackbridge.testing import anomaly, deliver, end, row, rows, run_info

ROWS = 120


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run file of the real client, longer than two blocks, whose rows do not fit into one block each."""
    folder = tmp_path_factory.mktemp("run")
    backend = QuickConfig(mode="offline").build()
    backend.open(run_info(folder))
    wide = {f"layer/h.{i}.weight/grad_norm": i / 3 for i in range(1000)}
    deliver(backend, [*rows(range(ROWS)), row(ROWS, ROWS, wide), anomaly(ROWS + 1, 3)])
    backend.close(end(ROWS + 2), timeout=20)
    (path,) = wandb_file.run_files(folder / "wandb")
    assert path.stat().st_size > 2 * wandb_file.BLOCK
    return path


def held(run: wandb_file.RecordedRun) -> list[int]:
    return [line[SEQ] for line in run.history]


def test_the_whole_file(file: Path) -> None:
    run = wandb_file.load(file)
    assert (held(run), run.exit_code, run.damage) == (list(range(ROWS + 1)), 0, 0)
    assert (run.run_id, run.project, run.name, run.tags) == ("run-0001", "contract", "a run", ("t",))
    assert run.history[-1]["layer/h.2.weight/grad_norm"] == 2 / 3
    assert run.metrics["*"] == "trackbridge/step"
    assert [(title, level) for title, _, level in run.alerts] == [("spike at step 3: train/loss", "WARN")]
    assert "corrupt-batch" in run.alerts[0][1]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_a_file_that_grows_gives_each_record_once(file: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = file.read_bytes()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), min_size=1, max_size=8)))
    path = tmp_path / file.name
    reader, run = None, wandb_file.RecordedRun()
    for cut in [*cuts, len(whole)]:
        path.write_bytes(whole[:cut])
        reader = reader or wandb_file.RunFile(path)
        for record in reader.read():
            run.add(record)
        seen = held(run)
        assert seen == list(range(len(seen)))
    assert (held(run), run.exit_code, reader.damage if reader else -1) == (list(range(ROWS + 1)), 0, 0)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_a_flipped_byte_costs_one_block_and_is_counted(file: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(file.read_bytes())
    last_block = len(whole) - len(whole) % wandb_file.BLOCK
    place = data.draw(st.integers(7, last_block - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path / file.name
    path.write_bytes(whole)
    run = wandb_file.load(path)
    there = held(run)
    assert there == sorted(set(there)) and set(there) <= set(range(ROWS + 1))
    lost = sorted(set(range(ROWS + 1)) - set(there))
    assert lost == list(range(lost[0], lost[-1] + 1)) if lost else True, "more than one place was lost"
    assert run.damage >= bool(lost)


def test_what_is_found_in_a_records_bytes_is_what_it_says(file: Path) -> None:
    reader, seqs = wandb_file.RunFile(file), []
    for data in reader.payloads():
        record = reader.parsed(data)
        kind = record.WhichOneof("record_type")
        assert wandb_file.kind_of(data) == record.DESCRIPTOR.fields_by_name[kind].number
        if kind == "history":
            seqs.append(wandb_file.number_in(data, SEQ))
        if kind in ("history", "summary"):
            items = record.history.item or record.summary.update
            said = {wandb_file.item_key(item): item.value_json for item in items}
            assert wandb_file.number_in(data, SEQ) == (int(said[SEQ]) if SEQ in said else None)
    assert seqs == list(range(ROWS + 1))


LIKE_OURS = [SEQ, f"\x0f{SEQ}", f"\x12\x0f{SEQ}", f"\n\x15\x12\x0f{SEQ}"]
WORDS = st.text(max_size=40) | st.sampled_from([*LIKE_OURS, f"\x12\x0f{SEQ}\u0082\x01\x0213", "x" * 127, "x" * 300])


@settings(deadline=None)
@given(st.lists(st.tuples(WORDS, WORDS, st.booleans()), max_size=6), st.integers(0, 2**62), st.booleans(), st.integers(0, 6))
def test_a_number_is_found_under_its_key_alone(others: list[tuple[str, str, bool]], seq: int, there: bool, place: int) -> None:
    """Whatever the other keys and values are: our own key as a value, as a part of another key, or the end of one."""
    schema = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    items = [
        (name, json.dumps(value, ensure_ascii=False), nested)
        for name, value, nested in others
        if there or name not in LIKE_OURS
    ]
    items = [item for item in items if item[0] != SEQ]
    if there:
        items.insert(place, (SEQ, str(seq), place % 2 == 0))
    record = schema.Record(num=seq)
    record.history.SetInParent()
    for name, value, nested in items:
        record.history.item.add(value_json=value, **({"nested_key": [name]} if nested else {"key": name}))
    data = record.SerializeToString()
    assert wandb_file.kind_of(data) == wandb_file.HISTORY
    assert wandb_file.number_in(data, SEQ) == (seq if there else None)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_record_raise_nothing(data: bytes) -> None:
    assert wandb_file.kind_of(data) >= -1


def test_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "run-x.wandb"
    path.write_bytes(os.urandom(100))
    with pytest.raises(TrackbridgeError, match="not a W&B run file"):
        wandb_file.load(path)
    with pytest.raises(ReferenceNotFoundError, match="holds no W&B run file"):
        wandb_file.load(tmp_path / "nowhere")


def test_lives_are_read_in_their_order(tmp_path: Path) -> None:
    names = [
        "offline-run-20260101_000000-a-1",
        "offline-run-20260101_000000-a-1-1",
        "offline-run-20260101_000001-a-1",
        "run-20250101_000000-a-1",
    ]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "run-a-1.wandb").touch()
    assert [path.parent.name for path in wandb_file.run_files(tmp_path, "a-1")] == [names[3], *names[:3]]


NAMES = st.text() | st.from_regex(r"\A(?:u*\\?|u*_.?|\\u*)\Z")


@given(NAMES, NAMES)
def test_keys_are_injective_and_never_the_trackers_own(one: str, other: str) -> None:
    assert original(key(one)) == one
    assert not key(one).startswith("_")
    assert key(one) != "\\"
    assert (key(one) == key(other)) == (one == other)
