"""The page of a run: what its run directory knows, with the inspectors of its worst anomalies."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Container, ItemsView, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trackbridge import capsule as capsules
from trackbridge import untrusted
from trackbridge.answers import to_do
from trackbridge.capsule import SpikeCapsule
from trackbridge.errors import TrackbridgeError
from trackbridge.history import RunRecord, own_rows
from trackbridge.journal import JournalReader
from trackbridge.names import is_wide
from trackbridge.records import Anomaly, Histograms, Row
from trackbridge.reports import spike
from trackbridge.reports.decimate import Series
from trackbridge.reports.embed_histograms import LEAST_STEPS, choose
from trackbridge.reports.markup import Table
from trackbridge.reports.page import PageData, Spike, page
from trackbridge.rundir import RunDirectory

INSPECTED = 12
AROUND_RANKS = 64
HISTOGRAM_MEMORY = 256 << 20


def run_page(record: RunRecord, *, live: dict[str, Any] | None = None) -> str:
    """One self-contained HTML document on the run. `live`: as in `PageData`."""
    return page(run_page_data(record, live=live))


def run_page_data(record: RunRecord, *, live: dict[str, Any] | None = None) -> PageData:
    """What the page of `record` says. The most severe anomaly is its subject; those of the worst that have a sealed capsule get
    an inspector with what the capsule tells."""
    found = sorted(record.anomalies, key=lambda a: (-a.severity, a.onset))
    sealed = {anomaly.id: opened for anomaly in found[:INSPECTED] if (opened := _opened(record, anomaly))}
    spikes = [sealed[anomaly.id][1] if anomaly.id in sealed else Spike(anomaly) for anomaly in found[:INSPECTED]]
    info, subject = record.info, spikes[0].anomaly if spikes else None
    tables, curves = _ranks(record, subject)
    return PageData(
        title=f"{subject.title[0].upper()}{subject.title[1:]} at step {subject.onset}"
        if subject
        else info.name or info.run_id,
        where="/".join(filter(None, (info.project, info.name or info.run_id))),
        status=record.status,
        series=Recorded(record),
        spikes=spikes,
        marked=found[INSPECTED:],
        actions=actions(
            record, subject, sealed[subject.id][0] if subject and subject.id in sealed else None, live=live is not None
        ),
        histograms=_histograms(record, subject.onset if subject else None),
        ranks=tables,
        rank_curves=curves,
        rank_series=spike.RANK_SERIES,
        missing=missing(record, found[:INSPECTED], sealed),
        facts=_facts(record),
        live=live,
    )


class Recorded(Mapping[str, Series]):
    """The series of a run, run-level ones first; going through all of them reads the journal in few passes and keeps none."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self._names = sorted(record.names, key=is_wide)

    def __getitem__(self, name: str) -> Series:
        if name not in self.record.names:
            raise KeyError(name)
        return self.record.series(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def items(self) -> ItemsView[str, Series]:
        return _Items(self)


class _Items(ItemsView[str, Series]):
    _mapping: Recorded

    def __iter__(self) -> Iterator[tuple[str, Series]]:
        return self._mapping.record.many(self._mapping)


def _opened(record: RunRecord, anomaly: Anomaly) -> tuple[SpikeCapsule, Spike] | None:
    """The anomaly's capsule in this run directory and what its inspector shows, None where it is not there or is damaged.

    Digests are not checked: they are `pull`'s business, and a run's snapshots may be many gigabytes.
    """
    folder = record.path / anomaly.capsule if anomaly.capsule else None
    if folder is None or not (folder / capsules.MANIFEST).is_file():
        return None
    try:
        capsule = capsules.parse_manifest(untrusted.read_json(folder / capsules.MANIFEST))
        if capsule.local is not None and folder.with_name(folder.name + capsules.LOCAL).is_dir():
            capsule = capsule.model_copy(update={"tier": capsule.local.tier, "missing": capsule.local.missing})
        capsule = capsule.at(folder)
        return capsule, spike.inspected(capsule, anomaly)
    except TrackbridgeError:
        return None  # `missing` says so


def actions(
    record: RunRecord, subject: Anomaly | None, capsule: SpikeCapsule | None, *, live: bool = False
) -> list[tuple[str, str]]:
    """What to do now about the run's subject, or about the run: (what for, command or "")."""
    if capsule is not None:
        return spike.actions(capsule, record.path)
    running = record.status == "running" and not live
    follow = [("Follow the run:", f"trackbridge view {shlex.quote(str(record.path))} --live")] if running else []
    if subject is not None:
        found = [(to_do(subject), "")]
        if follow:
            found.append(("Its capsule is sealed a few steps after the anomaly.", ""))
        return [*found, *follow]
    if record.status == "running":
        return follow or [("Nothing has to be done: this page follows the run.", "")]
    if record.status == "failed":
        return [(f"Look at the error that ended it: {record.error or 'not recorded'}", "")]
    if record.status == "killed":
        return [("Find out what killed the process (out of memory, a time limit, a lost node); no error was recorded.", "")]
    return [("Nothing has to be done.", "")]


def missing(record: RunRecord, found: Sequence[Anomaly], sealed: Container[str]) -> list[str]:
    """What this page cannot say, and why."""
    lacks = [str(record.damage)] if record.damage else []
    ranks = set(RunDirectory(record.path).ranks())
    absent = sorted(set(range(record.info.world_size)) - ranks)
    if absent:
        lacks.append(f"The journals of {len(absent)} of {record.info.world_size} ranks are not on this disk.")
    for anomaly in found:
        if not anomaly.capsule:
            lacks.append(f"No capsule of the {anomaly.what} at step {anomaly.onset}: it cannot be run again from here.")
        elif anomaly.id not in sealed:
            lacks.append(f"The capsule {anomaly.capsule} is not here, or is damaged.")
    for name in (
        "trackbridge/rows_dropped", "trackbridge/rows_lost", "trackbridge/rows_unmerged", "trackbridge/contexts_dropped",
    ):  # fmt: skip
        if name in record.names and (lost := np.nanmax(record.series(name)[1])) > 0:
            lacks.append(f"{name}: {lost:,.0f}")
    return lacks


def _histograms(record: RunRecord, onset: int | None) -> list[Histograms]:
    """The steps' histograms that a page has room for: a long run of a large model has gigabytes of them."""
    directory = RunDirectory(record.path)
    reader = JournalReader(directory.rows(next(iter(directory.ranks()), 0)), kinds={Histograms})
    steps: set[int] = set()
    largest = 1
    while found := reader.read(limit=16):
        for each in found:
            if isinstance(each, Histograms):
                steps.add(each.step)
                largest = max(largest, each.counts.nbytes)
    room = max(LEAST_STEPS, HISTOGRAM_MEMORY // largest)
    return record.histograms(steps=frozenset(choose(sorted(steps), onset, room))) if steps else []


def _ranks(record: RunRecord, subject: Anomaly | None) -> tuple[list[Table], dict[str, Series]]:
    """What each rank recorded around the subject (or at the end), and the gradient norm of those that went farthest."""
    directory = RunDirectory(record.path)
    ranks = directory.ranks()
    if len(ranks) < 2:
        return [], {}
    last = max((int(steps[-1]) for name in record.names[:1] for steps, _ in [record.series(name)]), default=0)
    onset = subject.onset if subject else last
    rows, curves = [], {}
    for rank in ranks[:64]:
        near = range(max(0, onset - AROUND_RANKS), onset + AROUND_RANKS)
        reader = JournalReader(directory.rows(rank), kinds={Row}, steps=near)
        own = [row for row in reader.read() if isinstance(row, Row) and row.kind == "step"]
        own = own_rows(directory, rank, record.info.attempt, near) or own
        at = next((row for row in own if row.step == onset), own[-1] if own else None)
        cells = [(at.get(name) if at else None) for name in ("train/loss", spike.RANK_SERIES)]
        told = "yes" if subject and rank in subject.ranks else ""
        rows.append((rank, len(own), *("" if cell is None else cell for cell in cells), told))
        points = [(row.step, value) for row in own if (value := row.get(spike.RANK_SERIES)) is not None]
        if points:
            curves[f"rank {rank}"] = (np.array([p[0] for p in points], np.int64), np.array([p[1] for p in points], np.float64))
    columns = ("rank", "steps near", "loss", "gradient norm", "told the anomaly")
    title = f"{len(ranks)} of {record.info.world_size} ranks, around step {onset:,}"
    return [Table(title, columns, rows)], spike.farthest(curves, onset)


def _facts(record: RunRecord) -> dict[str, Any]:
    info, provenance = record.info, record.provenance
    git, torch = provenance.get("git"), provenance.get("torch")
    found = {
        "run": "/".join(filter(None, (info.project, info.name or info.run_id))),
        "run id": info.run_id,
        "status": f"{record.status}: {record.error}" if record.error else record.status,
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(info.created)) if info.created else None,
        "attempts": info.attempt + 1,
        "ranks": f"{len(RunDirectory(record.path).ranks())} of {info.world_size}",
        "directory": str(record.path),
        "commit": git.get("commit") if isinstance(git, dict) else None,
        "torch": torch.get("version") if isinstance(torch, dict) else None,
        "configuration": json.dumps(record.config, default=str)[:600] if record.config else None,
    }
    return {name: value for name, value in found.items() if value is not None}
