"""What a run directory says about the cause of an anomaly: the record around it, handed to the diagnosis.

Rules see more than a capsule keeps: rows of the attempts before as well, and what changed between two attempts. Needs no
torch. ``python -m trackbridge.explain RUN_DIR ANOMALY_ID...`` prints a line of JSON for each anomaly and writes nothing.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trackbridge import coverage, provenance
from trackbridge.config import RecorderConfig
from trackbridge.diagnosis import diagnose
from trackbridge.diagnosis.view import since_resume
from trackbridge.journal import JournalReader
from trackbridge.records import Anomaly, Hypothesis, Params, Row, StepContext
from trackbridge.rundir import RunDirectory, dumps

HISTORY = 256
"""Steps before the onset whose rows the rules see."""
CONTEXTS = 64
"""The same for step contexts: they hold batches, which may be large."""
FRESH = 50
"""Steps after the start of an attempt in which what changed with it may have caused something."""
_CHANGES = 12


def explain(run_dir: RunDirectory, anomaly: Anomaly) -> tuple[Hypothesis, ...]:
    """Ranked hypotheses on `anomaly`, from the journal of the first rank that has rows of it. Writes nothing.

    Only what was recorded up to `recorder.after` steps past the detection counts, as when a capsule is sealed: the answer
    does not depend on how far training went on.
    """
    after = RecorderConfig.model_validate(run_dir.read().settings.get("recorder", {})).after
    last = anomaly.step + after
    for rank in run_dir.ranks():
        rows = _rows(run_dir, rank, anomaly, last)
        if any(row.step >= anomaly.onset for row in rows):
            contexts = _contexts(run_dir, rank, anomaly, last)
            since = since_resume(anomaly, rows)
            notes: tuple[str, ...] = ()
            if since is not None and since <= FRESH:
                notes = (*_resumed(anomaly), *(f"changed: {text}" for text in changes(run_dir, rank, anomaly.attempt)))
            return diagnose(anomaly.updated(notes=(*anomaly.notes, *notes)), rows, contexts)
    return diagnose(anomaly, ())


def _resumed(anomaly: Anomaly) -> tuple[str, ...]:
    return () if "after_resume" in anomaly.notes else ("after_resume",)


def _rows(run_dir: RunDirectory, rank: int, anomaly: Anomaly, last: int) -> list[Row]:
    """Step rows up to `last` that led to the anomaly: of its attempt and, for the steps before it began, of earlier ones."""
    steps = range(max(anomaly.onset - HISTORY, 0), last + 1)
    reader = JournalReader(run_dir.rows(rank), kinds={Row}, steps=steps)
    rows = [row for row in reader.read() if isinstance(row, Row) and row.kind == "step" and row.attempt <= anomaly.attempt]
    later = coverage.went_back_since(run_dir, run_dir.ranks(), anomaly, steps)
    own = coverage.one_way([row for row in rows if row.attempt == anomaly.attempt], later)
    return [*(row for row in rows if row.attempt < anomaly.attempt and own and row.step < min(own)), *own.values()]


def _contexts(run_dir: RunDirectory, rank: int, anomaly: Anomaly, last: int) -> list[StepContext]:
    steps = range(max(anomaly.onset - CONTEXTS, 0), last + 1)
    reader = JournalReader(run_dir.contexts(rank), kinds={StepContext}, steps=steps)
    found = [c for c in reader.read() if isinstance(c, StepContext) and c.attempt <= anomaly.attempt]
    later = coverage.went_back_since(run_dir, run_dir.ranks(), anomaly, steps)
    own = coverage.one_way([c for c in found if c.attempt == anomaly.attempt], later)
    return [*(c for c in found if c.attempt < anomaly.attempt), *own.values()]


def changes(run_dir: RunDirectory, rank: int, attempt: int) -> list[str]:
    """What differs between `attempt` and the one before: the user's configuration first, then the training's own settings and
    the provenance. In words, at most a dozen; empty where one of the two left no record."""
    reader = JournalReader(run_dir.rows(rank), kinds={Params})
    attempts: list[dict[str, Mapping[str, Any]]] = []
    for record in reader.read():
        if isinstance(record, Params):
            if "config" in record.values:  # the first record of an attempt
                attempts.append({})
            if attempts:
                attempts[-1].update((k, v) for k, v in record.values.items() if isinstance(v, Mapping))
    if not 0 < attempt < len(attempts):
        return []
    before, now = attempts[attempt - 1], attempts[attempt]
    found = [
        _in_words(name, old, new)
        for part in ("config", "training", "provenance")
        for name, old, new in provenance.differences(before.get(part, {}), now.get(part, {}))
    ]
    return found[:_CHANGES]


def _in_words(name: str, old: Any, new: Any) -> str:
    return f"{name} {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.6g}"
    text = "absent" if value is None else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def find(run_dir: RunDirectory, anomaly_ids: Sequence[str]) -> dict[str, Anomaly]:
    """The newest version of each anomaly, from the first rank that has it."""
    found: dict[str, Anomaly] = {}
    for rank in run_dir.ranks():
        own: dict[str, Anomaly] = {}
        for record in JournalReader(run_dir.rows(rank), kinds={Anomaly}).read():
            if isinstance(record, Anomaly) and record.id in anomaly_ids:
                own[record.id] = record
        found = {**own, **found}
    return found


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 2 or arguments[0].startswith("-"):
        print("usage: python -m trackbridge.explain RUN_DIR ANOMALY_ID...", file=sys.stderr)
        return 2
    if hasattr(os, "nice"):
        os.nice(10)  # training comes first
    directory = RunDirectory(arguments[0])
    known = find(directory, arguments[1:])
    for anomaly_id in arguments[1:]:
        if anomaly_id in known:
            found = [asdict(hypothesis) for hypothesis in explain(directory, known[anomaly_id])]
            print(dumps({"id": anomaly_id, "hypotheses": found}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
