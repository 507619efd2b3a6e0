"""What the commands share: where output goes, JSON, and finding a run."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trackbridge.errors import ReferenceNotFoundError, nearest
from trackbridge.rundir import dumps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from trackbridge.shipper import BackendStatus

Json = Annotated[bool, typer.Option("--json", help="Strict JSON on stdout, nothing else.")]

_BARS = "▁▂▃▄▅▆▇█"


def console(*, stderr: bool = False) -> Console:
    """Tables go to stdout, progress to stderr. In a pipe lines are wide, so that nothing is cut."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else 200)


def plain(value: object) -> str:
    """`value` as text in which rich sees no markup: names, paths and errors may have brackets."""
    from rich.markup import escape

    return escape(str(value))


def emit(value: Any) -> None:
    """`value` as strict JSON on stdout; NaN and infinities are the strings "NaN", "Infinity", "-Infinity"."""
    typer.echo(dumps(value))


def find_run(reference: str, folder: Path) -> Path:
    """The run directory that `reference` names: a path, or a run's id or name in `folder`.

    Raises `ReferenceNotFoundError` with the nearest one.
    """
    from trackbridge import history

    if Path(reference).exists():
        return Path(reference)
    known = {key: run.path for run in (history.runs(folder) if folder.is_dir() else ()) for key in (run.name, run.run_id)}
    if reference in known:
        return known[reference]
    raise ReferenceNotFoundError(
        f"no run {reference!r} here or in {folder}{nearest(reference, known)}; `trackbridge runs DIR` lists a folder's runs"
    )


def lags(backends: Sequence[BackendStatus]) -> str:
    """What a table says about delivery: what each tracker lacks, or that nothing does."""
    if not backends:
        return "no tracker"
    return ", ".join(f"{status.kind} lacks {status.lag}" for status in backends if status.lag) or "all"


def sparkline(values: Any, width: int = 40) -> str:
    """`values` (finite or not) as one line of bars, each bar the value of its stretch that is farthest from the median, so
    that a single spike survives; a non-finite stretch is ``!``."""
    import numpy as np

    given = np.asarray(values, dtype=np.float64)
    if not len(given):
        return ""
    finite = given[np.isfinite(given)]
    middle = float(np.median(finite)) if len(finite) else 0.0
    stretches = np.array_split(given, min(width, len(given)))
    peaks = [float(part[np.argmax(np.abs(part - middle))]) if np.isfinite(part).all() else np.nan for part in stretches]
    shown = [peak for peak in peaks if np.isfinite(peak)]
    low, high = (min(shown), max(shown)) if shown else (0.0, 1.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((peak - low) * scale)] if np.isfinite(peak) else "!" for peak in peaks)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def size(count: float) -> str:
    """Bytes for a reader: ``12.3 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
