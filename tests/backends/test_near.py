"""Beside and inside a run that the user has open: W&B (real client, offline and against the loopback server) and MLflow.

Each case is a training script of its own, as SDKs keep their open run in the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from wandb_kit import QuickConfig

from tests.wandb_server import KEY
from trackbridge import shipper
from trackbridge.backends.wandb_file import RecordedRun, load
from trackbridge.errors import RetryLater
from trackbridge.journal import JournalWriter
from trackbridge.names import SEQ, STEP
from trackbridge.rundir import RunDirectory
from trackbridge.shipping.cursor import first_free_seq
from trackbridge.testing import rows

if TYPE_CHECKING:
    from tests.wandb_server import WandbServer
    from tests.wandb_server.runs import Run

BEGIN = """
import json, random, sys
import trackbridge, {sdk}
def steps(run, many=20):
    for step in range(many):
        run.step(loss=1.0 / (step + 1))
"""


def script(folder: Path, text: str, sdk: str = "wandb", code: int = 0, **environment: str) -> str:
    # not from an environment in which a test has set things for its own client
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "MLFLOW"))}
    env |= {"WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false", **environment}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN.format(sdk=sdk) + text], cwd=folder, env=env, capture_output=True, text=True, timeout=150,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def ours(history: list[dict[str, Any]]) -> list[int]:
    return [int(row[STEP]) for row in history if marks(row) and "train/loss" in row]


def marks(row: dict[str, Any]) -> list[str]:
    """Under which keys a row says its seq: one for each recording in a run."""
    return [key for key in row if key.startswith(SEQ)]


def config(run: RecordedRun, key: str) -> Any:
    return run.config.get(key)


# -- W&B


def test_a_companion_in_the_same_project_and_group_linked_both_ways(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
theirs = wandb.init(mode="offline", project="their-project", id="theirs", group="their-group")
run = trackbridge.init(backend={"kind": "wandb", "mode": "offline"}, id="ours", project="p")
theirs.log({"mine": 1.0}, step=7)
steps(run)
assert run.finish(60), "not delivered"
theirs.log({"mine": 2.0}, step=8)
theirs.finish()
""",
    )
    theirs, mine = load(tmp_path / "wandb"), load(tmp_path / "runs" / "ours" / "wandb")
    assert [row["mine"] for row in theirs.history] == [1.0, 2.0]
    assert not ours(theirs.history)
    assert ours(mine.history) == list(range(20))
    assert config(theirs, "trackbridge/companion") == "their-project/ours"
    assert config(mine, "trackbridge/companion_of") == "theirs"
    where = json.loads((tmp_path / "runs" / "ours" / "run.json").read_text())["backends"][0]
    assert (where["project"], where["beside"]["group"]) == ("their-project", "their-group")


def test_joined_rows_are_in_the_users_own_run_which_stays_theirs(tmp_path: Path) -> None:
    out = script(
        tmp_path,
        """
quick = wandb.Settings(x_transaction_log_flush_interval=0.2)
theirs = wandb.init(mode="offline", project="their-project", id="theirs", config={"lr": 5}, settings=quick)
run = trackbridge.init(backend=["tensorboard", "wandb"], join=True, id="ours", config={"lr": 7, "width": 3})
assert run.native("wandb") is theirs
steps(run)
report = run.finish(60)
assert report, str(report)
theirs.log({"after": 1.0})
theirs.finish()
print(wandb.run, theirs.id)
""",
    )
    assert "None theirs" in out
    both = load(tmp_path / "wandb")
    assert ours(both.history) == list(range(20))
    assert [row["after"] for row in both.history if "after" in row] == [1.0]
    assert both.exit_code == 0
    assert (config(both, "lr"), config(both, "width")) == (5, 3)
    ours_ = tmp_path / "runs" / "ours"
    assert not list((ours_ / "wandb").glob("*run*"))
    assert list((ours_ / "tensorboard").glob("events.*"))
    assert "wandb" not in (ours_ / "shipper" / "shipper.log").read_text(), "the shipper must not write into their run as well"


def test_joined_online(tmp_path: Path, wandb_server: WandbServer) -> None:
    script(
        tmp_path,
        """
theirs = wandb.init(project="their-project", id="theirs", settings=wandb.Settings(x_file_stream_transmit_interval=1))
for n in range(30):
    theirs.log({"mine": float(n)})
(open("a.txt", "w")).write("hello")
run = trackbridge.init(backend="wandb", join=True, id="ours")
steps(run)
run.log_artifact("a.txt")
report = run.finish(60)
assert report, str(report)
theirs.log({"mine": 99.0})
theirs.finish()
""",
        WANDB_BASE_URL=wandb_server.url, WANDB_API_KEY=KEY,
    )  # fmt: skip
    history = wandb_server.run("their-project", "theirs").history()
    assert ours(history) == list(range(20))
    assert [row["mine"] for row in history if "mine" in row] == [*map(float, range(30)), 99.0]
    assert wandb_server.operations["CommitArtifact"] >= 1


TWO = """
for name, many in (("one", 20), ("two", 13)):
    run = trackbridge.init(backend="wandb", join=True, id=f"{name}-{theirs.offline}", config={name: 1})
    steps(run, many)
    run.log_artifact("a.txt")
    report = run.finish(60)
    assert report, str(report)
theirs.log({"mine": 99.0})
theirs.finish()
"""


def both_arrived(history: list[dict[str, Any]]) -> None:
    rows = [row for row in history if "train/loss" in row]
    first = marks(rows[0])
    assert [int(row[STEP]) for row in rows if marks(row) == first] == list(range(20))
    assert [int(row[STEP]) for row in rows if marks(row) != first] == list(range(13))


def test_two_recordings_in_one_run_are_told_apart(tmp_path: Path, wandb_server: WandbServer) -> None:
    (tmp_path / "a.txt").write_text("hello")
    begin = 'theirs = wandb.init(project="their-project", id="theirs", settings=wandb.Settings('
    script(tmp_path, f'{begin}mode="offline", x_transaction_log_flush_interval=0.2))\n{TWO}')
    held = load(tmp_path / "wandb")
    both_arrived(held.history)
    assert (config(held, "one"), config(held, "two")) == (1, 1)
    assert len(held.artifacts) == 2
    script(
        tmp_path, f"{begin}x_file_stream_transmit_interval=1))\n{TWO}", WANDB_BASE_URL=wandb_server.url, WANDB_API_KEY=KEY
    )  # fmt: skip
    both_arrived(wandb_server.run("their-project", "theirs").history())


DIES = """
import os, pathlib, signal
from trackbridge.backends.wandb_file import load
from trackbridge.journal import JournalReader
from trackbridge.records import Row
run = trackbridge.init(
    backend="wandb", join=True, id="ours", config={"lr": 7, "width": 3}, tags=["ours"], name="ours", group="ours", project="p"
)
here = pathlib.Path.cwd()
(here / "elsewhere").mkdir()
os.chdir("elsewhere")
steps(run, 10)
%s
steps(run, 10)
reader, found = JournalReader(here / "runs" / "ours" / "rank-0000" / "rows"), 0
while found < 20:
    found += sum(isinstance(record, Row) for record in reader.read())
os.kill(os.getpid(), signal.SIGKILL)
"""

THEIRS = """
theirs = wandb.init(
    %s project="their-project", id="theirs", config={"lr": 5}, settings=wandb.Settings(x_transaction_log_flush_interval=0.2),
    tags=["mine"], name="mine", group="mine", job_type="mine", notes="mine",
)
"""


def died(folder: Path, begin: str, theirs: str, **environment: str) -> QuickConfig:
    """A training that joined a run of the user's, which `theirs` ended after ten steps, went on and was killed. Returns what
    served it."""
    script(folder, begin + DIES % theirs, code=-9, **environment)
    saved = json.loads((folder / "runs" / "ours" / "run.json").read_text())["backends"][0]
    return QuickConfig.model_validate(saved)


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("failed", 1), ("killed", 255)])
def test_sync_of_a_joined_run_leaves_it_as_it_was(tmp_path: Path, wandb_server: WandbServer, state: str, code: int) -> None:
    """Ours was killed; theirs is ended as it had ended, with all that they said of it."""
    config = died(tmp_path, THEIRS % "", "theirs.finish()", WANDB_BASE_URL=wandb_server.url, WANDB_API_KEY=KEY)
    theirs = wandb_server.run("their-project", "theirs")
    theirs.state, theirs.exit_code = state, None
    report = shipper.sync(tmp_path / "runs" / "ours", [config.model_copy(update={"base_url": wandb_server.url})], timeout=60)
    assert report.complete and report.killed, report
    assert ours(theirs.history()) == list(range(20))
    assert theirs.exit_code == code
    said_by_them(theirs)


def said_by_them(theirs: Run) -> None:
    assert theirs.tags == ["mine"]
    assert {theirs.display, theirs.group, theirs.job_type, theirs.notes} == {"mine"}
    assert (theirs.settings()["lr"], theirs.settings()["width"]) == (5, 3)
    assert "trackbridge/created" not in theirs.settings()


BOTH_DIE = """
import os, signal
for name in ("one", "two"):
    run = trackbridge.init(backend="wandb", join=True, id=name)
    if name == "one":
        run.finish(0.1)
theirs.finish()
os.kill(os.getpid(), signal.SIGKILL)
"""


def two_recordings(folder: Path, server: WandbServer) -> tuple[list[Path], list[QuickConfig]]:
    """Two recordings that joined one run, which has ended, with rows that are still to be delivered."""
    begin = 'theirs = wandb.init(project="their-project", id="theirs")\n'
    script(folder, begin + BOTH_DIE, code=-9, WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY)
    runs = [folder / "runs" / name for name in ("one", "two")]
    configs = []
    for run, many in zip(runs, (40, 30), strict=True):
        directory = RunDirectory(run)
        later = JournalWriter(directory.rows(), segment_bytes=1 << 20, fsync_seconds=1e9, floor=first_free_seq(directory))
        for record in rows(range(many)):
            later.append(record)
        later.close()
        saved = json.loads(directory.file.read_text())["backends"][0]
        configs.append(QuickConfig.model_validate(saved).model_copy(update={"base_url": server.url}))
    return runs, configs


def test_one_sync_at_a_time_into_a_joined_run(tmp_path: Path, wandb_server: WandbServer) -> None:
    """Each directory has a claim of its own; two processes in one run of W&B replace each other's rows."""
    runs, configs = two_recordings(tmp_path, wandb_server)
    first, second = (config.build() for config in configs)
    first.open(RunDirectory(runs[0]).info())
    wandb_server.run("their-project", "theirs").state = "finished"  # as it is shown until the first one's rows are there
    with pytest.raises(RetryLater, match="another process is writing into the W&B run theirs"):
        second.open(RunDirectory(runs[1]).info())
    first.close(None, timeout=5)
    wandb_server.run("their-project", "theirs").state = "finished"
    second.open(RunDirectory(runs[1]).info())
    second.close(None, timeout=5)


def test_two_syncs_at_once_into_a_joined_run_lose_nothing(tmp_path: Path, wandb_server: WandbServer) -> None:
    runs, configs = two_recordings(tmp_path, wandb_server)
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda run, config: shipper.sync(run, [config], timeout=90), runs, configs))
    assert all(report.complete for report in reports), reports
    theirs = wandb_server.run("their-project", "theirs")
    found = [row for row in theirs.history() if "train/loss" in row]
    of = {mark: [int(row[STEP]) for row in found if marks(row) == [mark]] for row in found for mark in marks(row)}
    assert sorted(of.values(), key=len) == [[*range(30)], [*range(40)]]
    assert theirs.state == "finished"


@pytest.mark.parametrize(("later", "left"), [("crashed", "finished"), ("failed", "failed")])
def test_a_sync_that_was_cut_short_does_not_leave_a_joined_run_crashed(
    tmp_path: Path, wandb_server: WandbServer, later: str, left: str
) -> None:
    """W&B has it crashed after some minutes. If they resumed it meanwhile, it is left as that life ended."""
    begin = 'theirs = wandb.init(project="their-project", id="theirs")\n'
    config = died(tmp_path, begin, "theirs.finish()", WANDB_BASE_URL=wandb_server.url, WANDB_API_KEY=KEY)
    config = config.model_copy(update={"base_url": wandb_server.url})
    theirs = wandb_server.run("their-project", "theirs")
    cut = config.build()
    cut.open(RunDirectory(tmp_path / "runs" / "ours").info())
    cut._drop()
    cut._leave()  # as the system does with the process
    theirs.state = later
    report = shipper.sync(tmp_path / "runs" / "ours", [config], timeout=60)
    assert report.complete, report
    assert ours(theirs.history()) == list(range(20))
    assert theirs.state == left


def test_sync_waits_for_a_joined_run_that_goes_on(tmp_path: Path, wandb_server: WandbServer) -> None:
    """Two processes that write to one run of W&B overwrite each other's rows. One that is gone is crashed there some minutes
    later, and stays so."""
    begin = 'theirs = wandb.init(project="their-project", id="theirs")\n'
    config = died(tmp_path, begin, "theirs.log({'mine': 1.0})", WANDB_BASE_URL=wandb_server.url, WANDB_API_KEY=KEY)
    config = config.model_copy(update={"base_url": wandb_server.url})
    theirs = wandb_server.run("their-project", "theirs")
    report = shipper.sync(tmp_path / "runs" / "ours", [config], timeout=6)
    assert not report.complete
    assert "has not ended there" in (report.backends[0].last_error or "")
    for state in ("preempting", "preempted"):  # it will be taken up again
        theirs.state = state
        with pytest.raises(RetryLater, match=f"has not ended there.*{state}"):
            config.build().open(RunDirectory(tmp_path / "runs" / "ours").info())
        assert theirs.state == state
    theirs.state = "crashed"
    report = shipper.sync(tmp_path / "runs" / "ours", [config], timeout=60)
    assert report.complete, report
    assert ours(theirs.history()) == list(range(20))
    assert theirs.exit_code is None


def test_a_joined_run_that_was_deleted(tmp_path: Path, wandb_server: WandbServer) -> None:
    """It was theirs, so it is theirs to restore: no run of ours is made in its place."""
    begin = 'theirs = wandb.init(project="their-project", id="theirs")\n'
    config = died(tmp_path, begin, "theirs.finish()", WANDB_BASE_URL=wandb_server.url, WANDB_API_KEY=KEY)
    config = config.model_copy(update={"base_url": wandb_server.url})
    wandb_server.runs.delete("team", "their-project", "theirs")
    for anew in (False, True):
        report = shipper.sync(tmp_path / "runs" / "ours", [config], anew=anew)
        assert not report.complete and not wandb_server.runs.all
        said = report.backends[0].last_error or ""
        assert said.startswith("W&B has no run team/their-project/theirs any more") and "--anew" not in said
    wandb_server.runs.undelete("team", "their-project", "theirs")
    assert shipper.sync(tmp_path / "runs" / "ours", [config], timeout=60).complete
    assert ours(wandb_server.run("their-project", "theirs").history()) == list(range(20))


OFFLINE = THEIRS % 'mode="offline", dir="here",'
WRITTEN = """
while len([row for row in load(here / "here" / "wandb").history if "train/loss" in row]) < 10:
    pass
"""


@pytest.mark.parametrize("code", [0, 3])
def test_sync_of_a_run_joined_offline(tmp_path: Path, wandb_server: WandbServer, code: int) -> None:
    """Rows that are in their file, which is in a folder that they named relatively, are not written again."""
    config = died(tmp_path, OFFLINE, f"{WRITTEN}theirs.finish(exit_code={code})")
    report = shipper.sync(tmp_path / "runs" / "ours", [config], timeout=60)
    assert report.complete, report
    first, second = load(tmp_path / "here" / "wandb"), load(tmp_path / "runs" / "ours" / "wandb")
    assert (ours(first.history), ours(second.history)) == ([*range(10)], [*range(10, 20)])
    assert (first.exit_code, second.exit_code) == (code, code)
    assert "lr" not in second.config and not second.tags and not second.group
    files = [str(path) for path in (*tmp_path.glob("here/wandb/offline-*"), *tmp_path.glob("runs/ours/wandb/offline-*"))]
    env = {**os.environ, "WANDB_BASE_URL": wandb_server.url}
    subprocess.run([sys.executable, "-m", "wandb", "sync", *files], env=env, cwd=tmp_path, check=True, capture_output=True)
    theirs = wandb_server.run("their-project", "theirs")
    assert ours(theirs.history()) == [*range(20)]
    said_by_them(theirs)


@pytest.mark.parametrize("what", ["gone", "of another version"])
def test_sync_of_a_run_joined_offline_whose_file_cannot_be_read(tmp_path: Path, what: str) -> None:
    """What was in it is not known, nor how it ended: what was not confirmed is in ours, which ends as our recording did."""
    config = died(tmp_path, OFFLINE, f"{WRITTEN}theirs.finish()")
    (file,) = (tmp_path / "here" / "wandb").glob("*run-*/run-theirs.wandb")
    file.unlink()
    if what != "gone":
        file.write_bytes(b":W&B" + bytes([0xE1, 0xBE, 9]) + bytes(100))
    report = shipper.sync(tmp_path / "runs" / "ours", [config], timeout=60)
    assert report.complete, report
    second = load(tmp_path / "runs" / "ours" / "wandb")
    steps = ours(second.history)
    assert steps == [*range(steps[0], 20)] and steps[0] <= 10
    assert second.exit_code == 255


def test_in_a_thread_the_run_object_is_there_and_the_global_run_is_left_alone(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
run = trackbridge.init(backend={"kind": "wandb", "mode": "offline"}, shipping="thread", id="ours")
steps(run)
native = run.native("wandb")
assert isinstance(native, wandb.Run) and wandb.run is None
native.log({"mine": 1.0})
report = run.finish(60)
assert report, str(report)
""",
    )
    mine = load(tmp_path / "runs" / "ours" / "wandb")
    assert ours(mine.history) == list(range(20))
    assert any("mine" in row for row in mine.history)
    assert mine.exit_code == 0


def test_nothing_to_join_and_nothing_native_are_said(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
try:
    trackbridge.init(backend="wandb", join=True)
except trackbridge.errors.ConfigError as error:
    assert "no W&B or MLflow run is open" in str(error)
else:
    raise AssertionError
run = trackbridge.init(backend=["tensorboard"], id="x")
for name, words in {"wandb": "has no backend 'wandb'", "tensorboard": "pass shipping='thread'"}.items():
    try:
        run.native(name)
    except trackbridge.errors.UsageError as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError
run.finish()
""",
    )


# -- MLflow


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One database for the tests here: creating it takes seconds."""
    folder = tmp_path_factory.mktemp("mlflow")
    script(folder, "mlflow.set_tracking_uri('sqlite:///mlflow.db'); mlflow.search_experiments()", "mlflow")
    return folder


def test_mlflow_nested_joined_and_native(database: Path) -> None:
    script(
        database,
        """
from mlflow.tracking import MlflowClient
mlflow.set_tracking_uri("sqlite:///mlflow.db")
mlflow.set_experiment("theirs")
client = MlflowClient()

with mlflow.start_run(run_name="outer") as outer:
    run = trackbridge.init(backend="mlflow", id="nested")
    steps(run)
    assert run.finish(60)
    mlflow.log_metric("mine", 1.0)
held = client.search_runs([outer.info.experiment_id], "tags.`trackbridge.run_id` = 'nested'")[0]
assert held.data.tags["mlflow.parentRunId"] == outer.info.run_id
assert client.get_run(outer.info.run_id).data.tags["trackbridge.companion"] == held.info.run_id
assert held.info.status == "FINISHED" and len(client.get_metric_history(held.info.run_id, "train/loss")) == 20

with mlflow.start_run(run_name="joined") as theirs:
    mlflow.log_param("lr", 5)
    run = trackbridge.init(backend="mlflow", id="joined", join=True, config={"lr": 7})
    steps(run)
    assert run.finish(60)
    assert client.get_run(theirs.info.run_id).info.status == "RUNNING"
    mlflow.log_metric("mine", 1.0)
held = client.get_run(theirs.info.run_id)
assert held.info.status == "FINISHED" and held.data.tags["trackbridge.status"] == "finished"
assert held.data.params["lr"] == "5" and held.data.params["lr:attempt-0"] == "7"
assert len(client.get_metric_history(held.info.run_id, "train/loss")) == 20
assert len(client.search_runs([held.info.experiment_id])) == 3

run = trackbridge.init(backend="mlflow", id="thread", shipping="thread")
steps(run)
native = run.native("mlflow")
client.set_tag(native.info.run_id, "mine", "yes")
assert run.finish(60)
""",
        "mlflow",
    )
