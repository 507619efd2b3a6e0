"""The trackers of the demo, each in a folder, and what each tracker's own reader says it holds.

Nothing here asks the journal or our own bookkeeping: this is the other side's view.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trackbridge.backends.base import BackendConfig
from trackbridge.backends.mlflow import MlflowConfig
from trackbridge.backends.tensorboard import TensorboardConfig
from trackbridge.backends.wandb import WandbConfig
from trackbridge.records import RunInfo

LOSS = "train/loss"
CAPSULE = "spike-capsule"


def program(name: str) -> str:
    """What to type for `name`: by itself where the shell finds it, else its place in this environment."""
    beside = Path(sys.executable).parent / name
    return name if shutil.which(name) or not beside.exists() else shlex.quote(str(beside))


@dataclass(frozen=True)
class Held:
    """What a tracker holds: the loss by step, as (step, value) points, and where its capsules are."""

    losses: list[tuple[int, float]]
    capsules: list[str]


@dataclass(frozen=True)
class DemoTracker:
    """`number` is the tracker's own number type, `read` asks its own reader, `look` is the command that shows the run, `pull`
    the capsule's reference without the step (None where there is no server to pull from), for which `variables` must be set."""

    title: str
    config: BackendConfig
    number: type[np.floating[Any]]
    read: Callable[[RunInfo], Held]
    look: Callable[[RunInfo], str]
    pull: Callable[[RunInfo], str] | None
    variables: Mapping[str, str] = field(default_factory=dict)


def trackers(folder: Path) -> list[DemoTracker]:
    """MLflow in a sqlite file, TensorBoard, W&B offline; all inside `folder`."""
    return [_mlflow(folder), _tensorboard(folder), _wandb()]


def _mlflow(folder: Path) -> DemoTracker:
    uri = f"sqlite:///{folder.absolute()}/mlflow.db"

    def read(run: RunInfo) -> Held:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(run.project)
        (found,) = client.search_runs([experiment.experiment_id], f"tags.`trackbridge.run_id` = '{run.run_id}'")
        points = [(metric.step, metric.value) for metric in client.get_metric_history(found.info.run_id, LOSS)]
        capsules = [
            f"run {found.info.run_id}, artifact {entry.path}"
            for entry in client.list_artifacts(found.info.run_id)
            if any(Path(inside.path).name == "manifest.json" for inside in client.list_artifacts(found.info.run_id, entry.path))
        ]
        return Held(points, capsules)

    return DemoTracker(
        title="MLflow",
        config=MlflowConfig(tracking_uri=uri, artifact_location=(folder.absolute() / "mlartifacts").as_uri()),
        number=np.float64,
        read=read,
        look=lambda run: f"{program('mlflow')} ui --backend-store-uri {shlex.quote(uri)}",
        pull=lambda run: f"mlflow:{run.run_id}",
        variables={"MLFLOW_TRACKING_URI": uri},
    )


def _tensorboard(folder: Path) -> DemoTracker:
    config = TensorboardConfig(logdir=folder / "tensorboard")

    def read(run: RunInfo) -> Held:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        root = config.root(run)
        events = EventAccumulator(str(root), size_guidance={"scalars": 0})
        events.Reload()
        points = [(event.step, event.value) for event in events.Scalars(LOSS)]
        return Held(points, [str(manifest.parent) for manifest in root.glob("artifacts/*/manifest.json")])

    return DemoTracker(
        title="TensorBoard",
        config=config,
        number=np.float32,
        read=read,
        look=lambda run: config.where(run).replace("tensorboard", program("tensorboard"), 1),
        pull=lambda run: f"tensorboard:{config.root(run)}",
    )


def _wandb() -> DemoTracker:
    def folder(run: RunInfo) -> Path:
        return Path(run.directory) / "wandb"

    def read(run: RunInfo) -> Held:
        from trackbridge.backends import wandb_file

        recorded = wandb_file.load(folder(run))
        points = [(row["trackbridge/step"], row[LOSS]) for row in recorded.history if LOSS in row]
        capsules = [f"artifact {a.name}, {len(a.files)} files" for a in recorded.artifacts if a.kind == CAPSULE]
        return Held(points, capsules)

    return DemoTracker(
        title="W&B (offline)",
        config=WandbConfig(mode="offline"),
        number=np.float64,
        read=read,
        look=lambda run: f"{program('wandb')} leet {shlex.quote(str(next(folder(run).glob('offline-run-*'), folder(run))))}",
        pull=None,
    )
