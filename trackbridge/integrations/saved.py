"""A run's state beside a checkpoint that a framework writes, so that a resume goes on with the same run.

One small JSON for each rank, ``trackbridge_<rank>.json``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trackbridge.run import Run
from trackbridge.rundir import write_atomic

logger = logging.getLogger("trackbridge")


def write(checkpoint: Path, rank: int, state: Mapping[str, Any]) -> None:
    checkpoint.mkdir(parents=True, exist_ok=True)  # this rank's disk may not be the first rank's
    write_atomic(_file(checkpoint, rank), json.dumps(dict(state)).encode())  # what is not finite comes back as it was


def read(checkpoint: Path, rank: int) -> dict[str, Any] | None:
    """This rank's state, else the first rank's (the world may have grown); None if the checkpoint was made without trackbridge.
    One that cannot be read is said, and no reason to stop a training."""
    path = next((path for path in (_file(checkpoint, rank), _file(checkpoint, 0)) if path.exists()), None)
    if path is None:
        return None
    try:
        state = json.loads(path.read_bytes())
        if isinstance(state, dict) and isinstance(state.get("run_id"), str) and isinstance(state.get("step"), int):
            return state
        why = "it is no state of a run"
    except (OSError, ValueError) as error:
        why = str(error)
    logger.warning("trackbridge: %s cannot be read (%s): this training is recorded as a new run", path, why)
    return None


def resume(run: Run, state: Mapping[str, Any]) -> None:
    """`run` goes on from `state`. What of it cannot be used is said, and no reason to stop a training."""
    try:
        run.load_state_dict(state)
    except Exception as error:
        logger.warning("trackbridge: the run's state in the checkpoint cannot be used as a whole: %r", error)


def _file(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"trackbridge_{rank}.json"
