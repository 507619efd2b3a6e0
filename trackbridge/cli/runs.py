"""``trackbridge runs [DIR]``: the runs of a folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trackbridge.cli.common import Json, console, emit, lags, number, plain, when


def runs(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="The folder of run folders.")] = Path("runs"),
    json: Json = False,
) -> None:
    """List the runs of a folder: how far they are, what was detected, what each tracker still lacks."""
    from trackbridge import history, shipper

    with console(stderr=True).status(f"Reading {plain(folder)} ..."):
        found = [(summary, shipper.status(summary.path)) for summary in history.runs(folder)]
    if json:
        emit([{**asdict(s), "lag": {b.kind: b.lag for b in backends}} for s, backends in found])
        return
    from rich.table import Table

    table = Table("run", "name", "started", "status", "step", "loss", "anomalies", "delivered", box=None, pad_edge=False)
    for s, backends in found:
        step = str(s.step) if s.step >= 0 else ""
        table.add_row(
            s.run_id, plain(s.name), when(s.created), s.status, step, number(s.loss), str(s.anomalies or ""), lags(backends)
        )
    out = console()
    out.width = max(out.width, 200)  # in a narrow terminal a line goes on below: no id is cut
    out.print(table if found else f"no runs in {plain(folder.absolute())}")
