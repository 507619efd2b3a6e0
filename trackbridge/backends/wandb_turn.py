"""One process of this user at a time into a run of theirs that several recordings have joined.

The claim of a run directory keeps two processes from delivering one recording. Two recordings in one W&B run have two
directories, and their rows go to the same numbered lines of its history: what the second process writes replaces what the first
one wrote. So who takes such a run up again holds a lock, which the system lets go of with the process.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


class Turn:
    """The right to write into the run that `names` name (server, entity, project, id)."""

    def __init__(self, *names: str) -> None:
        digest = hashlib.blake2b("\n".join(names).encode(), digest_size=12).hexdigest()
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._path = cache / "trackbridge" / f"wandb-{digest}.lock"
        self._descriptor: int | None = None

    def take(self) -> bool:
        """False if another process has it. Where locks are not to be had, everybody gets it."""
        if self._descriptor is not None:
            return True
        try:
            import fcntl

            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.leave()
            return False
        except (ImportError, OSError):
            pass
        return True

    def leave(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
