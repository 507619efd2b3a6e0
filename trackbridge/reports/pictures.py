"""Heatmaps of every layer over steps, as PNG: a small file that each tracker can show. Needs numpy and Pillow, nothing else.

One row of cells per series, one column per step (or per stretch of steps: then the largest value of the stretch). Around an
anomaly a cell is coloured by how far the value is from the row's own median before the onset, so that the first layer to move
stands out whatever its size; over a whole run it is coloured by the value. What was not finite is magenta, what was not
recorded is left blank.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbridge import panels
from trackbridge.panels import Panel

Floats = npt.NDArray[np.float64]

MAX_ROWS = 96
_WIDTH, _LEFT, _TOP, _BOTTOM, _RIGHT = 760, 250, 46, 22, 14
_LABEL = 40
_VALUES = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
_CHANGES = ((33, 102, 172), (146, 197, 222), (240, 240, 240), (244, 165, 130), (178, 24, 43))
_SHADES = 250
_DECADE = math.log(10.0)
_BACK: Mapping[str, Callable[[float], float]] = {
    "linear": lambda value: value,
    "log": lambda value: float(10.0**value),
    "asinh": lambda value: math.sinh(value * _DECADE),
}
_BLANK, _BAD, _INK, _PAPER = 250, 251, 252, 253
_FIXED = ((214, 214, 214), (255, 0, 255), (30, 30, 30), (255, 255, 255))


@dataclass(frozen=True)
class Matrix:
    """`values` and `there` have shape (len(rows), len(steps)); a value counts where `there` is True. `steps`: the first step of
    each column."""

    rows: Sequence[str]
    steps: Sequence[int]
    values: Floats
    there: npt.NDArray[np.bool_]


def around(series: Mapping[int, Mapping[str, float]], onset: int) -> dict[str, bytes]:
    """Pictures of the recorded steps ``{step: {series: value}}`` around an anomaly, by `panels.picture` name."""
    return {panels.picture(panel): draw(panel, matrix, onset) for panel, matrix in _matrices(series)}


def write(folder: Path, pictures: Mapping[str, bytes]) -> None:
    """Each picture as ``<folder>/<name>.png``."""
    for name, data in pictures.items():
        path = folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def draw(panel: Panel, matrix: Matrix, onset: int | None = None, marks: Sequence[int] = ()) -> bytes:
    """The heatmap of `panel` as a PNG. With `onset`: colours are changes against the row's median before it, and a line marks
    its column. `marks`: steps that get a small triangle above their column."""
    from PIL import Image, ImageDraw, ImageFont

    scaled, bad, how = _scaled(panel, matrix)
    before = np.array([step < onset for step in matrix.steps]) if onset is not None else np.zeros(len(matrix.steps), bool)
    relative = bool(before.any())
    if relative:
        scaled = scaled - _medians(scaled[:, before])
    rows, scaled, bad, there = _fewer(matrix, scaled, bad, relative)
    low, high = _limits(scaled, relative)
    shades = np.clip((np.nan_to_num(scaled, nan=low) - low) / max(high - low, 1e-12), 0.0, 1.0) * (_SHADES - 1)
    cells = np.where(bad, _BAD, np.where(there & np.isfinite(scaled), shades.round(), _BLANK)).astype(np.uint8)

    wide = max(1, min(24, (_WIDTH - _LEFT - _RIGHT) // len(matrix.steps)))
    high_ = 12
    size = (max(_LEFT + wide * len(matrix.steps) + _RIGHT, 480), _TOP + high_ * len(rows) + _BOTTOM)
    image = Image.new("P", size, _PAPER)
    image.putpalette(_palette(_CHANGES if relative else _VALUES))
    image.paste(Image.fromarray(np.kron(cells, np.ones((high_, wide), np.uint8))), (_LEFT, _TOP))
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(11)
    pen.text((8, 6), panel.title, fill=_INK, font=ImageFont.load_default(13))
    pen.text((8, 24), _legend(panel.unit, low, high, relative, how), fill=_INK, font=font)
    for place, row in enumerate(rows):
        pen.text((8, _TOP + place * high_), _shortened(row), fill=_INK, font=font)
    foot = _TOP + high_ * len(rows)
    pen.text((_LEFT, foot + 4), f"step {matrix.steps[0]}", fill=_INK, font=font)
    last = str(matrix.steps[-1])
    pen.text((_LEFT + wide * len(matrix.steps) - 7 * len(last), foot + 4), last, fill=_INK, font=font)
    starts = np.array(matrix.steps)
    for step in marks:
        at = _LEFT + wide * max(int(np.searchsorted(starts, step, side="right")) - 1, 0) + wide // 2
        pen.polygon((at - 4, _TOP - 7, at + 4, _TOP - 7, at, _TOP - 1), fill=_INK)
    if onset is not None and matrix.steps[0] <= onset:
        at = _LEFT + wide * (int(np.searchsorted(starts, onset, side="right")) - 1)
        pen.line((at, _TOP - 4, at, foot + 3), fill=_INK)
        pen.text((at + 3, foot + 4), f"onset {onset}", fill=_INK, font=font)
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


def _matrices(series: Mapping[int, Mapping[str, float]]) -> Iterator[tuple[Panel, Matrix]]:
    """The heatmap panels that have something to show."""
    steps = sorted(series)
    names = list(dict.fromkeys(name for step in steps for name in series[step]))
    for panel in panels.PANELS:
        rows = panel.members(names) if panel.view == "heatmap" else []
        if rows:
            values = np.array([[series[step].get(row, np.nan) for step in steps] for row in rows], np.float64)
            there = np.array([[row in series[step] for step in steps] for row in rows], bool)
            shown = there.any(axis=0)  # a statistic on a cadence is absent in most steps
            kept = [steps[at] for at in np.flatnonzero(shown).tolist()]
            yield panel, Matrix(rows, kept, values[:, shown], there[:, shown])


def _scaled(panel: Panel, matrix: Matrix) -> tuple[Floats, npt.NDArray[np.bool_], str]:
    """Values on the panel's scale, NaN where there is none to show; where a recorded value was not finite; and how they were
    scaled (a key of `_BACK`): a log scale shows what may be negative or zero, a kurtosis, by its asinh, in decades too."""
    bad = matrix.there & ~np.isfinite(matrix.values)
    values = np.where(matrix.there & ~bad, matrix.values, np.nan)
    if panel.scale == "linear":
        return values, bad, "linear"
    if (values[np.isfinite(values)] > 0).all():
        return np.log10(values), bad, "log"
    return np.arcsinh(values) / _DECADE, bad, "asinh"


def _medians(values: Floats) -> Floats:
    """Median per row of what is finite, shape (rows, 1); NaN without any."""
    found = [np.median(row[np.isfinite(row)]) if np.isfinite(row).any() else np.nan for row in values]
    return np.array(found, np.float64).reshape(-1, 1)


def _limits(values: Floats, relative: bool) -> tuple[float, float]:
    """The values of the first and the last colour."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return 0.0, 1.0
    if relative:
        most = max(float(np.abs(finite).max()), 0.05)
        return -most, most
    return float(finite.min()), float(finite.max())


def _fewer(matrix: Matrix, scaled: Floats, bad: Any, relative: bool) -> tuple[list[str], Floats, Any, Any]:
    """At most `MAX_ROWS` rows: those that changed or vary most, in the model's order."""
    rows = list(matrix.rows)
    if len(rows) <= MAX_ROWS:
        return rows, scaled, bad, matrix.there
    filled = np.where(np.isfinite(scaled), scaled, 0.0)
    news = np.abs(filled).max(axis=1) if relative else filled.max(axis=1) - filled.min(axis=1)
    news = np.where(bad.any(axis=1), np.inf, news)
    keep = np.sort(np.argsort(-news, kind="stable")[:MAX_ROWS])
    return [rows[at] for at in keep.tolist()], scaled[keep], bad[keep], matrix.there[keep]


def _legend(unit: str, low: float, high: float, relative: bool, how: str) -> str:
    if relative and how == "log":
        said = f"blue to red: 1/{10**high:.3g} to {10**high:.3g} times the row's median before the onset"
    elif relative:
        scale = " decades of asinh" if how == "asinh" else ""
        said = f"blue to red: {low:+.3g} to {high:+.3g}{scale} against the row's median before the onset"
    else:
        ends = _BACK[how](low), _BACK[how](high)
        said = f"violet to yellow: {ends[0]:.3g} to {ends[1]:.3g}{f' {unit}' if unit else ''}"
    return f"{said}; magenta: not finite"


def _shortened(row: str) -> str:
    """The layer's name: without family and statistic, its end where it is long."""
    name = row.partition("/")[2].rpartition("/")[0] or row
    return name if len(name) <= _LABEL else f"..{name[2 - _LABEL :]}"


def _palette(stops: Sequence[tuple[int, int, int]]) -> list[int]:
    at = np.linspace(0, len(stops) - 1, _SHADES)
    shades = np.stack([np.interp(at, range(len(stops)), [stop[c] for stop in stops]) for c in range(3)], axis=1)
    return [*shades.round().astype(int).ravel().tolist(), *(c for colour in _FIXED for c in colour)]
