"""A plan skips exactly the batches it names: on each rank, in their own epoch, after a resume, once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import trackbridge
from trackbridge.batches import Feed, Fetch, LoaderBook
from trackbridge.errors import UsageError
from trackbridge.skip import Skip, SkipPlan

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        return int(index)


class Notes:
    """Which samples were handed out, by (epoch, index)."""

    def __init__(self) -> None:
        self.seen: dict[tuple[Any, Any], tuple[int, ...]] = {}

    def before_fetch(self, *, opening: bool = False) -> None: ...

    def exhausted(self) -> None: ...

    def fetched(self, batch: Any, fetch: Fetch) -> None:
        assert fetch.sample_ids is None or list(fetch.sample_ids) == batch.tolist(), "ids travel with their batch"
        self.seen[fetch.epoch, fetch.index] = tuple(batch.tolist())


def shuffled(seed: int = 0, **more: Any) -> DataLoader[int]:
    return DataLoader(Numbers(), 4, shuffle=True, generator=torch.Generator().manual_seed(seed), **more)


def epochs(loader: Any, count: int, plan: SkipPlan | None = None, **more: Any) -> dict[tuple[Any, Any], tuple[int, ...]]:
    notes = Notes()
    book = LoaderBook()
    for _ in range(count):
        list(Feed(loader, notes, book=book, skip=plan, **more))
    return notes.seen


@pytest.mark.parametrize("index", [3, 9], ids=["in the middle", "the last batch"])
@pytest.mark.parametrize("workers", [0, 2])
def test_d10_the_batch_is_skipped_once_and_the_epochs_after_it_are_complete(workers: int, index: int) -> None:
    """D10: two workers that fetch four batches ahead; batch 3 of 10, and batch 10."""
    more: dict[str, Any] = {"num_workers": workers, **({"prefetch_factor": 4} if workers else {})}
    whole = epochs(shuffled(**more), 3)
    plan = SkipPlan(skips=(Skip(loader=0, epoch=1, sample_ids=whole[1, index]),))
    assert epochs(shuffled(**more), 3, plan) == {key: ids for key, ids in whole.items() if key != (1, index)}
    assert plan.pending == ()


def test_the_same_samples_in_another_epoch_are_trained_on() -> None:
    loader = DataLoader(Numbers(), 4)  # each epoch alike
    plan = SkipPlan(skips=(Skip(epoch=2, sample_ids=(8, 9, 10, 11)),))
    seen = epochs(loader, 4, plan)
    assert [epoch for epoch in range(4) if (epoch, 2) not in seen] == [2]


def test_what_is_no_plan_is_told_at_once(tmp_path: Path) -> None:
    run = trackbridge.init(dir=tmp_path)
    with pytest.raises(UsageError, match="takes a SkipPlan or the path of one, not a dict"):
        run.batches(shuffled(), skip={"skips": []})  # type: ignore[arg-type]
    run.finish()


def test_each_rank_skips_its_own_share() -> None:
    def loader(rank: int) -> DataLoader[int]:
        return DataLoader(Numbers(), 4, sampler=DistributedSampler(Numbers(), 2, rank, seed=3))

    whole = [epochs(loader(rank), 1) for rank in (0, 1)]
    plan = SkipPlan(skips=tuple(Skip(rank=rank, loader=0, epoch=0, sample_ids=whole[rank][0, 2]) for rank in (0, 1)))
    for rank in (0, 1):
        mine = plan.model_copy(deep=True)  # a process of its own loads its own
        assert epochs(loader(rank), 1, mine, rank=rank) == {k: v for k, v in whole[rank].items() if k != (0, 2)}
        assert [skip.rank for skip in mine.pending] == [1 - rank]
        assert mine.missed(0, 0, rank=rank) == []


class Rest:
    """A sampler that goes on in the middle of an epoch: its batches are numbered from 0 again."""

    def __init__(self, order: list[int], done: int) -> None:
        self.order, self.done = order, done

    def __iter__(self) -> Iterator[int]:
        yield from self.order[self.done :]

    def __len__(self) -> int:
        return len(self.order) - self.done


def test_a_sampler_that_goes_on_in_the_middle_of_an_epoch() -> None:
    order = torch.randperm(40, generator=torch.Generator().manual_seed(5)).tolist()
    plan = SkipPlan(skips=(Skip(loader=0, epoch=0, sample_ids=tuple(order[24:28])),))
    seen = epochs(DataLoader(Numbers(), 4, sampler=Rest(order, 12)), 1, plan)
    assert list(seen.values()) == [tuple(order[i : i + 4]) for i in range(12, 40, 4) if i != 24]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("skipped", [(0, 7), (1, 2)], ids=["later in the epoch", "in the next epoch"])
def test_torchdatas_loader_that_goes_on_in_the_middle_of_an_epoch(workers: int, skipped: tuple[int, int]) -> None:
    module = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        return module.StatefulDataLoader(
            Numbers(), 4, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(2)
        )

    first, book = loader(), LoaderBook()
    iterator = iter(Feed(first, Notes(), book=book))
    for _ in range(5):
        next(iterator)
    saved, place = first.state_dict(), book.state()
    del iterator

    def resumed() -> Any:
        again = loader()
        again.load_state_dict(saved)
        return again

    bare = resumed()  # what comes after a resume is torchdata's affair: its next epoch is not that of a run without one
    whole = {(epoch, (1 - epoch) * 5 + i): tuple(batch.tolist()) for epoch in (0, 1) for i, batch in enumerate(bare)}
    plan = SkipPlan(skips=(Skip(loader=0, epoch=skipped[0], sample_ids=whole[skipped]),))
    again, notes, book = resumed(), Notes(), LoaderBook()
    book.resume(place)
    for _ in range(2):
        list(Feed(again, notes, book=book, skip=plan))
    assert notes.seen == {key: ids for key, ids in whole.items() if key != skipped}
    assert plan.pending == ()


def test_epochs_are_numbered_on_after_a_resume(tmp_path: Path) -> None:
    """In the middle of an epoch that epoch goes on; after its last batch the next one begins."""
    loader = shuffled()
    run = trackbridge.init(dir=tmp_path)
    for number, _ in enumerate(run.batches(loader)):
        if number == 3:
            middle = run.state_dict()
    done = run.state_dict()
    feed = iter(run.batches(loader))
    for _ in range(10):
        next(feed)
    last = run.state_dict()
    run.finish()
    assert [state["epochs"] for state in (middle, done, last)] == [[0], [1], [2]]

    run = trackbridge.init(dir=tmp_path, id=run.id, resume="must")
    run.load_state_dict(last)
    plan = SkipPlan(skips=(Skip(epoch=2, index=0),))
    plan.save(tmp_path / "plan.json")
    feed_again = run.batches(shuffled(), skip=tmp_path / "plan.json")
    assert len(list(feed_again)) == 9 and feed_again.skipped == 1
    run.finish()


def test_what_no_epochs_end_tells_is_told_at_the_end_of_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A loader that has another number now would be trained on the bad batch in silence."""
    skips = (Skip(loader=5, epoch=0, index=1), Skip(epoch=1, index=2), Skip(epoch=0, index=99), Skip(rank=3, index=1))
    SkipPlan(skips=skips).save(tmp_path / "plan.json")
    run = trackbridge.init(dir=tmp_path)
    loader = shuffled()
    for _ in range(2):  # the file is read again in each epoch
        list(run.batches(loader, skip=tmp_path / "plan.json"))
    with caplog.at_level(logging.WARNING, "trackbridge"):
        run.finish()
    said = [record.getMessage() for record in caplog.records if "never came" in record.getMessage()]
    assert said == [
        "trackbridge: epoch 0 is over, but a batch to skip never came: epoch 0, index 99",
        "trackbridge: a batch to skip never came: loader 5, epoch 0, index 1",
    ]


def test_ids_of_another_loaders_batch_need_not_be_known_here(tmp_path: Path) -> None:
    plan = SkipPlan(skips=(Skip(loader=1, epoch=0, sample_ids=(1, 2)),))
    run = trackbridge.init(dir=tmp_path)
    assert len(list(run.batches([1, 2, 3], skip=plan))) == 3
    run.finish()


def test_a_batch_that_never_comes_is_told(caplog: pytest.LogCaptureFixture) -> None:
    plan = SkipPlan(skips=(Skip(epoch=0, sample_ids=(7, 7), why="spike at 40"), Skip(epoch=5, index=0)))
    with caplog.at_level(logging.WARNING, "trackbridge"):
        epochs(shuffled(), 1, plan)
    assert [record.getMessage() for record in caplog.records] == [
        "trackbridge: epoch 0 is over, but a batch to skip never came: epoch 0, samples 7, 7 (spike at 40)"
    ]
