"""The registry of diagnosis rules. A rule is a small function that weighs the record for and against one cause.

Ours are registered by the decorator `rule`. A third party's live in its own package, which names them in the entry-point
group `GROUP`: sealing runs in a process of its own, where nobody has imported that package::

    [project.entry-points."trackbridge.rules"]
    cosmic-ray = "their_package.rules:cosmic_ray"
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from trackbridge import plugins
from trackbridge.diagnosis.view import View

logger = logging.getLogger("trackbridge")

GROUP = "trackbridge.rules"
WEAK, SOLID, STRONG = 1, 2, 4


@dataclass
class Case:
    """Evidence for and against one cause. A weight ranks, it is no probability: `WEAK` fits several causes, `SOLID` few,
    `STRONG` hardly any other. `of_batch` are those of the supports that are facts about a batch."""

    supports: list[tuple[int, str]] = field(default_factory=list)
    opposes: list[tuple[int, str]] = field(default_factory=list)
    of_batch: set[str] = field(default_factory=set)

    def add(self, weight: int, text: str, *, of_batch: bool = False) -> None:
        self.supports.append((weight, text))
        if of_batch:
            self.of_batch.add(text)

    def against(self, weight: int, text: str) -> None:
        self.opposes.append((weight, text))

    @property
    def weight(self) -> int:
        return sum(w for w, _ in self.supports) - sum(w for w, _ in self.opposes)


RuleFunction: TypeAlias = Callable[[View, Case], None]


@dataclass(frozen=True, slots=True)
class Rule:
    """`name` is the hypothesis; `intervention` the change to a replay that would test it."""

    name: str
    intervention: str
    weigh: RuleFunction


RULES: dict[str, Rule] = {}
_broken: set[str] = set()


def rule(name: str, intervention: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule under a hypothesis name. Third parties use it too; a name registered twice is an error."""

    def register(weigh: RuleFunction) -> RuleFunction:
        if name in RULES:
            raise ValueError(f"a diagnosis rule named {name!r} exists already; choose another name")
        RULES[name] = Rule(name, intervention, weigh)
        return weigh

    return register


def load() -> None:
    """Import what installed packages name in the entry-point group; their decorators register it. A package that cannot be
    imported is said once and left out: a stranger's bug must not cost a capsule."""
    for name, point in plugins.available(GROUP).items():
        if name not in _broken:
            try:
                point.load()
            except Exception:
                broken(name)


def broken(name: str) -> None:
    """Say that a rule, or the package that brings it, failed; call it in the handler of the exception."""
    if name not in _broken:
        _broken.add(name)
        logger.exception("trackbridge: the diagnosis rule %s failed and is left out", name)
