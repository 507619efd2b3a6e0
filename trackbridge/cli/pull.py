"""``trackbridge pull REF``: fetch a capsule out of a tracker, or check one on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trackbridge.cli.common import Json, console, emit, plain, size

if TYPE_CHECKING:
    from trackbridge.capsule import SpikeCapsule


def pull(
    reference: Annotated[
        str,
        typer.Argument(
            metavar="REF",
            help="A folder, wandb:entity/project/artifact:alias, wandb:entity/project/run_id[@step], mlflow:run_id[@step] "
            "(honours MLFLOW_TRACKING_URI) or tensorboard:logdir[@step].",
        ),
    ],
    dest: Annotated[Path | None, typer.Option(help="Where to put it; default: a folder of its own here.")] = None,
    json: Json = False,
) -> None:
    """Fetch a spike capsule out of a tracker and check every file of it."""
    from trackbridge.backends.words import anomaly_line
    from trackbridge.fetch import pull as fetch

    progress = console(stderr=True)
    with progress.status(f"Fetching {plain(reference)} ..."):
        capsule = fetch(reference, dest)
    anomaly = capsule.anomaly
    total = sum(entry.bytes for entry in capsule.files.values())
    if json:
        emit(
            {
                "path": capsule.path,
                "tier": capsule.tier,
                "run": capsule.run,
                "step": capsule.step,
                "restart_step": capsule.restart_step,
                "anomaly": {"kind": anomaly.kind, "series": anomaly.series, "onset": anomaly.onset, "value": anomaly.value},
                "files": len(capsule.files),
                "bytes": total,
                "missing": capsule.missing,
            }
        )
        return
    out = console()
    out.print(plain(anomaly_line(anomaly)))
    out.print(f"{len(capsule.files)} files, {size(total)}, every digest checked; tier [bold]{_tier(capsule)}[/]")
    for lack in capsule.missing:
        out.print(f"[yellow]missing[/] {plain(lack)}", soft_wrap=True)
    out.print(plain(capsule.path), style="bold", soft_wrap=True)


def _tier(capsule: SpikeCapsule) -> str:
    """What the capsule is good for here."""
    if capsule.joined or capsule.local is None or capsule.local.tier == "explain":
        return capsule.tier
    return f"{capsule.local.tier} once the batches are there (they stayed on the recording machine)"
