"""How far replays of the same steps are from each other, and so how far from them a healthy record may be.

Without a fault the record is one more draw of what the replays are draws of. Two things follow. Its distance from the nearest
of them is of the size of their distances from each other, at that step. And where noise is rare, so that all agree for a while,
it is as likely as any of them to leave the others first; what it then does is what each of them does when it leaves, some steps
later. So a distance is compared with those of all pairs of replays up to the same step, and up to the same number of steps
after the two of a pair had left each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

from trackbridge.replay.compare import LOSS, RATE, Observation, comparable, family, is_id, ulps

TYPICAL = 4.0
SINGLE = 64.0
"""The record is within the noise while its typical distance from the nearest replay is at most `TYPICAL` times that of two
replays, and that of each series at most `SINGLE` times the largest of two replays in the same statistic of any layer, one ULP
added to each. What noise alone gives, and what a flipped bit: docs/replay.md."""

MOST = 5
"""Replays, where they differ: of six healthy draws, one further from all others than `SINGLE` times their distances is rare."""

_FARTHEST = 2.0**25
"""The largest distance between two finite numbers, in ULP at the larger; what is absent or not finite counts as much."""


def typical(distances: Iterable[float], series: int) -> float:
    """Typical distance (ULP) over so many `series`, of which those not in `distances` are equal: the geometric mean, one ULP
    added to each. A median over the series that differ would jump while only few do."""
    bits = math.fsum(math.log2(1.0 + min(distance, _FARTHEST)) for distance in distances)
    return 2.0 ** (bits / series) - 1.0 if series else 0.0


@dataclass(frozen=True)
class Apart:
    """Two replays at one step. `series` maps those that differ to their distance (ULP), `families` each statistic that was
    measured to the largest of its layers; ids have no distance, and count as differing only. `compared`: how many series."""

    series: Mapping[str, float]
    families: Mapping[str, float]
    compared: int
    ids: bool

    @classmethod
    def between(cls, a: Observation, b: Observation) -> Apart:
        found: dict[str, float] = {}
        families: dict[str, float] = {}
        ids, compared = False, 0
        pairs = [(LOSS, a.loss, b.loss)]
        if a.rates and b.rates:
            pairs += [(name, rate, b.rates[-1].get(name, math.nan)) for name, rate in a.rates[-1].items()]
        pairs += [(name, value, b.values[name]) for name, value in a.values.items() if name in b.values and comparable(name)]
        for name, left, right in pairs:
            distance = ulps(left, right)
            if is_id(name):
                ids = ids or distance > 0
                continue
            compared += 1
            kind = family(name)
            families[kind] = max(families.get(kind, 0.0), distance)
            if distance:
                found[name] = distance
        return cls(found, families, compared, ids)

    @property
    def differ(self) -> bool:
        return bool(self.series) or self.ids

    @property
    def typical(self) -> float:
        return typical(self.series.values(), self.compared)


@dataclass(frozen=True)
class Bounds:
    """What noise has done by some step, in ULP; `differ`: whether any two replays had left each other."""

    differ: bool = False
    typical: float = 0.0
    families: Mapping[str, float] = field(default_factory=dict)

    def joined(self, differ: bool, typical: float, families: Mapping[str, float]) -> Bounds:
        """The larger of both."""
        most = dict(self.families)
        for kind, distance in families.items():
            most[kind] = max(most.get(kind, 0.0), distance)
        return Bounds(self.differ or differ, max(self.typical, typical), most)

    def most(self, series: str) -> float:
        """How far from the nearest replay noise may take the record in `series`; a learning rate is not rounded by chance."""
        distance = self.families.get(family(series))
        rounding = 0.0 if distance is None or series.startswith(RATE) else 1.0
        return SINGLE * ((distance or 0.0) + rounding)

    def beyond(self, nearest: Mapping[str, float], compared: int) -> str | None:
        """What noise does not explain of the record's distance from the nearest replay; None where it explains it. `nearest`:
        that distance of each series that differs, of so many compared."""
        if not nearest:
            return None
        if not self.differ:
            return "while the replays agree with each other to the bit"
        measured = {series: distance for series, distance in nearest.items() if not is_id(series)}
        for series, distance in sorted(measured.items(), key=lambda item: item[1], reverse=True):
            most = self.most(series)
            if distance > most:
                return f"{series} is {distance:.3g} ULP from the nearest replay, and noise explains {most:.3g}"
        near, far = typical(measured.values(), compared), TYPICAL * (self.typical + 1.0)
        return f"typically {near:.3g} ULP from the nearest replay, and noise explains {far:.3g}" if near > far else None


class Noise:
    """The distances between all pairs of replays of one window. `seen` has the steps of each replay, in order."""

    def __init__(self, seen: Sequence[Sequence[Observation]]) -> None:
        self._pairs = [[Apart.between(x, y) for x, y in zip(a, b, strict=True)] for a, b in combinations(seen, 2)]
        self._places = _reached(self._pairs)
        self._ages = _reached([pair[_left(pair) :] for pair in self._pairs])

    @property
    def any(self) -> bool:
        """Whether any two replays differ anywhere."""
        return self._places[-1].differ

    def at(self, place: int) -> dict[str, float]:
        """By series, the largest distance (ULP) between any two replays at the step `place` of the window."""
        found: dict[str, float] = {}
        for pair in self._pairs:
            for series, distance in pair[place].series.items():
                found[series] = max(found.get(series, 0.0), distance)
        return found

    def typical(self, place: int) -> float:
        """The typical distance of the two replays that are furthest apart at the step `place`."""
        return max(pair[place].typical for pair in self._pairs)

    def opening(self) -> float:
        """How far apart the gradients of the first step typically are (ULP), in the median pair of those that differ."""
        typically = []
        for pair in self._pairs:
            moved = [d for series, d in pair[0].series.items() if family(series) == "layer/*/grad_norm"]
            typically += [median(moved)] if moved else []
        return median(typically) if typically else 0.0

    def bounds(self, place: int, age: int) -> Bounds:
        """What noise does up to the step `place` of the window, or up to `age` steps after two replays leave each other."""
        found = self._places[place]
        if not self._ages:
            return found
        since = self._ages[min(age, len(self._ages) - 1)]
        return found.joined(since.differ, since.typical, since.families)


def _left(pair: Sequence[Apart]) -> int:
    """The place at which the two leave each other."""
    return next((place for place, apart in enumerate(pair) if apart.differ), len(pair))


def _reached(pairs: Sequence[Sequence[Apart]]) -> list[Bounds]:
    """By place, the most that any pair reached up to it. A statistic that is not measured there counts up to where it next is:
    the cadence of one pair's steps, counted from where the two left each other, is not the other's."""
    steps = [Bounds()] * max(map(len, pairs), default=0)
    for pair in pairs:
        differ, most = False, 0.0
        families: list[dict[str, float]] = [{} for _ in pair]
        reached: dict[str, float] = {}
        waiting: dict[str, int] = {}
        for place, apart in enumerate(pair):
            for kind, distance in apart.families.items():
                reached[kind] = max(reached.get(kind, 0.0), distance)
                for earlier in range(waiting.get(kind, 0), place + 1):
                    families[earlier][kind] = reached[kind]
                waiting[kind] = place + 1
        for kind, first in waiting.items():
            for later in range(first, len(pair)):
                families[later][kind] = reached[kind]
        for place in range(len(steps) if pair else 0):
            if place < len(pair):
                differ, most = differ or pair[place].differ, max(most, pair[place].typical)
            steps[place] = steps[place].joined(differ, most, families[min(place, len(pair) - 1)])
    return steps
