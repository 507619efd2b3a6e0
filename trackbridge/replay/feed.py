"""The recorded batches of a step, as the list that the user's step function takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, SupportsIndex

import numpy as np

from trackbridge import fingerprints, rng, tree
from trackbridge.records import MicroBatch
from trackbridge.replay.rebuilt import Rebuilt


class Incomplete(Exception):  # noqa: N818 - a finding, not an error
    """The capsule and what `build()` gave are not enough for this step; the text says what is missing."""


class MicroBatches(list[Any]):
    """A list of micro-batches. Where the fetch of one had moved the random state (a transform in the training process, an
    epoch's start), that state is put back as it is first taken: between the micro-batches of a step, as in training."""

    def __init__(
        self, batches: list[Any], states: list[Mapping[str, np.ndarray] | None], generators: Mapping[str, Any]
    ) -> None:
        super().__init__(batches)
        self._states = list(states)
        self._generators = generators
        self.micros: tuple[MicroBatch, ...] = ()  # what is recorded of each: its place in the data, its sample ids
        self.reports: list[rng.RestoreReport] = []

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        for place in range(len(self))[index] if isinstance(index, slice) else (self._place(index),):
            self._take(place)
        return found

    def __iter__(self) -> Iterator[Any]:
        for place in range(len(self)):
            self._take(place)
            yield super().__getitem__(place)

    def pop(self, index: SupportsIndex = -1) -> Any:
        place = self._place(index)
        self._take(place)
        del self._states[place]
        return super().pop(index)

    def _place(self, index: SupportsIndex) -> int:
        return range(len(self))[index]

    def _take(self, place: int) -> None:
        state, self._states[place] = self._states[place], None
        if state is not None:
            self.reports.append(rng.restore(state, self._generators))


def micro_batches(step: int, micros: tuple[MicroBatch, ...], rebuilt: Rebuilt) -> MicroBatches:
    """The batches of `step`, new objects at each call. Raises `Incomplete`."""
    if not micros:
        raise Incomplete(f"no batch of step {step} was recorded: pass them through run.batches or run.step(batch=...)")
    batches = [_batch(step, k, micro, rebuilt) for k, micro in enumerate(micros)]
    found = MicroBatches(batches, [micro.rng for micro in micros], rebuilt.generators)
    found.micros = micros
    return found


def _batch(step: int, k: int, micro: MicroBatch, rebuilt: Rebuilt) -> Any:
    if micro.tensors is not None:
        return tree.unpack(micro.skeleton, micro.tensors)
    which = f"batch {k} of step {step}"
    if rebuilt.fetch is None or micro.sample_ids is None:
        why = micro.why_no_tensors or "raw batches are not in this capsule"
        cure = "" if micro.sample_ids is None else ", or return Rebuilt(fetch=...) that makes it from its sample ids"
        raise Incomplete(f"{which} is not here ({why}): replay where it was recorded{cure}")
    if micro.fingerprint is None:
        raise Incomplete(f"{which} has no recorded fingerprint to check what fetch makes against")
    try:
        batch = rebuilt.fetch(micro)
    except Exception as error:  # the dataset may be another one now
        words = " ".join(f"{type(error).__name__}: {error}".split())
        raise Incomplete(f"{which} could not be made again: fetch raised {words[:300]}") from error
    skeleton, leaves = tree.pack(batch)
    if not fingerprints.matches(micro.fingerprint, tree.values(skeleton, tree.to_numpy(leaves))):
        raise Incomplete(f"{which}, as fetch made it, is not the recorded one: its fingerprint is not {micro.fingerprint}")
    return batch
