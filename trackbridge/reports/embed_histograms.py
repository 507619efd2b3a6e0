"""Histograms as a page carries them, bounded by bytes. What had to be left out is said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbridge.histograms import BINS, EDGES, NONFINITE, ZERO, divergence
from trackbridge.records import Histograms
from trackbridge.reports.embed import base64_of

HISTOGRAM_BYTES = 3 << 20
"""Before base64."""
LEAST_STEPS = 8


def histogram_block(
    records: Sequence[Histograms], onset: int | None, *, max_bytes: int = HISTOGRAM_BYTES
) -> dict[str, Any] | None:
    """The ``histograms`` part: {"names", "steps", "counts" (a text per step), "edges", ...}, None without records.

    Of one step: for each name the first column, how many follow, and their counts, all uint32. When they are too many, steps
    go first (the ends and those next to `onset` stay), then the tensors that changed least around `onset`: "left_out" says
    how many of each.
    """
    if not records:
        return None
    names = list(dict.fromkeys(name for record in records for name in record.names))
    steps = [record.step for record in records]
    before, after = _around(steps, onset)
    cost = max(1, max(sum(_span(row)[1] + 2 for row in record.counts) for record in records) * 4)
    room = max(1, max_bytes // cost)
    chosen = _spread(len(records), max(room, LEAST_STEPS), (before, after))
    kept = names
    if room < len(chosen):
        share = len(names) * room // len(chosen)
        scores = {name: _moved(name, records[before], records[after if onset is not None else -1]) for name in names}
        kept = sorted(names, key=lambda name: -scores[name])[: max(1, share)]
        kept = [name for name in names if name in set(kept)]
    return {
        "names": kept,
        "steps": [steps[place] for place in chosen],
        "counts": [base64_of(_step_counts(records[place], kept)) for place in chosen],
        "edges": [float(edge) for edge in EDGES[1:-1]],
        "zero": ZERO,
        "nonfinite": NONFINITE,
        "bins": BINS,
        "left_out": {"steps": len(records) - len(chosen), "tensors": len(names) - len(kept)},
    }


def _moved(name: str, before: Histograms, now: Histograms) -> float:
    one, other = before.get(name), now.get(name)
    return divergence(one, other) if one is not None and other is not None else 0.0


def choose(steps: Sequence[int], onset: int | None, limit: int) -> list[int]:
    """At most about `limit` of `steps`: evenly, with both ends and those on both sides of `onset`."""
    return [steps[place] for place in _spread(len(steps), limit, _around(steps, onset))]


def _around(steps: Sequence[int], onset: int | None) -> tuple[int, int]:
    """The places of the last step before `onset` and of the next one."""
    before = max([place for place, step in enumerate(steps) if onset is None or step < onset], default=0)
    return before, min(before + 1, len(steps) - 1)


def _spread(count: int, limit: int, always: Sequence[int]) -> list[int]:
    """At most about `limit` of `count` places, evenly, the ends and those of `always` among them."""
    if count <= limit:
        return list(range(count))
    even = np.linspace(0, count - 1, max(2, limit - len(set(always)))).round().astype(int).tolist()
    return sorted({*always, *even})


def _span(counts: npt.NDArray[np.int64]) -> tuple[int, int]:
    """(first column, number of columns) that hold something."""
    used = np.flatnonzero(counts)
    return (int(used[0]), int(used[-1] - used[0] + 1)) if len(used) else (0, 0)


def _step_counts(record: Histograms, names: Sequence[str]) -> npt.NDArray[np.uint32]:
    place = {name: row for row, name in enumerate(record.names)}
    parts: list[npt.NDArray[Any]] = []
    for name in names:
        counts = record.counts[place[name]] if name in place else np.zeros(BINS, np.int64)
        first, length = _span(counts)
        parts += [np.array([first, length]), counts[first : first + length]]
    counts32: npt.NDArray[np.uint32] = np.minimum(np.concatenate(parts), np.iinfo(np.uint32).max).astype("<u4")
    return counts32
