"""What the suite's three files share: a tracker for a module, and one schedule as a test. They are three, not one, so that the
workers of a parallel run share the work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tests.faults import schedule
from tests.faults.__main__ import make
from tests.faults.trackers import Tracker

SCHEDULES = 20


def served(name: str, folder: Path) -> Iterator[Tracker]:
    """The tracker `name` with its server; what it sets in the environment is taken back."""
    before = dict(os.environ)
    made = make(name, folder)
    yield made
    made.close()
    os.environ.clear()
    os.environ.update(before)


def check(tracker: Tracker, seed: int, folder: Path) -> None:
    outcome = schedule.run(tracker, seed, folder)
    print(f"{tracker.name}, seed {seed}, {outcome.rows} rows, {outcome.artifacts} artifacts", *outcome.story, sep="\n  ")
    assert not outcome.faults, outcome.faults
