"""The command line, ``trackbridge``. One small file per command; a command imports what it needs when it runs.

Exit status: 0 done; 1 the command ran and the answer is no (each command says what that means); 2 a mistake of the user, one
line on stderr. `replay` has a list of its own.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trackbridge._version import __version__
from trackbridge.cli.demo import demo
from trackbridge.cli.diff import diff
from trackbridge.cli.doctor import doctor
from trackbridge.cli.export import export
from trackbridge.cli.init_config import init_config
from trackbridge.cli.pull import pull
from trackbridge.cli.replay import replay
from trackbridge.cli.report import report
from trackbridge.cli.rollback import rollback
from trackbridge.cli.runs import runs
from trackbridge.cli.scan import scan
from trackbridge.cli.show import show
from trackbridge.cli.sync import sync
from trackbridge.cli.view import view
from trackbridge.errors import TrackbridgeError
from trackbridge.harmless import harmless


class OneLineErrors(TyperGroup):
    """An error that names its fix is shown as one line; a traceback would hide it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TrackbridgeError as error:
            typer.echo(f"trackbridge: {harmless(str(error))}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=OneLineErrors,
    help="A flight recorder for PyTorch training that lives inside the tracker you already use.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trackbridge {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # it draws one for each small file of a capsule


for command in (demo, runs, show, diff, scan, view, sync, export, pull, replay, rollback, report, init_config, doctor):
    app.command()(command)
