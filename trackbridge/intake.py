"""The way in for integrations: batches of feeds and of loops that fetch by themselves, on to the recorder and the pace of one
run; and what a framework says of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from trackbridge import redact
from trackbridge.batches import Feed, Fetch, LoaderBook, Observer
from trackbridge.errors import Part, UsageError
from trackbridge.pace import Pace
from trackbridge.recorder import Recorder
from trackbridge.skip import SkipPlan

T = TypeVar("T")


class Intake:
    """The `trackbridge.batches.Observer` of a run, and what an integration feeds: `Run.intake`. Silent when `inert()` says so:
    after `finish`, in a forked worker.

    `book` numbers the loaders and their epochs, `plans` are the skip plans that were given.
    """

    def __init__(
        self,
        recorder: Recorder | None,
        pace: Pace,
        part: Part,
        rank: int,
        inert: Callable[[], bool],
        submit_facts: Callable[[str, Mapping[str, Any]], None],
    ) -> None:
        self.book = LoaderBook()
        self.plans: list[SkipPlan] = []
        self._recorder = recorder
        self._pace = pace
        self._part = part
        self._rank = rank
        self._inert = inert
        self._submit_facts = submit_facts

    def facts(self, section: str, facts: Mapping[str, Any]) -> None:
        """What a framework says of the run, for the tracker's config panel: a section of its own beside the user's config.
        Values under secret-sounding names are redacted."""
        if not self._inert():
            self._submit_facts(section, redact.tree(dict(facts)))

    def feed(
        self,
        loader: Iterable[T],
        *,
        skip: SkipPlan | str | Path | None = None,
        epoch: int | None = None,
        known_as: Any = None,
        observer: Observer | None = None,
    ) -> Feed[T]:
        """What `Run.batches` returns. `known_as` is the loader whose epochs are counted, where `loader` is only one pass of it;
        `observer` is told instead of this intake, and tells it."""
        plan = SkipPlan.load(skip) if isinstance(skip, (str, Path)) else skip
        if not isinstance(plan, (SkipPlan, type(None))):
            raise UsageError(f"run.batches(skip=...) takes a SkipPlan or the path of one, not a {type(plan).__name__}")
        if plan is not None and not any(known is plan for known in self.plans):
            self.plans.append(plan)
        observer = self if observer is None else observer
        return Feed(
            loader, observer, book=self.book, skip=plan, epoch=epoch, known_as=known_as, part=self._part, rank=self._rank
        )

    def told(
        self, batch: Any, *, epoch: int | None, index: int | None, sample_ids: Sequence[Any] | None, seconds: float
    ) -> None:
        """`Run.fetched`."""
        if not self._inert():
            with self._part:
                self.before_fetch()
                self.fetched(batch, Fetch(None, epoch, index, sample_ids, seconds))

    def fetching(self) -> None:
        """A batch is about to be fetched that `told` will tell of. What the fetch draws in the middle of a step, a replay,
        which has the batch, does not draw: so the random state after it is kept where it has moved."""
        if not self._inert():
            with self._part:
                self.before_fetch()

    # the observer

    def before_fetch(self, *, opening: bool = False) -> None:
        if self._recorder is not None and not self._inert():
            self._recorder.before_fetch(opening=opening)

    def fetched(self, batch: Any, fetch: Fetch, /) -> None:
        if not self._inert():
            self._pace.fetched(fetch.seconds)
            if self._recorder is not None:
                self._recorder.fetched(batch, fetch)

    def exhausted(self) -> None:
        if self._recorder is not None and not self._inert():
            self._recorder.exhausted()


class Later:
    """The observer of a feed that keeps what it is told until `tell`. For a loop that fetches, then puts its random state back,
    and only then uses the batch: the state of a step is what it has when it begins."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._waiting: list[tuple[Any, Fetch]] = []

    def before_fetch(self, *, opening: bool = False) -> None:
        if opening:
            self._intake.before_fetch(opening=True)

    def fetched(self, batch: Any, fetch: Fetch, /) -> None:
        self._waiting.append((batch, fetch))

    def exhausted(self) -> None:
        self._intake.exhausted()

    def forget(self) -> None:
        """No step will use what was fetched."""
        self._waiting.clear()

    def tell(self) -> None:
        """The step that uses these batches begins now."""
        waiting, self._waiting = self._waiting, []
        for batch, fetch in waiting:
            self._intake.before_fetch()
            self._intake.fetched(batch, fetch)
