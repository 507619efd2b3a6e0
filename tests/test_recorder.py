"""What a step started from is what makes it run again to the bit, however the loop is written."""

from __future__ import annotations

import copy
import gc
import io
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trackbridge import fingerprints, recorder, rng, tree
from trackbridge.batches import Feed, RecordingBatchSampler
from trackbridge.config import RecorderConfig
from trackbridge.errors import UsageError
from trackbridge.recorder import Recorder
from trackbridge.records import StepContext
from trackbridge.rundir import RunDirectory
from trackbridge.tokens import tokens_of

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Sequences(Dataset[dict[str, Tensor]]):
    """40 token rows. With `noisy`, reading one moves the RNG of whoever reads it."""

    def __init__(self, *, noisy: bool = False) -> None:
        self.noisy = noisy
        self.rows = torch.randint(0, 50, (40, 6), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = torch.rand(()) + random.random() + np.random.rand() if self.noisy else torch.zeros(())
        return {"ids": self.rows[index], "noise": noise}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 50)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.calls += self.training
        hidden = self.drop(self.norm(self.embed(batch["ids"]).mean(1)) + batch["noise"][:, None] * self.calls)
        return nn.functional.cross_entropy(self.head(hidden), batch["ids"][:, 0])


def parts() -> tuple[Model, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(5)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def make(tmp_path: Path, **config: Any) -> Recorder:
    return Recorder(RecorderConfig(**config), RunDirectory(tmp_path), 0, attempt=0, strict=True)


def same_rng(packed: Any, state: rng.RngState) -> bool:
    other = state.pack()
    return packed.keys() == other.keys() and all(np.array_equal(packed[name], other[name]) for name in packed)


def now() -> rng.RngState:
    return rng.capture({}, [])


def digest(model: nn.Module) -> list[bytes]:
    return [tensor.detach().numpy().tobytes() for tensor in (*model.parameters(), *model.buffers())]


# the whole: run a step again ---------------------------------------------------------------------------------------------


def train(record: Recorder | None, loader: Any, *, accumulate: int, epochs: int, augment: Any) -> tuple[list[Any], list[Any]]:
    """A loop with everything that a replay trips over. Returns (contexts, weights after each step)."""
    model, optimizer, scheduler = parts()
    if record is not None:
        record.attach({"": model}, {"": optimizer}, None, {"sched": scheduler}, {"augment": augment})
    contexts: list[Any] = []
    weights: list[Any] = []
    seen = 0
    feed = Feed(loader, record)
    for _ in range(epochs):
        for batch in feed:
            batch["noise"] += torch.rand(()) + augment.random()  # between fetch and forward, in place
            (model(batch) / accumulate).backward()
            seen += 1
            if seen % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                if record is not None:
                    contexts.append(record.pack(record.close_step(len(weights))))
                weights.append(digest(model))
                scheduler.step()
        if record is not None:
            record.pause()
        model.eval()
        with torch.no_grad():  # an evaluation that draws, at times in the middle of a step
            model(next(iter(DataLoader(Sequences(noisy=True), batch_size=4, shuffle=True))))
        model.train()
        if record is not None:
            record.resume()
    return contexts, weights


def rerun(folder: Path, contexts: list[StepContext], accumulate: int) -> list[Any]:
    """Restore the snapshot and run the recorded steps from it, in objects of their own."""
    model, optimizer, scheduler = parts()
    augment = random.Random(99)
    skeleton, arrays, metadata = tree.load(folder)
    state = tree.unpack(skeleton, arrays)
    model.load_state_dict(state["models"][""])
    model.calls.copy_(state["buffers"][""]["calls"])
    optimizer.load_state_dict(state["optimizers"][""])
    scheduler.load_state_dict(state["state"]["sched"])
    weights = []
    for context in contexts[metadata["step"] :]:
        assert rng.restore(context.rng, {"augment": augment}).exact
        for micro in context.micro:
            if micro.rng is not None:
                assert rng.restore(micro.rng, {"augment": augment}).exact
            batch = tree.unpack(micro.skeleton, micro.tensors)
            batch["noise"] += torch.rand(()) + augment.random()
            (model(batch) / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        weights.append(digest(model))
        scheduler.step()
    return weights


@pytest.mark.parametrize(("workers", "noisy"), [(0, True), (0, False), (2, True)])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_step_after_a_snapshot_runs_again_to_the_bit(tmp_path: Path, accumulate: int, workers: int, noisy: bool) -> None:
    """D5, D8: shuffled (multi-worker) loader, in-process transforms, dropout, BatchNorm, AdamW, a schedule, accumulation over
    epoch edges, an evaluation in between: from the snapshot before step 3, into the second and third epoch."""

    def loader() -> DataLoader[Any]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        return DataLoader(Sequences(noisy=noisy), batch_size=8, shuffle=noisy, num_workers=workers)

    bare = train(None, loader(), accumulate=accumulate, epochs=3, augment=random.Random(7))[1], now().pack()
    record = make(tmp_path, snapshot_every=3)
    contexts, weights = train(record, loader(), accumulate=accumulate, epochs=3, augment=random.Random(7))
    assert weights == bare[0] and all(
        np.array_equal(a, b) for a, b in zip(bare[1].values(), now().pack().values(), strict=True)
    )
    # The newest two are kept, the older of which has steps of more than one epoch behind it.
    oldest = record._snapshots._kept[0].step
    assert record.pin(oldest) is None
    again = rerun(tmp_path / "rank-0000" / "snapshots" / f"step-{oldest}", contexts, accumulate)
    assert len(again) >= 3 and again == weights[oldest:]
    assert [c.notes for c in contexts] == [()] * len(contexts)


def test_the_replay_test_would_see_one_wrong_draw(tmp_path: Path) -> None:
    """The test above can fail: without the state between micro-batches the second epoch comes out otherwise."""
    record = make(tmp_path, snapshot_every=3)
    torch.manual_seed(1)
    loader = DataLoader(Sequences(noisy=True), batch_size=8, shuffle=True)
    contexts, weights = train(record, loader, accumulate=3, epochs=3, augment=random.Random(7))
    oldest = record._snapshots._kept[0].step
    record.pin(oldest)
    from dataclasses import replace

    blind = [replace(c, micro=tuple(replace(m, rng=None) for m in c.micro)) for c in contexts]
    assert rerun(tmp_path / "rank-0000" / "snapshots" / f"step-{oldest}", blind, 3) != weights[oldest:]


# where a step starts -----------------------------------------------------------------------------------------------------


def test_the_start_is_after_the_first_fetch(tmp_path: Path) -> None:
    record = make(tmp_path)
    expected = []
    for index, _ in enumerate(Feed(DataLoader(Sequences(noisy=True), batch_size=8), record)):
        expected.append(now())
        torch.rand(3)
        context = record.pack(record.close_step(index))
        assert same_rng(context.rng, expected[-1]) and context.notes == ()
        assert context.micro[0].rng is None


def test_a_later_fetch_keeps_its_state_only_if_it_moved_it(tmp_path: Path) -> None:
    for noisy in (False, True):
        record = make(tmp_path)
        after = []
        feed = iter(Feed(DataLoader(Sequences(noisy=noisy), batch_size=8), record))
        for _ in range(3):
            next(feed)
            after.append(now())
            torch.rand(2)
        context = record.pack(record.close_step(0))
        kept = [micro.rng for micro in context.micro]
        assert kept[0] is None
        for index in (1, 2):
            assert same_rng(kept[index], after[index]) if noisy else kept[index] is None


def test_an_epoch_edge_inside_a_step_is_a_fetch_that_moved_it(tmp_path: Path) -> None:
    """D5: the permutation and the base seed are drawn as the iterator is made; the state before is kept too."""
    record = make(tmp_path)
    feed = Feed(DataLoader(Sequences(), batch_size=20, shuffle=True), record)
    before = []
    for _ in range(2):
        before.append(now())
        for _ in feed:
            torch.rand(1)
    context = record.pack(record.close_step(0))
    assert [micro.rng is not None for micro in context.micro] == [False, False, True, False]
    assert [micro.opening_rng is not None for micro in context.micro] == [True, False, True, False]
    for micro, state in zip(context.micro[::2], before, strict=True):
        assert same_rng(micro.opening_rng, state)
        rng.restore(micro.opening_rng, strict=True)  # from it the same order is drawn again
        order = [batch["ids"] for batch in DataLoader(Sequences(), batch_size=20, shuffle=True)]
        assert torch.equal(order[0], torch.from_numpy(micro.tensors["ids"]))


def test_an_iterator_that_alone_draws_is_part_of_its_first_fetch(tmp_path: Path) -> None:
    """A loader that does not shuffle draws a base seed all the same, as its iterator is made."""
    record = make(tmp_path)
    feed = Feed(DataLoader(Sequences(), batch_size=20), record)
    list(feed), list(feed)
    context = record.pack(record.close_step(0))
    assert [micro.rng is not None for micro in context.micro] == [False, False, True, False]


def test_a_pause_in_a_step_does_not_reach_into_the_next(tmp_path: Path) -> None:
    record = make(tmp_path)
    model, optimizer, _ = parts()
    record.attach({"": model}, {"": optimizer})
    feed = iter(Feed(DataLoader(Sequences(), batch_size=8), record))
    for step in range(2):
        model(next(feed))
        model(next(feed))
        record.pause()
        torch.rand(3)
        record.resume()
        context = record.pack(record.close_step(step))
        assert [micro.rng for micro in context.micro] == [None, None]
    model({"ids": torch.zeros(4, 6, dtype=torch.long), "noise": torch.zeros(4)})
    model(next(feed))
    assert record.pack(record.close_step(2)).micro[0].rng is None


def test_without_a_feed_the_start_is_the_first_forward_pass(tmp_path: Path) -> None:
    record = make(tmp_path)
    model, optimizer, _ = parts()
    record.attach({"": model}, {"": optimizer})
    batch = {"ids": torch.zeros(4, 6, dtype=torch.long), "noise": torch.zeros(4)}
    for step in range(3):
        torch.rand(5)  # the user's own loader
        with torch.no_grad():
            model(batch)  # not a training pass
        expected = now()
        model(batch).backward()
        model(batch).backward()
        context = record.pack(record.close_step(step))
        assert same_rng(context.rng, expected) and context.micro == () and context.notes == ()


def test_without_any_sign_the_start_is_the_end_of_the_step_before(tmp_path: Path) -> None:
    record = make(tmp_path)
    first = record.pack(record.close_step(0))
    assert dict(first.rng) == {} and first.notes == (recorder.NO_START,)
    expected = now()
    torch.rand(3)
    second = record.pack(record.close_step(1))
    assert same_rng(second.rng, expected) and second.notes == (recorder.EARLY_START,)
    record.pause()
    torch.rand(3)
    record.resume()
    expected = now()
    third = record.pack(record.close_step(2))
    assert same_rng(third.rng, expected)
    feed = iter(Feed(DataLoader(Sequences(noisy=True), batch_size=8), record))
    next(feed)
    expected = now()
    fourth = record.pack(record.close_step(3))  # a better sign replaces the early start
    assert same_rng(fourth.rng, expected) and fourth.notes == ()


def test_a_pause_records_nothing(tmp_path: Path) -> None:
    record = make(tmp_path)
    model, optimizer, _ = parts()
    record.attach({"": model}, {"": optimizer})
    loader = DataLoader(Sequences(), batch_size=8)
    train_feed = iter(Feed(loader, record))
    model(next(train_feed))
    record.pause()
    record.pause()
    for batch in Feed(loader, record):
        model(batch)
    record.resume()
    for batch in Feed(loader, record):
        model(batch)
    record.resume()
    model(next(train_feed))
    context = record.pack(record.close_step(0))
    assert [micro.index for micro in context.micro] == [0, 1]
    assert [micro.sample_ids[0] for micro in context.micro] == [0, 8]


def test_a_batch_fetched_ahead_belongs_to_the_step_that_uses_it(tmp_path: Path) -> None:
    """D10: loops fetch the next batch before they close the step."""
    record = make(tmp_path)
    model, optimizer, _ = parts()
    record.attach({"": model}, {"": optimizer})
    feed = iter(Feed(DataLoader(Sequences(noisy=True), batch_size=8), record))
    batch = next(feed)
    for step in range(4):
        expected = now()
        torch.rand(2)
        ids = batch["ids"]
        started = now()
        model(batch).backward()
        batch = next(feed)
        context = record.pack(record.close_step(step))
        assert [micro.index for micro in context.micro] == [step]
        assert torch.equal(torch.from_numpy(context.micro[0].tensors["ids"]), ids)
        assert context.micro[0].rng is None
        assert same_rng(context.rng, expected if step == 0 else started)


def test_batches_fetched_together_all_belong_to_the_step(tmp_path: Path) -> None:
    record = make(tmp_path)
    model, optimizer, _ = parts()
    record.attach({"": model}, {"": optimizer})
    feed = iter(Feed(DataLoader(Sequences(), batch_size=8), record))
    for step in range(2):
        for batch in [next(feed), next(feed)]:
            model(batch).backward()
        context = record.pack(record.close_step(step))
        assert [micro.index for micro in context.micro] == [2 * step, 2 * step + 1]


def test_several_models_start_one_step(tmp_path: Path) -> None:
    record = make(tmp_path)
    g, d = nn.Linear(2, 2), nn.Linear(2, 2)
    record.attach({"g": g, "d": d}, {})
    expected = now()
    d(g(torch.ones(1, 2)) + torch.rand(2))
    assert same_rng(record.pack(record.close_step(0)).rng, expected)


# batches -----------------------------------------------------------------------------------------------------------------


def test_the_record_is_of_the_batch_as_fetched(tmp_path: Path) -> None:
    record = make(tmp_path)
    loader = DataLoader(Sequences(), batch_size=8)
    original = next(iter(loader))["ids"].clone()
    for batch in Feed(loader, record):
        batch["ids"].fill_(-1)
        batch["noise"] = "gone"
        break
    micro = record.pack(record.close_step(0)).micro[0]
    kept = tree.unpack(micro.skeleton, micro.tensors)
    assert torch.equal(kept["ids"], original) and kept["noise"].shape == (8,)
    assert micro.fingerprint == fingerprints.fingerprint({"a": original.numpy(), "b": np.zeros(8, np.float32)})
    statistics = tokens_of(micro)
    assert statistics["ids"]["length"] == 48 and statistics["noise"]["nonfinite"] == 0
    assert (micro.loader, micro.epoch, micro.index, micro.sample_ids) == (0, 0, 0, tuple(range(8)))
    assert micro.workers == 0 and isinstance(micro.base_seed, int) and micro.why_no_tensors is None


def test_no_reference_to_a_batch_is_kept(tmp_path: Path) -> None:
    record = make(tmp_path, batch_bytes=100)
    for size in (4, 10_000):
        batch = {"x": torch.ones(size)}
        gone = weakref.ref(batch["x"])
        storage = weakref.ref(batch["x"].untyped_storage())
        list(Feed([batch], record))
        raw = record.close_step(0)
        del batch
        gc.collect()
        assert gone() is None and storage() is None
        del raw


def test_the_budget_is_of_a_step(tmp_path: Path) -> None:
    record = make(tmp_path, batch_bytes=1000)
    batches = [{"x": torch.full((100,), float(value))} for value in range(4)]  # 400 bytes each
    for step in range(2):
        list(Feed(batches, record))
        context = record.pack(record.close_step(step))
        assert [micro.tensors is not None for micro in context.micro] == [True, True, False, False]
        assert "400 bytes did not fit recorder.batch_bytes (1000)" in context.micro[2].why_no_tensors
        assert len({micro.fingerprint for micro in context.micro}) == 4


def test_a_batch_too_large_to_keep_still_has_a_fingerprint(tmp_path: Path) -> None:
    record = make(tmp_path, batch_bytes=1000)
    x = torch.arange(60_000).reshape(300, 200)
    batch = {"x": x, "labels": x, "w": torch.ones(5).to(torch.bfloat16)}
    list(Feed([batch, {"x": x.T}], record))
    micros = record.pack(record.close_step(0)).micro
    skeleton, leaves = tree.pack({"x": x.clone(), "labels": x.clone(), "w": torch.ones(5).to(torch.bfloat16)})
    assert micros[0].tensors is None and tokens_of(micros[0]) == {}
    assert fingerprints.matches(micros[0].fingerprint, tree.values(skeleton, tree.to_numpy(leaves)))
    assert micros[1].fingerprint is None  # sampling a transposed tensor would copy it


def test_what_cannot_be_stored_says_why(tmp_path: Path) -> None:
    record = make(tmp_path, batch_bytes=5000)
    crowd = [list(range(recorder.MAX_OBJECTS + 1))]
    list(Feed([{"image": object()}, crowd, ["text"] * 3, "x" * 6000], record))
    micros = record.pack(record.close_step(0)).micro
    assert "'image'" in micros[0].why_no_tensors and "too many" in micros[1].why_no_tensors
    assert tree.unpack(micros[2].skeleton, micros[2].tensors) == ["text"] * 3 and micros[2].fingerprint is None
    assert "its text did not fit" in micros[3].why_no_tensors and micros[3].skeleton is None


def test_the_users_own_batch_and_identity(tmp_path: Path) -> None:
    record = make(tmp_path)
    record.close_step(0)
    context = record.pack(record.close_step(1, batch={"x": torch.ones(3)}, batch_index=7, sample_ids=["a", 4]))
    (micro,) = context.micro
    assert (micro.index, micro.sample_ids, micro.loader) == (7, ("a", 4), None)
    assert micro.tensors["x"].tolist() == [1, 1, 1] and recorder.AFTER_USE in context.notes
    (bare,) = record.pack(record.close_step(2, sample_ids=[3])).micro
    assert (bare.sample_ids, bare.why_no_tensors, bare.tensors) == ((3,), "no batch was given", None)


def test_the_users_ids_complete_what_the_feed_does_not_know(tmp_path: Path) -> None:
    record = make(tmp_path)
    list(Feed([torch.ones(2)], record))
    (micro,) = record.pack(record.close_step(0, batch=torch.zeros(9), batch_index=9, sample_ids=[5, 6])).micro
    assert (micro.sample_ids, micro.index, micro.tensors["~"].tolist()) == ((5, 6), 0, [1, 1])
    list(Feed(DataLoader(Sequences(), batch_size=40), record))
    (micro,) = record.pack(record.close_step(1, sample_ids=[5])).micro
    assert micro.sample_ids == tuple(range(40))  # the sampler knows better
    list(Feed([torch.ones(2)] * 2, record))
    context = record.pack(record.close_step(2, sample_ids=[5]))
    assert recorder.UNATTRIBUTED in context.notes and context.micro[0].sample_ids is None


def test_a_loop_that_never_closes_a_step_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_MICRO", 5)
    record = make(tmp_path)
    list(Feed(range(50), record))
    context = record.pack(record.close_step(0))
    assert len(context.micro) == 5 and len(context.notes) == 1 and "only the first" in context.notes[0]


def test_ids_of_a_sampler_that_was_passed_in(tmp_path: Path) -> None:
    record = make(tmp_path)
    sampler = RecordingBatchSampler([[3, 1], [2, 0]])
    for step, _ in enumerate(Feed(DataLoader(Sequences(), batch_sampler=sampler), record)):
        assert record.pack(record.close_step(step)).micro[0].sample_ids == ((3, 1), (2, 0))[step]


# hooks ---------------------------------------------------------------------------------------------------------------------


def test_copies_of_a_watched_model_are_not_watched(tmp_path: Path) -> None:
    record = make(tmp_path)
    model, optimizer, _ = parts()
    record.attach({"": model}, {"": optimizer})
    batch = {"ids": torch.zeros(4, 6, dtype=torch.long), "noise": torch.zeros(4)}
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        torch.rand(1)
        twin(batch).backward()
        assert record._open.fresh
    model(batch)
    assert not record._open.fresh
    assert all("trackbridge" not in str(type(hook)) for hook in twin._forward_pre_hooks.values())


def test_a_saved_model_loads_where_trackbridge_is_not(tmp_path: Path) -> None:
    record = make(tmp_path)
    model = nn.Sequential(nn.Linear(2, 2))
    record.attach({"": model}, {})
    torch.save(model, tmp_path / "model.pt")
    code = f"""
import sys
sys.modules["trackbridge"] = None
import torch
model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
print(model(torch.ones(1, 2)).shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch.Size([1, 2])" in done.stdout


@pytest.mark.parametrize("wrap", [torch.compile, lambda model, **o: model.compile(**o) or model], ids=["function", "method"])
def test_a_compiled_model_keeps_its_one_graph(tmp_path: Path, wrap: Callable[..., nn.Module]) -> None:
    record = make(tmp_path)
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    record.attach({"": model}, {})
    compiled = wrap(model, fullgraph=True, backend="eager")
    record.close_step(0)
    expected = now()
    compiled(torch.ones(1, 2)).sum().backward()
    assert same_rng(record.pack(record.close_step(1)).rng, expected)


def test_watching_the_compiled_module_sees_its_forward(tmp_path: Path) -> None:
    record = make(tmp_path)
    model = torch.compile(nn.Linear(2, 2), backend="eager", fullgraph=True)
    record.attach({"": model}, {})
    torch.rand(2)
    expected = now()
    model(torch.ones(1, 2))
    context = record.pack(record.close_step(0))
    assert same_rng(context.rng, expected) and context.notes == ()


def test_attaching_again_replaces_and_detaching_leaves_no_hook(tmp_path: Path) -> None:
    record = make(tmp_path)
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    record.attach({"": model}, {})
    record.attach({"": other}, {})
    assert not model._forward_pre_hooks and len(other._forward_pre_hooks) == 1
    other(torch.ones(1, 2))
    record.detach()
    assert not other._forward_pre_hooks
    with pytest.raises(UsageError, match="generators"):
        record.attach({}, {}, generators={"x": object()})


def test_a_forked_child_records_nothing(tmp_path: Path) -> None:
    record = make(tmp_path)
    model = nn.Linear(2, 2)
    record.attach({"": model}, {})
    child = os.fork()
    if child == 0:
        model(torch.ones(1, 2))
        os._exit(0 if record._open.fresh else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_failing_hook_is_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Recorder(RecorderConfig(), RunDirectory(tmp_path), 0, attempt=0)
    model = nn.Linear(2, 2)
    record.attach({"": model}, {})
    calls = []
    monkeypatch.setattr(Recorder, "forward", lambda self: calls.append(1) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 2))  # under pytest our bugs are raised
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert len(calls) == 2 and not record._part.alive


def test_registered_generators_are_recorded(tmp_path: Path) -> None:
    """D9: a generator of the dataset's own is nobody's global."""
    record = make(tmp_path)
    augment = np.random.default_rng(3)
    model = nn.Linear(2, 2)
    record.attach({"": model}, {}, generators={"aug": augment})
    model(torch.ones(1, 2))
    context = record.pack(record.close_step(0))
    expected = augment.random(3).tolist()
    fresh = np.random.default_rng(8)
    rng.restore(context.rng, {"aug": fresh}, strict=True)
    assert fresh.random(3).tolist() == expected


# on a GPU --------------------------------------------------------------------------------------------------------------------

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def cuda_parts() -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Dropout(0.5), nn.Linear(8, 50)).cuda()
    return model, torch.optim.AdamW(model.parameters(), fused=True), torch.amp.GradScaler("cuda", init_scale=4.0)


@gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_on_a_gpu_never_waits_for_it_and_runs_again_to_the_bit(tmp_path: Path) -> None:
    record = make(tmp_path, snapshot_every=4)
    model, optimizer, scaler = cuda_parts()
    record.attach({"": model}, {"": optimizer}, scaler)
    batches = [torch.randint(0, 50, (4, 6)).cuda() for _ in range(8)]
    for warm in batches[:2]:  # lazy allocations of torch's own
        scaler.scale(model(warm).square().mean()).backward()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    raws, losses, originals = [], [], [batch.clone() for batch in batches]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step, batch in enumerate(Feed(batches, record)):
            loss = model(batch).square().mean()
            scaler.scale(loss).backward()
            batch.fill_(-1)
            optimizer.step()
            optimizer.zero_grad()
            raws.append(record.close_step(step))
            losses.append(loss.detach())
            if step == 4:
                assert record._snapshots._making is not None
                record._snapshots._making.join()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    contexts = [record.pack(raw) for raw in raws]
    assert all("cuda:0" in context.rng for context in contexts)
    assert record.pin(5) is None
    skeleton, arrays, _ = tree.load(tmp_path / "rank-0000" / "snapshots" / "step-5")
    state = tree.unpack(skeleton, arrays)
    again, optimizer, scaler = cuda_parts()
    again.load_state_dict(state["models"][""])
    optimizer.load_state_dict(state["optimizers"][""])
    scaler.load_state_dict(state["scaler"])
    for context in contexts[5:]:
        assert rng.restore(context.rng, strict=True).exact
        batch = tree.unpack(context.micro[0].skeleton, context.micro[0].tensors)
        assert torch.equal(batch, originals[context.step].cpu())
        loss = again(batch.cuda()).square().mean()
        scaler.scale(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(loss.detach(), losses[context.step])


@gpu
def test_capturing_a_cuda_graph_is_left_alone(tmp_path: Path) -> None:
    record = make(tmp_path, snapshot_every=1)
    model = nn.Linear(4, 4).cuda()
    record.attach({"": model}, {})
    x = torch.ones(2, 4, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for step in range(3):
            model(x).sum().backward()
            record.close_step(step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).sum().backward()
    for step in range(3):
        graph.replay()
        context = record.pack(record.close_step(3 + step))
    assert context.notes == (recorder.EARLY_START,) and "cuda:0" in context.rng


@gpu
def test_the_default_device_may_be_the_gpu(tmp_path: Path) -> None:
    record = make(tmp_path, snapshot_every=1)
    with torch.device("cuda"):
        model = nn.Linear(2, 2)
        record.attach({"": model}, {})
        list(Feed([{"cpu": torch.ones(3, device="cpu"), "gpu": torch.ones(3)}], record))
        model(torch.ones(1, 2))
        (micro,) = record.pack(record.close_step(0)).micro
        assert record.pin(0) is None
    assert micro.tensors["gpu"].tolist() == [1, 1, 1]
