"""What W&B's client says when it cannot open a run: whether that may pass by itself, or a person has to do something.

W&B keeps the id of a deleted run, and refuses it with a 409 (docs.wandb.ai, delete runs: "A run ID cannot be reused"). A
deleted or renamed project is made anew by whoever writes to it, so a run that was there is only resumed (``resume="must"``).
"""

from __future__ import annotations

import re

from trackbridge.backends.wandb_process import reason
from trackbridge.errors import RetryLater, TrackbridgeError

_RETRY_SECONDS = 30.0
_MISSING = re.compile(r"does not exist.*resum|resum.*does not exist", re.DOTALL | re.IGNORECASE)
_DENIED = re.compile(r"permission denied|\b(HTTP|error) 403\b", re.IGNORECASE)


def deleted(error: Exception) -> bool:
    """Whether W&B refuses the id of a new run because it was that of a run which was deleted."""
    return "previously created and deleted" in str(error)


def meaning(error: Exception, run: str, otherwise: str) -> Exception:
    """What to raise for `error` at the opening of `run` (``[entity/]project/id``). `otherwise`: what else than restoring it
    makes delivery go on, empty where nothing does."""
    said = reason(error)
    if deleted(error) or _MISSING.search(str(error)):
        return TrackbridgeError(
            f"W&B has no run {run} any more: it was deleted, its project was deleted or renamed, or this key may not see it. "
            f"Undelete it in the project's overview, or give the project its name back{otherwise}"
        )
    if _DENIED.search(str(error)):
        return TrackbridgeError(
            f"W&B does not let you write to {run}: ask its team for access, or use another key: wandb login"
        )
    if "wandb login" in said:
        return TrackbridgeError(f"W&B cannot open the run: {said}")
    return RetryLater(_RETRY_SECONDS, f"W&B cannot open the run: {said}")
