"""Puts together what works beside training: a rank's journals, and the stages from the queue to a sealed capsule.

    handover -> scribe -> concluding -> anomalies -> sealer

Each knows only what comes after it. What works on the training thread is put together in `trackbridge.run`.
"""

from __future__ import annotations

from trackbridge.anomalies import Anomalies
from trackbridge.concluding import Concluder
from trackbridge.config import TrackbridgeConfig
from trackbridge.detectors.prime import primed
from trackbridge.handover import Handover
from trackbridge.journal import JournalWriter
from trackbridge.merging import merging
from trackbridge.probes import Instruments
from trackbridge.recorder import Recorder
from trackbridge.records import RunInfo
from trackbridge.retention import Retainer
from trackbridge.rowmaker import RowMaker
from trackbridge.rundir import RunDirectory
from trackbridge.scribe import Scribe
from trackbridge.sealer import sealing
from trackbridge.shipping.cursor import first_free_seq


def scribe(
    settings: TrackbridgeConfig, directory: RunDirectory, info: RunInfo, instruments: Instruments, recorder: Recorder | None
) -> Scribe:
    """The scribe of this rank, at work. It reads what `instruments` measured and packs what `recorder` took."""
    retainer = Retainer(directory, info.rank, settings.journal)
    rows = _rows(settings, directory, info, retainer)
    contexts = _contexts(settings, directory, info)
    strict, keep = settings.strict, settings.recorder
    queue = Handover()
    maker = RowMaker(info.attempt)
    anomalies = Anomalies(
        rows=rows,
        directory=directory,
        instruments=instruments,
        later=queue.later,
        seal=(lambda told: sealing(told, directory, info, keep, recorder, contexts)) if recorder else None,
        world_size=info.world_size,
        strict=strict,
    )
    watch = None
    if settings.detection.enabled:
        watch = primed(settings.detection, directory.rows(info.rank), info.attempt, info.start_step, strict=strict)
    concluder = Concluder(
        rows=rows,
        contexts=contexts,
        recorder=recorder,
        watch=watch,
        merging=merging(info, settings.ranks, maker, strict=strict),
        anomalies=anomalies,
        strict=strict,
    )
    return Scribe(
        queue,
        rows=rows,
        contexts=contexts,
        retainer=retainer,
        instruments=instruments,
        recorder=recorder,
        maker=maker,
        concluder=concluder,
        anomalies=anomalies,
        attempt=info.attempt,
        strict=strict,
    )


def _rows(settings: TrackbridgeConfig, directory: RunDirectory, info: RunInfo, retainer: Retainer) -> JournalWriter:
    """The journal that trackers are served from; kept to its budget by thinning."""
    journal = settings.journal
    return JournalWriter(
        directory.rows(info.rank),
        segment_bytes=min(journal.segment_bytes, journal.budget_bytes // 16),
        on_closed=retainer.closed,
        fsync_seconds=journal.fsync_seconds,
        floor=first_free_seq(directory) if info.rank == 0 else 0,  # a tracker may know more than a disk that lost power
    )


def _contexts(settings: TrackbridgeConfig, directory: RunDirectory, info: RunInfo) -> JournalWriter:
    """What a replay needs of each step; a ring."""
    journal, ring = settings.journal, settings.recorder.context_bytes
    return JournalWriter(
        directory.contexts(info.rank),
        segment_bytes=min(journal.segment_bytes, ring // 8),
        fsync_seconds=journal.fsync_seconds,
        ring_bytes=ring,
    )
