"""The user's own scalars, as `run.log` takes them: under which series each goes, and which are on the host already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trackbridge import names
from trackbridge.errors import UsageError
from trackbridge.misuse import Use
from trackbridge.scalars import scalar

MOST = 256
"""Sets of names that are remembered. A loop logs the same ones over and over."""


class OwnScalars:
    """What became of names stays known, so that a call with floats under names that were there before looks at neither."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, ...], tuple[str, ...]] = {}

    def read(self, values: Mapping[Any, Any], used: Use) -> tuple[tuple[str, ...], list[float], dict[str, Tensor]]:
        """Series of numbers on the host, these numbers, and 0-d tensors on a device by series. What `used` says no to is left
        out; raises `UsageError` where it does."""
        try:
            values = dict(values)  # read once: a mapping that changes meanwhile must not put numbers under other names
        except Exception as error:
            with used:
                raise UsageError(f"log could not read the mapping it was given: {error}") from None
            return (), [], {}
        given = tuple(values)
        plain = set(map(type, given)) <= {str}  # others may be equal to a str
        known = self._series.get(given) if plain else None
        if known is not None and set(map(type, values.values())) <= {float}:
            return known, list(values.values()), {}
        found: dict[str, Tensor | float] = {}
        for place, (name, value) in enumerate(values.items()):
            with used:
                try:
                    series = known[place] if known is not None else _series(str(name), found)
                    read = scalar(str(name), value)
                    if isinstance(read, Tensor) and read.device.type == "cpu":
                        read = float(read.item())
                except UsageError:
                    raise
                except Exception as error:  # whatever a foreign object does, or a mode in which nothing has a value
                    raise UsageError(f"a value of log cannot be read: {type(error).__name__}") from error
                found[series] = read
        if known is None and plain and len(found) == len(given):
            if len(self._series) >= MOST:
                self._series.clear()
            self._series[given] = tuple(found)
        tensors = {series: value for series, value in found.items() if isinstance(value, Tensor)}
        numbers = {series: value for series, value in found.items() if not isinstance(value, Tensor)}
        return tuple(numbers), list(numbers.values()), tensors


def _series(name: str, taken: Mapping[str, Any]) -> str:
    """Raises `UsageError` for a name that is one of ours, or that another one became."""
    series = names.legal(name)
    if names.describe(series) is not None:
        raise UsageError(f"{name!r} is a series of trackbridge's own; log yours under another name")
    if series in taken:
        raise UsageError(f"{name!r} and another name both become {series!r}; rename one")
    return series
