"""Seal a spike capsule: everything the run directory knows about one anomaly, in one folder that can travel.

``python -m trackbridge.seal RUN_DIR ANOMALY_ID...`` runs beside training, niced, and reads only the run directory; the shipper
calls `seal` when the trainer is dead. It prints a line ``ID<TAB>PATH`` for each capsule as it is ready. Exit status: 0 all
sealed, 1 some could not be (a line each says why), 2 usage.
Needs no torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trackbridge import attendance, checkpoints, coverage, history, untrusted
from trackbridge import capsule as capsules
from trackbridge import capsule_parts as parts
from trackbridge.capsule import LocalFiles, SpikeCapsule
from trackbridge.config import ParametersConfig, RecorderConfig
from trackbridge.coverage import RankRecord, Window
from trackbridge.errors import CapsuleError, ReferenceNotFoundError, TrackbridgeError
from trackbridge.journal import JournalReader
from trackbridge.records import Anomaly, Artifact, Hypothesis
from trackbridge.rundir import RunDirectory, RunFile

KIND = "spike-capsule"
HISTOGRAMS_BEFORE = 4
WAIT_SECONDS = 60.0
SETTINGS = ("parameters", "activations", "recorder", "detection")
HISTORY = 256
"""Steps before the window whose run-level series travel along: what a detector must have seen to judge the window again."""


def seal(run_dir: str | Path, anomaly_id: str, *, wait: float = 0.0) -> Path:
    """The path of the sealed capsule of `anomaly_id` in the run directory; made now unless it exists.

    Other ranks that share this disk get up to `wait` seconds to write their part. A capsule that lacks ranks whose folders
    are here now (copied from other machines) is made again with them.

    Raises `ReferenceNotFoundError` if there is no such run or anomaly, `CapsuleError` if nothing of its window is left.
    """
    directory = RunDirectory(run_dir)
    file = directory.read()
    anomaly = _find(directory, anomaly_id)
    destination = directory.path / (anomaly.capsule or f"capsules/spike-{anomaly.step}")
    if destination.parent != directory.capsules or not destination.name.startswith("spike-"):
        raise CapsuleError(
            f"anomaly {anomaly_id!r} names the capsule {anomaly.capsule!r}, which is not in {directory.capsules}"
        )
    old = destination.exists()
    if old and not _more_ranks(directory, destination):
        return destination
    recorder = RecorderConfig.model_validate(file.settings.get("recorder", {}))
    world = coverage.world_size(file, anomaly.attempt)
    if world > 1 and wait:
        attendance.wait_for(directory, destination.name, anomaly.attempt, anomaly.step + recorder.after, wait)
    window, records = coverage.gather(directory, anomaly, recorder, _checkpoints(directory, file, anomaly))
    anomaly = anomaly.updated(capsule=destination.relative_to(directory.path).as_posix())
    anomaly = _diagnosed(directory, anomaly)
    manifest = _manifest(directory, file, anomaly, recorder, window, records)

    def fill(folder: Path) -> None:
        _fill(folder, window, records, upload=recorder.upload_batches)
        steps = range(max(window.first - HISTORY, 0), window.first)
        parts.write_history(folder, coverage.earlier_rows(directory.rows(records[0].rank), anomaly.attempt, steps))
        for record in records:
            own = directory.contexts(record.rank) if record.own else directory.rows(record.rank)
            if record.own or record is not records[0]:
                parts.write_history(folder / f"rank-{record.rank:04d}", coverage.earlier_rows(own, anomaly.attempt, steps))
        _histograms(folder, directory, file, window, records)
        _pages(folder, manifest)

    def fill_local(folder: Path) -> None:
        for record in records:
            parts.write_tensors(folder / f"rank-{record.rank:04d}", list(record.contexts.values()))

    try:
        return capsules.write(destination, manifest, fill, fill_local, replace=old)
    except CapsuleError:
        if destination.exists():  # the trainer's child and the shipper may both have tried
            return destination
        raise


def _checkpoints(directory: RunDirectory, file: RunFile, anomaly: Anomaly) -> dict[int, Path]:
    """The user's own checkpoints by the step after them: those of the anomaly's attempt, and what that may have gone on from. A
    later one of an earlier attempt is of a training that was left behind."""
    start = next((life.start_step for life in file.attempts if life.number == anomaly.attempt), 0)
    return {
        saved.step: saved.path
        for saved in checkpoints.saved_checkpoints(directory)
        if saved.attempt == anomaly.attempt or (saved.attempt < anomaly.attempt and saved.step <= start)
    }


def _more_ranks(directory: RunDirectory, destination: Path) -> bool:
    """Whether ranks are here now that the capsule lacks."""
    there = capsules.parse_manifest(untrusted.read_json(destination / capsules.MANIFEST))
    return len(there.ranks) < there.world_size and bool(set(directory.ranks()) - set(there.ranks))


def artifact_for(run_dir: str | Path, anomaly: Anomaly, capsule_path: Path) -> Artifact:
    """The journal record that makes the shipper upload the capsule at `capsule_path`. Its `seq` is the writer's to give."""
    manifest = capsules.parse_manifest(untrusted.read_json(capsule_path / capsules.MANIFEST))
    name = f"spike-{manifest.run}-{capsule_path.name.removeprefix('spike-')}"
    return Artifact(
        seq=-1,
        step=anomaly.step,
        time=time.time(),
        name=re.sub(r"[^A-Za-z0-9._-]", "-", name),
        kind=KIND,
        path=capsule_path.relative_to(RunDirectory(run_dir).path).as_posix(),
        metadata={
            "step": anomaly.step,
            "anomaly_id": anomaly.id,
            "kind": anomaly.kind,
            "severity": anomaly.severity,
            "tier": manifest.tier,
        },
    )


def hypotheses_in(capsule_path: Path) -> tuple[Hypothesis, ...]:
    """What the diagnosis of a sealed capsule found, ranked."""
    return capsules.parse_manifest(untrusted.read_json(capsule_path / capsules.MANIFEST)).anomaly.hypotheses


def _find(directory: RunDirectory, anomaly_id: str) -> Anomaly:
    """The newest version of the anomaly, from the first rank that has it."""
    known: list[str] = []
    for rank in directory.ranks():
        found = [a for a in JournalReader(directory.rows(rank), kinds={Anomaly}).read() if isinstance(a, Anomaly)]
        mine = [anomaly for anomaly in found if anomaly.id == anomaly_id]
        if mine:
            return mine[-1]
        known += [anomaly.id for anomaly in found]
    there = ", ".join(dict.fromkeys(known)) or "none"
    raise ReferenceNotFoundError(f"no anomaly {anomaly_id!r} in {directory.path}; there: {there}")


def _manifest(
    directory: RunDirectory,
    file: RunFile,
    anomaly: Anomaly,
    recorder: RecorderConfig,
    window: Window,
    records: Sequence[RankRecord],
) -> SpikeCapsule:
    world = coverage.world_size(file, anomaly.attempt)
    missing = list(coverage.lacking(records, window, world))
    local = None
    kept = any(micro.tensors is not None for record in records for c in record.contexts.values() for micro in c.micro)
    if kept and not recorder.upload_batches:
        local = LocalFiles(tier=coverage.tier(records, window, world, tensors=True), files={}, missing=missing)
        beside = f"{Path(anomaly.capsule or '').name}{capsules.LOCAL}"
        stay = (
            f"raw batches: they stay on the recording machine, in {beside} (recorder.upload_batches is off); a replay needs "
            "that folder beside the capsule, or Rebuilt(fetch=...), which makes them again from their sample ids"
        )
        missing = [stay, *missing]
    return SpikeCapsule(
        tier=coverage.tier(records, window, world, tensors=recorder.upload_batches),
        project=file.project,
        run=file.run_id,
        name=file.name,
        attempt=anomaly.attempt,
        step=anomaly.step,
        restart_step=window.first,
        checkpoint=None if window.checkpoint is None else str(window.checkpoint),
        anomaly=anomaly,
        span=(window.first, window.last),
        world_size=world,
        ranks=tuple(record.rank for record in records),
        created=time.time(),
        provenance=_provenance(directory),
        settings={name: file.settings[name] for name in SETTINGS if name in file.settings},
        config=file.config,
        local=local,
        missing=missing,
    )


def _fill(folder: Path, window: Window, records: Sequence[RankRecord], *, upload: bool) -> None:
    for record in records:
        own = folder / f"rank-{record.rank:04d}"
        own.mkdir()
        contexts = list(record.contexts.values())
        parts.write_rows(folder if record is records[0] else own, list(record.rows.values()))
        if record.own:
            parts.write_rows(own, list(record.own.values()))
        parts.write_rng(own, contexts)
        parts.write_batches(own, contexts, runs=upload)
        if upload:
            parts.write_tensors(own, contexts)
        if record.rank in window.snapshots:
            _link_folder(window.snapshots[record.rank], own / "state")


def _histograms(folder: Path, directory: RunDirectory, file: RunFile, window: Window, records: Sequence[RankRecord]) -> None:
    """Those of the window and the newest few before it: what changed shows against them."""
    every = ParametersConfig.model_validate(file.settings.get("parameters", {})).histograms_every
    steps = range(max(window.first - HISTOGRAMS_BEFORE * every, 0), window.last + 1)
    for record in records:
        found = history.read_histograms(directory, record.rank, steps)
        parts.write_histograms(folder if record is records[0] else folder / f"rank-{record.rank:04d}", found)


def _pages(folder: Path, manifest: SpikeCapsule) -> None:
    """What people read."""
    from trackbridge.reports import pictures, tables
    from trackbridge.reports.post_mortem import post_mortem
    from trackbridge.reports.spike import spike_page

    placed = manifest.at(folder)
    pictures.write(folder, pictures.around(placed.series(), manifest.anomaly.onset))
    tables.write(folder, placed)
    (folder / "post-mortem.md").write_text(post_mortem(placed), encoding="utf-8")
    (folder / "report.html").write_text(spike_page(placed), encoding="utf-8")


def _diagnosed(directory: RunDirectory, anomaly: Anomaly) -> Anomaly:
    """With hypotheses; the rules see more of the past than the capsule keeps."""
    from trackbridge.explain import explain

    return anomaly if anomaly.hypotheses else anomaly.updated(hypotheses=explain(directory, anomaly))


def _provenance(directory: RunDirectory) -> dict[str, Any]:
    try:
        found = json.loads(directory.provenance.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _link_folder(source: Path, target: Path) -> None:
    """A copy without the copying where the file system allows: snapshots are large and never change."""
    target.mkdir()
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.startswith("."):
            try:
                os.link(file, target / file.name)
            except OSError:
                shutil.copy2(file, target / file.name)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 2 or arguments[0].startswith("-"):
        print("usage: python -m trackbridge.seal RUN_DIR ANOMALY_ID...", file=sys.stderr)
        return 2
    if hasattr(os, "nice"):
        os.nice(10)  # training comes first
    failed = 0
    for anomaly_id in arguments[1:]:
        try:
            print(anomaly_id, seal(arguments[0], anomaly_id, wait=WAIT_SECONDS), sep="\t", flush=True)
        except (TrackbridgeError, OSError) as error:
            failed = 1
            print(f"{anomaly_id}: {error}", file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
