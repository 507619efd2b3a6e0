"""``trackbridge runs [DIR]``: the runs of a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from trackbridge.cli.common import Json, console, emit, number, when


@dataclass(frozen=True)
class Summary:
    """One line of the table. `status` is "running" where the run has no end yet."""

    id: str
    name: str
    project: str
    created: float
    status: str
    steps: int
    loss: float | None
    anomalies: int
    lag: dict[str, int]
    path: str


def summarise(path: Path) -> Summary:
    """Read a run's journal. Raises `TrackbridgeError` if it is no run or damaged beyond reading."""
    from trackbridge import load, shipper

    record = load(path)
    steps, loss = record.series("train/loss")
    return Summary(
        id=record.info.run_id,
        name=record.info.name,
        project=record.info.project,
        created=record.info.created,
        status=record.end.status if record.end else "running",
        steps=len(steps),
        loss=float(loss[-1]) if len(loss) else None,
        anomalies=len(record.anomalies),
        lag={state.kind: state.lag for state in shipper.status(path)},
        path=str(path),
    )


def runs(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="The folder of run folders.")] = Path("runs"),
    json: Json = False,
) -> None:
    """List the runs of a folder: how far they are, what was detected, what each tracker still lacks."""
    from trackbridge.errors import ReferenceNotFoundError

    found = sorted(path.parent for path in folder.glob("*/run.json"))
    if not found:
        raise ReferenceNotFoundError(f"no runs in {folder.absolute()}: give the folder that trackbridge.init(dir=...) had")
    summaries = [summarise(path) for path in found]
    if json:
        emit([_plain(summary) for summary in summaries])
        return
    from rich.table import Table

    table = Table("run", "name", "started", "status", "steps", "loss", "anomalies", "not delivered", box=None, pad_edge=False)
    for s in summaries:
        lag = ", ".join(f"{kind} {count}" for kind, count in s.lag.items() if count) or ("" if s.lag else "no tracker")
        table.add_row(s.id, s.name, when(s.created), s.status, str(s.steps), number(s.loss), str(s.anomalies or ""), lag)
    console().print(table)


def _plain(summary: Summary) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(summary)
