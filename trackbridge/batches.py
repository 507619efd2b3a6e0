"""Which batch was that: iterate a loader as before, and know the samples of each batch as it is consumed.

A `Feed` changes nothing about the loader: no random number is drawn, no order changes, nothing is fetched earlier. For a
`torch.utils.data.DataLoader` it notes the sampler's indices on their way to the workers, by putting a
`RecordingBatchSampler` in the loader's place for the moment in which an iterator is made. Workers fetch ahead, so indices
wait in a queue until their batch arrives; batches come in order, or (``in_order=False``) their ids are unknown.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import index as as_index
from typing import Any, Generic, Protocol, TypeVar

from trackbridge.errors import Part, UsageError
from trackbridge.sampling import Recorded, RecordingBatchSampler, in_place, left_out, sampler_for, torch_iterator
from trackbridge.skip import SkipPlan

__all__ = ["Feed", "Fetch", "LoaderBook", "Observer", "RecordingBatchSampler", "plain_ids"]

T = TypeVar("T")

logger = logging.getLogger("trackbridge")


@dataclass(frozen=True, slots=True)
class Fetch:
    """One fetched batch. `sample_ids` are the sampler's own objects (see `plain_ids`), None if unknown; `index` counts
    batches within `epoch`, None after a fetch failed; `seconds` is how long the loop waited for it. `opened` is True for
    the first batch of an epoch. `workers` and `base_seed` say how the workers of this epoch were seeded (worker i:
    ``base_seed + i``), None without a DataLoader. `loader` and `epoch` are None for a batch that no feed fetched."""

    loader: int | None
    epoch: int | None
    index: int | None
    sample_ids: Sequence[Any] | None
    seconds: float
    opened: bool = False
    workers: int | None = None
    base_seed: int | None = None


class Observer(Protocol):
    """What a feed tells, always on the training thread."""

    def before_fetch(self, *, opening: bool = False) -> None: ...
    def fetched(self, batch: Any, fetch: Fetch, /) -> None: ...
    def exhausted(self) -> None: ...


def plain_ids(sample_ids: Sequence[Any] | None) -> tuple[int | str, ...] | None:
    """Ids as ints and strings; None if any is something else, for an id that cannot be written down names nothing."""
    if sample_ids is None:
        return None
    try:
        return tuple([item if isinstance(item, str) else as_index(item) for item in sample_ids])
    except TypeError:
        return None


@dataclass(slots=True, eq=False)
class Entry:
    """What is known of one loader: its number, how many epochs were begun, and whether the newest is under way."""

    number: int
    begun: int = 0
    under_way: bool = False


class LoaderBook:
    """Numbers loaders in the order of their first use, and the epochs of each. One per run."""

    def __init__(self) -> None:
        self._entries: weakref.WeakKeyDictionary[Any, Entry] = weakref.WeakKeyDictionary()
        self._plain: tuple[Any, Entry] | None = None
        self._all: list[Entry] = []
        self._resumed: list[int] = []

    def entry(self, loader: Any) -> Entry:
        """A list or tuple cannot be remembered weakly; the last one is."""
        if self._plain is not None and self._plain[0] is loader:
            return self._plain[1]
        try:
            found = self._entries.get(loader)
        except TypeError:
            found = None
        if found is None:
            number = len(self._all)
            found = Entry(number, self._resumed[number] if number < len(self._resumed) else 0)
            self._all.append(found)
            try:
                self._entries[loader] = found
            except TypeError:
                self._plain = (loader, found)
        return found

    def state(self) -> list[int]:
        """The number of the epoch that the next pass over each loader is: the one under way goes on."""
        return [entry.begun - entry.under_way for entry in self._all]

    def resume(self, state: Sequence[int]) -> None:
        """Go on from `state`, with loaders that are first used in the same order as then."""
        self._resumed = [int(epoch) for epoch in state]
        for entry, epoch in zip(self._all, self._resumed, strict=False):
            entry.begun, entry.under_way = epoch, False


class Feed(Generic[T]):
    """Iterate `loader` while telling `observer` about each batch. Each ``iter()`` is an epoch.

    `skip` names batches that are fetched but not handed out, so that what follows them is what it would have been; `rank` is
    this process' own, for the entries of a plan that name one. `epoch` numbers the next pass where the loop knows better;
    `known_as` is the loader to number it under, where `loader` is only one pass of it. Attributes are the loader's own.
    """

    def __init__(
        self,
        loader: Iterable[T],
        observer: Observer | None = None,
        *,
        book: LoaderBook | None = None,
        skip: SkipPlan | None = None,
        epoch: int | None = None,
        known_as: Any = None,
        part: Part | None = None,
        rank: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.loader = loader
        self.seconds = 0.0  # spent waiting for batches, in total
        self.skipped = 0
        self._observer = observer
        self._entry = (book or LoaderBook()).entry(loader if known_as is None else known_as)
        self._skip = skip
        self._rank = rank
        if epoch is not None:
            self._entry.begun = epoch
        self._part = part or Part("batches")
        self._clock = clock

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[T]:
        epoch = self._entry.begun
        self._entry.begun += 1
        self._entry.under_way = True
        return _Pass(self, self._entry, epoch)


class _Pass(Generic[T]):
    """One epoch. Makes the loader's iterator at once, as ``iter(loader)`` does."""

    def __init__(self, feed: Feed[T], entry: Entry, epoch: int) -> None:
        self._feed, self._entry, self._epoch = feed, entry, epoch
        self._length: int | None = None  # batches in the epoch, where the sampler knows
        self._part, self._observer, self._clock = feed._part, feed._observer, feed._clock
        self._skip = feed._skip
        self._left_out = left_out(feed.loader)
        self._index: int | None = self._left_out
        self._first = True
        self._sampler: RecordingBatchSampler | None = None
        self._recorded: Recorded | None = None
        if self._observer is not None and self._part.alive:
            with self._part:
                self._observer.before_fetch(opening=True)
        if self._part.alive:
            with self._part:
                self._sampler = sampler_for(feed.loader)
        if self._sampler is not None:
            length = _length(feed.loader)
            self._length = None if length is None else length + self._left_out
        start = self._clock()
        if self._sampler is None:
            self._iterator: Iterator[T] = iter(feed.loader)
        else:
            with in_place(feed.loader, self._sampler):
                self._iterator = iter(feed.loader)
            self._recorded = self._sampler.newest
        self._torch: Any = self._iterator  # torch's own iterator, where another one is around it
        self._opening = self._clock() - start

    def __iter__(self) -> _Pass[T]:
        return self

    def __next__(self) -> T:
        while True:
            if self._observer is not None and self._part.alive:
                with self._part:
                    self._observer.before_fetch()
            start = self._clock()
            try:
                batch = self._next()
            except StopIteration:
                self._entry.under_way = False
                if self._observer is not None and self._part.alive:
                    with self._part:
                        self._observer.exhausted()
                if self._skip is not None:
                    for skip in self._skip.missed(self._entry.number, self._epoch, rank=self._feed._rank):
                        logger.warning("trackbridge: epoch %d is over, but a batch to skip never came: %s", self._epoch, skip)
                raise
            except BaseException:
                self._lost()
                raise
            seconds = self._clock() - start + self._opening
            self._opening = 0.0
            self._feed.seconds += seconds
            if self._skip is not None:  # outside the guard: skipping is asked for, so an error is the user's to see
                fetch = self._identify(seconds)
                if self._skips(fetch):
                    self._feed.skipped += 1
                    continue
                self._tell(batch, fetch)
            elif self._part.alive:
                with self._part:
                    self._tell(batch, self._identify(seconds))
            return batch

    def _next(self) -> T:
        if self._first and self._recorded is None and self._sampler is not None:  # a loader that begins at its first batch
            with in_place(self._feed.loader, self._sampler):
                return next(self._iterator)
        return next(self._iterator)

    def _tell(self, batch: T, fetch: Fetch) -> None:
        if self._observer is not None and self._part.alive:
            with self._part:
                self._observer.fetched(batch, fetch)

    def _identify(self, seconds: float) -> Fetch:
        first, self._first = self._first, False
        if first:
            self._begin()
        ids = None if self._recorded is None else self._recorded.take()
        fetch = Fetch(
            self._entry.number,
            self._epoch,
            self._index,
            ids,
            seconds,
            first,
            getattr(self._torch, "_num_workers", None),
            getattr(self._torch, "_base_seed", None),
        )
        if self._index is not None:
            self._index += 1
            if self._index == self._length:
                self._entry.under_way = False  # a checkpoint of now goes on with the next epoch
        return fetch

    def _begin(self) -> None:
        self._torch = torch_iterator(self._iterator)
        if self._recorded is None and self._sampler is not None:  # a loader class that asks its sampler at the first batch
            self._recorded = self._sampler.newest
        drawn = getattr(self._iterator, "_sampler_iter_yielded", None)
        if drawn is not None:
            # torchdata: a resumed iterator may have drawn and consumed batches before its first one reaches us. Either it
            # drew the epoch from us again, or the sampler's own state went on and we did not see its first draws.
            self._index = self._iterator._num_yielded - 1  # type: ignore[attr-defined]
            if self._recorded is not None:
                unseen = drawn - self._recorded.drawn
                self._recorded.drop(self._index - unseen)

    def _skips(self, fetch: Fetch) -> bool:
        assert self._skip is not None
        pending = self._skip.pending
        number, rank = self._entry.number, self._feed._rank
        ours = (skip for skip in pending if skip.loader in (None, number) and skip.rank in (None, rank))
        if fetch.sample_ids is None and any(skip.sample_ids is not None for skip in ours):
            raise UsageError("the skip plan names sample ids, but this loader's are not known; give epoch and index instead")
        ids = plain_ids(fetch.sample_ids) if pending else None
        return self._skip.take(number, self._epoch, fetch.index, ids, rank=rank)

    def _lost(self) -> None:
        """A fetch failed. Without workers its indices were drawn just now; with workers nobody can say which batch the
        next one will be."""
        if getattr(self._torch, "_num_workers", None) == 0 and self._index is not None:
            self._index += 1
            if self._recorded is not None and self._recorded.waiting:
                self._recorded.waiting.clear()
        else:
            self._index = None
            self._recorded = None


def _length(loader: Any) -> int | None:
    """Batches in an epoch, None where the loader does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
