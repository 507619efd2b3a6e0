"""``trackbridge sync DIR``: deliver what a tracker has not got yet."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trackbridge.cli.common import Json, console, emit

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress

    from trackbridge.shipper import BackendStatus


def sync(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")],
    to: Annotated[list[str] | None, typer.Option(help="Only this tracker; may be repeated.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on while the run does.")] = False,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds to try for; default: until done, or a tracker is away.")
    ] = None,
    json: Json = False,
) -> None:
    """Deliver what the trackers of a run lack, from its journal. Exit status 1 if something is left."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from trackbridge import shipper

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True)) as progress:
        report = shipper.sync(directory, to=to, follow=follow, timeout=timeout, on_progress=_advance(progress))
    if json:
        emit({**asdict(report), "complete": report.complete})
    else:
        out = console()
        for status in report.backends:
            state = "everything delivered" if not status.lag else f"[yellow]{status.lag} records left[/]"
            out.print(f"[bold]{status.kind}[/]: {state}{f'; {status.where}' if status.where else ''}")
            if status.lag and status.last_error:
                out.print(f"  {status.last_error}")
        if not report.backends:
            out.print("this run was given no tracker; name one with --to")
        for kind, who in report.busy:
            out.print(f"{kind} is being served by {who}")
        for path in report.sealed:
            out.print(f"sealed {path}")
        if report.killed:
            out.print("the trainer was killed; the run is marked so")
    if not report.complete:
        raise typer.Exit(1)


def _advance(progress: Progress) -> Callable[[list[BackendStatus]], None]:
    """Shows each tracker's cursor as a bar."""
    tasks = {}

    def advance(statuses: list[BackendStatus]) -> None:
        for status in statuses:
            if status.kind not in tasks:
                tasks[status.kind] = progress.add_task(status.kind)
            progress.update(tasks[status.kind], total=status.last_seq + 1, completed=status.last_seq + 1 - status.lag)

    return advance
