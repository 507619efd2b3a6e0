"""Keeping a row journal within its budget, in a process of its own beside the writer and any reader.

``python -m trackbridge.retention RUN_DIR [RANK]`` replaces whole closed segments, oldest first, by thinned ones
(`trackbridge.journal.thin`) until the journal fits. A thinned segment is written under a temporary name, synced, and renamed to
its own name before the old file is deleted, so at any instant a reader finds the one or the other. The newest segment, which
is being written, and the one before it are never touched. A segment with damage in it is left alone.

What is left out first is what nobody waits for: segments that every tracker has and that are older than
`journal.full_resolution_steps`, more and more coarsely. Only if that is not enough: the newest steps, and then rows that a
tracker still lacks, which is counted and said. Anomalies, artifacts, params, ends and the rows around each anomaly are never
left out. In the trainer `Retainer` starts it whenever a segment was closed.
"""

from __future__ import annotations

import bisect
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trackbridge.config import JournalConfig
from trackbridge.errors import TrackbridgeError
from trackbridge.history import find
from trackbridge.journal import JournalReader, segments, thin
from trackbridge.journal.segments import Segment
from trackbridge.journal.writer import extent
from trackbridge.records import Anomaly, Histograms, Row
from trackbridge.rundir import RunDirectory
from trackbridge.shipping.claim import Claim
from trackbridge.shipping.cursor import cursors

logger = logging.getLogger("trackbridge")

AROUND = 64
"""Steps before an anomaly's onset and after its detection whose rows stay whole."""
STRETCH = (256, 4096, 65536)
"""Steps that are thinned together, by level."""
_HISTOGRAMS = 16  # of that many histograms one stays, at each level
_SECONDS = 1800.0


@dataclass
class Thinned:
    """What one pass did. `rows` lost some of their values; `undelivered` of them before every tracker had them. `over`: the
    journal does not fit its budget although nothing is left to thin."""

    segments: int = 0
    rows: int = 0
    undelivered: int = 0
    bytes: int = 0
    over: bool = False


def fit(directory: RunDirectory, rank: int = 0, settings: JournalConfig | None = None) -> Thinned:
    """Thin the row journal of `rank` until it fits. Does nothing when another process is at it."""
    journal = directory.rows(rank)
    settings = settings or JournalConfig.model_validate(directory.read().settings.get("journal", {}))
    done = Thinned(bytes=_size(journal))
    if done.bytes <= settings.budget_bytes:
        return done
    claim = Claim(directory.rank(rank) / "retention.claim")
    if claim.take() is not None:
        return done
    try:
        _clean(journal)
        keep = Windows(journal)
        for segment, level, undelivered in _candidates(directory, rank, settings):
            done.bytes = _size(journal)
            if done.bytes <= settings.budget_bytes:
                return done
            if not claim.touch():
                return done
            gone = _replace(segment, level, keep)
            if gone is not None:
                done.segments += 1
                done.rows += gone
                done.undelivered += gone * undelivered
        done.bytes = _size(journal)
        done.over = done.bytes > settings.budget_bytes
        return done
    finally:
        claim.release()


class Windows:
    """Which steps of which attempt are around an anomaly."""

    def __init__(self, journal: Path) -> None:
        found: dict[int, list[tuple[int, int]]] = {}
        reader = JournalReader(journal, kinds={Anomaly})
        while records := reader.read(4096):
            for anomaly in records:
                assert isinstance(anomaly, Anomaly)
                first = min(anomaly.onset, anomaly.step) - AROUND
                last = max(anomaly.onset, anomaly.step) + AROUND
                if anomaly.step - anomaly.onset > 4 * AROUND:  # one that took long to see: both of its ends
                    found.setdefault(anomaly.attempt, []).append((first, first + 2 * AROUND))
                    first = anomaly.step - AROUND
                found.setdefault(anomaly.attempt, []).append((first, last))
        self._spans = {attempt: _merged(spans) for attempt, spans in found.items()}

    def __call__(self, record: Row | Histograms) -> bool:
        spans = self._spans.get(record.attempt, [])
        at = bisect.bisect_right(spans, (record.step, sys.maxsize)) - 1
        return at >= 0 and spans[at][0] <= record.step <= spans[at][1]


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return merged


def _candidates(directory: RunDirectory, rank: int, settings: JournalConfig) -> Iterator[tuple[Segment, int, bool]]:
    """(segment, the level it may go to, whether a tracker still lacks it), in the order in which they should go. Never the
    newest two: an anomaly about to be found may be in them."""
    closed = segments.listing(directory.rows(rank))[:-2]
    extents = {segment.number: extent(segment) for segment in closed}
    newest = max((step for _, step in extents.values()), default=0)
    before = newest - settings.full_resolution_steps
    delivered = _delivered(directory) if rank == 0 else sys.maxsize
    safe = [s for s in closed if extents[s.number][0] <= delivered]
    old = [s for s in safe if extents[s.number][1] < before]
    recent = [s for s in safe if extents[s.number][1] >= before]
    lacking = [s for s in closed if extents[s.number][0] > delivered]
    level = {segment.number: segment.level for segment in closed}
    for group, undelivered in ((old, False), (recent, False), (lacking, True)):
        for wanted in range(1, len(STRETCH) + 1):
            for segment in group:
                if level[segment.number] < wanted:
                    at = level[segment.number]
                    path = segment.path.with_name(segments.name(segment.number, segment.first_seq, at))
                    yield Segment(segment.number, segment.first_seq, path, at), wanted, undelivered
                    level[segment.number] = wanted


def _delivered(directory: RunDirectory) -> int:
    """The highest seq that every configured tracker has."""
    held = cursors(directory)
    kinds = [str(backend.get("kind")) for backend in directory.read().backends]
    return min((held[kind].seq if kind in held else -1 for kind in kinds), default=sys.maxsize)


def _replace(segment: Segment, level: int, keep: Callable[[Row | Histograms], bool]) -> int | None:
    """Put a thinned segment in the place of `segment`. How many rows lost values; None if it was left as it is."""
    target = thin.Target(STRETCH[level - 1], _HISTOGRAMS)
    try:
        for record in thin.Source(segment).records():
            target.add(record, whole=not isinstance(record, (Row, Histograms)) or keep(record))
    except thin.Damaged as damage:
        logger.warning("trackbridge: %s is damaged and stays as it is", damage)
        return None
    except FileNotFoundError:
        return None
    data = target.finish()
    path = segment.path.with_name(segments.name(segment.number, segment.first_seq, level))
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    segments.sync_directory(path.parent)
    segment.path.unlink()
    return target.rows_gone


def _clean(journal: Path) -> None:
    """What an earlier pass left when it was killed: half a file, or the one that was replaced already."""
    for half in journal.glob(".*.tbj.tmp"):
        half.unlink(missing_ok=True)
    valid = set(segments.listing(journal))
    for segment in segments.files(journal):
        if segment not in valid:
            segment.path.unlink(missing_ok=True)


def _size(journal: Path) -> int:
    total = 0
    for segment in segments.files(journal):
        try:
            total += segment.path.stat().st_size
        except OSError:
            pass
    return total


class Retainer:
    """In the trainer: `closed` says that a segment was closed; a child process does the rest. `thinned` counts rows that lost
    values before every tracker had them."""

    def __init__(self, directory: RunDirectory, rank: int, settings: JournalConfig) -> None:
        self._directory = directory
        self._rank = rank
        self._settings = settings
        self._busy = threading.Lock()
        self._said: set[str] = set()
        self.thinned = 0

    def closed(self) -> None:
        """Called on the scribe's thread; returns at once."""
        if self._busy.acquire(blocking=False):
            threading.Thread(target=self._run, name="trackbridge-retention", daemon=True).start()

    def _run(self) -> None:
        try:
            if _size(self._directory.rows(self._rank)) > self._settings.budget_bytes:
                self._read(subprocess.run(self._command, capture_output=True, text=True, timeout=_SECONDS, check=False))
        except (OSError, subprocess.SubprocessError) as error:
            self._say(f"the journal could not be thinned: {error}")
        finally:
            self._busy.release()

    @property
    def _command(self) -> list[str]:
        return [sys.executable, "-m", "trackbridge.retention", str(self._directory.path), str(self._rank)]

    def _read(self, ended: subprocess.CompletedProcess[str]) -> None:
        try:
            done = Thinned(**json.loads(ended.stdout))
        except (ValueError, TypeError):
            self._say(f"the journal could not be thinned: {(ended.stderr.strip().splitlines() or ['no answer'])[-1]}")
            return
        if done.undelivered:
            self.thinned += done.undelivered
            self._say("the journal is over its budget (journal.budget_bytes): rows that a tracker still lacks were thinned")
        if done.over:
            self._say("the journal is over its budget (journal.budget_bytes) with nothing left to thin")

    def _say(self, words: str) -> None:
        if words not in self._said:
            self._said.add(words)
            logger.warning("trackbridge: %s", words)


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print("usage: python -m trackbridge.retention RUN_DIR [RANK]", file=sys.stderr)
        return 2
    if hasattr(os, "nice"):
        os.nice(10)  # training comes first
    try:
        done = fit(find(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 0)
    except (TrackbridgeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(asdict(done)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
