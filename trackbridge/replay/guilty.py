"""Which batches are suspected of an anomaly, and the plan that leaves them out."""

from __future__ import annotations

from trackbridge.capsule import SpikeCapsule
from trackbridge.errors import UsageError
from trackbridge.records import Anomaly
from trackbridge.skip import Skip, SkipPlan

NEAR = 2
"""A first mover this many steps or fewer before the onset belongs to the same event: a gradient or an activation shows a bad
batch in its own step, the loss sometimes only in the next."""


def guilty_steps(anomaly: Anomaly, restart_step: int = 0) -> tuple[int, ...]:
    """The onset's step, and those from the first mover's on, where that is near."""
    first = anomaly.onset
    if anomaly.first_mover is not None and anomaly.onset - NEAR <= anomaly.first_mover[1] < anomaly.onset:
        first = anomaly.first_mover[1]
    return tuple(range(max(first, restart_step), max(anomaly.onset, restart_step) + 1))


def skip_plan(capsule: SpikeCapsule, steps: tuple[int, ...] | None = None) -> SkipPlan:
    """A plan that leaves out the batches of `steps` (default: the suspected ones), of every rank that the capsule has.

    Raises `UsageError` where the record does not identify them.
    """
    steps = guilty_steps(capsule.anomaly, capsule.restart_step) if steps is None else steps
    skips = []
    for rank in capsule.ranks:
        batches = capsule.micro_batches(rank)
        for step in steps:
            micros = batches.get(step, ())
            if not micros:
                raise UsageError(f"no batch of step {step} was recorded, so no plan can name it; use run.batches(loader)")
            for micro in micros:
                if micro.sample_ids is None and micro.index is None:
                    raise UsageError(f"the batch of step {step} has neither an index nor sample ids; use run.batches(loader)")
                known = micro.sample_ids is not None
                skips.append(
                    Skip(
                        rank=rank if capsule.world_size > 1 else None,
                        loader=micro.loader,
                        epoch=micro.epoch,
                        index=None if known else micro.index,
                        sample_ids=micro.sample_ids,
                        why=f"{capsule.anomaly.what} at step {capsule.anomaly.onset} of run {capsule.run}, step {step}",
                    )
                )
    return SkipPlan(skips=tuple(skips))
