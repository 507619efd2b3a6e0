"""How long to wait after a failure: exponential with full jitter, from a random generator of our own."""

from __future__ import annotations

import random

FIRST_SECONDS = 0.5
MOST_SECONDS = 60.0
ASKED_SECONDS = 600.0
"""What a tracker may ask for at most: a server that says "tomorrow" may be back in a minute."""


class Backoff:
    """`failures` counts those in a row. A fleet of shippers that lost one server must not come back all at once."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.failures = 0

    def fail(self, at_least: float = 0.0) -> float:
        """Seconds to wait now: at least what the tracker asks for, up to `ASKED_SECONDS`."""
        self.failures += 1
        at_least = min(at_least, ASKED_SECONDS) if at_least > 0 else 0.0  # no number is none as well
        most = min(FIRST_SECONDS * 2.0 ** min(self.failures, 20), MOST_SECONDS)
        return at_least + self._rng.uniform(FIRST_SECONDS / 2, most)

    def ok(self) -> None:
        self.failures = 0
