"""``trackbridge view REF``: the local page of a run or of a spike capsule, once or following a running run."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trackbridge.cli.common import Json, console, emit, find_run, plain, size
from trackbridge.errors import ReferenceNotFoundError, UsageError

if TYPE_CHECKING:
    from trackbridge.fetch import Reference


def view(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="REF",
            help="A run (folder, id or name), a capsule's folder, RUN@STEP, or a capsule in a tracker: wandb:..., mlflow:..., "
            "tensorboard:...",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the page goes; default: beside what it shows.")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Show it in a browser.")] = True,
    live: Annotated[bool, typer.Option("--live", help="Serve it on this machine and follow the run until Ctrl-C.")] = False,
    port: Annotated[int, typer.Option(help="For --live; default: any free one.")] = 0,
    folder: Annotated[Path, typer.Option("--dir", help="Where to look for ids and names.")] = Path("runs"),
    json: Json = False,
) -> None:
    """Make the local page of a run or a capsule: one file, no network."""
    from trackbridge.fetch import LOCAL, Reference

    ref = Reference.parse(reference)
    if ref.kind == LOCAL and not Path(ref.where).exists():
        ref = Reference(LOCAL, str(find_run(ref.where, folder)), ref.step)
    if live:
        if out is not None:
            raise UsageError("--live serves the page and writes no file; leave --out away")
        _follow(ref, port, open_page and not json, json=json)
        return
    if port:
        raise UsageError("--port is for --live")
    with console(stderr=True).status("Making the page ..."):
        html, default = _made(ref)
    target = (out or default).absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(html, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{target} cannot be written ({error.strerror}); say with --out where the page may go") from None
    if json:
        emit({"path": target, "bytes": len(html.encode())})
    else:
        out_ = console()
        out_.print(plain(target), style="bold", soft_wrap=True)
        out_.print(f"{size(len(html.encode()))}, one file; it opens from disk and asks for nothing", style="dim")
    if open_page and not json:
        _open(target.as_uri())


def _made(ref: Reference) -> tuple[str, Path]:
    """The page, and where it goes unless told otherwise. Never into a capsule: its files are sealed."""
    from trackbridge import capsule as capsules
    from trackbridge import fetch, history
    from trackbridge.reports.run_page import run_page
    from trackbridge.reports.spike import run_directory, spike_page

    if ref.kind != fetch.LOCAL:
        with tempfile.TemporaryDirectory() as quarantine:
            capsule = fetch.pull(f"{ref.kind}:{ref.where}{'' if ref.step is None else f'@{ref.step}'}", quarantine)
            return spike_page(capsule), Path(f"{capsule.path.name}.html")
    path = Path(ref.where)
    if ref.step is None and not (path / capsules.MANIFEST).is_file():
        try:
            found = history.find(path)
        except ReferenceNotFoundError as error:
            raise ReferenceNotFoundError(f"{error}; a capsule's folder or a tracker's reference will do, too") from None
        return run_page(history.RunRecord(found)), found.path / "report.html"
    capsule = fetch.pull(path if ref.step is None else f"{path}@{ref.step}")
    beside = run_directory(capsule) or capsule.path.parent
    return spike_page(capsule), beside / f"{capsule.path.name}.html"


def _follow(ref: Reference, port: int, open_page: bool, *, json: bool) -> None:
    from trackbridge.fetch import LOCAL
    from trackbridge.reports.live import LiveRun
    from trackbridge.reports.server import LiveServer

    if ref.kind != LOCAL or ref.step is not None:
        raise UsageError("--live follows a run on this disk; for a capsule leave it away")
    with LiveServer(LiveRun(ref.where), port) as server:
        if json:
            emit({"url": server.url})
        else:
            out = console()
            out.print(f"[bold]{plain(server.url)}[/]", soft_wrap=True)
            out.print("on this machine only; Ctrl-C ends it", style="dim")
        sys.stdout.flush()
        if open_page:
            _open(server.url)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            console(stderr=True).print("stopped")


def _open(address: str) -> None:
    """Show it, where there is a screen: a text browser would take the terminal over."""
    import webbrowser

    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return
    webbrowser.open(address)
