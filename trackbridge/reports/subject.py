"""What a W&B report says, gathered from a recorded run on this disk or from a capsule."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from trackbridge import capsule as capsules
from trackbridge import panels, untrusted
from trackbridge.capsule import SpikeCapsule
from trackbridge.config import StreamConfig
from trackbridge.errors import UsageError
from trackbridge.history import RunRecord
from trackbridge.records import Anomaly, Hypothesis, Record, Row
from trackbridge.reports import contents
from trackbridge.reports.wandb_report import WINDOW, Subject
from trackbridge.stream import Stream

ENTITY = "ENTITY"
"""Stands for the entity where nobody may be asked for it."""


def of_run(record: RunRecord, step: int | None = None, *, entity: str | None = None, project: str | None = None) -> Subject:
    """A recorded run with one of its anomalies: that of `step`, else the most severe; a run without any is fine. Entity and
    project are those of its run in W&B as far as the run directory knows, unless given. Raises `UsageError` for a `step` at
    which there is no anomaly."""
    anomaly = choose(record.anomalies, step, f"run {record.info.run_id}")
    known_entity, known_project, known_run = where(record.path)
    held = [artifact.name for artifact in record.artifacts if anomaly and artifact.metadata.get("anomaly_id") == anomaly.id]
    subject = Subject(
        entity=entity or known_entity or ENTITY,
        project=project or known_project or record.info.project,
        run_id=known_run or record.info.run_id,
        name=record.info.name,
        anomaly=anomaly,
        present=sent(record, anomaly),
        pictures=pictures(_held_pictures(record), ".png"),
        texts={"anomalies": contents.anomalies(record.anomalies)} if record.anomalies else {},
        artifact=held[-1] if held else None,
    )
    folder = record.path / anomaly.capsule if anomaly and anomaly.capsule else None
    if folder is not None and (folder / capsules.MANIFEST).is_file():
        subject = with_capsule(subject, capsules.load(folder))
    return subject


def with_capsule(subject: Subject, capsule: SpikeCapsule) -> Subject:
    """`subject` with what the capsule of its anomaly tells."""
    anomaly = subject.anomaly or capsule.anomaly
    if not anomaly.hypotheses:
        anomaly = anomaly.updated(hypotheses=capsule.anomaly.hypotheses)
    drawn = {*(subject.pictures or ()), *pictures(capsule.files, ".png")}
    return replace(subject, anomaly=anomaly, pictures=drawn, texts={**subject.texts, **contents.of_capsule(capsule)})


def with_folder(subject: Subject, folder: Path) -> Subject:
    """`subject` with what a capsule's folder tells from which large files may have been left out. Its other files have been
    checked against the manifest."""
    manifest = capsules.parse_manifest(untrusted.read_json(folder / capsules.MANIFEST))
    there = {name: entry for name, entry in manifest.files.items() if (folder / name).is_file()}
    seen = with_capsule(subject, manifest.model_copy(update={"files": there}).at(folder))
    return replace(seen, texts={**seen.texts, "capsule": contents.files(manifest)})


def choose(found: Sequence[Anomaly], step: int | None, what: str) -> Anomaly | None:
    """The anomaly that was detected at `step` or began there; without a step the most severe, None if there is none. Raises
    `UsageError` saying where there are some."""
    if step is None:
        return max(found, key=lambda anomaly: (anomaly.severity, anomaly.score, -anomaly.onset), default=None)
    at = [anomaly for anomaly in found if step in (anomaly.step, anomaly.onset)]
    if not at:
        there = ", ".join(str(anomaly.step) for anomaly in found[:20])
        raise UsageError(f"{what} has no anomaly at step {step}; {f'it has them at {there}' if there else 'it has none'}")
    return max(at, key=lambda anomaly: (anomaly.step == step, anomaly.severity))


def where(run_dir: Path) -> tuple[str, str, str] | tuple[None, None, None]:
    """(entity, project, run id) in W&B: from the run's address, which the run directory keeps; None where it was never online.
    The id is another one than ours where the rows went into a run of the user's."""
    try:
        url = json.loads((run_dir / "wandb" / "where.json").read_bytes())["url"]
        entity, project, _, run_id = (unquote(part) for part in urlsplit(str(url)).path.strip("/").split("/"))
    except (OSError, ValueError, KeyError, TypeError):
        return None, None, None
    return entity, project, run_id


def sent(record: RunRecord, anomaly: Anomaly | None) -> set[str]:
    """The series that the stream policy of the run sends to a tracker: around `anomaly`, or of the newest steps."""
    stream = Stream(StreamConfig.model_validate(record.settings.get("stream", {})))
    rows = record.rows()  # a long run's do not fit into memory
    if anomaly is not None:
        near = [row for row in rows if abs(row.step - anomaly.step) <= WINDOW]
    else:
        near = list(deque(rows, maxlen=2 * WINDOW))
    found: list[Record] = [*near, *([anomaly] if anomaly is not None else [])]
    out = stream.push(sorted(found, key=lambda record: record.seq)) + stream.finish()
    return {name for row in out if isinstance(row, Row) for name in row.schema.names}


def _held_pictures(record: RunRecord) -> list[str]:
    """Relative paths of the pictures that the artifacts of the run and its views hold."""
    folders = [record.path / "views", *(record.path / artifact.path for artifact in record.artifacts)]
    return [path.relative_to(folder).as_posix() for folder in folders for path in folder.glob("pictures/*.png")]


def pictures(there: Collection[str], ending: str = "") -> set[str]:
    """The names of pictures and page (`panels.picture`, `panels.PAGE`) among the names `there`, which end with `ending`."""
    maps = [panel for panel in panels.PANELS if panel.view == "heatmap"]
    known = {panels.PAGE, *(panels.picture(panel, whole=whole) for panel in maps for whole in (False, True))}
    return {name for name in known if name in there or f"{name}{ending}" in there}


def of_facts(anomaly_id: str, facts: Mapping[str, Any]) -> Anomaly:
    """The anomaly as W&B's summary tells it (`backends.wandb_rows.anomaly_facts`): no cascade, hypotheses by name only."""

    def number(name: str) -> float:
        value = facts.get(name)
        return math.nan if value is None else float(value)

    over = facts.get("recovered_after")
    step = int(facts["step"])
    return Anomaly(
        id=anomaly_id,
        kind=str(facts.get("kind", "anomaly")),
        step=step,
        onset=int(facts.get("onset", step)),
        severity=number("severity"),
        series=str(facts.get("series", "")),
        value=number("value"),
        expected=number("expected"),
        score=number("score"),
        recovered_after=None if over is None else int(over),
        hypotheses=tuple(Hypothesis(str(name)) for name in facts.get("hypotheses") or ()),
        capsule=facts.get("capsule"),
        terms=str(facts.get("terms") or ""),
        value_step=None if facts.get("value_step") is None else int(facts["value_step"]),
    )
