"""``trackbridge export RUN --to parquet``: the rows of a run as a file for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from trackbridge.cli.common import Json, console, emit, find_run, plain


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or the id or name of a run in DIR.")],
    to: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="parquet, csv or jsonl; default: as the file is named, else parquet.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The file; default: <run id>.<format> here.")] = None,
    names: Annotated[list[str] | None, typer.Option(help="A series or a pattern such as 'grad/*'; may be repeated.")] = None,
    rank: Annotated[int | None, typer.Option(help="This rank's own journal; default: the leader's.")] = None,
    folder: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Where to look for a run's id or name.")] = Path("runs"),
    json: Json = False,
) -> None:
    """Write every row of a run to a file: seq, attempt, kind, step, time, and a column per series."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from trackbridge.errors import UsageError, nearest
    from trackbridge.export import FORMATS, Format
    from trackbridge.export import export as write

    if to is None:
        ending = out.suffix[1:].lower() if out is not None else ""
        to = ending if ending in FORMATS else "parquet"
    chosen: Format | None = next((known for known in get_args(Format) if known == to), None)
    if chosen is None:
        raise UsageError(f"--to {to}: there is no such format{nearest(to, FORMATS)}; one of: {', '.join(FORMATS)}")
    shown = console(stderr=True)
    columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as progress:
        task = progress.add_task("rows", total=None)
        done = write(
            find_run(run, folder), chosen, out, names=names or (), rank=rank,
            on_progress=lambda count, total: progress.update(task, completed=count, total=total),
        )  # fmt: skip
    if json:
        emit({"path": str(done.path), "rows": done.rows, "series": len(done.series), "damaged": bool(done.damage)})
    else:
        console().print(f"{plain(done.path)}: {done.rows} rows, {len(done.series)} series")
        if done.damage:
            shown.print(f"[yellow]{plain(done.damage)}[/]")
