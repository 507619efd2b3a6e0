"""What a feed tells about each batch, on to the recorder and the pace of one run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trackbridge.batches import Fetch
from trackbridge.pace import Pace
from trackbridge.recorder import Recorder


class Intake:
    """The `trackbridge.batches.Observer` of a run. Silent when `inert()` says so: after `finish`, in a forked worker."""

    def __init__(self, recorder: Recorder | None, pace: Pace, inert: Callable[[], bool]) -> None:
        self._recorder = recorder
        self._pace = pace
        self._inert = inert

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
    """Keeps what a feed tells until `tell`. For a loop that fetches, then puts its random state back, and only then uses the
    batch: the state of a step is what it has when it begins."""

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
