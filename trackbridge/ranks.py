"""Which of the training processes this is, and one agreement between them at start.

Agreement goes through the process group's key-value store, not a collective: a rank that never calls `init` makes the others
fail in seconds with a sentence instead of hanging in NCCL.
"""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from trackbridge.errors import UsageError

_gathers = itertools.count()


@dataclass(frozen=True, slots=True)
class Ranks:
    """Global rank and world size. The leader (rank 0) is the only one that ships."""

    rank: int = 0
    world_size: int = 1

    @property
    def leader(self) -> bool:
        return self.rank == 0

    @classmethod
    def current(cls) -> Ranks:
        """From torch.distributed where it is initialised, else from the launcher's environment."""
        dist = _initialised()
        if dist is not None:
            return cls(dist.get_rank(), dist.get_world_size())
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))

    def agree(self, value: str | None, *, timeout: float = 15.0) -> str | None:
        """The leader's `value`, on every rank. Blocks up to `timeout` seconds for the others.

        Raises `UsageError` when a rank does not take part, or when there is no process group to agree over.
        """
        if self.world_size == 1:
            return value
        if _initialised() is None:
            raise UsageError(
                f"world size is {self.world_size} but torch.distributed is not initialised: "
                "call init_process_group before trackbridge.init"
            )
        said = self.gather("" if value is None else value, timeout=timeout, what="trackbridge.init")
        return said[0] or None

    def gather(self, said: str, *, timeout: float, what: str) -> list[str]:
        """What every rank says, by rank. All must call it, in the same order; `what` names the call for the error.

        Raises `UsageError` when one does not within `timeout` seconds.
        """
        own = store()
        if self.world_size == 1 or own is None:
            return [said]
        key = f"trackbridge/{next(_gathers)}"
        own.set(f"{key}/{self.rank}", said)
        try:
            own.wait([f"{key}/{rank}" for rank in range(self.world_size)], timedelta(seconds=timeout))
        except RuntimeError as error:  # DistStoreError
            raise UsageError(
                f"not every rank called {what} within {timeout:g} s: call it on all {self.world_size} ranks or on none"
            ) from error
        return [own.get(f"{key}/{rank}").decode() for rank in range(self.world_size)]


def store() -> Any:
    """The process group's key-value store, None where there is no process group."""
    dist = _initialised()
    return None if dist is None else dist.distributed_c10d._get_default_store()


def any_rank(flag: bool, device: Any) -> bool:
    """True on every rank if `flag` is on any. A collective over all ranks, on `device`; just `flag` without a process group."""
    dist = _initialised()
    if dist is None or dist.get_world_size() == 1:
        return flag
    torch = sys.modules["torch"]
    answer = torch.tensor([float(flag)], device=device)
    dist.all_reduce(answer, dist.ReduceOp.MAX)
    return bool(answer.item())


def _initialised() -> Any:
    """torch.distributed if it is imported and initialised, else None; imports nothing."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None
