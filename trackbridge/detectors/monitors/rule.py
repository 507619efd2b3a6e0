"""The user's own thresholds (`trackbridge.rules`), each an event while it holds."""

from __future__ import annotations

import sys
from functools import cache
from typing import ClassVar

import psutil

from trackbridge.detectors.monitors.base import Look, Monitor, Sign
from trackbridge.rules import Rule


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

    def follows(self, name: str) -> bool:
        return self.rule.concerns(name)

    def update(self, look: Look) -> Sign | None:
        found: Sign | None = None
        for name in self.columns(look)[0]:
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
                found = Sign("rule", "rule", name, onset, value, limit, 1.0, self.rule.severity, words)
        return found

    def over(self) -> int | None:
        return self.ended if self.ended >= 0 else None


@cache
def capacity(series: str) -> float | None:
    """How much memory there is for a series in bytes, of this process's host and devices; None where it is not known."""
    if series.startswith("host/"):
        return float(psutil.virtual_memory().total)
    torch = sys.modules.get("torch")
    if not series.startswith("mem/") or torch is None or not torch.cuda.is_initialized():
        return None
    return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
