"""What a run directory still holds around one anomaly: the window a capsule can have, its tier, and what is lacking."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from trackbridge import history
from trackbridge.capsule import Tier
from trackbridge.config import RecorderConfig
from trackbridge.errors import CapsuleError
from trackbridge.journal import JournalReader
from trackbridge.records import Anomaly, MicroBatch, Row, StepContext
from trackbridge.rundir import RunDirectory, RunFile

StepT = TypeVar("StepT", Row, StepContext)

CHECKPOINT_STEPS = 1024
"""A window that begins at a checkpoint holds at most so many steps before `recorder.before`."""


@dataclass
class RankRecord:
    """Rows and contexts of one rank by step, of the anomaly's attempt. `own` are this rank's own rows where `rows` are of all
    ranks together: the leader's."""

    rank: int
    rows: dict[int, Row]
    contexts: dict[int, StepContext]
    damage: str | None = None  # of the context journal, in words
    own: dict[int, Row] = field(default_factory=dict)

    def clip(self, window: Window) -> RankRecord:
        """The part inside `window`, in order of steps."""
        return RankRecord(
            self.rank,
            {step: self.rows[step] for step in window.steps if step in self.rows},
            {step: self.contexts[step] for step in window.steps if step in self.contexts},
            self.damage,
            {step: self.own[step] for step in window.steps if step in self.own},
        )


@dataclass(frozen=True)
class Window:
    """The steps `first` to `last` of a capsule. `snapshots` are the folders with each rank's state before `first`; without
    them `why_no_snapshot` says why, and `checkpoint` is the user's own of that state, if there is one."""

    first: int
    last: int
    snapshots: Mapping[int, Path] = field(default_factory=dict)
    why_no_snapshot: str | None = None
    checkpoint: Path | None = None

    @property
    def steps(self) -> range:
        return range(self.first, self.last + 1)


def gather(
    directory: RunDirectory, anomaly: Anomaly, recorder: RecorderConfig, checkpoints: Mapping[int, Path] | None = None
) -> tuple[Window, list[RankRecord]]:
    """The window of a capsule and what each rank has of it; the first rank is the leader. `checkpoints` are the user's own, by
    the step that comes after them.

    Of a step that was run twice in one attempt, because the training went back to a checkpoint, that counts which came before
    the anomaly. Raises `CapsuleError` if nothing is left to seal.
    """
    ranks = directory.ranks()
    usable = _usable(checkpoints or {}, anomaly, recorder)
    wanted, end = _wanted(anomaly, recorder), anomaly.step + recorder.after + 1
    early = ([step for step in steps if step <= wanted] for steps in (_shared(directory, ranks, anomaly), usable))
    starts = [max(steps) for steps in early if steps]  # a window that is whole from an older one is whole from this one
    rings = {rank: read_contexts(directory, rank, anomaly.attempt, range(min([wanted, *starts]), end)) for rank in ranks}
    held = [{context.step for context in ring} for ring, _ in rings.values() if ring]
    # From a start that the rings do not reach back to nothing can be replayed: its rows may be those of the whole run.
    first = min([wanted, *(start for start in starts if held and all(start in ring for ring in held))])
    later = went_back_since(directory, ranks, anomaly, range(first, end))
    records = []
    for rank, (contexts, damage) in rings.items():
        rows = one_way(read_rows(directory, rank, anomaly.attempt, range(first, end)), later)
        if rows:
            own = one_way(history.own_rows(directory, rank, anomaly.attempt, range(first, end)), later)
            records.append(RankRecord(rank, rows, one_way([c for c in contexts if c.step >= first], later), damage, own))
    if not records or not any(step >= anomaly.onset for step in records[0].rows):
        raise CapsuleError(f"the journal in {directory.path} has no rows around step {anomaly.step}: nothing to seal")
    window = choose(directory, anomaly, recorder, records, usable)
    return window, [record.clip(window) for record in records]


def read_contexts(directory: RunDirectory, rank: int, attempt: int, steps: range) -> tuple[list[StepContext], str | None]:
    """(the step contexts of one attempt as they were written, damage of their journal in words)."""
    reader = JournalReader(directory.contexts(rank), kinds={StepContext}, steps=steps)
    found = [c for c in reader.read() if isinstance(c, StepContext) and c.attempt == attempt]
    return found, str(reader.damage) if reader.damage else None


def read_rows(directory: RunDirectory, rank: int, attempt: int, steps: range) -> list[Row]:
    """The step rows of one attempt as they were written."""
    reader = JournalReader(directory.rows(rank), kinds={Row}, steps=steps)
    return [r for r in reader.read() if isinstance(r, Row) and r.kind == "step" and r.attempt == attempt]


def went_back_since(directory: RunDirectory, ranks: Iterable[int], anomaly: Anomaly, steps: range) -> int:
    """How often the attempt went back to an earlier step after it had told of `anomaly`."""
    for rank in ranks:
        told, times, before = False, 0, -1
        for record in JournalReader(directory.rows(rank), kinds={Row, Anomaly}, steps=steps).read():
            if isinstance(record, Anomaly):
                told = told or record.id == anomaly.id
            elif isinstance(record, Row) and record.kind == "step" and record.attempt == anomaly.attempt:
                times += told and record.step <= before
                before = record.step
        if told:
            return times
    return 0


def one_way(written: Sequence[StepT], later: int) -> dict[int, StepT]:
    """{step: record} of the steps that led on: where the training went back, what had come after that is left out. The newest
    `later` times of going back have not happened yet."""
    ways: list[list[StepT]] = []
    for record in written:
        if not ways or record.step <= ways[-1][-1].step:
            ways.append([])
        ways[-1].append(record)
    found: dict[int, StepT] = {}
    for way in ways[: len(ways) - later]:
        for step in [step for step in found if step >= way[0].step]:
            del found[step]
        found |= {record.step: record for record in way}
    return found


def earlier_rows(journal: Path, attempt: int, steps: range) -> list[Row]:
    """The step rows of `attempt` and of those before it, in order of steps; of a step that was run twice, the newest."""
    found: dict[int, Row] = {}
    for record in JournalReader(journal, kinds={Row}, steps=steps).read():
        if isinstance(record, Row) and record.kind == "step" and record.attempt <= attempt and record.step in steps:
            found[record.step] = record
    return [found[step] for step in sorted(found)]


def choose(
    directory: RunDirectory,
    anomaly: Anomaly,
    recorder: RecorderConfig,
    records: Sequence[RankRecord],
    checkpoints: Mapping[int, Path],
) -> Window:
    """From the newest usable snapshot that leaves `recorder.before` steps before the onset (or else the earliest later one,
    up to the onset) to `recorder.after` steps after the detection. Without a snapshot, from a checkpoint chosen likewise;
    without either, from `before` steps before the onset."""
    wanted = _wanted(anomaly, recorder)
    recorded = sorted(records[0].rows)
    ends = [end for record in records if (end := max(record.rows)) >= anomaly.onset]  # killed ranks end at different steps
    last = min([*ends, anomaly.step + recorder.after])
    kept: dict[int, dict[int, Path]] = {}
    why = None
    for record in records:
        kept[record.rank], refused = snapshots(directory, record.rank, anomaly.attempt)
        why_not = next(iter(refused), None) or _not_pinned(directory, record.rank, anomaly)
        if why is None and why_not is not None:
            why = f"{why_not} (rank {record.rank})" if len(records) > 1 else why_not
    common = set.intersection(*(set(found) for found in kept.values()))

    def whole(start: int) -> bool:
        return all(step in record.contexts and step in record.rows for record in records for step in range(start, last + 1))

    def order(steps: Iterable[int]) -> list[int]:
        before, later = [step for step in steps if step <= wanted], [s for s in steps if wanted < s <= anomaly.onset]
        return sorted(before, reverse=True) + sorted(later)

    for start in order(common):
        if whole(start):
            return Window(start, last, {rank: found[start] for rank, found in kept.items()})
        why = why or f"the steps from the one kept before step {start} on are no longer all in the context ring"
    if recorder.snapshot_every == 0:
        why = "recorder.snapshot_every is 0"
    why = why or f"none was kept at or before step {anomaly.onset}"
    for start in order(checkpoints):
        if whole(start):
            return Window(start, last, why_no_snapshot=why, checkpoint=checkpoints[start])
    return Window(max(wanted, recorded[0]), last, why_no_snapshot=why)


def _shared(directory: RunDirectory, ranks: Iterable[int], anomaly: Anomaly) -> set[int]:
    """Steps of which every rank that has snapshots has one."""
    kept = [set(found) for rank in ranks if (found := snapshots(directory, rank, anomaly.attempt)[0])]
    return set.intersection(*kept) if kept else set()


def _usable(checkpoints: Mapping[int, Path], anomaly: Anomaly, recorder: RecorderConfig) -> dict[int, Path]:
    """Those that are on this disk, up to the onset and not too long before it."""
    wanted = _wanted(anomaly, recorder)
    return {
        step: path for step, path in checkpoints.items() if wanted - CHECKPOINT_STEPS <= step <= anomaly.onset and path.exists()
    }


def snapshots(directory: RunDirectory, rank: int, attempt: int) -> tuple[dict[int, Path], list[str]]:
    """Snapshots of `attempt` on disk, by the step they come before, and why others are of no use."""
    found: dict[int, Path] = {}
    refused: list[str] = []
    for folder in sorted(directory.snapshots(rank).glob("step-*")):
        state = folder / "state.json"
        if folder.name[5:].isdecimal() and state.is_file():
            try:
                metadata = json.loads(state.read_text(encoding="utf-8"))["metadata"]
            except (OSError, ValueError, LookupError, TypeError):
                refused.append(f"{folder.name} is damaged")
                continue
            if metadata.get("attempt", attempt) != attempt:
                continue
            for part, why in metadata.get("missing", {}).items():
                refused.append(f"{part} could not be stored ({why})")
            if not metadata.get("missing"):
                found[int(folder.name[5:])] = folder
    return found, refused


def tier(records: Sequence[RankRecord], window: Window, world_size: int, *, tensors: bool) -> Tier:
    """What can be done with the record: nothing is executed again without all `world_size` ranks. `tensors`: whether kept
    batches count, or only their sample ids."""

    def can_feed(micro: MicroBatch) -> bool:
        return (tensors and micro.tensors is not None) or micro.sample_ids is not None

    for record in records:
        for step in window.steps:
            micros = record.contexts[step].micro if step in record.contexts else ()
            if not micros or not all(map(can_feed, micros)):
                return "explain"
    restart = window.snapshots or window.checkpoint is not None
    return "re-execute" if restart and len(records) >= world_size else "re-feed"


def lacking(records: Sequence[RankRecord], window: Window, world_size: int) -> Iterator[str]:
    """What is missing, each with what that costs a replay."""
    if window.checkpoint is not None:
        yield (
            f"parameter snapshot: {window.why_no_snapshot}; a replay begins at your checkpoint {window.checkpoint}, which "
            "Rebuilt(checkpoint=...) must load"
        )
    elif window.why_no_snapshot:
        yield (
            f"parameter snapshot: {window.why_no_snapshot}; the recorded batches can be fed again, but only into weights of "
            "your own"
        )
    absent = sorted(set(range(world_size)) - {record.rank for record in records})
    if absent:
        yield (
            f"ranks {spans(absent)}: nothing of them is on this disk, and a replay needs all {world_size}; copy their folders "
            "rank-NNNN into this run directory and run `python -m trackbridge.seal RUN_DIR ANOMALY_ID`"
        )
    for record in records:
        of = f" of rank {record.rank}" if world_size > 1 else ""
        if record.damage is not None:
            yield f"step contexts{of}: {record.damage}"
        gone = [step for step in window.steps if step not in record.rows]
        if gone:
            yield f"rows{of} of steps {spans(gone)}: a replay has nothing to compare these steps with"
        gone = [step for step in window.steps if step not in record.contexts or not record.contexts[step].rng]
        if gone:
            yield f"random state{of} before steps {spans(gone)}: a replay cannot run these steps"
        notes: dict[str, list[int]] = {}
        for step, context in record.contexts.items():
            for note in context.notes:
                notes.setdefault(note, []).append(step)
        for note, steps in notes.items():
            yield f"steps {spans(steps)}{of}: {note}"
        bare = [step for step, context in record.contexts.items() if not context.micro]
        if bare:
            yield (
                f"batches{of} of steps {spans(bare)}: neither run.batches nor run.step(batch=...) saw them; a replay has "
                "nothing to feed"
            )
        reasons: dict[str, list[int]] = {}
        for step, context in record.contexts.items():
            for micro in context.micro:
                if micro.tensors is None:
                    reasons.setdefault(micro.why_no_tensors or "not kept", []).append(step)
        for reason, steps in reasons.items():
            yield (
                f"raw batches{of} of steps {spans(sorted(set(steps)))}: {reason}; a replay needs Rebuilt(fetch=...), which "
                "makes them again from their sample ids"
            )


def spans(numbers: Sequence[int]) -> str:
    """``3-5, 9`` for [3, 4, 5, 9]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def world_size(file: RunFile, attempt: int) -> int:
    """How many ranks ran in `attempt`."""
    return next((life.world_size for life in file.attempts if life.number == attempt), 1)


def _not_pinned(directory: RunDirectory, rank: int, anomaly: Anomaly) -> str | None:
    """Why the rank could keep no snapshot when it was asked to; None where it did, or left no word."""
    try:
        why = json.loads(directory.pin(Path(anomaly.capsule or "").name, rank).read_bytes())["why_not"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return None if why is None else str(why)


def _wanted(anomaly: Anomaly, recorder: RecorderConfig) -> int:
    return max(anomaly.onset - recorder.before, 0)
