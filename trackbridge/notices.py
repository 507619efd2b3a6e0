"""What the ranks of a run tell each other about anomalies: through the process group's key-value store, never a collective.

The leader decides what gets a capsule. Other ranks report what they detected and hear what to keep. A message is a few
hundred bytes; looking for one is a question to the store (16 microseconds on one host), asked by the scribe's thread at most
a few hundred times a second over all ranks together.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

logger = logging.getLogger("trackbridge")

ASKED_PER_SECOND = 1000.0  # by all ranks together
STORE_SECONDS = 5.0  # a store that does not answer for so long is given up

Message = dict[str, Any]


class Notices:
    """Messages from the leader to all others, and from each of them to the leader, each heard once and in order.

    `name` is one that no other run of this process group has. A store that fails is said once and not asked again: then each
    rank is on its own.
    """

    def __init__(self, store: Any, name: str, rank: int, world_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.leader = rank == 0
        self.rank = rank
        self.others = world_size - 1
        self._store = store
        self._down, self._up = f"trackbridge/{name}/down", f"trackbridge/{name}/up"
        self._clock = clock
        self._interval = world_size / ASKED_PER_SECOND
        self._asked = -1.0
        self._told = self._heard = 0
        self.alive = True
        self.parting = False  # then a store that is gone is no news: the rank that held it has ended

    def tell(self, message: Message) -> None:
        """Leader: to all others. Other ranks: to the leader."""
        if self.alive:
            self._guarded(lambda: self._put(json.dumps(message)))

    def heard(self, *, now: bool = False) -> list[Message]:
        """New messages. Asks the store only if some time has passed since the last question, or `now`."""
        at = self._clock()
        if not self.alive or (at - self._asked < self._interval and not now):
            return []
        self._asked = at
        found: list[Message] = []
        self._guarded(lambda: self._take(found))
        return found

    def _put(self, text: str) -> None:
        if self.leader:
            number, self._told = self._told, self._told + 1
            self._store.set(f"{self._down}/{number}", text)
        else:
            self._store.set(f"{self._up}/{self._store.add(self._up, 1) - 1}", text)

    def _take(self, found: list[Message]) -> None:
        while True:
            key = f"{self._up if self.leader else self._down}/{self._heard}"
            if not self._store.check([key]):
                return
            found.append(json.loads(self._store.get(key)))
            self._heard += 1

    def _guarded(self, what: Callable[[], None]) -> None:
        try:
            what()
        except (RuntimeError, ValueError) as error:  # the store's errors are RuntimeErrors
            self.alive = False
            if self.parting:
                return
            words = str(error).strip().splitlines() or [type(error).__name__]
            logger.warning("trackbridge: ranks cannot tell each other about anomalies any more: %s", words[0])


def private(store: Any) -> Any:
    """A connection of our own to the same store, so that nobody waits for our questions; the store itself where it cannot be
    had twice."""
    try:
        own = store.clone()
        own.set_timeout(timedelta(seconds=STORE_SECONDS))
    except (AttributeError, RuntimeError):
        return store
    return own
