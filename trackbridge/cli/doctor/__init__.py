"""``trackbridge doctor``: is this machine ready to record, ship and replay? Each finding says what to do about it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trackbridge.cli.common import Json, console, emit, plain
from trackbridge.cli.doctor.finding import Finding


def doctor(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="The folder of run folders.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Look at this machine: versions, trackers, GPU, determinism, disk, runs left over. Exit status 1 if there is a problem."""
    from trackbridge.cli.doctor import device, place, software, trackers

    with console(stderr=True).status("Looking ..."):
        settings, found = software.settings()
        findings = [
            *software.look(),
            found,
            *device.look(),
            *trackers.look(),
            *place.look(folder or settings.dir, settings),
        ]
    if json:
        emit([asdict(finding) for finding in findings])
    else:
        show(findings)
    if any(finding.state == "problem" for finding in findings):
        raise typer.Exit(1)


def show(findings: list[Finding]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    signs = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[red]problem[/]"}
    for finding in findings:
        advice = f"\n[dim]{plain(finding.advice)}[/]" if finding.advice else ""
        table.add_row(signs[finding.state], finding.what, f"{plain(finding.found)}{advice}")
    console().print(table)
