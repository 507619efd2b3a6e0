"""A watched loader is the same loader, and each batch comes with the ids it was made of."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from trackbridge import rng
from trackbridge.batches import Feed, Fetch, LoaderBook, RecordingBatchSampler, plain_ids
from trackbridge.errors import Part, UsageError
from trackbridge.skip import Skip, SkipPlan

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


class Numbers(Dataset[torch.Tensor]):
    """Item i is [i, a global draw]: in the main process it moves the RNG, in a worker it depends on the base seed."""

    def __init__(self, size: int = 23) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor([float(index), random.random() + np.random.rand() + torch.rand(()).item()], dtype=torch.float64)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(10):
            yield torch.tensor([float(index), torch.rand(()).item()], dtype=torch.float64)


class Eager:
    """A batch sampler that draws in ``__iter__`` itself, not at the first batch, and may reuse its list (which torch itself
    does not bear with workers)."""

    def __init__(self, size: int, *, reuse: bool) -> None:
        self.size, self.reuse = size, reuse

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.size).tolist()
        return self._batches(order)

    def _batches(self, order: list[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        for start in range(0, self.size, 3):
            batch = batch if self.reuse else []
            batch[:] = order[start : start + 3]
            yield batch

    def __len__(self) -> int:
        return -(-self.size // 3)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


LOADERS: dict[str, Callable[[dict[str, Any]], DataLoader[Any]]] = {
    "sequential": lambda o: DataLoader(Numbers(), batch_size=4, **o),
    "shuffle": lambda o: DataLoader(Numbers(), batch_size=4, shuffle=True, **o),
    "own generator": lambda o: DataLoader(Numbers(), batch_size=4, shuffle=True, generator=generator(), **o),
    "drop_last": lambda o: DataLoader(Numbers(), batch_size=4, shuffle=True, drop_last=True, **o),
    "weighted": lambda o: DataLoader(Numbers(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 9 + [5.0] * 14, 30), **o),
    "batch_sampler": lambda o: DataLoader(Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), 5, False), **o),
    "eager": lambda o: DataLoader(Numbers(), batch_sampler=Eager(23, reuse=not o.get("num_workers")), **o),
    "no batches": lambda o: DataLoader(Numbers(), batch_size=None, shuffle=True, **o),
    "distributed": lambda o: DataLoader(Numbers(), batch_size=4, sampler=DistributedSampler(Numbers(), 2, 1, seed=3), **o),
    "passed in": lambda o: DataLoader(
        Numbers(), batch_sampler=RecordingBatchSampler(BatchSampler(RandomSampler(Numbers()), 4, True)), **o
    ),
    "iterable": lambda o: DataLoader(Stream(), batch_size=4, **o),
}
WITHOUT_IDS = ("iterable",)


class Notes:
    """An observer that keeps everything it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fetches: list[Fetch] = []
        self.batches: list[Any] = []

    def before_fetch(self, *, opening: bool = False) -> None:
        self.calls.append("open" if opening else "before")

    def fetched(self, batch: Any, fetch: Fetch) -> None:
        self.calls.append("fetched")
        self.batches.append(batch)
        self.fetches.append(fetch)

    def exhausted(self) -> None:
        self.calls.append("end")

    def ids(self) -> list[tuple[int | str, ...] | None]:
        return [plain_ids(fetch.sample_ids) for fetch in self.fetches]


def seed() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def digest() -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in rng.capture({}, []).pack().items()}


def loop(loader: Any, epochs: int = 2) -> list[Any]:
    """Batches and the RNG after each, with draws between them as a training step makes."""
    seen = []
    for _ in range(epochs):
        for batch in loader:
            seen.append((batch.tolist(), digest()))
            torch.rand(3)
            random.random()
    return seen


CASES = [(kind, 0, False) for kind in LOADERS] + [
    (kind, 2, persistent)
    for kind in ("shuffle", "own generator", "eager", "no batches", "iterable")
    for persistent in (False, True)
]


@pytest.mark.parametrize(("kind", "workers", "persistent"), CASES)
def test_a_watched_loader_is_the_same_loader(kind: str, workers: int, persistent: bool) -> None:
    options = {"num_workers": workers, "persistent_workers": persistent}
    seed()
    bare = LOADERS[kind](options)
    expected = loop(bare), digest()
    seed()
    loader = LOADERS[kind](options)
    before = dict(loader.__dict__)
    notes = Notes()
    got = loop(Feed(loader, notes)), digest()
    assert got == expected
    assert {**loader.__dict__, "_iterator": None} == {**before, "_iterator": None}
    assert getattr(loader._iterator, "_index_sampler", loader._index_sampler) is loader._index_sampler
    consumed = [tuple(int(row[0]) for row in np.atleast_2d(batch)) for batch in notes.batches]
    assert notes.ids() == ([None] * len(consumed) if kind in WITHOUT_IDS else consumed)
    half = len(consumed) // 2
    assert [(f.epoch, f.index) for f in notes.fetches] == [(e, i) for e in (0, 1) for i in range(half)]
    assert [f.opened for f in notes.fetches] == ([True] + [False] * (half - 1)) * 2
    assert {f.workers for f in notes.fetches} == {workers}


def test_the_same_feed_made_anew_each_epoch_goes_on_counting() -> None:
    book, notes = LoaderBook(), Notes()
    train, other = LOADERS["shuffle"]({}), LOADERS["sequential"]({})
    for loader in (train, other, train):
        list(Feed(loader, notes, book=book))
    assert [(f.loader, f.epoch) for f in notes.fetches if f.opened] == [(0, 0), (1, 0), (0, 1)]
    list(Feed(train, notes, book=book, epoch=7))
    list(Feed(train, notes, book=book))
    assert [(f.loader, f.epoch) for f in notes.fetches if f.opened][3:] == [(0, 7), (0, 8)]


def test_the_book_keeps_no_loader_alive() -> None:
    book = LoaderBook()
    loader = LOADERS["shuffle"]({})
    gone = weakref.ref(loader)
    list(Feed(loader, Notes(), book=book))
    del loader
    gc.collect()
    assert gone() is None
    plain = [1, 2]
    notes = Notes()
    for _ in range(2):
        list(Feed(plain, notes, book=book))
    assert [(f.loader, f.epoch) for f in notes.fetches] == [(1, 0), (1, 0), (1, 1), (1, 1)]


def test_any_iterable_can_be_fed() -> None:
    notes = Notes()
    assert list(Feed([5, 6, 7], notes)) == [5, 6, 7]
    assert [(f.sample_ids, f.index, f.workers) for f in notes.fetches] == [(None, 0, None), (None, 1, None), (None, 2, None)]
    assert notes.calls == ["open", *["before", "fetched"] * 3, "before", "end"]
    assert list(Feed(iter("ab"))) == ["a", "b"]


@pytest.mark.parametrize("workers", [0, 2])
def test_making_the_iterator_early_draws_when_the_bare_loader_does(workers: int) -> None:
    def odd_loop(loader: Any) -> list[Any]:
        iterator = iter(loader)
        drawn = torch.rand(2).tolist()  # a model made between iter() and the first batch
        first = next(iterator).tolist()
        return [drawn, first, digest()]

    seed()
    expected = odd_loop(LOADERS["shuffle"]({"num_workers": workers}))
    seed()
    assert odd_loop(Feed(LOADERS["shuffle"]({"num_workers": workers}), Notes())) == expected


def test_nothing_is_fetched_early() -> None:
    asked: list[int] = []

    class Watched(Numbers):
        def __getitem__(self, index: Any) -> torch.Tensor:
            asked.append(index)
            return super().__getitem__(index)

    feed = Feed(DataLoader(Watched(), batch_size=4), Notes())
    iterator = iter(feed)
    assert asked == []
    next(iterator)
    assert asked == [0, 1, 2, 3]
    assert len(feed) == 6


def test_length_and_attributes_are_the_loaders() -> None:
    loader = LOADERS["distributed"]({})
    feed = Feed(loader)
    feed.sampler.set_epoch(3)
    assert loader.sampler.epoch == 3 and feed.batch_size == 4
    with pytest.raises(AttributeError):
        _ = feed.nothing
    with pytest.raises(TypeError):
        len(Feed(iter([])))


@pytest.mark.parametrize("workers", [0, 2])
def test_break_and_errors_leave_the_loader_as_it_was(workers: int) -> None:
    loader = LOADERS["shuffle"]({"num_workers": workers})
    own = loader.batch_sampler
    notes = Notes()
    for _ in Feed(loader, notes):
        break
    assert loader.batch_sampler is own
    with pytest.raises(ZeroDivisionError):
        for _ in Feed(loader, notes):
            _ = 1 / 0
    assert loader.batch_sampler is own

    class Broken:
        def __iter__(self) -> Any:
            raise LookupError("no samples")

    broken = DataLoader(Numbers(), batch_sampler=Broken(), num_workers=workers)
    own = broken.batch_sampler
    with pytest.raises(LookupError):
        iter(Feed(broken, notes))
    assert broken.batch_sampler is own


def test_an_abandoned_epoch_frees_its_workers() -> None:
    loader = LOADERS["shuffle"]({"num_workers": 2})
    iterator = iter(Feed(loader, Notes()))
    next(iterator)
    workers = iterator._iterator._workers
    del iterator  # no cycle keeps it: reference counting alone must end the workers
    assert not any(worker.is_alive() for worker in workers)


class Poisoned(Numbers):
    def __getitem__(self, index: Any) -> torch.Tensor:
        if index == 9:
            raise ValueError("bad sample")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_ids_after_a_failed_fetch_are_right_or_unknown(workers: int) -> None:
    notes = Notes()
    iterator = iter(Feed(DataLoader(Poisoned(), batch_size=4, num_workers=workers), notes))
    failures = 0
    while True:
        try:
            next(iterator)
        except StopIteration:
            break
        except ValueError:
            failures += 1
    assert failures == 1
    consumed = [tuple(batch[:, 0].int().tolist()) for batch in notes.batches]
    assert notes.ids() == consumed if workers == 0 else notes.ids() == [*consumed[:2], *[None] * (len(consumed) - 2)]
    assert [f.index for f in notes.fetches] == ([0, 1, 3, 4, 5] if workers == 0 else [0, 1, None, None, None])


def test_prefetched_batches_are_not_mistaken_for_consumed_ones() -> None:
    """D10: 2 workers, 4 batches ahead each: the ids at batch 3 of 10 and at batch 10 are of the batch in hand."""
    loader = DataLoader(Numbers(40), batch_size=4, shuffle=True, num_workers=2, prefetch_factor=4)
    notes = Notes()
    for number, batch in enumerate(Feed(loader, notes), start=1):
        if number in (3, 10):
            assert plain_ids(notes.fetches[-1].sample_ids) == tuple(batch[:, 0].int().tolist())
            assert notes.fetches[-1].index == number - 1
    assert len(notes.fetches) == 10


def test_unordered_loaders_have_no_ids() -> None:
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2, in_order=False)
    notes = Notes()
    assert len(list(Feed(loader, notes))) == 6
    assert notes.ids() == [None] * 6


def test_a_loader_class_of_its_own_gets_ids_only_from_a_sampler_passed_in() -> None:
    class Ahead(DataLoader[Any]):
        """Holds one batch back, as accelerate's loader does."""

        def __iter__(self) -> Any:
            iterator = super().__iter__()
            held = next(iterator)
            for batch in iterator:
                yield held
                held = batch
            yield held

    notes = Notes()
    list(Feed(Ahead(Numbers(), batch_size=4, shuffle=True), notes))
    assert notes.ids() == [None] * 6
    sampler = RecordingBatchSampler(BatchSampler(RandomSampler(Numbers()), 4, False))
    notes = Notes()
    list(Feed(Ahead(Numbers(), batch_sampler=sampler), notes))
    assert notes.ids() == [tuple(batch[:, 0].int().tolist()) for batch in notes.batches]


def test_two_passes_at_once_keep_their_own_ids() -> None:
    for sampler in (None, RecordingBatchSampler(BatchSampler(RandomSampler(Numbers(12)), 4, False))):
        options = {"batch_size": 4, "shuffle": True} if sampler is None else {"batch_sampler": sampler}
        loader = DataLoader(Numbers(12), **options)
        left, right = Notes(), Notes()
        one, two = iter(Feed(loader, left)), iter(Feed(loader, right))
        for _ in range(3):
            next(one), next(two)
        for notes in (left, right):
            assert notes.ids() == [tuple(batch[:, 0].int().tolist()) for batch in notes.batches]


def test_unusual_ids() -> None:
    assert plain_ids(["a", np.int64(3), torch.tensor(4), True]) == ("a", 3, 4, 1)
    assert plain_ids([(1, 2)]) is None and plain_ids([0.5]) is None and plain_ids(None) is None
    tensors = RecordingBatchSampler([torch.tensor([1, 2]), np.array([3]), range(4, 6), iter([7])])
    iterator = iter(tensors)
    items = list(iterator)
    assert [plain_ids(iterator.take()) for _ in items] == [(1, 2), (3,), (4, 5), None]
    assert list(items[-1]) == [7]  # not used up by us
    keys = iter(RecordingBatchSampler([(1, 2), "k"], single=True))
    list(keys)
    assert [plain_ids(keys.take()) for _ in range(2)] == [None, ("k",)]


def test_a_recording_sampler_is_otherwise_its_sampler() -> None:
    inner = BatchSampler(SequentialSampler(range(10)), 4, True)
    outer = RecordingBatchSampler(inner)
    assert list(outer) == list(inner) and len(outer) == 2 and outer.batch_size == 4 and outer.drop_last
    for twin in (copy.deepcopy(outer), pickle.loads(pickle.dumps(outer))):
        assert type(twin) is type(outer) and list(twin) == list(inner)
    assert not hasattr(outer, "state_dict")
    with pytest.raises(TypeError):
        len(RecordingBatchSampler(iter([])))


def test_an_unread_recording_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trackbridge.sampling.MAX_WAITING", 5)
    iterator = iter(RecordingBatchSampler([[i] for i in range(20)]))
    assert len(list(iterator)) == 20
    assert iterator.take() is None and iterator.waiting is None


def test_fetch_times_come_from_the_clock() -> None:
    now = [0.0]

    def slow() -> Iterator[int]:
        for item in range(3):
            now[0] += 2.0
            yield item
        now[0] += 0.5

    class Loader:
        def __iter__(self) -> Iterator[int]:
            now[0] += 10.0
            return slow()

    notes = Notes()
    feed = Feed(Loader(), notes, clock=lambda: now[0])
    for _ in feed:
        now[0] += 100.0
    assert [f.seconds for f in notes.fetches] == [12.0, 2.0, 2.0]
    assert feed.seconds == 16.0


# skipping --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_skipped_batch_is_fetched_and_nothing_else_changes(workers: int) -> None:
    seed()
    everything = loop(LOADERS["shuffle"]({"num_workers": workers}), epochs=1)
    seed()
    loader = LOADERS["shuffle"]({"num_workers": workers})
    plan = SkipPlan(skips=(Skip(index=2), Skip(index=4)))
    feed = Feed(loader, Notes(), skip=plan)
    got = [batch.tolist() for batch in feed]
    if workers:  # the loop's own draws move nothing that workers see
        assert got == [batch for number, (batch, _) in enumerate(everything) if number not in (2, 4)]
    assert [row[0] for batch in got for row in batch] == [
        row[0] for number, (batch, _) in enumerate(everything) if number not in (2, 4) for row in batch
    ]
    assert feed.skipped == 2 and plan.pending == ()


def test_a_skip_applies_once_and_the_second_epoch_is_complete() -> None:
    """D10: a skip list that applies in each epoch loses data quietly."""
    plan = SkipPlan(skips=(Skip(sample_ids=(4, 5, 6, 7)), Skip(epoch=1, index=0)))
    loader, notes, book = LOADERS["sequential"]({}), Notes(), LoaderBook()
    for _ in range(3):
        list(Feed(loader, notes, book=book, skip=plan))
    assert [[f.index for f in notes.fetches if f.epoch == epoch] for epoch in range(3)] == [
        [0, 2, 3, 4, 5],
        [1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5],
    ]
    assert notes.calls.count("end") == 3


def test_skipping_by_ids_that_are_not_known_is_an_error_not_a_silence() -> None:
    plan = SkipPlan(skips=(Skip(sample_ids=(1,)),))
    with pytest.raises(UsageError, match="sample ids"):
        list(Feed(LOADERS["iterable"]({}), skip=plan))
    assert len(list(Feed(LOADERS["iterable"]({}), skip=SkipPlan(skips=(Skip(index=0),))))) == 2


def test_plans_are_readable_files(tmp_path: Any) -> None:
    plan = SkipPlan(skips=(Skip(loader=0, epoch=1, index=2, why="spike at 40"), Skip(sample_ids=(1, "x"))))
    plan.save(tmp_path / "plan.json")
    assert SkipPlan.load(tmp_path / "plan.json") == plan
    for text, words in [
        ("{", "skip plan"),
        ('{"skips": [{"epoch": 1}]}', "give index or sample_ids"),
        ('{"skips": [{"batch": 1}]}', r"skips.0"),
        ('{"format_version": 2}', "format_version"),
    ]:
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(UsageError, match=words):
            SkipPlan.load(tmp_path / "bad.json")
    with pytest.raises(UsageError, match="No such file"):
        SkipPlan.load(tmp_path / "none.json")


# our own trouble -------------------------------------------------------------------------------------------------------


def test_a_failing_observer_is_switched_off_and_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")

    class Failing(Notes):
        def fetched(self, batch: Any, fetch: Fetch) -> None:
            raise RuntimeError("ours")

    part = Part("batches")
    notes = Failing()
    assert len(list(Feed(LOADERS["shuffle"]({}), notes, part=part))) == 6
    assert (part.failures, part.alive) == (1, False)
    assert notes.calls == ["open", "before"]
    assert len(list(Feed(LOADERS["shuffle"]({}), notes, part=part))) == 6


# torchdata -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("kind", ["shuffle", "eager"])
def test_stateful_loaders_resume_with_the_right_ids(kind: str, every: int, workers: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        options = {"batch_sampler": Eager(23, reuse=not workers)} if kind == "eager" else {"batch_size": 4, "shuffle": True}
        return torchdata.StatefulDataLoader(Numbers(), num_workers=workers, snapshot_every_n_steps=every, **options)

    def run(wrap: Callable[[Any], Any]) -> tuple[list[Any], list[Any]]:
        seed()
        loader = make()
        iterator = iter(wrap(loader))
        head = [next(iterator)[:, 0].tolist() for _ in range(4)]
        state = loader.state_dict()
        del iterator
        seed()
        again = make()
        again.load_state_dict(state)
        tail = [batch[:, 0].tolist() for batch in wrap(again)]
        second = [batch[:, 0].tolist() for batch in wrap(again)]
        return head, [tail, second]

    expected = run(lambda loader: loader)
    notes = Notes()
    assert run(lambda loader: Feed(loader, notes)) == expected
    consumed = [tuple(batch[:, 0].int().tolist()) for batch in notes.batches]
    assert notes.ids() == consumed
    tail = len(expected[1][0])
    assert [f.index for f in notes.fetches][4 : 4 + tail] == list(range(4, 4 + tail))
