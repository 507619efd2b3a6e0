"""Series as a page carries them: typed arrays in base64 inside JSON, decoded when they are first drawn. Bounded by points."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbridge.names import is_wide
from trackbridge.reports.decimate import Series, Span, decimate, nonfinite_spans

POINTS, ALL_POINTS = 4000, 600_000
"""Of a run-level series, and of all of them; fewer each where there are many."""
WIDE_POINTS, ALL_WIDE_POINTS = 800, 600_000
"""The same for layers' series."""
LEAST_POINTS = 96
LEAST_SPANS = 8  # of steps that were not finite
LONGEST_NAME = 400

_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass
class SeriesBlock:
    """The ``series`` part of the page's data. `windows` are spans of steps of which every point is kept: the first one always,
    then as many, in order, as do not more than double what a series may have.

    Attributes: `decimated`, the longest series' own length if any was shortened, else 0; `left_out`, series for which there was
    no room; `thinned`, windows of which only the extremes are there.
    """

    windows: Sequence[Span] = ()
    decimated: int = 0
    left_out: int = 0
    thinned: int = 0
    _grids: dict[bytes, int] = field(default_factory=dict)
    _packed: list[dict[str, Any]] = field(default_factory=list)

    def pack(self, series: Mapping[str, Series]) -> dict[str, Any]:
        """{"grids": steps, shared between series, "series": {name: [grid, values, non-finite spans]}}.

        Values are little-endian float32, NaN where not finite; what float32 cannot hold is its largest number."""
        limits: dict[str, int] = {}
        windows: dict[int, list[Span]] = {}
        for wide, each, total in ((False, POINTS, ALL_POINTS), (True, WIDE_POINTS, ALL_WIDE_POINTS)):
            names = [name for name in series if is_wide(name) == wide]
            shown = [name for name in names if len(name) <= LONGEST_NAME][: total // LEAST_POINTS]
            self.left_out += len(names) - len(shown)
            limit = min(each, total // max(1, len(shown)))
            windows[limit] = self._fitting(limit)
            limits |= dict.fromkeys(shown, limit)
        found = {
            name: self._one(*pair, limit=limits[name], windows=windows[limits[name]])
            for name, pair in series.items()
            if name in limits
        }
        return {"grids": self._packed, "series": found}

    def add(self, steps: npt.NDArray[Any], values: npt.NDArray[Any]) -> list[Any]:
        """One more series, [grid, values, non-finite spans], which is not among those of `pack`."""
        return self._one(steps, values, POINTS, ())

    def _fitting(self, limit: int) -> list[Span]:
        lengths = np.cumsum([last - first + 1 for first, last in self.windows])
        count = max(1, int(np.searchsorted(lengths, limit, side="right")))
        self.thinned = max(self.thinned, len(self.windows) - count)
        return list(self.windows[:count])

    def _one(self, steps: npt.NDArray[Any], values: npt.NDArray[Any], limit: int, windows: Sequence[Span]) -> list[Any]:
        steps, values = np.asarray(steps), np.asarray(values, np.float64)
        kept_steps, kept = decimate(steps, values, limit, windows)
        if len(kept) < len(values):
            self.decimated = max(self.decimated, len(values))
        spans = [list(span) for span in nonfinite_spans(steps, values, max(LEAST_SPANS, limit // 4))]
        return [self._grid(kept_steps), base64_of(float32(kept)), spans]

    def _grid(self, steps: npt.NDArray[Any]) -> int:
        """The number of a steps array. Ascending steps are their first one and uint16 differences where those fit."""
        key = np.ascontiguousarray(steps, np.float64).tobytes()
        if key not in self._grids:
            gaps = np.diff(steps)
            small = len(steps) > 0 and (gaps < 1 << 16).all() and (gaps >= 0).all()
            entry = (
                {"first": int(steps[0]), "gaps": base64_of(gaps.astype("<u2"))}
                if small
                else {"all": base64_of(steps.astype("<f8"))}
            )
            self._grids[key] = len(self._packed)
            self._packed.append(entry)
        return self._grids[key]


def float32(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """`values` as a page has them: NaN where they are not finite; what float32 cannot hold is its largest number."""
    return np.where(np.isfinite(values), np.clip(values, -_FLOAT32, _FLOAT32), np.nan).astype("<f4")


def base64_of(array: npt.NDArray[Any]) -> str:
    """The bytes of `array`, in its own order and type, as text."""
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")
