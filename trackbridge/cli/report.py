"""``trackbridge report REF``: a prebuilt view in W&B, made or updated; or the post-mortem of an anomaly."""

from __future__ import annotations

import json as json_
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trackbridge.cli.common import Json, console, emit, find_run, load_run
from trackbridge.cli.post_mortem import post_mortem_of
from trackbridge.errors import TrackbridgeError, UsageError, nearest
from trackbridge.harmless import harmless
from trackbridge.panels import TEMPLATES

if TYPE_CHECKING:
    from trackbridge.backends.wandb_process import Process
    from trackbridge.backends.wandb_views import Survey
    from trackbridge.fetch import Reference
    from trackbridge.history import RunRecord
    from trackbridge.panels import Template
    from trackbridge.reports.wandb_report import Subject

_SECONDS = 120.0
_LARGEST = 256 << 20  # of what people read of a capsule


def report(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="REF",
            help="wandb:entity/project/run_id[@step], wandb:entity/project for a view of all runs, or a run on this disk "
            "(folder, id or name)[@step]. With --post-mortem also a capsule, mlflow:... or tensorboard:...",
        ),
    ],
    template: Annotated[str, typer.Option(metavar="NAME", help=f"Which view: {', '.join(TEMPLATES)}.")] = "spike-forensics",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the spec as JSON; contact nobody.")] = False,
    post_mortem: Annotated[bool, typer.Option("--post-mortem", help="Print the post-mortem as Markdown instead.")] = False,
    folder: Annotated[Path, typer.Option("--dir", help="Where runs on this disk are.")] = Path("runs"),
    json: Json = False,
) -> None:
    """Make a prebuilt view in W&B, or update it, and print its address."""
    if template not in TEMPLATES:
        raise UsageError(f"unknown template {template!r}{nearest(template, TEMPLATES)}; there are: {', '.join(TEMPLATES)}")
    if post_mortem:
        text = post_mortem_of(reference, folder)
        if json:
            emit({"post_mortem": text})
        else:
            typer.echo(harmless(text), nl=False)
        return
    chosen = TEMPLATES[template]
    ref, record = _parse(reference, folder)
    if dry_run:
        typer.echo(json_.dumps(_spec(chosen, _offline(ref, record, chosen)), indent=1, allow_nan=False))
        return
    with console(stderr=True).status("Asking W&B ..."):
        published = _publish(chosen, ref, record)
    if json:
        emit({"template": chosen.name, **published})
    else:
        typer.echo(published["url"])


def _parse(reference: str, folder: Path) -> tuple[Reference, RunRecord | None]:
    """What is meant, and its run on this disk if it is here: read from there, a report says more and asks for less."""
    from trackbridge.fetch import LOCAL, Reference

    ref = Reference.parse(reference)
    if ref.kind == LOCAL:
        return ref, load_run(find_run(ref.where, folder))
    if ref.kind != "wandb":
        raise UsageError(f"reports are made in W&B, not in {ref.kind}; with --post-mortem any capsule will do")
    parts = ref.where.split("/")
    if len(parts) not in (2, 3) or not all(parts) or ":" in parts[-1]:
        raise UsageError(f"{ref.where!r} names no run: give wandb:ENTITY/PROJECT/RUN_ID[@STEP], or wandb:ENTITY/PROJECT")
    here = folder / parts[2] if len(parts) == 3 else None
    return ref, load_run(here) if here is not None and (here / "run.json").is_file() else None


def _offline(ref: Reference, record: RunRecord | None, template: Template) -> Subject:
    """The subject as far as this disk knows it. Raises `UsageError` where the template needs more."""
    from trackbridge.reports import subject
    from trackbridge.reports.wandb_report import Subject

    entity, project, run = _address(ref)
    if template.about == "project":
        if record is not None and not entity:
            found = subject.of_run(record)
            entity, project = found.entity, found.project
        return Subject(entity, project)
    if record is not None:
        about = subject.of_run(record, ref.step, entity=entity or None, project=project or None)
        if template.about == "anomaly" and about.anomaly is None:
            raise UsageError(f"run {about.run_id} has no anomaly to report on")
        return about
    if not run:
        raise UsageError(f"the template {template.name} is about one run: give wandb:{entity}/{project}/RUN_ID")
    return Subject(entity, project, run, step=ref.step)


def _address(ref: Reference) -> tuple[str, str, str]:
    """(entity, project, run id) of a W&B reference; empty strings for what it does not say."""
    if ref.kind != "wandb":
        return "", "", ""
    entity, project, *run = ref.where.split("/")
    return entity, project, run[0] if run else ""


def _spec(template: Template, subject: Subject) -> dict[str, Any]:
    from trackbridge.reports import wandb_report, wandb_workspace

    return wandb_workspace.build(subject) if template.name == "workspace" else wandb_report.build(template, subject)


def _publish(template: Template, ref: Reference, record: RunRecord | None) -> dict[str, Any]:
    """Look at the run in W&B, build the view, make or update it."""
    from trackbridge.backends.wandb_views import REPORT, WORKSPACE, View
    from trackbridge.reports import wandb_report, wandb_workspace
    from trackbridge.reports.subject import ENTITY

    about = _offline(ref, record, template)
    known = "" if about.entity == ENTITY else about.entity
    with _client(_base_url(record)) as process:
        found: Survey = _ask(process, "survey", known, about.project, about.run_id)
        about = replace(about, entity=found.entity)
        about = _seen(process, about, found, template, ref, record)
        if template.name == "workspace":
            kind, name, title = WORKSPACE, wandb_workspace.workspace_name(about), template.title
        else:
            kind, name, title = REPORT, wandb_report.view_name(template, about), wandb_report.title_of(template, about)
        view = View(about.entity, about.project, kind, name, title, _spec(template, about))
        return asdict(_ask(process, "publish", view))


def _seen(
    process: Process, about: Subject, found: Survey, template: Template, ref: Reference, record: RunRecord | None
) -> Subject:
    """`about` with what W&B has: the series that have points, the pictures, the capsule's artifact, the anomaly."""
    from trackbridge.reports import contents, subject

    about = replace(about, present=found.keys, pictures=subject.pictures(found.keys))
    if template.about == "project":
        return about
    about = replace(about, name=found.name)
    if record is None:
        there = [subject.of_facts(key, facts) for key, facts in found.anomalies.items()]
        told = {"anomalies": contents.anomalies(there)} if there else {}
        about = replace(about, anomaly=subject.choose(there, ref.step, f"W&B run {about.run_id}"), texts=told)
    anomaly = about.anomaly
    if anomaly is None:
        if template.about == "anomaly":
            raise UsageError(f"W&B run {about.entity}/{about.project}/{about.run_id} has no anomaly to report on")
        return about
    held = [name for name, step in found.capsules if step == anomaly.step]
    about = replace(about, artifact=held[-1] if held else None)
    if held and not about.texts.get("post-mortem"):
        with tempfile.TemporaryDirectory(prefix="trackbridge-report-") as scratch:
            where = f"{about.entity}/{about.project}/{held[-1]}:step-{anomaly.step}"
            folder = _ask(process, "download", where, None, scratch, _LARGEST, True)
            about = subject.with_folder(about, Path(folder))
    return about


def _base_url(record: RunRecord | None) -> str | None:
    """The server of the run's own W&B settings."""
    from trackbridge.rundir import RunDirectory

    backends = RunDirectory(record.path).read().backends if record is not None else []
    return next((backend.get("base_url") for backend in backends if backend.get("kind") == "wandb"), None)


@contextmanager
def _client(base_url: str | None) -> Iterator[Process]:
    """W&B's client, in a process that is gone afterwards."""
    from trackbridge.backends.wandb_process import Process
    from trackbridge.plugins import require

    require("wandb", "wandb")
    require("wandb_workspaces", "reports")
    with tempfile.TemporaryDirectory(prefix="trackbridge-wandb-") as scratch:
        process = Process(Path(scratch), base_url)
        try:
            yield process
        finally:
            process.kill()


def _ask(process: Process, method: str, *arguments: Any) -> Any:
    from trackbridge.backends.wandb_process import ClientError, ours

    try:
        return process.call(method, *arguments, timeout=_SECONDS)
    except ClientError as error:
        raise ours(error) from None
    except TimeoutError as error:
        raise TrackbridgeError(str(error)) from None
