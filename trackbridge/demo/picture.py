"""The loss with the spike marked, as an SVG: a picture without a plotting package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

import numpy as np
import numpy.typing as npt

WIDTH, HEIGHT = 960, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 34, 34


def loss_picture(steps: Sequence[int], loss: Sequence[float], *, marks: Sequence[tuple[int, int, str]], title: str) -> str:
    """An SVG of `loss` over `steps`; `marks` are (first step, last step, label) bands. Non-finite values are gaps."""
    x, y = np.asarray(steps, dtype=np.float64), np.asarray(loss, dtype=np.float64)
    finite = y[np.isfinite(y)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    first, last = (float(x[0]), float(x[-1])) if len(x) else (0.0, 1.0)

    def px(step: float) -> float:
        return LEFT + (step - first) / max(last - first, 1.0) * (WIDTH - LEFT - RIGHT)

    def py(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / max(high - low, 1e-12) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-weight="bold">{escape(title)}</text>',
    ]
    for value in _ticks(low, high):
        parts.append(f'<path d="M{LEFT} {py(value):.1f}H{WIDTH - RIGHT}" stroke="#e6e6e6"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{py(value) + 4:.1f}" text-anchor="end" fill="#666">{value:g}</text>')
    for value in _ticks(first, last):
        parts.append(f'<text x="{px(value):.1f}" y="{HEIGHT - 12}" text-anchor="middle" fill="#666">{value:g}</text>')
    for begin, end, label in marks:
        left, right = px(begin - 0.5), px(end + 0.5)
        parts.append(
            f'<rect x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{HEIGHT - TOP - BOTTOM}" fill="#c8321f22"/>'
        )
        parts.append(f'<text x="{left - 6:.1f}" y="{TOP + 12}" text-anchor="end" fill="#c8321f">{escape(label)}</text>')
    parts += [f'<polyline fill="none" stroke="#2457c5" stroke-width="1.6" points="{run}"/>' for run in _runs(x, y, px, py)]
    return "\n".join([*parts, "</svg>"])


def _runs(
    x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], px: Callable[[float], float], py: Callable[[float], float]
) -> list[str]:
    """The points of each stretch without a gap."""
    stretches: list[list[str]] = [[]]
    for step, value in zip(x.tolist(), y.tolist(), strict=True):
        if np.isfinite(value):
            stretches[-1].append(f"{px(step):.1f},{py(value):.1f}")
        elif stretches[-1]:
            stretches.append([])
    return [" ".join(points) for points in stretches if points]


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers from `low` to `high`."""
    span = max(high - low, 1e-12)
    power = 10.0 ** np.floor(np.log10(span / 5))
    step = next(power * m for m in (1, 2, 5, 10) if span / (power * m) <= 7)
    return [float(v) for v in np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step]
