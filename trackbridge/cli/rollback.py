"""``trackbridge rollback RUN``: which checkpoint to go back to."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trackbridge.cli.common import Json, console, emit, find_run, plain


def rollback(
    reference: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or a run's id or name.")],
    step: Annotated[int | None, typer.Option(help="Of the anomaly to go back from; default: the newest lasting one.")] = None,
    folder: Annotated[Path, typer.Option("--dir", help="Where to look for ids and names.")] = Path("runs"),
    json: Json = False,
) -> None:
    """Name the newest checkpoint that is clean by the record, and say why each newer one is not.

    Checkpoints are those that run.checkpoint_saved told of. Exit status 1 if none is clean.
    """
    from trackbridge import rollback as advise
    from trackbridge.backends.words import anomaly_line

    found = advise(find_run(reference, folder), step=step)
    if json:
        emit(
            {
                "anomaly": None if found.anomaly is None else asdict(found.anomaly),
                "precursor": found.precursor,
                "checkpoint": None if found.checkpoint is None else asdict(found.checkpoint),
                "before": None if found.before is None else asdict(found.before),
                "rejected": [{**asdict(rejected.saved), "why": rejected.why} for rejected in found.rejected],
            }
        )
    else:
        out = console()
        if found.anomaly is None:
            out.print("no anomaly that says anything of the weights")
        else:
            out.print(plain(anomaly_line(found.anomaly)))
        if found.precursor is not None:
            out.print(f"its first sign: {plain(found.precursor[0])} at step {found.precursor[1]}")
        for rejected in found.rejected:
            out.print(f"[red]not[/] {plain(rejected.saved)}: it {plain(rejected.why)}", soft_wrap=True)
        colour = "red" if found.checkpoint is None else "green"
        where = "nothing to go back to" if found.checkpoint is None else "go back to"
        out.print(f"{where}: [bold {colour}]{plain(found)}[/]", soft_wrap=True)
        if found.after and found.anomaly is not None:
            over = f"it was saved when the {found.anomaly.what} of step {found.anomaly.onset} was over, and has that step in it"
            other = "no clean checkpoint is from before it" if found.before is None else f"from before it: {found.before}"
            out.print(f"  {plain(over)}; {plain(other)}", soft_wrap=True)
    if found.checkpoint is None:
        raise typer.Exit(1)
