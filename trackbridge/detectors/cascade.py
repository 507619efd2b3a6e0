"""Who takes part in an event: the series that leave their bands with it, and those that were ahead of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from trackbridge.detectors.band import BandDetector
from trackbridge.detectors.base import Verdict

_FAR = 64  # steps before the onset in which the drift of a layer counts as its beginning

Entry: TypeAlias = tuple[str, int, int]  # as `Episode.join` takes it: series, step, place


def beside(band: BandDetector, verdicts: Sequence[Verdict]) -> Iterator[Entry]:
    return ((band.series[v.index], v.onset, v.index) for v in verdicts)


def ahead(band: BandDetector, onset: int) -> list[Entry]:
    """Series that left their band before `onset` and were still, or until just now, outside; and those in a drift."""
    outside = (band.last_out >= max(onset - 2, 0)) & (band.onset <= onset) & (band.onset >= onset - band.settings.lookback)
    near = band.is_head | (band.drift_onset >= onset - _FAR)  # a drift that was told may be as old as it is
    drifting = band.drifting() & (band.drift_onset <= onset) & near
    since = np.where(drifting, band.drift_onset, band.onset)
    return [(band.series[i], int(since[i]), i) for i in np.flatnonzero(outside | drifting).tolist()]
