"""Which samples are in a batch of a loader that somebody else's loop iterates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from trackbridge.sampling import RecordingBatchSampler, sampler_for


class SampleIds:
    """Notes what the sampler of one DataLoader hands out, from now on until `remove`.

    The loader forbids assigning a sampler, hence its ``__dict__``. Nothing that it yields changes. Batches must be asked for in
    the order in which the loop gets them.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._recording = sampler_for(loader) if isinstance(loader, DataLoader) else None
        self._pass: Any = None
        self._next = 0
        self._name, self._own = "", None
        if self._recording is not None:
            self._name = "sampler" if loader.batch_sampler is None else "batch_sampler"
            self._own = vars(loader)[self._name]
            vars(loader)[self._name] = self._recording

    def take(self, index: int) -> Sequence[Any] | None:
        """The ids of the loop's next batch, its number `index` in the epoch; None if they are not known.

        An index further on than the next one means that the loop dropped what lies between. The first index of a pass is where
        it begins: a loop that resumes in the middle of an epoch may count on from there.
        """
        if self._recording is None or self._recording.newest is None:
            return None
        if self._recording.newest is not self._pass:
            self._pass, self._next = self._recording.newest, index
        ids = None
        while self._next <= index:
            ids = self._pass.take()
            self._next += 1
        return ids

    def remove(self) -> None:
        loader, recording = self._loader, self._recording
        self._recording = self._pass = None
        if recording is None or self._own is recording:
            return
        if vars(loader).get(self._name) is recording:
            vars(loader)[self._name] = self._own
        iterator: Any = getattr(loader, "_iterator", None)  # a persistent one, which asks the sampler again at each epoch
        if isinstance(getattr(iterator, "_index_sampler", None), RecordingBatchSampler):
            iterator._index_sampler = self._own
