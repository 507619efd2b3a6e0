"""Messages of every rank to the leader, one a step, through the process group's key-value store; never a collective.

A rank puts a message under a key of its own and does not wait; it deletes its oldest ones, so that what lies in the store is
bounded whoever reads it. The leader asks for all messages of a step in one question and fetches them in one answer. Nobody
waits for anybody: a message is there or it is not.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

logger = logging.getLogger("trackbridge")

STORE_BYTES = 16 << 20
"""What the messages of all ranks together may take in the store, on the host of the rank that holds it."""
LEAST = 4  # messages that a rank leaves there all the same


class Exchange:
    """`name` is one that no other run of this process group has. A store that fails is said once and not asked again: then each
    rank is on its own. All methods belong to one thread, the scribe's."""

    def __init__(self, store: Any, name: str, rank: int, world_size: int) -> None:
        self._store = store
        self._prefix = f"trackbridge/{name}/step"
        self._rank = rank
        self._others = range(1, world_size)
        self._share = STORE_BYTES // world_size
        self._sent: deque[tuple[str, int]] = deque()
        self._bytes = 0
        self.alive = True

    def send(self, call: int, message: bytes) -> None:
        """For the leader: this rank's message about call number `call` of `run.step`."""
        self._guarded(lambda: self._put(self._key(call, self._rank), message))

    def take(self, call: int) -> list[bytes] | None:
        """The messages of all other ranks about `call`, by rank; None while one of them is not there."""
        keys = [self._key(call, rank) for rank in self._others]
        found: list[bytes] = []
        self._guarded(lambda: found.extend(self._store.multi_get(keys)) if self._store.check(keys) else None)
        return found or None

    def lacking(self, call: int) -> list[int]:
        """The ranks of which there is no message about `call`."""
        found: list[int] = []
        self._guarded(lambda: found.extend(r for r in self._others if not self._store.check([self._key(call, r)])))
        return found

    def sent(self, call: int) -> bool:
        """Whether every other rank's message about `call` is there now."""
        answer: list[bool] = [False]
        keys = [self._key(call, rank) for rank in self._others]
        self._guarded(lambda: answer.append(self._store.check(keys)))
        return answer[-1]

    def leave(self) -> None:
        """This rank has sent its last message."""
        self._guarded(lambda: self._store.set(self._end(self._rank), "1"))

    def left(self, ranks: Sequence[int]) -> bool:
        """Whether all of `ranks` have sent their last message."""
        answer: list[bool] = [False]
        self._guarded(lambda: answer.append(bool(ranks) and self._store.check([self._end(rank) for rank in ranks])))
        return answer[-1]

    def finish(self) -> None:
        """Leader: nothing more will be read. Other ranks: delete what is still there if the leader has said so."""
        done = f"{self._prefix}/done"
        try:
            if not self._rank:
                self._store.set(done, "1")
            elif self.alive and self._store.check([done]):
                for key, _ in self._sent:
                    self._store.delete_key(key)
        except (RuntimeError, ValueError):
            pass  # the rank that held the store has ended
        self.alive = False

    def _end(self, rank: int) -> str:
        return f"{self._prefix}/end/{rank}"

    def _key(self, call: int, rank: int) -> str:
        return f"{self._prefix}/{call}/{rank}"

    def _put(self, key: str, message: bytes) -> None:
        self._store.set(key, message)
        self._sent.append((key, len(message)))
        self._bytes += len(message)
        while self._bytes > self._share and len(self._sent) > LEAST:
            oldest, size = self._sent.popleft()
            self._bytes -= size
            self._store.delete_key(oldest)

    def _guarded(self, what: Callable[[], Any]) -> None:
        if not self.alive:
            return
        try:
            what()
        except (RuntimeError, ValueError) as error:  # the store's errors are RuntimeErrors
            self.alive = False
            words = str(error).strip().splitlines() or [type(error).__name__]
            logger.warning("trackbridge: ranks cannot exchange their numbers any more, rows are each rank's own: %s", words[0])
