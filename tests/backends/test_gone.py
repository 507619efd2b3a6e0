"""A tracker in which the run is not there any more, or may not be written to: `sync` ends with a line that says what to do,
nothing is lost, and all of it can be delivered to a new run. W&B's own client against the loopback server, a real MLflow
server, TensorBoard."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from test_mlflow import Server
from wandb_kit import QuickConfig

from tests.flaky.a_run import ARun
from trackbridge import shipper
from trackbridge.backends.mlflow import MlflowConfig
from trackbridge.backends.tensorboard import TensorboardConfig
from trackbridge.errors import TrackbridgeError
from trackbridge.names import STEP
from trackbridge.testing import deliver, rows, run_info

if TYPE_CHECKING:
    from tests.wandb_server import WandbServer
    from trackbridge.backends.base import BackendConfig

FIRST, ALL = list(range(10)), list(range(20))
ANEW = "deliver all of it to a new run: trackbridge sync {} --to {} --anew"


@pytest.fixture
def delivered(tmp_path: Path) -> ARun:
    """A run of ten rows that goes on after they were delivered, ends at twenty, and is then delivered further."""
    run = ARun(tmp_path / "run")
    run.rows(range(10))
    return run


def given_up(run: ARun, config: BackendConfig) -> str:
    """`sync` without a time limit; what it says when it gives up, with the journal as it was."""
    journal = {path.name: path.read_bytes() for path in run.directory.rows().iterdir()}
    report = shipper.sync(run.directory.path, [config])
    assert not report.complete
    assert {path.name: path.read_bytes() for path in run.directory.rows().iterdir()} == journal
    (said,) = [backend.last_error or "" for backend in report.backends]
    assert "\n" not in said
    return said


def go_on(run: ARun) -> None:
    run.rows(range(10, 20))
    run.end()


def steps(server: WandbServer, run_id: str = "run") -> list[int]:
    return [int(row[STEP]) for row in server.run("p", run_id).history() if "train/loss" in row]


# -- W&B


@pytest.mark.parametrize("then", ["a new run", "undeleted"])
def test_a_deleted_wandb_run(wandb_server: WandbServer, delivered: ARun, then: str) -> None:
    config = QuickConfig(base_url=wandb_server.url)
    assert not shipper.sync(delivered.directory.path, [config], timeout=60).backends[0].lag
    wandb_server.runs.delete("team", "p", "run")
    go_on(delivered)
    said = given_up(delivered, config)
    assert said.startswith("W&B has no run p/run any more: it was deleted")
    assert said.endswith(ANEW.format(delivered.directory.path, "wandb"))
    if then == "undeleted":
        wandb_server.runs.undelete("team", "p", "run")
    for anew in (then == "a new run", False):  # and the next one finds it
        report = shipper.sync(delivered.directory.path, [config], timeout=60, anew=anew)
        assert report.complete, report
    (name,) = [name for _, _, name in wandb_server.runs.all]
    assert (name == "run") == (then == "undeleted")
    assert steps(wandb_server, name) == ALL
    assert wandb_server.run("p", name).state == "finished"


def test_a_new_run_may_be_deleted_as_well(wandb_server: WandbServer, delivered: ARun) -> None:
    go_on(delivered)
    config = QuickConfig(base_url=wandb_server.url)
    assert shipper.sync(delivered.directory.path, [config], timeout=60).complete
    names = []
    for _ in range(2):
        (name,) = [name for _, _, name in wandb_server.runs.all]
        names.append(name)
        wandb_server.runs.delete("team", "p", name)
        assert shipper.sync(delivered.directory.path, [config], timeout=90, anew=True).complete
    (name,) = [name for _, _, name in wandb_server.runs.all]
    assert len({*names, name}) == 3
    assert steps(wandb_server, name) == ALL


def test_all_of_it_again_into_a_run_that_is_there_changes_nothing(wandb_server: WandbServer, delivered: ARun) -> None:
    go_on(delivered)
    config = QuickConfig(base_url=wandb_server.url)
    for anew in (False, True):
        assert shipper.sync(delivered.directory.path, [config], timeout=60, anew=anew).complete
    assert list(wandb_server.runs.all) == [("team", "p", "run")]
    assert steps(wandb_server) == ALL


@pytest.mark.parametrize("what", ["deleted", "renamed"])
def test_a_wandb_project_that_is_gone_is_not_made_again(wandb_server: WandbServer, delivered: ARun, what: str) -> None:
    """W&B makes a project for whoever writes to it: the rest of the run would be all that is there."""
    config = QuickConfig(base_url=wandb_server.url)
    assert not shipper.sync(delivered.directory.path, [config], timeout=60).backends[0].lag
    if what == "deleted":
        wandb_server.runs.delete_project("team", "p")
    else:
        wandb_server.runs.rename_project("team", "p", "q")
    go_on(delivered)
    assert "its project was deleted or renamed" in given_up(delivered, config)
    assert not [project for _, project, _ in wandb_server.runs.all if project == "p"]
    if what == "deleted":
        assert shipper.sync(delivered.directory.path, [config], timeout=60, anew=True).complete
    else:
        wandb_server.runs.rename_project("team", "q", "p")
        assert shipper.sync(delivered.directory.path, [config], timeout=60).complete
    assert steps(wandb_server) == ALL


def test_another_wandb_project_gets_a_run_of_its_own(wandb_server: WandbServer, delivered: ARun) -> None:
    go_on(delivered)
    for project in (None, "elsewhere"):
        config = QuickConfig(base_url=wandb_server.url, project=project)
        assert shipper.sync(delivered.directory.path, [config], timeout=60).complete
    assert sorted(wandb_server.runs.all) == [("team", "elsewhere", "run"), ("team", "p", "run")]


@pytest.mark.parametrize("before", [True, False], ids=["since", "from the beginning"])
def test_a_wandb_project_without_permission(wandb_server: WandbServer, delivered: ARun, before: bool) -> None:
    config = QuickConfig(base_url=wandb_server.url)
    if before:
        assert not shipper.sync(delivered.directory.path, [config], timeout=60).backends[0].lag
    wandb_server.runs.closed.add(("team", "p"))
    go_on(delivered)
    assert given_up(delivered, config) == (
        "W&B does not let you write to p/run: ask its team for access, or use another key: wandb login"
    )
    wandb_server.runs.closed.clear()
    assert shipper.sync(delivered.directory.path, [config], timeout=60).complete
    assert steps(wandb_server) == ALL


def test_an_id_that_was_deleted_before_the_run_began(wandb_server: WandbServer, delivered: ARun, tmp_path: Path) -> None:
    config = QuickConfig(base_url=wandb_server.url)
    assert not shipper.sync(delivered.directory.path, [config], timeout=60).backends[0].lag
    wandb_server.runs.delete("team", "p", "run")
    later = ARun(tmp_path / "later" / "run")
    later.rows(range(20))
    later.end()
    assert shipper.sync(later.directory.path, [config], timeout=60).complete
    ((_, _, name),) = wandb_server.runs.all
    assert name == f"run-{int(later.directory.info().created)}"
    assert steps(wandb_server, name) == ALL


def test_a_run_deleted_while_it_is_open(wandb_server: WandbServer, delivered: ARun) -> None:
    """W&B's client gives up at the stream's 404; opening the run anew tells why."""
    config = QuickConfig(base_url=wandb_server.url)
    backend = config.build()
    info = delivered.directory.info()
    backend.open(info)
    deliver(backend, rows(range(5)))
    assert backend.write(rows(range(5)), timeout=10) >= -1
    wandb_server.runs.delete("team", "p", "run")
    with pytest.raises(TrackbridgeError, match="W&B has no run p/run any more"):
        while True:
            backend.write(rows(range(9)), timeout=10)
    backend.close(None, timeout=5)


# -- MLflow


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


@pytest.fixture
def mlflow(mlflow_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowConfig:
    for name, text in MlflowConfig.environment.items():
        monkeypatch.setenv(name, text)
    return MlflowConfig(tracking_uri=mlflow_server.uri, experiment=str(tmp_path))


def found(config: MlflowConfig) -> tuple[Any, str, list[str]]:
    """A client, the experiment's id, and the ids of its runs that are not deleted."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(config.uri)
    experiment = client.get_experiment_by_name(str(config.experiment)).experiment_id
    return client, experiment, [run.info.run_id for run in client.search_runs([experiment])]


def losses(client: Any, run_id: str) -> list[int]:
    return sorted(metric.step for metric in client.get_metric_history(run_id, "train/loss"))


@pytest.mark.parametrize("then", ["a new run", "restored"])
def test_a_deleted_mlflow_run(mlflow: MlflowConfig, delivered: ARun, then: str) -> None:
    """Its id is not found any more by a new process: the rest of the run must not go to one that has nothing else."""
    assert not shipper.sync(delivered.directory.path, [mlflow], timeout=60).backends[0].lag
    client, _, (run_id,) = found(mlflow)
    client.delete_run(run_id)
    go_on(delivered)
    assert given_up(delivered, mlflow) == (
        f"MLflow run {run_id} is deleted; restore it with: mlflow runs restore --run-id {run_id}; else "
        + ANEW.format(delivered.directory.path, "mlflow")
    )
    assert not found(mlflow)[2]
    if then == "restored":
        client.restore_run(run_id)
    for anew in (then == "a new run", False):
        assert shipper.sync(delivered.directory.path, [mlflow], timeout=60, anew=anew).complete
    (now,) = found(mlflow)[2]
    assert (now == run_id) == (then == "restored")
    assert losses(client, now) == ALL


def test_a_deleted_mlflow_experiment(mlflow: MlflowConfig, delivered: ARun) -> None:
    assert not shipper.sync(delivered.directory.path, [mlflow], timeout=60).backends[0].lag
    client, experiment, (run_id,) = found(mlflow)
    client.delete_experiment(experiment)
    go_on(delivered)
    assert given_up(delivered, mlflow).endswith(f"restore it with: mlflow experiments restore -x {experiment}")
    client.restore_experiment(experiment)
    assert shipper.sync(delivered.directory.path, [mlflow], timeout=60).complete
    assert losses(client, run_id) == ALL


def test_an_mlflow_experiment_that_has_nothing_of_the_run(mlflow: MlflowConfig, delivered: ARun) -> None:
    """Removed for good (``mlflow gc``), or another server at the address."""
    assert not shipper.sync(delivered.directory.path, [mlflow], timeout=60).backends[0].lag
    client, experiment, (run_id,) = found(mlflow)
    client.rename_experiment(experiment, f"{mlflow.experiment}-old")
    go_on(delivered)
    said = given_up(delivered, mlflow)
    assert said.startswith("mlflow had 10 rows of this run and has none any more")
    assert said.endswith(ANEW.format(delivered.directory.path, "mlflow"))
    assert shipper.sync(delivered.directory.path, [mlflow], timeout=60, anew=True).complete
    (now,) = found(mlflow)[2]
    assert (losses(client, run_id), losses(client, now)) == (FIRST, ALL)


# -- TensorBoard


def events(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [event.step for event in read.Scalars("train/loss")]


def test_a_tensorboard_folder_that_was_removed(delivered: ARun, tmp_path: Path) -> None:
    config = TensorboardConfig(logdir=tmp_path / "tb")
    assert not shipper.sync(delivered.directory.path, [config], timeout=60).backends[0].lag
    assert events(tmp_path / "tb" / "run") == FIRST
    shutil.rmtree(tmp_path / "tb")
    go_on(delivered)
    said = given_up(delivered, config)
    assert said.startswith("tensorboard had 10 rows of this run and has none any more")
    assert said.endswith(ANEW.format(delivered.directory.path, "tensorboard"))
    assert shipper.sync(delivered.directory.path, [config], timeout=60, anew=True).complete
    assert events(tmp_path / "tb" / "run") == ALL


@pytest.mark.parametrize("how", ["removed", "made again"])
def test_a_tensorboard_folder_that_was_removed_under_the_shipper(tmp_path: Path, how: str) -> None:
    """The open file takes what is written to it all the same, and it is nowhere."""
    backend = TensorboardConfig(logdir=tmp_path / "tb").build()
    run = run_info(tmp_path / "run")
    backend.open(run)
    assert backend.write(rows(range(5)), timeout=5) == 4
    (file,) = (tmp_path / "tb").rglob("events.*")
    shutil.rmtree(tmp_path / "tb")
    if how == "made again":
        file.parent.mkdir(parents=True)
        file.touch()
    with pytest.raises(TrackbridgeError, match=r"was removed; deliver all of it to a new run: trackbridge sync .* --anew"):
        backend.write(rows(range(9)), timeout=5)
