"""The user's own thresholds (`trackbridge.rules`), each an event while it holds."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from typing import ClassVar

import psutil

from trackbridge.detectors.monitors.base import Look, Monitor, Sign
from trackbridge.errors import nearest
from trackbridge.rules import Rule

logger = logging.getLogger("trackbridge")

_SILENT_STEPS = 20


class RuleMonitor(Monitor):
    """Tells when `rule` has held for as many steps as it says; over with the first step in which it does not hold."""

    KEPT: ClassVar[tuple[str, ...]] = ("counts", "told", "ended")
    CAUSAL = False

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.NAME = f"rule {rule.rule}"  # type: ignore[misc]
        self.rule = rule
        self.counts: dict[str, int] = {}  # steps in a row in which it holds, by series
        self.told = ""  # the series that is told
        self.ended = -1
        self._steps = rule.steps
        self._left = _SILENT_STEPS  # steps until it is said that no series is there; 0: said, or one was seen
        self._others: dict[int, Mapping[str, int]] = {}  # what was there instead, by the mapping's id

    def follows(self, name: str) -> bool:
        return self.rule.concerns(name)

    def update(self, look: Look) -> Sign | None:
        found: Sign | None = None
        names = self.columns(look)[0]
        if self._left:
            self._listen(look, bool(names))
        for name in names:
            limit = self.rule.limit(name, capacity)
            value = look.get(name)
            if limit is None or value is None or value != value:
                continue
            if not self.rule.broken(value, limit):
                self.counts.pop(name, None)
                if self.told == name:
                    self.told, self.ended = "", look.step
                continue
            count = self.counts[name] = min(self.counts.get(name, 0) + 1, self._steps)
            if count >= self._steps and not self.told and found is None:
                self.told, self.ended = name, -1
                words = f"{self.rule.rule} ({name} is {value:.6g})"
                onset = look.step - self._steps + 1
                terms = f"the rule is {self.rule.rule}"
                found = Sign("rule", "rule", name, onset, value, limit, 1.0, self.rule.severity, words, terms=terms)
        return found

    def _listen(self, look: Look, seen: bool) -> None:
        """Say once that the first steps had no series of that name: the rule would be silent for ever."""
        self._left = 0 if seen else self._left - 1
        self._others[id(look.places)] = look.places
        if self._left == 0:
            others = {name for places in self._others.values() for name in places}
            self._others.clear()
            if not seen:
                logger.warning(
                    "trackbridge: the rule %r has nothing to judge: none of the first %d steps recorded a series %r%s",
                    self.rule.rule, _SILENT_STEPS, self.rule.series, meant(self.rule.series, others),
                )  # fmt: skip

    def over(self) -> int | None:
        return self.ended if self.ended >= 0 else None


def meant(series: str, known: Iterable[str]) -> str:
    """`errors.nearest`, but a name in full before all that look alike: ``train/loss`` for ``loss``."""
    known = sorted(known, key=lambda name: (not name.startswith("train/"), len(name), name))
    whole = next((name for name in known if name.endswith(f"/{series}")), None)
    return f" (did you mean {whole!r}?)" if whole else nearest(series, known)


@cache
def capacity(series: str) -> float | None:
    """How much memory there is for a series in bytes, of this process's host and devices; None where it is not known."""
    if series.startswith("host/"):
        return float(psutil.virtual_memory().total)
    torch = sys.modules.get("torch")
    if not series.startswith("mem/") or torch is None or not torch.cuda.is_initialized():
        return None
    return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
