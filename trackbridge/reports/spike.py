"""The page of one spike capsule: ``report.html``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trackbridge.answers import INTERVENTIONS, how_to_test
from trackbridge.capsule import SpikeCapsule
from trackbridge.errors import CapsuleError
from trackbridge.names import is_wide
from trackbridge.records import Anomaly, Hypothesis
from trackbridge.reports.contents import post_mortem_of
from trackbridge.reports.decimate import Series
from trackbridge.reports.markup import Table
from trackbridge.reports.page import PageData, Spike, page
from trackbridge.rundir import RunDirectory

LAYERS_SHOWN = 12
RANKS_SHOWN = 8
RANK_SERIES = "grad/norm"
BUILD = "--build my_module:build"


def spike_page(capsule: SpikeCapsule) -> str:
    """One self-contained HTML document. No raw batch is in it, only the identity of batches."""
    return page(page_data(capsule))


def page_data(capsule: SpikeCapsule) -> PageData:
    """What the page of `capsule` says."""
    anomaly = capsule.anomaly
    tables, curves = _ranks(capsule)
    return PageData(
        title=f"{anomaly.kind.capitalize()} in {anomaly.series} at step {anomaly.onset}",
        where=run_label(capsule),
        series=_series(capsule.series()),
        spikes=(inspected(capsule),),
        actions=[*actions(capsule, run_directory(capsule)), *_elsewhere(capsule)],
        histograms=capsule.histograms,
        ranks=tables,
        rank_curves=curves,
        rank_series=RANK_SERIES,
        facts=facts(capsule),
    )


def inspected(capsule: SpikeCapsule, anomaly: Anomaly | None = None) -> Spike:
    """The inspector of the capsule's anomaly; `anomaly`, its newest version, when the run knows more by now."""
    anomaly = anomaly or capsule.anomaly
    if not anomaly.hypotheses:
        anomaly = anomaly.updated(hypotheses=capsule.anomaly.hypotheses)
    try:
        tables = (_layers(capsule), _batches(capsule), _tokens(capsule))
    except (LookupError, TypeError, ValueError) as error:  # columns that a stranger left out, or filled with something else
        why = f"{type(error).__name__}: {str(error)[:120]}"
        raise CapsuleError(f"{capsule.path.name} has tables that are not a capsule's ({why})") from None
    return Spike(
        anomaly=anomaly,
        tables=tables,
        post_mortem=post_mortem_of(capsule),
        tier=capsule.tier,
        missing=capsule.missing,
        replay=capsule.replay,
        counterfactuals=capsule.counterfactuals,
    )


def run_label(capsule: SpikeCapsule) -> str:
    return "/".join(filter(None, (capsule.project, capsule.name or capsule.run)))


def run_directory(capsule: SpikeCapsule) -> Path | None:
    """The run directory around the capsule's folder: there while it is sealed; a copy elsewhere has none."""
    run = capsule.path.absolute().parent.parent
    return run if RunDirectory(run).file.is_file() else None


def actions(capsule: SpikeCapsule, run: Path | None) -> list[tuple[str, str]]:
    """What to do about the anomaly, the most telling thing first: (what for, command or "")."""
    report, replay = capsule.counterfactuals, capsule.replay
    where = shlex.quote(f"{run}@{capsule.step}") if run is not None else "PATH/OF/THIS/FOLDER"
    found: list[tuple[str, str]] = []
    if report is not None and report.best is not None:
        what = report.best.what.rstrip(".")
        found.append((f"{report.best.name} would have prevented it ({what}): resume from before it with that change.", ""))
        found += _to_resume(report.best.name == "skip-batch", where, run, capsule.step)
    elif replay is not None:
        found.append((_after(replay.verdict), ""))
        if report is not None and report.tries:
            found.append((f"None of the {len(report.tries)} changes tried would have prevented it: see Replays.", ""))
    tried = {attempt.name for attempt in report.tries} if report else set()
    test = next((h for h in capsule.anomaly.hypotheses if h.intervention and h.intervention not in tried), None)
    command = f"trackbridge replay {where} {BUILD}"
    can_run = (capsule.local.tier if capsule.local else capsule.tier) != "explain"
    if report is None or report.best is None:
        found += _to_run(test, command if can_run else "", again=replay is None and can_run, here=run is not None)
    found.append(("Write down what you found in post-mortem.md, in the capsule's folder.", ""))
    return found


def _to_resume(skips: bool, where: str, run: Path | None, step: int) -> list[tuple[str, str]]:
    """The checkpoint from before it, and the batches to leave out from there on."""
    found = []
    if run is not None:
        command = f"trackbridge rollback {shlex.quote(str(run))} --step {step}"
        found.append(("Find the checkpoint that is clean and from before it:", command))
    if skips:
        what = "Write the plan that leaves those batches out, for run.batches(loader, skip=...) or hf.Callback(skip=...):"
        found.append((what, f"trackbridge replay {where} --plan skip.json"))
    return found


def _elsewhere(capsule: SpikeCapsule) -> list[tuple[str, str]]:
    """For the reader of a page that has travelled: where it was recorded, a path of that machine is named above."""
    if run_directory(capsule) is None or (capsule.local.tier if capsule.local else capsule.tier) == "explain":
        return []
    return [("On another machine, with a copy of the capsule:", f"trackbridge replay PATH/OF/THIS/FOLDER {BUILD}")]


def _to_run(test: Hypothesis | None, command: str, *, again: bool, here: bool) -> list[tuple[str, str]]:
    """The replay, with the experiment that the first untried hypothesis asks for."""
    place = f"{' on the machine that recorded it,' if here else ''} in the folder of your training code:"
    known = test is not None and test.intervention in INTERVENTIONS and test.intervention != "rerun"
    words = how_to_test(test.intervention or "").partition(" (--try")[0] if test is not None else ""
    if test is not None and command and known:
        what = "Run the bad step again and test" if again else "Test"
        return [(f"{what} {test.name} ({words}),{place}", f"{command} --try {shlex.quote(test.intervention or '')}")]
    found = [(f"Run the bad step again,{place}", command)] if again else []
    return [*found, (f"To test {test.name}: {words}.", "")] if test is not None and words else found


def _after(verdict: str) -> str:
    return {
        "exact": "A replay came out exactly the same, so no passing hardware fault: look at the batch and at what changed.",
        "within-noise": "A replay came out the same within its noise: look at the batch and at what changed.",
        "not-reproduced": "A replay did not show it again: suspect the machine, or some state that was not recorded.",
    }.get(verdict, "A replay could not be completed: see what it lacks under Replays.")


def facts(capsule: SpikeCapsule) -> dict[str, Any]:
    git, torch = capsule.provenance.get("git"), capsule.provenance.get("torch")
    found = {
        "run": run_label(capsule),
        "run id": capsule.run,
        "attempt": capsule.attempt,
        "steps": f"{capsule.span[0]:,} to {capsule.span[1]:,}",
        "tier": capsule.tier,
        "ranks": f"{len(capsule.ranks)} of {capsule.world_size}",
        "commit": git.get("commit") if isinstance(git, dict) else None,
        "torch": torch.get("version") if isinstance(torch, dict) else None,
        "configuration": json.dumps(capsule.config, default=str)[:600] if capsule.config else None,
        "format version": capsule.format_version,
    }
    return {name: value for name, value in found.items() if value is not None}


def _series(recorded: Mapping[int, Mapping[str, float]]) -> dict[str, Series]:
    """{series: (steps, values)}, layers' last. A step that has no value is not there: absent is not NaN, which is marked."""
    points: dict[str, tuple[list[int], list[float]]] = {}
    for step in sorted(recorded):
        for name, value in recorded[step].items():
            steps, values = points.setdefault(name, ([], []))
            steps.append(step)
            values.append(value)
    order = sorted(points, key=is_wide)
    return {name: (np.array(points[name][0], np.int64), np.array(points[name][1], np.float64)) for name in order}


def _layers(capsule: SpikeCapsule) -> Table:
    """The layers whose gradient grew most from before the onset to the onset."""
    frame, onset = capsule.layers, capsule.anomaly.onset
    columns = ("layer", "gradient norm before", "at the onset", "times")
    if "grad_norm" not in frame.columns:
        return Table("Layers that moved most", columns, ())
    frame = frame[frame["family"] == "layer"]
    before = frame[frame["step"] < onset].groupby("layer")["grad_norm"].median()
    at = frame[frame["step"] == onset].set_index("layer")["grad_norm"]
    rows = [(name, float(before[name]), float(at[name])) for name in at.index if name in before.index]
    scored = [(f"layer/{name}", a, b, b / a if a > 0 else float("nan")) for name, a, b in rows]
    scored.sort(key=lambda row: (row[3] != row[3], row[3]), reverse=True)
    return Table("Layers whose gradient grew most", columns, scored[:LAYERS_SHOWN], layers=True)


def _batches(capsule: SpikeCapsule) -> Table:
    columns = ("micro-batch", "loader", "epoch", "index", "samples", "fingerprint", "kept")
    frame = capsule.batches.frame
    rows = []
    for r in frame[frame["step"] == capsule.anomaly.onset].to_dict("records"):
        numbers = [_whole(r[name]) for name in ("micro", "loader", "epoch", "index")]
        rows.append((*numbers, _short(r["sample_ids"]), _short(r["fingerprint"]), "yes" if r["kept"] else "no"))
    return Table("Batches at the onset", columns, rows)


def _tokens(capsule: SpikeCapsule) -> Table:
    """Token statistics of the batches at the onset, beside those of the steps before."""
    rows = []
    frame = capsule.batches.frame
    for r in frame[frame["step"].between(capsule.anomaly.onset - 2, capsule.anomaly.onset + 1)].to_dict("records"):
        for leaf, s in _statistics(r["tokens"]).items():
            if isinstance(s, dict) and "entropy" in s:
                cells = tuple(s.get(name, "") for name in ("length", "unique", "min", "max", "entropy"))
                rows.append((f"{_whole(r['step'])}", _whole(r["micro"]), leaf, *cells))
    return Table(
        "Tokens around the onset",
        ("step", "micro-batch", "tensor", "tokens", "distinct", "least", "greatest", "entropy, bits"),
        rows[:40],
    )


def _statistics(stored: Any) -> dict[str, Any]:
    try:
        found = json.loads(stored) if isinstance(stored, str) else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _ranks(capsule: SpikeCapsule) -> tuple[list[Table], dict[str, Series]]:
    """What each rank has here, and the gradient norm of the ones that went farthest."""
    if capsule.world_size < 2:
        return [], {}
    onset, rows, curves = capsule.anomaly.onset, [], {}
    for rank in capsule.ranks[:64]:
        recorded = capsule.series(rank)
        at = recorded.get(onset, {})
        rows.append(
            (
                rank,
                len(recorded),
                at.get("train/loss", ""),
                at.get(RANK_SERIES, ""),
                "yes" if rank in capsule.anomaly.ranks else "",
            )
        )
        series = _series({step: {RANK_SERIES: row[RANK_SERIES]} for step, row in recorded.items() if RANK_SERIES in row})
        if series:
            curves[f"rank {rank}"] = series[RANK_SERIES]
    columns = ("rank", "steps here", "loss at the onset", "gradient norm at the onset", "told the anomaly")
    title = f"{len(capsule.ranks)} of {capsule.world_size} ranks are in this capsule"
    return [Table(title, columns, rows)], farthest(curves, onset)


def farthest(curves: Mapping[str, Series], onset: int) -> dict[str, Series]:
    """The curves that differ most from the others around `onset`, in their own order."""
    if len(curves) <= RANKS_SHOWN:
        return dict(curves)
    at = {name: float(values[np.abs(steps - onset).argmin()]) for name, (steps, values) in curves.items()}
    middle = float(np.nanmedian(list(at.values())))
    ranked = sorted(at, key=lambda name: -np.nan_to_num(abs(at[name] - middle), nan=np.inf))[:RANKS_SHOWN]
    return {name: curves[name] for name in curves if name in ranked}


def _whole(value: Any) -> Any:
    return "" if value is None or value != value else int(value)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else ""
    return text if len(text) <= 60 else text[:57] + "..."
