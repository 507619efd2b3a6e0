"""The same batch again, though the epoch is not over.

Batches are known by the fingerprints of their step (`trackbridge.fingerprints`). Within one epoch of one loader none comes
twice. Data that comes round again from its first batch on is a new pass that nobody counted; anything else is a repeat. A
single equal batch could be chance where a batch is a sample or two: then it takes three in a row, at one distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from trackbridge.config import RepeatsConfig
from trackbridge.detectors.monitors.base import Look, Monitor, Sign
from trackbridge.records import MicroBatch

FAULT = "repeated-batch"
SERIES = "data/repeated"
_CERTAIN = 3  # equal steps in a row, at one distance, that are no chance even where a batch is one small sample


class Repeats(Monitor):
    NAME = "repeats"
    KEPT: ClassVar[tuple[str, ...]] = ("seen", "first", "epoch", "around", "differ", "distance", "row", "told", "ended")

    def __init__(self, config: RepeatsConfig) -> None:
        super().__init__()
        self.config = config
        self.seen: dict[str, int] = {}  # batch -> the step that used it last, oldest first, at most `memory` of them
        self.epoch = ""  # loader and epoch of the latest step
        self.first = -1  # the step at which the present pass over the data began
        self.around = 0  # steps of a pass, once the data has come round within one epoch, as it does in `itertools.cycle`
        self.differ = False  # the micro-batches of some step were different ones
        self.distance = 0  # of the repeat under way
        self.row = 0  # its length in steps
        self.told = False
        self.ended = -1

    def update(self, look: Look) -> Sign | None:
        prints = [micro.fingerprint for micro in look.context.micro] if look.context else []
        if look.context is None or not prints or None in prints:
            return None
        head = f"{look.context.micro[0].loader}:{look.context.micro[0].epoch}"
        if head != self.epoch:
            self.epoch, self.first, self.around = head, look.step, 0
        self.differ |= len(set(prints)) > 1
        if self.differ and len(prints) > 1 and len(set(prints)) == 1:
            words = f"all {len(prints)} micro-batches of step {look.step} are the same batch"
            return None if self.told else self._tell(look.step, 0, words)
        key = f"{head}:" + "".join(str(one)[:16] for one in prints)  # sixteen digits of each tell them apart
        earlier = self.seen.pop(key, None)
        self.seen[key] = look.step
        if len(self.seen) > self.config.memory:
            del self.seen[next(iter(self.seen))]
        if earlier is None or not 0 < look.step - earlier <= self.config.memory:
            self._fresh(look.step)
            return None
        distance = look.step - earlier
        self.row = self.row + 1 if distance == self.distance else 1
        self.distance = distance
        if earlier == self.first or distance == self.around:
            if earlier == self.first:
                self.first, self.around = look.step, distance
            return None
        needed = 1 if _samples(look.context.micro) >= self.config.least_samples else _CERTAIN
        if self.told or self.row < needed:
            return None
        since = look.step - self.row + 1
        return self._tell(since, distance, f"the batch of step {since} is that of step {since - distance} again")

    def over(self) -> int | None:
        return self.ended if self.ended >= 0 else None

    def _fresh(self, step: int) -> None:
        self.row = self.distance = 0
        if self.told:
            self.told, self.ended = False, step

    def _tell(self, onset: int, distance: int, words: str) -> Sign:
        self.told, self.ended = True, -1
        return Sign(FAULT, "rule", SERIES, onset, float(distance), 0.0, 1.0, 0.5, words, terms=words)


def _samples(micros: Sequence[MicroBatch]) -> float:
    """How many samples the step used, as far as is known; a batch that was too large to keep counts as many."""
    found = 0.0
    for micro in micros:
        if micro.sample_ids is not None:
            found += len(micro.sample_ids)
        elif micro.tensors is None:
            return float("inf")
        else:
            found += max((len(array) for array in micro.tensors.values() if array.ndim), default=0)
    return found
