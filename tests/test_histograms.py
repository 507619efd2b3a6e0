"""Histograms: exact bins, the same counts on every path, from a training step to the capsule and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import trackbridge
from tests import replays
from trackbridge import capsule_parts as parts
from trackbridge import histograms
from trackbridge.errors import CapsuleError
from trackbridge.histograms import BINS, EDGES, NONFINITE, ZERO
from trackbridge.journal import JournalReader, JournalWriter
from trackbridge.probes.histograms import count_on_cpu, count_on_device
from trackbridge.records import Histograms
from trackbridge.replay import rerun

floats = hnp.arrays(np.float32, st.integers(0, 60), elements=st.floats(width=32))


def by_hand(values: np.ndarray) -> np.ndarray:
    """The definition: the column between whose edges a value lies, the edge nearer to zero included."""
    counts = np.zeros(BINS, np.int64)
    for value in values.astype(np.float64).reshape(-1):
        if not np.isfinite(value):
            counts[NONFINITE] += 1
            continue
        side = int(np.searchsorted(EDGES[ZERO + 1 : -1], abs(value), side="right"))
        counts[ZERO + side if value > 0 else ZERO - side] += 1
    return counts


@given(floats)
def test_counts_are_those_of_the_definition(values: np.ndarray) -> None:
    counts = histograms.count(values)
    assert (counts == by_hand(values)).all()
    assert (count_on_cpu(torch.from_numpy(values)).sum() == values.size) or values.size == 0


def test_every_edge_is_exact_in_every_float_format() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        edges = torch.tensor(EDGES[ZERO + 1 : -1]).to(dtype)
        assert (histograms.fold(count_on_cpu(edges))[ZERO + 1 : NONFINITE] == 1).all(), dtype
        assert (histograms.fold(count_on_cpu(-edges))[:ZERO] == 1).all(), dtype


@settings(deadline=None)
@given(st.lists(floats, min_size=1, max_size=5), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_the_device_path_counts_as_the_cpu_path(arrays: list[np.ndarray], dtype: torch.dtype) -> None:
    tensors = [torch.from_numpy(array).to(dtype) for array in arrays if array.size]
    if tensors:
        expected = np.stack([count_on_cpu(tensor) for tensor in tensors])
        found = count_on_device(tensors).numpy()
        assert (histograms.fold(found) == histograms.fold(expected)).all(), "a NaN may change its payload on the way"


def test_the_device_path_counts_large_tensors_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trackbridge.probes.histograms.CHUNK", 100)
    tensors = [torch.randn(size) for size in (3, 250, 1, 99, 1, 100, 7)]
    scale = torch.tensor(1024.0)
    assert (count_on_device(tensors).numpy() == np.stack([count_on_cpu(t) for t in tensors])).all()
    assert (count_on_device(tensors, scale).numpy() == np.stack([count_on_cpu(t / 1024) for t in tensors])).all()


def test_quantiles_and_divergence() -> None:
    values = np.random.default_rng(0).normal(size=100_000)
    counts = histograms.count(values)
    low, middle, high = histograms.quantiles(counts, [0.025, 0.5, 0.975])
    assert abs(middle) < 1e-2 and -2.5 < low < -1.5 and 1.5 < high < 2.5
    assert histograms.divergence(counts, counts) == 0.0
    wider = histograms.count(4 * values)
    assert 0.2 < histograms.divergence(counts, wider) < histograms.divergence(counts, histograms.count(64 * values))
    assert np.isfinite(histograms.divergence(histograms.count(np.zeros(5)), counts))
    assert np.isnan(histograms.quantiles(histograms.count(np.array([np.nan])), [0.5])).all()


def a_record(step: int, names: tuple[str, ...] = ("layer/a/weight", "layer/a/grad"), copies: Any = 1.0) -> Histograms:
    generator = np.random.default_rng(step)
    counts = np.stack([histograms.count(generator.normal(size=40) * 10.0**-step) for _ in names])
    return Histograms(-1, step, 1.5 + step, 0, names, counts, np.full(len(names), copies))


def same(a: Histograms, b: Histograms) -> bool:
    return (
        (a.step, a.time, a.attempt, a.names) == (b.step, b.time, b.attempt, b.names)
        and (a.counts == b.counts).all()
        and (a.copies == b.copies).all()
    )


def test_the_journal_and_the_parquet_file_give_back_what_was_written(tmp_path: Path) -> None:
    records = [a_record(step) for step in (0, 5, 7)]
    writer = JournalWriter(tmp_path / "j", segment_bytes=1 << 20, fsync_seconds=1.0)
    for record in records:
        writer.append(record)
    writer.close()
    back = JournalReader(tmp_path / "j", kinds={Histograms}).read()
    assert all(map(same, records, back)) and len(back) == 3
    parts.write_histograms(tmp_path, records)
    back = parts.read_histograms(tmp_path / parts.HISTOGRAMS)
    assert all(map(same, records, back)) and len(back) == 3


def test_shards_of_all_ranks_become_the_whole_and_what_every_rank_has_counts_once() -> None:
    names = ("layer/a/weight_local", "layer/b/weight")
    shared = a_record(9).counts[0]
    pieces = [a_record(rank).counts[0] for rank in (0, 1)]
    copies = np.array([1.0, 2.0])
    ranks = [Histograms(-1, 3, 0.0, 0, names, np.stack([piece, shared]), copies) for piece in pieces]
    both = histograms.merged(ranks, world_size=2)
    assert both.names == ("layer/a/weight", "layer/b/weight")
    assert (both.counts[0] == ranks[0].counts[0] + ranks[1].counts[0]).all()
    assert (both.counts[1] == ranks[0].counts[1]).all()
    assert histograms.merged(ranks[:1], world_size=2).names == names  # a shard is never shown as the whole
    with pytest.raises(ValueError, match="different steps"):
        histograms.merged([a_record(1), a_record(2)], 2)


@pytest.mark.parametrize("column, count", [(BINS, 1), (-1, 1), (3, -1)])
def test_a_hostile_histogram_file_is_refused(tmp_path: Path, column: int, count: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = {"step": [1], "time": [0.0], "attempt": [0], "name": ["x"], "copies": [1.0], "column": [column], "count": [count]}
    pq.write_table(pa.table(table), tmp_path / "h.parquet")
    with pytest.raises(CapsuleError, match="no histogram has"):
        parts.read_histograms(tmp_path / "h.parquet")


def test_from_a_training_step_to_the_capsule(tmp_path: Path) -> None:
    """On the cadence, at the first step, and after the anomaly was told; the numbers are the tensors' own."""
    settings = {"parameters": {**replays.SETTINGS["parameters"], "histograms_every": 20}}
    path = replays.record(tmp_path, **settings)
    record = trackbridge.load(path)
    found = {each.step: each for each in record.histograms()}
    told = sorted(found.keys() - {0, 20, 40})
    assert {0, 20, 40} <= found.keys() and told and replays.BAD < told[0] <= replays.BAD + 3, sorted(found)
    assert found[0].names == found[told[0]].names and not any(name.endswith("_local") for name in found[0].names)
    capsule = trackbridge.pull(path)
    assert [each.step for each in capsule.histograms] == [step for step in sorted(found) if step <= capsule.span[1]]
    assert all(same(each, found[each.step]) for each in capsule.histograms)
    elements = found[0].counts.sum(axis=1).tolist()
    sizes = {f"layer/{name}": value.numel() for name, value in replays.build().models[""].named_parameters()}
    assert {name.rpartition("/")[0]: count for name, count in zip(found[0].names, elements, strict=True)} == sizes
    assert rerun(capsule, replays.build).verdict == "exact"


def test_weights_after_the_update_and_gradients_as_the_optimizer_used_them(tmp_path: Path) -> None:
    run = trackbridge.init(dir=tmp_path, strict=True, parameters={"histograms_every": 1})
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run.watch(model, optimizer)
    weights, gradients = [], []
    for _ in range(3):
        model(torch.randn(8, 4)).square().mean().backward()
        gradients.append(histograms.count(model.weight.grad.numpy()))  # type: ignore[union-attr]
        optimizer.step()
        weights.append(histograms.count(model.weight.detach().numpy()))
        run.step(loss=1.0)
        optimizer.zero_grad()
    run.finish()
    for record in trackbridge.load(run.dir).histograms():
        assert (record.get("layer/weight/weight") == weights[record.step]).all()
        assert (record.get("layer/weight/grad") == gradients[record.step]).all()


def test_none_when_they_are_off(tmp_path: Path) -> None:
    path = replays.record(tmp_path, parameters={"histograms_every": 0})
    assert trackbridge.load(path).histograms() == [] and trackbridge.pull(path).histograms == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_on_a_gpu_without_waiting() -> None:
    tensors = [torch.randn(size, device="cuda") * 10.0**-size for size in (3, 250, 5)]
    tensors += [torch.randn(5_000_000, device="cuda"), torch.zeros(3_000_000, device="cuda")]
    low = [tensor.to(torch.bfloat16) for tensor in tensors]
    expected = [np.stack([count_on_cpu(tensor.cpu()) for tensor in each]) for each in (tensors, low)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [count_on_device(tensors), count_on_device(low)]
        torch.use_deterministic_algorithms(True)
        again = count_on_device(tensors)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.cuda.set_sync_debug_mode("default")
    assert all((counts.cpu().numpy() == wanted).all() for counts, wanted in zip(found, expected, strict=True))
    assert (again.cpu().numpy() == expected[0]).all()
