"""``trackbridge demo``: a real training, a real spike, three trackers, and the bad step again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trackbridge.cli.common import Json, console, emit, plain, sparkline

if TYPE_CHECKING:
    from rich.console import Console

    from trackbridge.demo.story import Delivered, Story
    from trackbridge.records import Anomaly


def demo(
    directory: Annotated[Path, typer.Option("--dir", help="Where everything goes.")] = Path("demo-run"),
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds of training.")] = False,
    seed: Annotated[int, typer.Option(help="Of the training.")] = 0,
    json: Json = False,
) -> None:
    """Train a small GPT, watch bad data hit it, find the spike in three trackers, and run the bad step again.

    Exit status 1 if a promise is not kept.
    """
    from trackbridge import plugins

    for module, extra in (("torch", "torch"), ("mlflow", "mlflow"), ("tensorboard", "tensorboard"), ("wandb", "wandb")):
        if not plugins.installed(module):
            plugins.require(module, extra)

    out = console(stderr=json)
    with out.status("Loading torch and the trackers' clients ..."):
        from trackbridge.demo.story import Story
        from trackbridge.demo.train import Plan

    story = Story(directory, Plan.quick() if quick else Plan(), seed)
    found = _tell(story, out)
    if json:
        emit(found)
    if not all(promise.kept for promise in story.promises):
        raise typer.Exit(1)


def _tell(story: Story, out: Console) -> dict[str, Any]:
    """Go through the story, showing it; the whole as data."""
    plan = story.plan
    out.print(
        f"[bold]Training[/] a byte-level GPT on the standard library's source files: {plan.steps} steps, {_titles(story)}"
    )
    with _live(out, plan.steps) as on_step:
        held_out = story.train(on_step)
    story.detected()
    out.print(
        f"held-out loss {held_out['first']:.3f} -> {held_out['last']:.3f} nats per byte; journal {plain(story.directory)}"
    )
    spike = story.spike
    _anomalies(story.record.anomalies, spike, out)

    with out.status("Asking each tracker's own reader ..."):
        delivered = story.delivered()
    _deliveries(delivered, len(story.record.series("train/loss")[0]), out)

    capsule, report = None, None
    if spike is not None and spike.capsule is not None:
        with out.status("Pulling the capsule out of MLflow ..."):
            capsule = story.pull()
        if capsule is not None:
            out.print(f"\n[bold]Pulled[/] out of MLflow into {plain(capsule.path)}")
            with out.status(f"Running steps {capsule.span[0]} to {capsule.span[1]} again, twice, in a fresh process ..."):
                report = story.replay(capsule)
            _verdict(report, out)
    with out.status("Writing the reports ..."):
        paths = story.reports(capsule, delivered)

    out.print()
    for promise in story.promises:
        out.print(f"{'[green]kept  [/]' if promise.kept else '[red]BROKEN[/]'} {promise.text}: {plain(promise.detail)}")
    out.print()
    for name, path in paths.items():
        out.print(f"{name}: [bold]{plain(path.absolute())}[/]", soft_wrap=True)
    out.print(f"the run: trackbridge show {plain(story.record.path)}", soft_wrap=True)
    return {
        "run": story.record.info.run_id,
        "directory": story.directory,
        "steps": plan.steps,
        "held_out_loss": held_out,
        "anomaly": asdict(spike) if spike else None,
        "trackers": [asdict(answer) for answer in delivered],
        "capsule": capsule.path if capsule else None,
        "replay": report,
        "files": {name: path.absolute() for name, path in paths.items()},
        "promises": [asdict(promise) for promise in story.promises],
    }


def _titles(story: Story) -> str:
    return ", ".join(tracker.title for tracker in story.trackers)


@contextmanager
def _live(out: Console, steps: int) -> Iterator[Callable[[int, float, Sequence[Anomaly]], None]]:
    """A progress bar with the loss as a growing line; where there is no terminal, a line now and then."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from trackbridge import answers

    losses: list[float] = []
    columns = ("{task.fields[line]}", "loss {task.fields[loss]:.3f}")
    bar = Progress(
        *(TextColumn(text) for text in columns), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), console=out
    )
    task = bar.add_task("", total=steps, line="", loss=float("nan"))

    def on_step(index: int, loss: float, anomalies: Sequence[Anomaly]) -> None:
        losses.append(loss)
        bar.update(task, completed=index + 1, loss=loss, line=sparkline(losses, 40))
        for anomaly in anomalies:
            note = f", {answers.peak(anomaly)}" if answers.peak(anomaly) else ""
            bar.print(f"[red]![/] step {index}: {anomaly.title} since step {anomaly.onset}{plain(note)}")
        if not out.is_terminal and (index + 1) % (steps // 10) == 0:
            out.print(f"step {index + 1} of {steps}, loss {loss:.3f}")

    with bar:
        yield on_step


def _anomalies(anomalies: Sequence[Anomaly], spike: Anomaly | None, out: Console) -> None:
    from trackbridge import answers
    from trackbridge.backends.words import anomaly_line

    out.print()
    for a in anomalies:
        style = "bold red" if spike is not None and a.id == spike.id else None
        out.print(f"! {plain(anomaly_line(a))}", style=style, soft_wrap=True)
        over = "" if a.recovered_after is None else f"over after {answers.plural(a.recovered_after, 'step')}"
        more = "; ".join(text for text in (f"first mover: {answers.moved_first(a)}", over, answers.peak(a)) if text)
        out.print(f"  [dim]{plain(more)}[/]", soft_wrap=True)
    if not anomalies:
        out.print("[red]no anomaly was detected[/]")


def _deliveries(delivered: Sequence[Delivered], steps: int, out: Console) -> None:
    out.print("\n[bold]In the trackers[/], as their own readers tell it")
    for d in delivered:
        good = d.complete(steps)
        loss = plain(d.error) if d.error else f"{d.equal} of {steps} losses equal the journal's as {d.number}"
        out.print(f"{'[green]✓[/]' if good else '[red]✗[/]'} [bold]{d.title}[/]: {loss}")
        for where in d.capsules:
            out.print(f"    capsule  {plain(where)}", soft_wrap=True)
        out.print(f"    look     {plain(d.look)}", soft_wrap=True)
        if d.pull:
            out.print(f"    pull     {plain(d.pull)}", soft_wrap=True)
        if d.replay:
            out.print(f"    replay   {plain(d.replay)}", soft_wrap=True)


def _verdict(report: dict[str, Any], out: Console) -> None:
    from rich.table import Table

    table = Table("step", "loss recorded", "loss replayed", "series equal", box=None, pad_edge=False)
    for step in report["steps"]:
        recorded, replayed = step["loss_recorded"], step["losses"]
        table.add_row(
            str(step["step"]),
            "" if recorded is None else repr(recorded),
            ", ".join(dict.fromkeys(map(repr, replayed))),
            f"{step['compared'] - step['different']} of {step['compared']}",
            style="bold red" if step["step"] == report.get("anomaly_step") else None,
        )
    out.print(table)
    colour = "green" if report["verdict"] == "exact" else "red"
    out.print(f"replay verdict: [bold {colour}]{report['verdict']}[/] ({plain(report['reason'])})")
