"""How many capsules a run keeps on this disk, and how large: when there are more, the most severe survive.

What gives way is said three times: in the anomaly's notes in the journal, in the log, and in the count that
``trackbridge/capsules_given_up`` is. The journal is written first: after a crash in between there is a folder too many, never
an anomaly that names a folder which is gone. A tracker that has the capsule keeps it.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trackbridge import untrusted
from trackbridge.capsule import LOCAL, MANIFEST, parse_manifest
from trackbridge.config import RecorderConfig
from trackbridge.errors import TrackbridgeError
from trackbridge.records import Anomaly
from trackbridge.rundir import RunDirectory
from trackbridge.tree import STATE_ARRAYS

logger = logging.getLogger("trackbridge")


@dataclass(slots=True, eq=False)
class Kept:
    """A capsule on this disk, or under way. `path` is relative to the run directory; `bytes` is 0 until it is sealed."""

    path: str
    anomaly: Anomaly
    severity: float
    bytes: int = 0
    given_up: bool = False

    @property
    def name(self) -> str:
        return Path(self.path).name


class Allowance:
    """Both budgets of a run, over all its attempts. For the scribe's thread, but for `weigh` and `remove`."""

    def __init__(self, directory: RunDirectory, config: RecorderConfig, gave_up: Callable[[str, Anomaly, str], None]) -> None:
        self._most, self._bytes = config.max_capsules, config.capsule_bytes
        self._gave_up = gave_up
        self._kept = [kept for folder in sorted(directory.capsules.glob("spike-*")) if (kept := _found(folder)) is not None]
        self.given_up = 0

    def add(self, anomaly: Anomaly) -> Kept:
        """`anomaly` gets the capsule that it names."""
        kept = Kept(anomaly.capsule or "", anomaly, anomaly.severity)
        self._kept.append(kept)
        return kept

    def make_room(self, anomaly: Anomaly, remove: Callable[[Kept], None]) -> str | None:
        """Give up the least severe capsule if there are as many as there may be. Returns why not, when `anomaly` is not more
        severe."""
        if len(self._kept) < self._most:
            return None
        least = min(self._kept, key=lambda kept: kept.severity, default=None)
        if least is None or anomaly.severity <= least.severity:
            self.given_up += 1
            return f"no capsule: recorder.max_capsules is {self._most}, and those that are kept are as severe or more"
        self._give_up(least, f"recorder.max_capsules is {self._most}, and the anomaly of step {anomaly.step} is more severe")
        remove(least)
        return None

    def settle(self, path: str | None, remove: Callable[[Kept], None]) -> bool:
        """Give up the least severe of the sealed capsules until they fit the budget of bytes; one is always kept. False when
        the capsule at `path` is not kept."""
        while True:
            sealed = [kept for kept in self._kept if kept.bytes]
            if len(sealed) < 2 or sum(kept.bytes for kept in sealed) <= self._bytes:
                break
            least = min(sealed, key=lambda kept: kept.severity)
            self._give_up(least, f"recorder.capsule_bytes is {self._bytes}, and the others are more severe")
            remove(least)
        return any(kept.path == path for kept in self._kept)

    def _give_up(self, kept: Kept, why: str) -> None:
        kept.given_up = True
        self._kept.remove(kept)
        self.given_up += 1
        logger.warning("trackbridge: the capsule of step %d was given up: %s", kept.anomaly.step, why)
        self._gave_up(kept.path, kept.anomaly, f"its capsule was given up: {why}; a tracker that has it keeps it")

    # worker thread

    def weigh(self, kept: Kept, directory: RunDirectory) -> None:
        """Note the size of a capsule that was sealed, or remove it if it was given up meanwhile."""
        if kept.given_up:
            self.remove(kept, directory)
        else:
            kept.bytes = _size(directory.path / kept.path)

    @staticmethod
    def remove(kept: Kept, directory: RunDirectory) -> None:
        """Delete a capsule and what is beside it."""
        folder = directory.path / kept.path
        for path in (folder, folder.with_name(folder.name + LOCAL)):
            if path.exists():
                gone = path.with_name(f".{path.name}.given-up")
                shutil.rmtree(gone, ignore_errors=True)
                path.rename(gone)  # nobody sees a half of it
                shutil.rmtree(gone, ignore_errors=True)

    @staticmethod
    def sweep(directory: RunDirectory) -> None:
        """Delete the snapshots that no capsule here holds or begins at. Only while none is under way, which may need one."""
        starts = {_restart(folder) for folder in directory.capsules.glob("spike-*")}
        for rank in directory.ranks():
            for state in directory.snapshots(rank).glob("step-*"):
                arrays = state / STATE_ARRAYS
                held = not arrays.exists() or arrays.stat().st_nlink > 1
                if not held and not any(state.name == f"step-{start}" for start in starts):
                    shutil.rmtree(state, ignore_errors=True)


def _found(folder: Path) -> Kept | None:
    """A capsule that an earlier attempt left."""
    try:
        manifest = parse_manifest(untrusted.read_json(folder / MANIFEST))
    except TrackbridgeError:
        return None
    return Kept(f"capsules/{folder.name}", manifest.anomaly, manifest.anomaly.severity, _size(folder))


def _restart(folder: Path) -> int | None:
    try:
        return parse_manifest(untrusted.read_json(folder / MANIFEST)).restart_step
    except TrackbridgeError:
        return None


def _size(folder: Path) -> int:
    """Bytes of a capsule and of what is beside it; at least 1 where there is one."""
    found = [
        os.lstat(Path(current) / name).st_size
        for root in (folder, folder.with_name(folder.name + LOCAL))
        for current, _, names in os.walk(root)
        for name in names
    ]
    return max(sum(found), 1) if found else 0
