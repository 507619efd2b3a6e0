"""``trackbridge sync DIR``: deliver what a tracker has not got yet."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trackbridge.cli.common import Json, console, emit, find_run, plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress, TaskID

    from trackbridge.shipper import BackendStatus


def sync(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder, or the id or name of a run in runs.")],
    to: Annotated[list[str] | None, typer.Option(help="Only this tracker; may be repeated.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on while the run does.")] = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds to try for; default: until everything is delivered.")] = None,
    anew: Annotated[
        bool,
        typer.Option("--anew", help="Deliver everything again that the tracker has not; to a new run where its run is gone."),
    ] = False,
    json: Json = False,
) -> None:
    """Deliver what the trackers of a run lack, from its journal. Exit status 1 if something is left."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from trackbridge import history, shipper

    directory = find_run(str(directory), Path("runs"))
    backends = shipper.configured(history.find(directory), to) if to else None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    shown = console(stderr=True)
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as progress:
        report = shipper.sync(directory, backends, follow=follow, timeout=timeout, on_progress=_advance(progress), anew=anew)
    if json:
        emit({**asdict(report), "busy": dict(report.busy), "complete": report.complete})
    else:
        out = console()
        for status in report.backends:
            state = "everything delivered" if not status.lag else f"[yellow]{status.lag} records left[/]"
            out.print(f"[bold]{status.kind}[/]: {state}{f'; {plain(status.where)}' if status.where else ''}", soft_wrap=True)
            if status.lag and status.last_error:
                out.print(f"  {plain(status.last_error)}", soft_wrap=True)
        for kind, who in report.busy.items():
            out.print(f"{kind} is being served by {plain(who)}")
        for path in report.sealed:
            out.print(f"sealed {plain(path)}")
        if report.killed:
            out.print("the trainer was killed; the run is marked so")
    if not report.complete:
        raise typer.Exit(1)


def _advance(progress: Progress) -> Callable[[list[BackendStatus]], None]:
    """Shows each tracker's cursor as a bar."""
    tasks: dict[str, TaskID] = {}

    def advance(statuses: list[BackendStatus]) -> None:
        for status in statuses:
            if status.kind not in tasks:
                tasks[status.kind] = progress.add_task(status.kind)
            trouble = f" [yellow]{plain(status.last_error[:80])}[/]" if status.last_error and status.lag else ""
            total = status.last_seq + 1
            progress.update(
                tasks[status.kind], total=total, completed=total - status.lag, description=f"{status.kind}{trouble}"
            )

    return advance
