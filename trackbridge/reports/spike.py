"""The page of one spike capsule: ``report.html``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np

from trackbridge.capsule import SpikeCapsule
from trackbridge.reports import wording
from trackbridge.reports.page import PageData, Series, Table, page
from trackbridge.rundir import RunDirectory

_FIRST = ("train/loss", "grad/norm", "train/lr", "optim/update_ratio", "perf/step_s")
_LAYERS = 12


def spike_page(capsule: SpikeCapsule) -> str:
    """One self-contained HTML document. No raw batch is in it, only the identity of batches."""
    return page(page_data(capsule))


def page_data(capsule: SpikeCapsule) -> PageData:
    """What the page of `capsule` says."""
    anomaly = capsule.anomaly
    return PageData(
        title=f"{anomaly.kind.capitalize()} in {anomaly.series} at step {anomaly.onset}",
        series=_series(capsule),
        anomalies=(anomaly,),
        hypotheses=anomaly.hypotheses,
        actions=_actions(capsule),
        facts=_facts(capsule),
        tables=tuple(table for table in (_layers(capsule), _batches(capsule), _missing(capsule)) if table.rows),
    )


def _series(capsule: SpikeCapsule) -> dict[str, Series]:
    """The anomaly's own series first, then the usual ones; the rest of the window after them."""
    recorded = capsule.series()
    there = [name for name in capsule.window.columns if "/" in name]
    first = [name for name in dict.fromkeys((capsule.anomaly.series, *_FIRST)) if name in there]
    return {name: _points(recorded, name) for name in dict.fromkeys((*first, *there))}


def _points(recorded: dict[int, dict[str, float]], name: str) -> Series:
    """Steps that have a value: absent is not NaN, which the page marks."""
    points = [(step, row[name]) for step, row in recorded.items() if name in row]
    return np.array([step for step, _ in points], np.int64), np.array([value for _, value in points], np.float64)


def _actions(capsule: SpikeCapsule) -> list[tuple[str, str]]:
    actions = []
    if (capsule.local.tier if capsule.local else capsule.tier) != "explain":
        run = _run_directory(capsule)
        if run is not None:
            where = shlex.quote(f"{run}@{capsule.step}")
            purpose = "Run the bad step again on the machine that recorded it, in the folder of your training code:"
            actions.append((purpose, f"trackbridge replay {where} --build my_module:build"))
        purpose = f"{'Elsewhere' if run else 'Run the bad step again'}, in the folder of your training code:"
        actions.append((purpose, "trackbridge replay PATH/OF/THIS/FOLDER --build my_module:build"))
    first = capsule.anomaly.hypotheses[0] if capsule.anomaly.hypotheses else None
    if first is not None and first.intervention:
        actions.append((f"To test the first hypothesis, {first.name}: {wording.how_to_test(first.intervention)}.", ""))
    actions.append(("Write down what you found in post-mortem.md, which is next to this page.", ""))
    return actions


def _run_directory(capsule: SpikeCapsule) -> Path | None:
    """The run directory around the capsule's folder: there while it is sealed; a copy elsewhere has none."""
    run = capsule.path.absolute().parent.parent
    return run if RunDirectory(run).file.is_file() else None


def _layers(capsule: SpikeCapsule) -> Table:
    """The layers whose gradient grew most from the step before the onset to the onset."""
    frame, onset = capsule.layers, capsule.anomaly.onset
    columns = ("layer", "gradient norm before", "at the onset", "times")
    if "grad_norm" not in frame.columns:
        return Table("Layers that moved most", columns, ())
    frame = frame[frame["family"] == "layer"]
    before = frame[frame["step"] < onset].groupby("layer")["grad_norm"].median()
    at = frame[frame["step"] == onset].set_index("layer")["grad_norm"]
    rows = [(name, float(before[name]), float(at[name])) for name in at.index if name in before.index]
    scored = [(name, a, b, b / a if a > 0 else float("nan")) for name, a, b in rows]
    scored.sort(key=lambda row: (row[3] != row[3], row[3]), reverse=True)
    return Table("Layers that moved most", columns, scored[:_LAYERS])


def _batches(capsule: SpikeCapsule) -> Table:
    columns = ("micro-batch", "loader", "epoch", "index", "samples", "fingerprint", "kept")
    frame = capsule.batches.frame
    rows = []
    for r in frame[frame["step"] == capsule.anomaly.onset].to_dict("records"):
        numbers = [_whole(r[name]) for name in ("micro", "loader", "epoch", "index")]
        rows.append((*numbers, _text(r["sample_ids"]), _text(r["fingerprint"]), "yes" if r["kept"] else "no"))
    return Table("Batches at the onset", columns, rows)


def _missing(capsule: SpikeCapsule) -> Table:
    return Table("What this capsule lacks", ("what, and what it costs a replay",), [(text,) for text in capsule.missing])


def _facts(capsule: SpikeCapsule) -> dict[str, Any]:
    git, torch = capsule.provenance.get("git", {}), capsule.provenance.get("torch", {})
    facts = {
        "run": f"{capsule.project}/{capsule.name or capsule.run}",
        "run id": capsule.run,
        "attempt": capsule.attempt,
        "steps": f"{capsule.span[0]} to {capsule.span[1]}",
        "tier": capsule.tier,
        "ranks": f"{len(capsule.ranks)} of {capsule.world_size}",
        "commit": git.get("commit"),
        "torch": torch.get("version"),
        "format version": capsule.format_version,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _whole(value: Any) -> Any:
    return "" if value is None or value != value else int(value)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else ""
    return text if len(text) <= 60 else text[:57] + "..."
