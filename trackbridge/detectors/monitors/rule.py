"""The user's own thresholds (`trackbridge.rules`), each an event while it holds."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from typing import ClassVar

import numpy as np
import psutil

from trackbridge.detectors.base import FloatArray
from trackbridge.detectors.monitors.base import Look, Monitor, Sign
from trackbridge.errors import nearest
from trackbridge.rules import Rule

logger = logging.getLogger("trackbridge")

_SILENT_STEPS = 20
_SCHEMAS = 64


class RuleMonitor(Monitor):
    """Tells when `rule` has held for as many steps as it says; over with the first step in
    which no series is out any more."""

    KEPT: ClassVar[tuple[str, ...]] = ("counts", "since", "told", "ended")
    CAUSAL = False

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.NAME = f"rule {rule.rule}"  # type: ignore[misc]
        self.rule = rule
        self.counts: dict[str, int] = {}  # steps in a row in which it holds, by series
        self.since: dict[str, int] = {}  # the first of these steps
        self.told = ""  # the series that is told
        self.ended = -1
        self._steps = rule.steps
        self._left = _SILENT_STEPS  # steps until it is said that no series is there; 0: said, or one was seen
        self._worked_out: dict[int, tuple[tuple[str, ...], FloatArray]] = {}
        self._others: dict[int, Mapping[str, int]] = {}  # what was there instead, by the mapping's id

    def follows(self, name: str) -> bool:
        return self.rule.concerns(name)

    def update(self, look: Look) -> Sign | None:
        names, columns = self.columns(look)
        if self._left:
            self._listen(look, bool(names))
        if not names:
            return None
        values, limits = look.row.values[columns], self._limits(names)
        known = np.isfinite(limits) & ~np.isnan(values)
        holds = known & self.rule.broken(values, limits)
        if not holds.any() and not self.counts:
            return None
        out = [names[i] for i in np.flatnonzero(holds).tolist()]
        for name in self.counts.keys() & {names[i] for i in np.flatnonzero(known & ~holds).tolist()}:
            del self.counts[name]
            self.since.pop(name, None)
        for name in out:
            self.since.setdefault(name, look.step)
            self.counts[name] = min(self.counts.get(name, 0) + 1, self._steps)
        return self._judge(look, dict(zip(names, limits.tolist(), strict=True)))

    def _judge(self, look: Look, limits: Mapping[str, float]) -> Sign | None:
        """One event for all series that match: it lasts as long as one of them is out."""
        if self.told in self.counts:
            return None
        name = next((name for name, count in self.counts.items() if count >= self._steps and name in limits), "")
        before, self.told = self.told, name
        if before:
            self.ended = -1 if name else look.step
            return None
        if not name:
            return None
        self.ended = -1
        value, terms = look.get(name), f"the rule is {self.rule.rule}"
        assert value is not None
        onset = self.since.get(name, look.step - self._steps + 1)  # a state of an older version has none
        words = f"{self.rule.rule} ({name} is {value:.6g})"
        return Sign("rule", "rule", name, onset, value, limits[name], 1.0, self.rule.severity, words, terms=terms)

    def _limits(self, names: tuple[str, ...]) -> FloatArray:
        """The threshold of each series, NaN where it is a share of nobody knows what; worked out once."""
        known = self._worked_out.get(id(names))
        if known is None:
            if len(self._worked_out) >= _SCHEMAS:
                self._worked_out.clear()
            limits = [self.rule.limit(name, capacity) for name in names]
            known = names, np.array([np.nan if limit is None else limit for limit in limits])
            self._worked_out[id(names)] = known  # holds the names, so that their id stays taken
        return known[1]

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
