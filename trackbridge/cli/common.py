"""What the commands share: where output goes, JSON, and finding a run."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trackbridge import plugins
from trackbridge.errors import ReferenceNotFoundError, UsageError, nearest
from trackbridge.harmless import harmless
from trackbridge.rundir import dumps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from trackbridge.history import RunRecord
    from trackbridge.shipper import BackendStatus

Json = Annotated[bool, typer.Option("--json", help="Strict JSON on stdout, nothing else.")]

_BARS = "▁▂▃▄▅▆▇█"
_FAR = 2.0
"""Heights of a bar that values far from the others have to themselves, at each end."""


_LEAST = 1e-306
"""What is closer together, beside a value of 0.25, is as good as equal: no slope through it is a number."""


def console(*, stderr: bool = False) -> Console:
    """Tables go to stdout, progress to stderr. In a pipe lines are wide, so that nothing is cut."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else 200)


def plain(value: object) -> str:
    """`value` as text in which rich sees no markup and a terminal no command: names, paths and errors may have brackets, and a
    name may come from anywhere."""
    from rich.markup import escape

    return escape(harmless(str(value)))


def emit(value: Any) -> None:
    """`value` as strict JSON on stdout; NaN and infinities are the strings "NaN", "Infinity", "-Infinity"."""
    typer.echo(dumps(value))


def find_run(reference: str, folder: Path) -> Path:
    """The run directory that `reference` names: a path, or a run's id or name in `folder`.

    Raises `ReferenceNotFoundError` with the nearest one, or `UsageError` for what names something else than a run here.
    """
    if Path(reference).exists():
        return Path(reference)
    known = known_runs(folder)
    if reference in known:
        return known[reference]
    run, _, step = reference.rpartition("@")
    if step.isdigit() and (run in known or Path(run).exists()):
        raise UsageError(f"{reference!r} names a step, and this is about a whole run: leave @{step} away")
    if reference.partition(":")[0] in plugins.available(plugins.BACKENDS):
        others = "`trackbridge pull` brings a capsule from a tracker, `trackbridge scan` reads a curve there"
        raise UsageError(f"{reference!r} is in a tracker, and this reads runs on this disk; {others}")
    raise ReferenceNotFoundError(
        f"no run {reference!r} here or in {folder}{nearest(reference, known)}; `trackbridge runs DIR` lists a folder's runs"
    )


def load_run(path: Path) -> RunRecord:
    """The run at `path`, without a warning of damage: `show` tells of it on its page, and it is no reason for no report."""
    import warnings

    from trackbridge import load

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return load(path)


def known_runs(folder: Path) -> dict[str, Path]:
    """The run directories in `folder` by name and by id; an id counts before a name."""
    from trackbridge import history

    found = history.runs(folder) if folder.is_dir() else []
    return {run.name: run.path for run in found} | {run.run_id: run.path for run in found}


def lags(backends: Sequence[BackendStatus]) -> str:
    """What a table says about delivery: what each tracker lacks, or that nothing does."""
    if not backends:
        return "no tracker"
    return ", ".join(f"{status.kind} lacks {status.lag}" for status in backends if status.lag) or "all"


def sparkline(values: Any, width: int = 40) -> str:
    """`values` (finite or not) as one line of bars, each bar the value of its stretch that is farthest from the median, so
    that a single spike survives; a non-finite stretch is ``!``. What lies far from the nine tenths of the bars that are closest
    together gets at most two heights on either side: neither the spike nor the course beside it is flat."""
    import numpy as np

    given = np.asarray(values, dtype=np.float64)
    if not len(given):
        return ""
    finite = given[np.isfinite(given)]
    given = given / (float(np.abs(finite).max(initial=0.0)) or 1.0) / 4  # so that no sum or difference overflows
    middle = float(np.median(given[np.isfinite(given)])) if len(finite) else 0.0
    stretches = np.array_split(given, min(width, len(given)))
    peaks = np.array([part[np.argmax(np.abs(part - middle))] if np.isfinite(part).all() else np.nan for part in stretches])
    known = np.isfinite(peaks)
    heights = np.zeros(len(peaks))
    if known.any():
        heights[known] = np.interp(peaks[known], *_axis(sorted(peaks[known].tolist())))
    return "".join(_BARS[round(height)] if fine else "!" for height, fine in zip(heights.tolist(), known, strict=True))


def _axis(shown: list[float]) -> tuple[list[float], list[float]]:
    """Values, ascending, and their heights, 0 to 7; between them heights are linear. `shown`: all there are, ascending."""
    top = len(_BARS) - 1.0
    least, most = shown[0], shown[-1]
    count = len(shown) - len(shown) // 10
    low, high = min(zip(shown, shown[count - 1 :], strict=False), key=lambda ends: ends[1] - ends[0])
    if high - low < _LEAST:
        return [least, most], [0.0, top if least < most else 0.0]
    down, up = (min(_FAR, top * (end / (most - least))) for end in (low - least, most - high))
    return [least, low, high, most], [0.0, down, top - up, top]


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
