"""``trackbridge report REF --post-mortem``: of a capsule wherever it is; of a run on this disk that of its newest anomaly, or
of ``@step``. Which one it is, where that was not said, is told on stderr."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from trackbridge.cli.common import find_run, load_run, plain
from trackbridge.errors import ReferenceNotFoundError, UsageError

if TYPE_CHECKING:
    from trackbridge.capsule import SpikeCapsule
    from trackbridge.fetch import Reference
    from trackbridge.history import RunRecord
    from trackbridge.records import Anomaly


def post_mortem_of(reference: str, folder: Path) -> str:
    """Markdown. Runs are looked for in `folder`."""
    from trackbridge import fetch
    from trackbridge.fetch import LOCAL, Reference

    ref = Reference.parse(reference)
    if ref.kind == LOCAL and not (Path(ref.where) / "manifest.json").is_file():
        return _of_run(load_run(find_run(ref.where, folder)), ref)
    with tempfile.TemporaryDirectory(prefix="trackbridge-report-") as scratch:
        return _of_capsule(fetch.pull(reference, None if ref.kind == LOCAL else scratch), ref)


def _of_run(record: RunRecord, ref: Reference) -> str:
    from trackbridge.capsule import load
    from trackbridge.reports import contents
    from trackbridge.reports.post_mortem import post_mortem

    chosen = _chosen(record, ref.step)
    if ref.step is None:
        several = f", the newest of {len(record.anomalies)}; for another: {ref.where}@STEP" if len(record.anomalies) > 1 else ""
        _say(f"This is of the {chosen.what} at step {chosen.step}{several}")
    if chosen.capsule is None:  # a kind without one, or it was given up: its notes say so
        _say(f"Made from the run's record: the {chosen.what} at step {chosen.step} has no capsule")
        return post_mortem(record, chosen)
    capsule = load(record.path / chosen.capsule)
    own = capsule.anomaly
    if chosen.id == own.id:
        return contents.post_mortem_of(capsule)
    where = f"that one's post-mortem is {record.path / chosen.capsule / contents.POST_MORTEM}"
    _say(f"Made from the capsule that it shares with the {own.what} at step {own.step}; {where}")
    return post_mortem(capsule, chosen)


def _chosen(record: RunRecord, step: int | None) -> Anomaly:
    """The anomaly that is meant. Raises where there is none, or its capsule was promised and is not there."""
    from trackbridge.reports import subject

    what = f"run {record.info.run_id}"
    if not record.anomalies:
        raise UsageError(f"{what} has no anomaly")
    chosen = record.anomalies[-1] if step is None else subject.choose(record.anomalies, step, what)
    if chosen is None:
        raise ReferenceNotFoundError(f"there is no anomaly at step {step} of {plain(what)}")
    if chosen.capsule is not None and not (record.path / chosen.capsule / "manifest.json").is_file():
        raise ReferenceNotFoundError(
            f"the capsule of step {chosen.step} of {plain(what)} is not sealed (yet); "
            f"if its trainer has ended, run: trackbridge sync {record.path}"
        )
    return chosen


def _of_capsule(capsule: SpikeCapsule, ref: Reference) -> str:
    from trackbridge.fetch import LOCAL
    from trackbridge.reports import contents

    own = capsule.anomaly
    other = ref.step not in (None, own.step, own.onset)  # a capsule's own folder is taken whatever the step
    if other or (ref.step is None and ref.kind != LOCAL):
        asked = f", not of step {ref.step}" if other else ""
        _say(f"This is of the {own.what} at step {own.step}{asked}")
    return contents.post_mortem_of(capsule)


def _say(text: str) -> None:
    typer.echo(text, err=True)
