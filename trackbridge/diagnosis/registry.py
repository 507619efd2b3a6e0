"""The registry of diagnosis rules. A rule is a small function that weighs the record for and against one cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from trackbridge.diagnosis.view import View

WEAK, SOLID, STRONG = 1, 2, 4


@dataclass
class Case:
    """Evidence for and against one cause. A weight ranks, it is no probability: `WEAK` fits several causes, `SOLID` few,
    `STRONG` hardly any other."""

    supports: list[tuple[int, str]] = field(default_factory=list)
    opposes: list[tuple[int, str]] = field(default_factory=list)

    def add(self, weight: int, text: str) -> None:
        self.supports.append((weight, text))

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


def rule(name: str, intervention: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule under a hypothesis name. Third parties use it too; a name registered twice is an error."""

    def register(weigh: RuleFunction) -> RuleFunction:
        if name in RULES:
            raise ValueError(f"a diagnosis rule named {name!r} exists already; choose another name")
        RULES[name] = Rule(name, intervention, weigh)
        return weigh

    return register
