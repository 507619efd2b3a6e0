"""Which `Trainer` calls us. A callback is not told, so it looks at who called it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from transformers import Trainer

from trackbridge.errors import UsageError


@dataclass(frozen=True)
class Caller:
    """The Trainer whose training begins. `checkpoint` is what it resumes from, None for a new training; `epoch` counts the
    epochs that are behind it."""

    trainer: Any
    checkpoint: str | None
    epoch: int


def caller() -> Caller:
    """The Trainer that is calling the callback, from its frame. Raises `UsageError` where no Trainer is."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",) and isinstance(frame.f_locals.get("self"), Trainer):
            local = frame.f_locals
            return Caller(local["self"], local.get("resume_from_checkpoint") or None, local.get("epochs_trained") or 0)
        frame = frame.f_back  # type: ignore[assignment]
    raise UsageError(
        "trackbridge.hf.Callback found no transformers.Trainer: Trainer(..., callbacks=[trackbridge.hf.Callback()])"
    )
