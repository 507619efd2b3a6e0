"""W&B beside or inside a run that the user has open, and its client in this process instead of one of its own.

By default our run is a companion: in the same project and group as theirs, linked both ways. With ``join=True`` our rows go
into theirs, through their run object, in their process; it stays theirs: never finished, renamed or tagged by us.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from trackbridge.backends.wandb_client import Client
from trackbridge.backends.wandb_process import ClientError

logger = logging.getLogger("trackbridge")


@dataclass(frozen=True)
class Joined:
    """A run object that was joined in this process, and the folder of its files: W&B has that as the user named it, perhaps
    relative to a folder in which the process is not any more later."""

    run: Any
    folder: Path


_joined: dict[str, Joined] = {}
"""By the run's id."""


class Beside(BaseModel):
    """A run that the user had open when ours began."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    id: str
    entity: str | None = None
    project: str | None = None
    group: str | None = None
    url: str | None = None


def active() -> Any:
    """The user's open run, None if there is none. Never imports wandb: who has a run open did."""
    wandb = sys.modules.get("wandb")
    run = getattr(wandb, "run", None)
    return None if run is None or getattr(run, "disabled", False) else run


def facts(run: Any) -> Beside:
    """Who `run` is. Contacts nobody."""
    group = getattr(run, "group", None) or None
    url = None if run.offline else run.url
    return Beside(id=run.id, entity=run.entity or None, project=run.project or None, group=group, url=url)


def join(run: Any) -> None:
    _joined[run.id] = Joined(run, Path(run.dir).resolve().parent)


def joined(run_id: str) -> Joined | None:
    """The run, if it was joined in this process."""
    return _joined.get(run_id)


def introduce(run_id: str, ours: str) -> None:
    """Note in the user's run which run of ours is beside it."""
    run = active()
    if run is not None and run.id == run_id:
        try:
            run.config.update({"trackbridge/companion": ours}, allow_val_change=True)
        except Exception as error:  # their run, their SDK: nothing of ours depends on it
            logger.warning("trackbridge: the W&B run %s could not be linked: %s", run_id, error)


class Local:
    """Stands in for `wandb_process.Process`. Calls are not cut short: whoever waits for the shipper's thread has a limit."""

    def __init__(self, theirs: Joined | None = None) -> None:
        """`theirs`: the user's run, which is written into; else `open` makes one that leaves ``wandb.run`` alone."""
        self._client = Client() if theirs is None else Client(run=theirs.run, folder=theirs.folder)

    @property
    def native(self) -> Any:
        return self._client.run

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        try:
            return getattr(self._client, method)(*arguments)
        except Exception as error:
            raise ClientError(type(error).__name__, str(error) or type(error).__name__) from error

    def remember(self, pids: list[int]) -> None:
        """Nothing to kill later: the SDK's service is the user's."""

    def kill(self) -> None:
        self._client.leave()
