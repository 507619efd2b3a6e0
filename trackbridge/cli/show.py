"""``trackbridge show RUN``: one run in a screenful."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trackbridge.cli.common import Json, console, emit, find_run, load_run, number, plain, sparkline, when

if TYPE_CHECKING:
    from rich.table import Table

    from trackbridge.history import RunRecord
    from trackbridge.shipper import BackendStatus

SERIES = (
    "train/loss", "grad/norm", "train/lr", "perf/tokens_per_s", "perf/samples_per_s", "perf/mfu", "optim/update_ratio",
    "trackbridge/overhead_share",
)  # fmt: skip
_BARS, _FEWEST_BARS = 40, 10


def show(
    reference: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or a run's id or name.")],
    folder: Annotated[Path, typer.Option("--dir", help="Where to look for ids and names.")] = Path("runs"),
    findings: Annotated[bool, typer.Option("--findings", help="What deserves a look, ranked.")] = False,
    json: Json = False,
) -> None:
    """Show one run: its loss, its anomalies, and how far each tracker is."""
    from trackbridge import shipper

    with console(stderr=True).status("Reading the journal ..."):
        record = load_run(find_run(reference, folder))
        backends = shipper.status(record.path)
    if findings:
        _findings(record, json)
    elif json:
        emit(_plain(record, backends))
    else:
        _print(record, backends)


def _findings(record: RunRecord, json: bool) -> None:
    from trackbridge.answers import plural
    from trackbridge.findings import findings

    found = findings(record)
    if json:
        emit({"run": record.info.run_id, "findings": [asdict(finding) for finding in found]})
        return
    out = console()
    out.print(f"[bold]{plain(record.info.name)}[/]: {plural(len(found), 'finding')}")
    about = max((len(finding.about) for finding in found), default=0)
    for finding in found:
        color = "red" if finding.severity >= 0.7 else "yellow" if finding.severity >= 0.35 else "dim"
        out.print(f"[{color}]{finding.severity:.2f}[/]  {finding.about:{about}}  {plain(finding.what)}", soft_wrap=True)
        if finding.advice:  # often a command, so never broken or cut
            out.print(f"{'':{about + 8}}[dim]{plain(finding.advice)}[/]", soft_wrap=True)


def _plain(record: RunRecord, backends: list[BackendStatus]) -> dict[str, Any]:
    return {
        "run": asdict(record.info),
        "status": record.status,
        "error": record.error,
        "series": {name: {"steps": len(found[0]), "last": found[1][-1]} for name, found in _series(record).items()},
        "anomalies": [asdict(anomaly) for anomaly in record.anomalies],
        "backends": [asdict(status) for status in backends],
        "damage": str(record.damage) if record.damage else None,
        "config": record.config,
    }


def _series(record: RunRecord) -> dict[str, Any]:
    return {name: record.series(name) for name in SERIES if name in record.names}


def _curves(record: RunRecord, width: int) -> Table:
    """A row per series; the bars get what a line of `width` characters leaves them. Bars are not to scale where one value is
    far off, so the highest is given."""
    import numpy as np
    from rich.table import Table

    rows = []
    for name, (steps, values) in _series(record).items():
        finite = np.isfinite(values)
        top = int(np.argmax(np.where(finite, values, -np.inf)))
        highest = f"{number(float(values[top]))} at {steps[top]}" if finite.any() else ""
        rows.append((name, values, number(float(values[-1])), highest))
    taken = sum(max((len(row[column]) for row in rows), default=0) + 2 for column in (0, 2, 3))
    bars = min(_BARS, max(_FEWEST_BARS, width - taken))
    table = Table("series", "", "last", "highest", box=None, pad_edge=False, header_style="dim")
    for name, values, last, highest in rows:
        table.add_row(name, sparkline(values, bars), last, highest)
    return table


def _print(record: RunRecord, backends: list[BackendStatus]) -> None:
    from trackbridge.answers import peak
    from trackbridge.backends.words import anomaly_line

    out = console()
    info = record.info
    attempt = f", attempt {info.attempt}" if info.attempt else ""
    who = f"({info.run_id}) of {info.project}"
    out.print(f"[bold]{plain(info.name)}[/] {plain(who)}: {record.status}{attempt}, started {when(info.created)}")
    if record.error:
        out.print(f"[red]{plain(record.error)}[/]")
    if record.damage:
        out.print(f"[red]{plain(record.damage)}[/]")
    out.print(_curves(record, out.width))
    for anomaly in record.anomalies:
        out.print(f"[red]![/] {plain(anomaly_line(anomaly))}")
        if peak(anomaly):
            out.print(f"  [dim]{plain(peak(anomaly))}[/]")
        if anomaly.capsule:
            out.print(f"  [dim]capsule {plain(record.path / anomaly.capsule)}[/]", soft_wrap=True)
    if not record.anomalies:
        out.print("no anomalies")
    for status in backends:
        state = "everything delivered" if not status.lag else f"[yellow]{status.lag} records behind[/]"
        if status.dead_letters:
            state += f", [red]{status.dead_letters} refused[/]"
        out.print(f"[bold]{status.kind}[/]: {state}{f'; {plain(status.where)}' if status.where else ''}", soft_wrap=True)
        if status.last_error and status.lag:
            out.print(f"  [dim]{plain(status.last_error)}[/]")
    if any(status.lag for status in backends):
        out.print(f"deliver the rest: trackbridge sync {plain(record.path)}", soft_wrap=True)
