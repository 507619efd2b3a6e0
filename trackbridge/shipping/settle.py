"""What a trainer that ended could not do itself: seal the capsules that were under way, and say that it was killed."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from trackbridge.errors import TrackbridgeError
from trackbridge.journal import JournalReader, JournalWriter
from trackbridge.records import Anomaly, Artifact, RunEnd
from trackbridge.rundir import RunDirectory
from trackbridge.shipping.claim import Claim
from trackbridge.shipping.cursor import first_free_seq

logger = logging.getLogger("trackbridge")

_SEGMENT_BYTES = 1 << 20
WAIT_SECONDS = 15.0  # other ranks may outlive the leader by a moment


@dataclass(frozen=True)
class Settled:
    """What was added to the journal: paths of capsules, and whether the run was marked as killed."""

    capsules: list[str] = field(default_factory=list)
    killed: bool = False


def settle(directory: RunDirectory, attempt: int, claim: Claim, *, dead: bool) -> Settled | None:
    """Become the journal's writer after `attempt` ended: nobody else may write it any more, which `claim` is for.

    Seals each capsule that an anomaly names and no artifact holds, and appends the artifacts; then ``RunEnd("killed")`` if
    `dead` and the attempt has no end. Returns None when another process is at it: ask again later.
    """
    unsealed, ended = _survey(directory, attempt)
    if not unsealed and (ended or not dead):
        return Settled()
    if claim.take() is not None:
        return None
    try:
        artifacts = [artifact for anomaly in unsealed if (artifact := _seal(directory, anomaly)) is not None]
        # someone may have come while we sealed
        unsealed, ended = _survey(directory, attempt)
        missing = {anomaly.capsule for anomaly in unsealed}
        artifacts = [artifact for artifact in artifacts if artifact.path in missing]
        killed = dead and not ended
        if not (artifacts or killed) or not claim.touch() or directory.read().attempts[-1].number != attempt:
            return Settled()  # nothing left to do, or a newer attempt has become the writer
        writer = JournalWriter(
            directory.rows(), segment_bytes=_SEGMENT_BYTES, fsync_seconds=1.0, floor=first_free_seq(directory)
        )
        written = [artifact.path for artifact in artifacts if writer.append(artifact) >= 0]  # a full disk takes none
        marked = killed and writer.append(RunEnd(-1, time.time(), "killed", attempt)) >= 0
        writer.close()
        return Settled(written, marked)
    finally:
        claim.release()


def _survey(directory: RunDirectory, attempt: int) -> tuple[list[Anomaly], bool]:
    """(one anomaly per capsule that is not sealed, whether the attempt has an end)."""
    capsules: dict[str, Anomaly] = {}
    artifacts: list[Artifact] = []
    ended = False
    for record in JournalReader(directory.rows(), kinds={Anomaly, Artifact, RunEnd}).read():
        if isinstance(record, Anomaly) and record.capsule:
            known = capsules.get(record.capsule)
            if known is None or known.id == record.id:
                capsules[record.capsule] = record
        elif isinstance(record, Artifact):
            artifacts.append(record)
        elif isinstance(record, RunEnd):
            ended = ended or record.attempt >= attempt
    if not capsules:
        return [], ended
    from trackbridge.seal import KIND

    sealed = {artifact.path for artifact in artifacts if artifact.kind == KIND}
    return [anomaly for path, anomaly in capsules.items() if path not in sealed], ended


def _seal(directory: RunDirectory, anomaly: Anomaly) -> Artifact | None:
    from trackbridge.seal import artifact_for, seal

    try:
        path: Path = seal(directory.path, anomaly.id, wait=WAIT_SECONDS)
        return artifact_for(directory.path, anomaly, path)
    except (TrackbridgeError, OSError) as error:
        logger.warning("the capsule of step %d could not be sealed: %s", anomaly.step, error)
    except Exception:
        logger.exception("the capsule of step %d could not be sealed", anomaly.step)
    return None
