"""``trackbridge replay REF --build module:function``: run the bad step again."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trackbridge import plugins
from trackbridge.cli.common import Json, console, plain
from trackbridge.errors import TrackbridgeError, UsageError

if TYPE_CHECKING:
    from trackbridge.replay import ReplayReport

EXIT = {"exact": 0, "within-noise": 0, "not-reproduced": 1, "incomplete": 2}
ERROR = 3


def replay(
    reference: Annotated[str, typer.Argument(metavar="REF", help="A capsule, as for `trackbridge pull`.")],
    build: Annotated[str, typer.Option(metavar="MODULE:FUNCTION", help="Your function that returns (model, optimizer, step).")],
    dest: Annotated[Path | None, typer.Option(help="Where a capsule from a tracker is put.")] = None,
    runs: Annotated[int, typer.Option(min=2, help="How many replays; their differences are the noise floor.")] = 2,
    json: Json = False,
) -> None:
    """Run the steps of a capsule again, and compare every recorded number.

    Exit status: 0 exact or within-noise; 1 not-reproduced; 2 incomplete (something the replay needs is missing);
    3 it could not run.
    """
    try:
        plugins.require("torch", "torch")
        report = _replay(reference, build, dest, runs)
    except TrackbridgeError as error:
        typer.echo(f"trackbridge: {error}", err=True)
        raise typer.Exit(ERROR) from None
    except Exception:  # in the user's own code, whose traceback is what they need
        traceback.print_exc()
        raise typer.Exit(ERROR) from None
    if json:
        typer.echo(report.model_dump_json())
    else:
        _print(report)
    raise typer.Exit(EXIT[report.verdict])


def function(name: str) -> Callable[[], Any]:
    """The object that ``module:function`` names; the working directory is searched too, as `python -m` does."""
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise UsageError(f"--build must be module:function, such as my_module:build, not {name!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"--build {name}: there is no module {error.name!r}; run this where your code is") from None
    if not callable(getattr(found, attribute, None)):
        raise UsageError(f"--build {name}: module {module!r} has no function {attribute!r}")
    made: Callable[[], Any] = getattr(found, attribute)
    return made


def _replay(reference: str, build: str, dest: Path | None, runs: int) -> ReplayReport:
    from rich.progress import Progress

    from trackbridge.fetch import pull
    from trackbridge.replay import rerun

    progress = console(stderr=True)
    with progress.status("Loading your code ..."):
        made = function(build)
    with progress.status(f"Fetching {plain(reference)} ..."):
        capsule = pull(reference, dest)
    with Progress(console=progress, transient=True, disable=not progress.is_terminal) as bar:
        first = capsule.restart_step
        task = bar.add_task("Replaying", total=None)

        def on_step(run: int, step: int, last: int) -> None:
            count = last - first + 1
            bar.update(task, total=runs * count, completed=run * count + step - first + 1)

        return rerun(capsule, made, runs=runs, on_step=on_step)


def _print(report: ReplayReport) -> None:
    from rich.table import Table

    out = console()
    for difference in report.environment:
        values = f"{difference.recorded} then, {difference.now} now"
        out.print(f"[yellow]not as recorded[/] {plain(difference.name)}: {plain(values)}")
    table = Table("step", "loss recorded", "loss replayed", "series equal", "furthest", "RNG", box=None, pad_edge=False)
    for step in report.steps:
        mark = " [red]<- anomaly[/]" if step.step == report.anomaly_step else ""
        recorded = "absent" if step.loss_recorded is None else f"{step.loss_recorded:.9g}"
        replayed = ", ".join(dict.fromkeys(f"{loss:.9g}" for loss in step.losses))
        equal = f"{step.compared - step.different} of {step.compared}"
        furthest = f"{step.worst}: {step.ulp:.3g} ULP" if step.worst else ""
        table.add_row(str(step.step), recorded, replayed, equal, furthest, f"{step.rng}{mark}")
    out.print(table)
    if report.first_divergence is not None:
        out.print(f"first divergence: {plain(report.first_divergence)}")
    for text in report.missing:
        out.print(f"[yellow]missing[/] {plain(text)}")
    colour = "green" if EXIT[report.verdict] == 0 else "red"
    out.print(f"verdict: [bold {colour}]{report.verdict}[/] ({plain(report.reason)})")
