"""``trackbridge scan REF``: the anomalies of a run that something else logged."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trackbridge.cli.common import Json, console, emit, find_run, known_runs, number, plain, sparkline
from trackbridge.errors import nearest

if TYPE_CHECKING:
    from trackbridge.scan import Scan


def scan(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="REF",
            help="A CSV file, a TensorBoard log folder, an offline W&B run, wandb:ENTITY/PROJECT/RUN_ID, mlflow:RUN_ID "
            "(honours MLFLOW_TRACKING_URI), tensorboard:LOGDIR, or a run of trackbridge: its folder, id or name.",
        ),
    ],
    loss: Annotated[str | None, typer.Option(help="The column of the loss; default: guessed.")] = None,
    step: Annotated[str | None, typer.Option(help="The column of the step; default: guessed, else rows are counted.")] = None,
    grad_norm: Annotated[str | None, typer.Option(help="The column of the gradient norm; default: guessed.")] = None,
    threshold: Annotated[float | None, typer.Option(help="Robust sigmas that make a spike of the loss.", min=0.1)] = None,
    folder: Annotated[Path, typer.Option("--dir", help="Where to look for ids and names.")] = Path("runs"),
    plot: Annotated[Path | None, typer.Option(help="Also write the curves with their anomalies to this HTML file.")] = None,
    json: Json = False,
) -> None:
    """List the anomalies of a run that was logged before trackbridge was there."""
    from trackbridge.config import DetectionConfig
    from trackbridge.scan import scan as run_scan

    meant = "" if ":" in reference or Path(reference).exists() else reference.partition("@")[0]
    if nearest(meant, known_runs(folder) if meant else ()):  # a run's id or name, or like one
        reference = str(find_run(reference, folder))
    settings = DetectionConfig() if threshold is None else DetectionConfig(threshold=threshold)
    with console(stderr=True).status(f"Reading {plain(reference)} ..."):
        found = run_scan(reference, loss=loss, step=step, grad_norm=grad_norm, settings=settings)
    if plot is not None:
        _write(found, plot)
    if json:
        emit(
            {
                "source": found.source,
                "columns": found.columns,
                "steps": len(found.steps),
                "first_step": int(found.steps[0]),
                "last_step": int(found.steps[-1]),
                "anomalies": [asdict(anomaly) for anomaly in found.anomalies],
            }
        )
        return
    _print(found, plot)


def _write(found: Scan, path: Path) -> None:
    from trackbridge.errors import UsageError
    from trackbridge.scan.plot import page

    try:
        path.write_text(page(found), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; give --plot a file in a folder that exists") from None


def _print(found: Scan, plot: Path | None) -> None:
    from rich.table import Table

    from trackbridge.answers import how_far

    out = console()
    out.print(f"[bold]{plain(found.source)}[/]: {len(found.steps):,} steps, {found.steps[0]} to {found.steps[-1]}")
    curves = Table(box=None, pad_edge=False, show_header=False)
    bars = {"train/loss": found.loss, "grad/norm": found.grad_norm}
    for ours, theirs in found.columns.items():
        named = theirs if ours == theirs else f"{theirs} (as {ours})"
        curves.add_row(plain(named), sparkline(bars[ours], 60) if ours in bars else "")
    out.print(curves)
    if not found.anomalies:
        out.print("no anomalies")
    else:
        table = Table(box=None, pad_edge=False)
        for name in ("step", "value", "expected", "how far"):
            table.add_column(name, justify="right")
        for name in ("kind", "series", "over after", "notes"):
            table.add_column(name)
        for a in found.anomalies:
            after = a.recovered_after
            over = "not over" if after is None else "1 step" if after == 1 else f"{after} steps"
            numbers = (str(a.onset), number(a.value), number(a.expected), plain(how_far(a)))
            table.add_row(*numbers, a.kind, plain(a.series), over, plain("; ".join(a.notes)))
        out.print(table)
    if plot is not None:
        out.print(f"plot: {plain(plot)}")
