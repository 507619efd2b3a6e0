"""``trackbridge replay REF --build module:function``: run the bad step again, and try what would have prevented it."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trackbridge import plugins
from trackbridge.cli.common import Json, console, emit, plain
from trackbridge.errors import TrackbridgeError, UsageError
from trackbridge.harmless import harmless
from trackbridge.ranks import Ranks
from trackbridge.rebuilding import importing

if TYPE_CHECKING:
    from rich.table import Table

    from trackbridge.capsule import SpikeCapsule
    from trackbridge.lab.replay import StepReport
    from trackbridge.replay import CounterfactualReport, ReplayReport

EXIT = {"exact": 0, "within-noise": 0, "not-reproduced": 1, "incomplete": 2}
ERROR = 3
FEW = 4
MANY, CLOSE = 32, 8
"""Of more than `MANY` steps, those farther than `CLOSE` from the anomaly share a row where nothing differs."""


def replay(
    reference: Annotated[str, typer.Argument(metavar="REF", help="A capsule, as for `trackbridge pull`.")],
    build: Annotated[
        str | None, typer.Option(metavar="MODULE:FUNCTION", help="Your function that returns (model, optimizer, step).")
    ] = None,
    tries: Annotated[
        str | None,
        typer.Option(
            "--try", metavar="LIST", help="Changes to try, such as skip-batch,lower-lr=0.5,clip=0.5,reset-momentum; or all."
        ),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Write the suspected batches here, for run.batches(loader, skip=...); needs no --build.")
    ] = None,
    dest: Annotated[Path | None, typer.Option(help="Where a capsule from a tracker is put.")] = None,
    runs: Annotated[int, typer.Option(min=2, help="How many replays; where they differ, at least five.")] = 2,
    keep: Annotated[bool, typer.Option(help="Write what was found into the capsule and its pages.")] = True,
    publish: Annotated[bool, typer.Option("--publish", help="And deliver the capsule again to the run's trackers.")] = False,
    json: Json = False,
) -> None:
    """Run the steps of a capsule again, and compare every recorded number; with --try, again with one thing changed at a time.

    Exit status: 0 exact or within-noise; 1 not-reproduced; 2 incomplete (something the replay needs is missing);
    3 it could not run.
    """
    try:
        if build is None and plan is None:
            raise UsageError("say --build module:function, your code that a replay runs (or --plan FILE, which needs none)")
        capsule = _fetch(reference, dest)
        plugins.require("torch", "torch")
        if plan is not None:
            _plan(capsule, plan, json=json and build is None)
        if build is None:
            return
        report, table, problem = _replay(capsule, build, runs, tries)
    except TrackbridgeError as error:
        typer.echo(f"trackbridge: {harmless(str(error))}", err=True)
        raise typer.Exit(ERROR) from None
    except SystemExit as error:  # its status is no verdict
        said = f"your code ended the process (sys.exit({error.code!r})); put a script's own run under if __name__ == '__main__'"
        typer.echo(f"trackbridge: --build {build}: {said}", err=True)
        raise typer.Exit(ERROR) from None
    except Exception:  # in the user's own code, whose traceback is what they need
        traceback.print_exc()
        raise typer.Exit(ERROR) from None
    if Ranks.current().leader:
        if json:
            typer.echo(report.model_dump_json() if table is None else _both(report, table))
        else:
            _print(report)
            if table is not None:
                _print_table(table)
        if keep or publish:
            _keep(capsule, report, table, publish=publish)
    if problem is not None:
        typer.echo(f"trackbridge: {harmless(str(problem))}", err=True)
        raise typer.Exit(ERROR)
    raise typer.Exit(EXIT[report.verdict])


def function(name: str) -> Callable[[], Any]:
    """The object that ``module:function`` names; the working directory is searched too, as `python -m` does."""
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise UsageError(f"--build must be module:function, such as my_module:build, not {name!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        with importing(module):
            found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UsageError(f"--build {name}: there is no module {error.name!r}; run this where your code is") from None
    if not callable(getattr(found, attribute, None)):
        raise UsageError(f"--build {name}: module {module!r} has no function {attribute!r}")
    made: Callable[[], Any] = getattr(found, attribute)
    return made


def _fetch(reference: str, dest: Path | None) -> SpikeCapsule:
    from trackbridge.fetch import pull

    with console(stderr=True).status(f"Fetching {plain(reference)} ..."):
        return pull(reference, dest)


def _plan(capsule: SpikeCapsule, path: Path, *, json: bool) -> None:
    from trackbridge.replay.guilty import skip_plan

    found = skip_plan(capsule)
    try:
        found.save(path)
    except OSError as error:
        raise UsageError(f"cannot write --plan {path}: {error.strerror or error}; choose another file") from None
    if json:
        emit({"path": path, "batches": len(found.skips)})
    say = console(stderr=True)
    batches = "1 batch" if len(found.skips) == 1 else f"{len(found.skips)} batches"
    plan = plain(repr(str(path)))
    ways = f"run.batches(loader, skip={plan}), in a Trainer with trackbridge.hf.Callback(skip={plan})"
    say.print(f"{batches} in {plain(path)}; go on with {ways}", soft_wrap=True)


def _replay(
    capsule: SpikeCapsule, build: str, runs: int, tries: str | None
) -> tuple[ReplayReport, CounterfactualReport | None, TrackbridgeError | None]:
    """(the replay, the table, why there is no table): a replay that is done is not lost with what was to follow."""
    from rich.progress import Progress

    from trackbridge.replay import rerun, what_if
    from trackbridge.replay.counterfactual import Asked

    for text in tries.split(",") if tries else ():
        if text.strip() != "all":
            Asked.parse(text).check(capsule)  # before the long work
    progress = console(stderr=True)
    with progress.status("Loading your code ..."):
        made = function(build)
    first, last = capsule.restart_step, capsule.span[1]
    length = last - first + 1
    with Progress(console=progress, transient=True, disable=not progress.is_terminal) as bar:
        task = bar.add_task("Replaying", total=runs * length)

        def on_step(run: int, step: int, last: int) -> None:
            total = max(runs, run + 1) * length  # replays that differ are followed by more
            bar.update(task, total=total, completed=run * length + step - first + 1)

        report = rerun(capsule, made, runs=runs, on_step=on_step)
        if tries is None or report.verdict == "incomplete":
            return report, None, None

        def on_try(name: str, number: int, count: int, step: int, last: int) -> None:
            bar.update(task, description=plain(name), total=count * length, completed=number * length + step - first + 1)

        try:
            return report, what_if(capsule, made, tries.split(","), replay=report, on_step=on_try), None
        except TrackbridgeError as error:
            return report, None, error


def _both(report: ReplayReport, table: CounterfactualReport) -> str:
    """One JSON object: the replay's, with the table under ``counterfactuals``."""
    return f'{report.model_dump_json()[:-1]},"counterfactuals":{table.model_dump_json()}}}'


def _keep(capsule: SpikeCapsule, report: ReplayReport, table: CounterfactualReport | None, *, publish: bool) -> None:
    from trackbridge.replay.keep import keep

    say = console(stderr=True)
    try:
        capsule = keep(capsule, replay=report, counterfactuals=table)
        say.print(f"kept in {plain(capsule.path)} (report.html, post-mortem.md)", soft_wrap=True)
        if publish:
            _publish(capsule)
    except (OSError, TrackbridgeError) as error:
        say.print(f"[yellow]not kept or published:[/] {plain(error)}")
        if publish:
            raise typer.Exit(ERROR) from None


def _publish(capsule: SpikeCapsule) -> None:
    from trackbridge.rundir import RunDirectory
    from trackbridge.seal import artifact_for
    from trackbridge.shipper import sync
    from trackbridge.shipping.publish import publish

    directory = RunDirectory(capsule.path.parent.parent)
    if not directory.file.is_file():
        raise UsageError(f"{capsule.path} is not in its run's folder, whose journal knows the trackers; replay RUN_DIR@STEP")
    publish(directory, artifact_for(directory.path, capsule.anomaly, capsule.path))
    done = sync(directory.path)
    say = console(stderr=True)
    for status in done.backends:
        left = f"[yellow]{status.lag} records left; trackbridge sync {plain(directory.path)}[/]" if status.lag else "delivered"
        say.print(f"{status.kind}: {left}{f'; {plain(status.where)}' if status.where else ''}", soft_wrap=True)


def _print(report: ReplayReport) -> None:
    out = console()
    more = []
    for difference in report.environment:
        if difference.name.startswith("packages.") and difference.recorded is None:
            more.append(difference.name.removeprefix("packages."))
            continue
        values = f"{difference.recorded} then, {difference.now} now"
        out.print(f"[yellow]not as recorded[/] {plain(difference.name)}: {plain(values)}")
    if more:
        names = ", ".join(more[:FEW]) + (", ..." if len(more) > FEW else "")
        out.print(f"[yellow]not as recorded[/] packages that were not there then: {len(more)} ({plain(names)})")
    if report.steps:
        out.print(_steps(report))
    if report.first_divergence is not None:
        out.print(f"first divergence: {plain(report.first_divergence)}")
    for text in report.missing:
        if text == report.reason:
            continue  # said with the verdict
        out.print(f"[yellow]missing[/] {plain(text)}")
    colour = "green" if EXIT[report.verdict] == 0 else "red"
    out.print(f"verdict: [bold {colour}]{report.verdict}[/] ({plain(report.reason)})")


def _steps(report: ReplayReport) -> Table:
    """A row per step; of many, those far from the anomaly in which nothing differs are one row together."""
    from rich.table import Table

    table = Table("step", "loss recorded", "loss replayed", "series equal", "furthest", "RNG", box=None, pad_edge=False)
    ends = (report.steps[0].step, report.steps[-1].step)
    folded: list[StepReport] = []

    def fold() -> None:
        if folded:
            compared = sum(step.compared for step in folded)
            table.add_row(f"{folded[0].step}-{folded[-1].step}", "", "", f"{compared} of {compared}", "", "exact", style="dim")
            folded.clear()

    for step in report.steps:
        near = step.step in ends or abs(step.step - report.anomaly_step) <= CLOSE
        as_recorded = step.different == 0 and step.rng == "exact" and step.loss_recorded is not None
        if len(report.steps) > MANY and not near and as_recorded:
            folded.append(step)
            continue
        fold()
        mark = " [red]<- anomaly[/]" if step.step == report.anomaly_step else ""
        recorded = "absent" if step.loss_recorded is None else f"{step.loss_recorded:.9g}"
        replayed = ", ".join(dict.fromkeys(f"{loss:.9g}" for loss in step.losses))
        equal = f"{step.compared - step.different} of {step.compared}"
        furthest = f"{step.worst}: {step.ulp:.3g} ULP" if step.worst else ""
        table.add_row(str(step.step), recorded, replayed, equal, furthest, f"{step.rng}{mark}")
    return table


def _print_table(found: CounterfactualReport) -> None:
    from rich.table import Table

    from trackbridge.cli.common import sparkline
    from trackbridge.lab.counterfactuals import number

    out = console()
    if found.caution:
        out.print(f"[red]{plain(found.caution)}[/]")
    table = Table("", "change", "outcome", "distance", "given up", "score", "loss", "", box=None, pad_edge=False)
    for tried in (*found.tries, found.rerun):
        colour = {"prevented": "green", "remains": "red"}.get(tried.outcome, "dim")
        numbers = (number(tried.distance), f"{tried.given_up:.0%}" if tried.ran else "", number(tried.score))
        told = "" if tried.outcome == "remains" else tried.reason
        curve = sparkline(tried.losses, 24)
        table.add_row(str(tried.rank or ""), plain(tried.name), f"[{colour}]{tried.outcome}[/]", *numbers, curve, plain(told))
    out.print(table)
    fitted = f"steps {found.trend.first} to {found.trend.last}"
    out.print(f"[dim]distance: mean sigmas above the trend of {fitted}; score: distance + given up[/]")
    best = found.best
    if best is not None:
        out.print(f"what would have prevented it: [bold green]{plain(best.name)}[/] ({plain(best.what)})")
    else:
        out.print("none of these changes would have prevented it")
