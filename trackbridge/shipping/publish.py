"""Adding to a journal whose trainer has ended: what was found out afterwards reaches the trackers like everything else."""

from __future__ import annotations

import time

from trackbridge.errors import UsageError
from trackbridge.journal import JournalReader, JournalWriter
from trackbridge.liveness import presumed_dead
from trackbridge.records import Artifact, RunEnd
from trackbridge.rundir import RunDirectory
from trackbridge.shipping.claim import Claim
from trackbridge.shipping.cursor import first_free_seq

_SEGMENT_BYTES = 1 << 20


def publish(directory: RunDirectory, artifact: Artifact) -> int:
    """Append `artifact` to the leader's journal; returns its `seq`. `trackbridge.shipper.sync` then delivers it, as a new
    version where the tracker keeps versions.

    Raises `UsageError` while the run is being recorded, or while another process writes its journal.
    """
    file = directory.read()
    newest = max((path.stat().st_mtime for path in directory.rows().glob("*")), default=0.0)
    if not presumed_dead(file.attempts[-1], newest, time.time()) and not _ended(directory, file.attempts[-1].number):
        raise UsageError(f"run {file.run_id} is still being recorded: its journal can be added to when it is over")
    claim = Claim(directory.shipper / "journal.claim")
    who = claim.take()
    if who is not None:
        raise UsageError(f"the journal of run {file.run_id} is being written by {who}; try again when it is done")
    try:
        writer = JournalWriter(
            directory.rows(), segment_bytes=_SEGMENT_BYTES, fsync_seconds=1.0, floor=first_free_seq(directory)
        )
        seq = writer.append(artifact)
        writer.close()
        return seq
    finally:
        claim.release()


def _ended(directory: RunDirectory, attempt: int) -> bool:

    reader = JournalReader(directory.rows(), kinds={RunEnd})
    return any(isinstance(record, RunEnd) and record.attempt >= attempt for record in reader.read())
