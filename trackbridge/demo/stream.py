"""The training data as a loader sees it: three sources in turn, shuffled inside each, read by worker processes.

First clean text, then a small source that a careless filter let in (compiled and compressed files), then clean text again. The
loader and the sampler know nothing of this; it is the order of the sources that puts the bad batches at a planned step.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler

from trackbridge.demo.corpus import Bytes, Corpus


class Windows(Dataset[Tensor]):
    """`count` windows of `context` + 1 bytes each, evenly spaced over `data`; int64, shape (context + 1,)."""

    def __init__(self, data: Bytes, count: int, context: int) -> None:
        self.data = data
        self.count = count
        self.length = context + 1
        if len(data) < self.length:
            raise ValueError(f"a window takes {self.length} bytes, the source has {len(data)}")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        start = index * (len(self.data) - self.length) // max(1, self.count - 1)
        return torch.from_numpy(self.data[start : start + self.length].astype(np.int64))


class ShuffleInside(Sampler[int]):
    """A permutation of each source in turn. Seeded from torch's global generator at each epoch, as `RandomSampler` is."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return sum(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        for start, length in zip(accumulate(self.lengths, initial=0), self.lengths, strict=False):
            yield from (start + torch.randperm(length, generator=generator)).tolist()


def training_loader(
    corpus: Corpus, *, context: int, batch: int, before: int, bad: int, after: int, workers: int = 2
) -> DataLoader[Tensor]:
    """Batches of int64 (batch, context + 1): `before` clean ones, `bad` bad ones, `after` clean ones."""
    cut = len(corpus.train) * before // max(1, before + after)
    parts = [(corpus.train[:cut], before), (corpus.binary, bad), (corpus.train[cut:], after)]
    sources = [Windows(data, batches * batch, context) for data, batches in parts if batches]
    sampler = ShuffleInside([len(source) for source in sources])
    return DataLoader(ConcatDataset(sources), batch_size=batch, sampler=sampler, num_workers=workers)


def held_out_batches(corpus: Corpus, *, context: int, batch: int, batches: int = 4) -> list[Tensor]:
    """The same few held-out batches at every evaluation."""
    windows = Windows(corpus.held_out, batch * batches, context)
    return [torch.stack([windows[i] for i in range(start, start + batch)]) for start in range(0, len(windows), batch)]
