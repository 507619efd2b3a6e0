"""``trackbridge sync DIR``: deliver what a tracker has not got yet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trackbridge.cli.common import Json, console, emit
