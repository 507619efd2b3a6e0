"""A user's own thresholds, as data: ``perf/mfu < 0.3 for 50 steps``, ``mem/reserved_bytes > 95%``.

    RULE   = SERIES OPERATOR NUMBER [UNIT] ["for" COUNT "steps"]
    SERIES = a name, or a pattern with * and ? such as layer/*/update_ratio
    OPERATOR = < <= > >= == !=
    UNIT   = % | B kB MB GB TB KiB MiB GiB TiB | ms s

``%`` of a series in bytes is a share of what there is (device memory for ``mem/``, host memory for ``host/``), of any other
series a hundredth. "for N steps" counts steps in a row that have the series.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

_FORM = re.compile(
    r"(?P<series>[^\s<>=!]+)\s*(?P<operator><=|>=|==|!=|<|>)\s*(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    r"\s*(?P<unit>%|[kKMGT]?i?B|ms|s)?(?:\s+for\s+(?P<steps>\d+)\s+steps?)?"
)
_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


class Rule(BaseModel):
    """One threshold. May be given as its text alone, or as a mapping with ``rule`` (the text) and ``severity``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rule: str
    severity: float = Field(0.5, ge=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, given: Any) -> Any:
        given = {"rule": given} if isinstance(given, str) else given
        text = given.get("rule") if isinstance(given, Mapping) else None
        if isinstance(text, str) and _FORM.fullmatch(text.strip()) is None:
            raise ValueError(
                f"{text!r} is no rule: write SERIES < NUMBER, then if you like a unit and 'for N steps', as in "
                "'perf/mfu < 0.3 for 50 steps' or 'mem/reserved_bytes > 95%'"
            )
        return given

    @property
    def series(self) -> str:
        return str(self._parts()["series"])

    @property
    def steps(self) -> int:
        """In how many steps in a row it must hold."""
        return max(int(self._parts()["steps"] or 1), 1)

    def concerns(self, name: str) -> bool:
        """Whether the series `name` is judged by this rule."""
        return fnmatchcase(name, self.series)

    def limit(self, name: str, capacity: Callable[[str], float | None]) -> float | None:
        """The threshold for the series `name`, in its own unit; None for a share of what nobody knows the size of."""
        parts = self._parts()
        number, unit = float(parts["number"]), parts["unit"] or ""
        if unit == "%":
            if not name.endswith("_bytes"):
                return number / 100
            whole = capacity(name)
            return None if whole is None else number / 100 * whole
        if unit.endswith("B"):
            prefix = unit[:-1]
            return float(number * (1024 if prefix.endswith("i") else 1000) ** _POWERS[prefix.rstrip("i")])
        return number / 1000 if unit == "ms" else number

    def broken(self, values: Any, limits: Any) -> Any:
        """Whether the condition holds for each of `values`; never for NaN, which is an event of its own."""
        return (values == values) & _OPERATORS[self._parts()["operator"]](values, limits)

    def _parts(self) -> dict[str, Any]:
        match = _FORM.fullmatch(self.rule.strip())
        assert match is not None, self.rule  # checked when it was made
        return match.groupdict()
