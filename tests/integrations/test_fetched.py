"""`Run.fetched`: the way in for a loop that fetches its own batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import trackbridge
from tests.training import fingerprint, loader, setup, train
from trackbridge.journal import JournalReader
from trackbridge.records import StepContext
from trackbridge.rundir import RunDirectory


def told(run: Any, batches: Iterable[Any]) -> Iterator[Any]:
    for index, batch in enumerate(batches):
        run.fetched(batch, epoch=0, index=index)
        yield batch


def test_a_told_batch_is_copied_named_and_timed(tmp_path: Path) -> None:
    run = trackbridge.init(dir=tmp_path, strict=True)
    tokens = torch.arange(36).reshape(4, 9) % 32
    batch = [tokens.clone()]
    made = setup(run=run)
    run.fetched(batch, epoch=3, index=7, sample_ids=[4, 5, 6, 7], seconds=0.25)
    loss = made.loss(batch)
    loss.backward()
    batch[0].zero_()  # whatever the loop does to it later
    made.optimizer.step()
    run.step(loss)
    assert run.finish()
    (context,) = [c for c in JournalReader(RunDirectory(run.dir).contexts(0)).read() if isinstance(c, StepContext)]
    (micro,) = context.micro
    assert (micro.loader, micro.epoch, micro.index, micro.sample_ids) == (None, 3, 7, (4, 5, 6, 7))
    assert [value.tolist() for value in micro.tensors.values()] == [tokens.tolist()]
    assert trackbridge.load(run.dir).series("perf/fetch_s")[1].tolist() == [0.25]


def test_watched_and_told_trains_to_the_same_bits(tmp_path: Path) -> None:
    bare = train(setup(), loader(), steps=6)
    run = trackbridge.init(dir=tmp_path, strict=True)
    seen = train(setup(run=run), told(run, loader()), steps=6)
    run.finish()
    assert fingerprint(seen) == fingerprint(bare) and seen.losses == bare.losses
