"""Noting what a sampler hands out, without changing what it hands out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

MAX_WAITING = 100_000  # batches drawn and never consumed: someone else iterates a sampler that was passed in
_TORCHDATA = "torchdata.stateful_dataloader.stateful_dataloader"


class RecordingBatchSampler:
    """A batch sampler that notes what it hands out, and is otherwise the one it wraps. `single` says that it is a plain
    sampler (``batch_size=None``), each of whose items is one sample.

    Pass one to a `DataLoader` yourself where `Feed` cannot put it in: a loader class with its own ``__iter__`` that hands
    out batches in the sampler's order.
    """

    def __new__(cls, sampler: Any, *, single: bool = False) -> RecordingBatchSampler:
        return super().__new__(_Stateful if hasattr(sampler, "state_dict") else cls)

    def __init__(self, sampler: Any, *, single: bool = False) -> None:
        self.inner = sampler
        self.single = single
        self.newest: Recorded | None = None

    def __iter__(self) -> Recorded:
        iterator = iter(self.inner)
        kind = _StatefulRecorded if hasattr(iterator, "state_dict") else Recorded
        self.newest = kind(iterator, self.single)
        return self.newest

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not yet set: unpickling
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __reduce__(self) -> Any:
        return _remade, (self.inner, self.single)


def _remade(sampler: Any, single: bool) -> RecordingBatchSampler:
    return RecordingBatchSampler(sampler, single=single)


class Recorded:
    """One pass over a recorded sampler. `waiting` holds what was drawn and not yet consumed, oldest first; `drawn` counts
    all draws."""

    def __init__(self, iterator: Iterator[Any], single: bool) -> None:
        self.iterator = iterator
        self.single = single
        self.waiting: deque[Sequence[Any] | None] | None = deque()
        self.drawn = 0

    def __iter__(self) -> Recorded:
        return self

    def __next__(self) -> Any:
        item = next(self.iterator)
        self.drawn += 1
        if self.waiting is not None:
            self.waiting.append((item,) if self.single else _copied(item))
            if len(self.waiting) > MAX_WAITING:
                self.waiting = None
        return item

    def take(self) -> Sequence[Any] | None:
        return self.waiting.popleft() if self.waiting else None

    def drop(self, count: int) -> None:
        if self.waiting is not None and 0 <= count <= len(self.waiting):
            for _ in range(count):
                self.waiting.popleft()
        else:
            self.waiting = None


def _copied(item: Any) -> Sequence[Any] | None:
    """A batch's indices, copied because a sampler may reuse its list; None for what would be used up by reading it."""
    if isinstance(item, (list, tuple, range)):
        return tuple(item)
    return item.tolist() if hasattr(item, "tolist") and getattr(item, "ndim", 0) == 1 else None


# torchdata looks for these two methods on the class, so only the wrappers of stateful samplers have them.
class _Stateful(RecordingBatchSampler):
    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


class _StatefulRecorded(Recorded):
    def state_dict(self) -> Any:
        return self.iterator.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        self.iterator.load_state_dict(state)  # type: ignore[attr-defined]


def sampler_for(loader: Any) -> RecordingBatchSampler | None:
    """The recording sampler for one pass over `loader`; None if its ids cannot be known."""
    loader = _inner(loader)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    if loader.num_workers > 0 and not getattr(loader, "in_order", True):  # torch < 2.6 has no such argument
        return None
    own = _own_sampler(loader)
    if isinstance(own, RecordingBatchSampler):
        return own
    return RecordingBatchSampler(own, single=loader.batch_sampler is None) if _iterates_as_torch_does(type(loader)) else None


def left_out(loader: Any) -> int:
    """How many batches at the epoch's start one pass over `loader` leaves out: accelerate's ``skip_first_batches``, which a
    resume in the middle of an epoch uses."""
    inner = _inner(loader)
    if inner is loader:
        return 0
    samplers = (loader, inner.batch_sampler, inner.sampler)  # an iterable dataset is skipped by the loader itself
    return next((int(where.skip_batches) for where in samplers if getattr(where, "skip_batches", 0)), 0)


def torch_iterator(iterator: Any) -> Any:
    """The iterator of torch behind that of a loader of accelerate, from its first batch on; else `iterator` itself."""
    frame = getattr(iterator, "gi_frame", None)
    found = frame.f_locals.get("dataloader_iter") if frame is not None else None
    return iterator if found is None else found


def _inner(loader: Any) -> Any:
    """The DataLoader in a loader that accelerate prepared, which iterates it when asked for the first batch; else `loader`."""
    kind = next((base for base in type(loader).__mro__ if "__iter__" in vars(base)), None)
    if kind is None or (kind.__module__, kind.__name__) != ("accelerate.data_loader", "DataLoaderShard"):
        return loader
    base = loader.base_dataloader
    return base if type(base).__module__ == "torch.utils.data.dataloader" else loader


def _iterates_as_torch_does(kind: type) -> bool:
    owners = [next(base for base in kind.__mro__ if method in vars(base)) for method in ("__iter__", "_get_iterator")]
    return all(owner.__module__ in ("torch.utils.data.dataloader", _TORCHDATA) for owner in owners)


def _own_sampler(loader: DataLoader[Any]) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


@contextmanager
def in_place(loader: Any, recording: RecordingBatchSampler) -> Iterator[None]:
    """`recording` stands for the loader's sampler inside the block. The loader forbids assigning it, hence ``__dict__``; a
    persistent iterator has its own reference, which it asks again at each epoch."""
    loader = _inner(loader)
    recording.newest = None
    own = _own_sampler(loader)
    if own is recording:
        yield
        return
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    kept = getattr(loader, "_iterator", None) if loader.persistent_workers else None
    loader.__dict__[name] = recording
    if kept is not None:
        kept._index_sampler = recording
    try:
        yield
    finally:
        loader.__dict__[name] = own
        for iterator in (kept, getattr(loader, "_iterator", None)):
            if iterator is not None and getattr(iterator, "_index_sampler", None) is recording:
                iterator._index_sampler = own
