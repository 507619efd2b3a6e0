"""The optimizer's state out of a checkpoint of the user's own making, without running any code of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from trackbridge.capsule import SpikeCapsule
from trackbridge.checkpoints import saved_checkpoints
from trackbridge.history import find
from trackbridge.replay.trial import NotRunnable
from trackbridge.rundir import RunDirectory


def newest_before(capsule: SpikeCapsule) -> Path:
    """The newest checkpoint that the run around the capsule's folder tells of, of a step up to the restart, still on disk.

    Raises `NotRunnable` where there is none.
    """
    run = capsule.path.absolute().parent.parent
    if not RunDirectory(run).file.is_file():
        raise NotRunnable("the capsule is not in its run's folder, which knows the checkpoints; use restore-optimizer=PATH")
    known = [saved for saved in saved_checkpoints(find(run)) if saved.step <= capsule.restart_step and saved.path.is_file()]
    if not known:
        raise NotRunnable(
            f"no checkpoint file of a step up to {capsule.restart_step} is known: tell run.checkpoint_saved(path, step), or "
            "use restore-optimizer=PATH"
        )
    return max(known, key=lambda saved: saved.step).path


def optimizer_states(path: Path, optimizers: Mapping[str, Optimizer]) -> dict[str, Mapping[str, Any]]:
    """{key of the optimizer: its state dict in the file at `path`}. The file is read with ``weights_only``: it may hold state
    dicts anywhere, and runs no code. Raises `NotRunnable` where it has none that fits."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds; each means that this file is of no use
        raise NotRunnable(f"{path} cannot be read as a checkpoint: {' '.join(str(error).split())[:200]}") from None
    found = list(_states(content))
    taken: dict[str, Mapping[str, Any]] = {}
    for key, optimizer in optimizers.items():
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        place = next((i for i, state in enumerate(found) if sizes == _sizes(state)), None)
        if place is None:
            raise NotRunnable(f"{path} holds no optimizer state with groups of {sizes} parameters")
        taken[key] = found.pop(place)
    return taken


def _states(content: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(content, Mapping):
        if content.keys() >= {"state", "param_groups"}:
            yield content
            return
        for item in content.values():
            yield from _states(item)
    elif isinstance(content, (list, tuple)):
        for item in content:
            yield from _states(item)


def _sizes(state: Mapping[str, Any]) -> list[int]:
    return [len(group["params"]) for group in state["param_groups"]]
