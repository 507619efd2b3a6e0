"""``trackbridge init-config``: every setting, with its default and what it does, as a YAML file to begin from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trackbridge.cli.common import console, plain
from trackbridge.errors import ConfigError


def init_config(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help='Where to; "-" prints it.')] = Path("trackbridge.yaml"),
) -> None:
    """Write every setting with its default as a YAML file that explains itself. Never writes over a file."""
    from trackbridge.reference import settings_yaml

    text = settings_yaml()
    if str(file) == "-":
        typer.echo(text, nl=False)
        return
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise ConfigError(f"{file} is there already; give another name, or `trackbridge init-config -` prints it") from None
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None
    console(stderr=True).print(f"{plain(file)}: use it as trackbridge.init({str(file)!r}, ...)")
