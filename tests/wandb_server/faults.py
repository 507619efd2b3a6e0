"""Faults on demand: a rule says which requests, an action says what happens to them.

The server asks `Faults.take` before it serves a request. Rules leave by themselves after `times` hits or with the
``with`` block of `WandbServer.fault`.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True)
class Status:
    """Answer with an HTTP error such as 401, 404, 429 or 503."""

    code: int


@dataclass(frozen=True)
class Drop:
    """Close the connection without an answer. `after` True: the request took effect first, only the answer is lost."""

    after: bool = False


@dataclass(frozen=True)
class Cut:
    """Read `size` bytes of the body, then close the connection: a transfer killed half way."""

    size: int = 1024


@dataclass(frozen=True)
class Stall:
    """Hold the request until the fault is lifted (never longer than `limit` seconds), then drop it."""

    limit: float = 120.0


Action: TypeAlias = Status | Drop | Cut | Stall


@dataclass(eq=False)
class Fault:
    """`path` and `operation` are regular expressions that the URL path and the GraphQL operation must match in full;
    `operation` is the empty string for requests that are not GraphQL."""

    action: Action
    path: str = ".*"
    operation: str = ".*"
    method: str = ".*"
    times: int | None = None
    hits: int = 0
    lifted: threading.Event = field(default_factory=threading.Event)
    hit: threading.Event = field(default_factory=threading.Event)


class Faults:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[Fault] = []

    def add(self, fault: Fault) -> None:
        with self._lock:
            self._rules.append(fault)

    def remove(self, fault: Fault) -> None:
        with self._lock:
            self._rules = [rule for rule in self._rules if rule is not fault]
        fault.lifted.set()

    def clear(self) -> None:
        for rule in list(self._rules):
            self.remove(rule)

    def take(self, method: str, path: str, operation: str) -> Fault | None:
        """The first rule for this request, counted as hit."""
        with self._lock:
            for rule in self._rules:
                given = ((rule.path, path), (rule.operation, operation), (rule.method, method))
                if (rule.times is None or rule.hits < rule.times) and all(re.fullmatch(p, text) for p, text in given):
                    rule.hits += 1
                    rule.hit.set()
                    return rule
        return None
