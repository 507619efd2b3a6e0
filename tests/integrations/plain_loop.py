"""What a plain loop computes, and that a record made through a framework is the plain loop's."""

from __future__ import annotations

import random
from collections.abc import Set
from pathlib import Path

import numpy as np
from torch import Tensor, nn

import trackbridge

BAD = 52  # the step whose batch is spoiled


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """The loss of tests/training.py, with noise from python's and numpy's generators."""
    tokens = batch[0]
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return loss + 1e-4 * random.random() + 1e-4 * float(np.random.rand())


def assert_the_same_series(recorded: Path, plain: Path, more: Set[str] = frozenset()) -> None:
    """All but times and our own, to the bit; `more` are series that only the framework's record has."""
    ours, theirs = trackbridge.load(recorded), trackbridge.load(plain)
    assert set(ours.names) == set(theirs.names) | more
    for name in set(ours.names) - more:
        if name.startswith(("perf/", "host/", "trackbridge/")):
            continue
        (steps, values), (their_steps, their_values) = ours.series(name), theirs.series(name)
        assert steps.tolist() == their_steps.tolist(), name
        assert values.tobytes() == their_values.tobytes(), name


def assert_the_same_spike(recorded: Path, plain: Path) -> None:
    """Anomalies, the capsule's span, sample ids, fingerprints and random states."""
    ours, theirs = trackbridge.load(recorded).anomalies, trackbridge.load(plain).anomalies
    facts = [(a.kind, a.step, a.onset, a.series, a.value, a.severity, a.first_mover) for a in ours]
    assert facts == [(a.kind, a.step, a.onset, a.series, a.value, a.severity, a.first_mover) for a in theirs]
    assert facts[0][:2] == ("spike", BAD)
    capsule, other = trackbridge.pull(recorded), trackbridge.pull(plain)
    assert capsule.verify() and (capsule.span, capsule.restart_step) == (other.span, other.restart_step)
    for step in capsule.steps:
        mine, their = capsule.micro_batches(0)[step], other.micro_batches(0)[step]
        assert [(m.epoch, m.index, m.sample_ids, m.fingerprint) for m in mine] == [
            (m.epoch, m.index, m.sample_ids, m.fingerprint) for m in their
        ]
        before, others = capsule.rng_states(0).before(step), other.rng_states(0).before(step)
        assert before.keys() == others.keys()
        assert all(np.array_equal(before[name], others[name]) for name in before), step
