"""``trackbridge diff RUN_A RUN_B``: what differs between two runs, and where they first part."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trackbridge.cli.common import Json, console, emit, find_run, plain
from trackbridge.names import is_wide

if TYPE_CHECKING:
    from rich.table import Table

    from trackbridge.diff import Diff, Fact

_MOST = 30
_CELL = 60


def diff(
    first: Annotated[str, typer.Argument(metavar="RUN_A", help="A run folder, or a run's id or name.")],
    second: Annotated[str, typer.Argument(metavar="RUN_B", help="The other one.")],
    folder: Annotated[Path, typer.Option("--dir", help="Where to look for ids and names.")] = Path("runs"),
    tolerance: Annotated[float, typer.Option(help="Relative difference of the loss that counts as visible.", min=0)] = 0.02,
    json: Json = False,
) -> None:
    """Compare two runs: code, packages, hardware, config, data, and the first step and layer in which they part.

    Exit status: 0 nothing differs, 1 something does.
    """
    from trackbridge.diff import diff as compare

    with console(stderr=True).status("Reading two journals ..."), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # damage is `show`'s to tell
        found = compare(find_run(first, folder), find_run(second, folder), tolerance=tolerance)
    if json:
        emit({**asdict(found), "same": found.same})
    else:
        _print(found)
    if not found.same:
        raise typer.Exit(1)


def _print(found: Diff) -> None:
    out = console()
    for title, facts in (("code and machine", found.provenance), ("config", found.config), ("settings", found.settings)):
        if facts:
            out.print(f"[bold]{title}[/]: {len(facts)} differ")
            out.print(_table(found, facts))
        else:
            out.print(f"[bold]{title}[/]: the same")
    out.print(f"[bold]data[/]: {plain(_data(found))}")
    out.print(f"[bold]numbers[/]: {plain(_numbers(found))}")
    if found.apart is not None:
        apart = found.apart
        values = f"{apart.a:.6g} and {apart.b:.6g}"
        out.print(f"[bold]loss[/]: apart by more than {found.tolerance:.3g} from step {apart.step}: {values}")
    elif found.split is not None:
        out.print(f"[bold]loss[/]: never apart by more than {found.tolerance:.3g}")


def _table(found: Diff, facts: list[Fact]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("", found.a, found.b):
        table.add_column(plain(name), overflow="fold")
    for name, mine, theirs in facts[:_MOST]:
        table.add_row(plain(name), _cell(mine), _cell(theirs))
    if len(facts) > _MOST:
        table.add_row(f"and {len(facts) - _MOST} more (--json has all)", "", "")
    return table


def _cell(value: object) -> str:
    return "[dim]absent[/]" if value is None else plain(str(value)[:_CELL])


def _data(found: Diff) -> str:
    data = found.data
    if not data.compared:
        return "not comparable: no step whose batches both records know"
    if data.first is None:
        words = f"the same batches in all {data.compared} steps that both records know, by {data.how}"
    else:
        words = f"different batches from step {data.first} on, by {data.how} ({data.compared} steps compared)"
        if data.same_elsewhere:
            words += f"; {data.same_elsewhere} of them are batches the other run had at another step"
    return words if data.rng is None else f"{words}; the random state differs from step {data.rng} on"


def _numbers(found: Diff) -> str:
    if found.split is None:
        return f"equal to the bit in {found.series} series over {found.steps} steps"
    s = found.split
    own = is_wide(s.series)  # else the layer is that of a later series of the step
    where = f", first in layer {s.layer}" if s.layer and own else ""
    later = f", first of a layer {s.layer}" if s.layer and not own else ""
    more = f"; {s.others} more series differ in that step{later}" if s.others else ""
    a, b = f"{s.a:.6g}", f"{s.b:.6g}"
    if a == b:  # they differ behind the sixth digit
        a, b = repr(s.a), repr(s.b)
    stage = "" if s.stage == "loss" and "loss" not in s.series else f" ({s.stage})"  # the learning rate is no loss
    return f"they part at step {s.step}{where}{stage}: {s.series} is {a} and {b}{more}"
