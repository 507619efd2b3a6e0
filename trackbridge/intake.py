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
