"""The trackers of the schedules: how each one fails, and what it holds in the end, by its own reader."""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from tests.faults.proxy import MODES, Proxy
from trackbridge.backends import eventfile
from trackbridge.backends.base import BackendConfig
from trackbridge.backends.mlflow import MlflowBackend, MlflowConfig
from trackbridge.backends.wandb import WandbBackend, WandbConfig
from trackbridge.backends.wandb_client import Pace, serve
from trackbridge.backends.wandb_process import Process
from trackbridge.names import STEP
from trackbridge.records import RunInfo
from trackbridge.rundir import RunDirectory

FORK = get_context("forkserver")
Points = dict[str, list[tuple[int, float]]]


@dataclass
class Held:
    """What a tracker has of a run: every point of every series, also one that is there twice; files by artifact."""

    series: Points
    artifacts: dict[str, dict[str, bytes]]
    status: str | None = None


class Tracker(Protocol):
    name: str
    single: bool  # values are float32
    lives: int  # attempts of a run, at most
    trouble_seconds: float  # how long one fault lasts, at most

    def config(self, run: RunDirectory) -> BackendConfig: ...
    def disturb(self, rng: random.Random) -> tuple[str, Callable[[], None]]: ...  # what happens now, and how it ends
    def held(self, run: RunDirectory, series: set[str]) -> Held: ...
    def close(self) -> None: ...


def folder_of(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


# -- TensorBoard


class Tensorboard:
    name, single, lives, trouble_seconds = "tensorboard", True, 3, 0.1

    def config(self, run: RunDirectory) -> BackendConfig:
        from trackbridge.backends.tensorboard import TensorboardConfig

        return TensorboardConfig(logdir=run.path.parent / "logdir")

    def disturb(self, rng: random.Random) -> tuple[str, Callable[[], None]]:
        """Its server is a disk: it fills up in the middle of a write, or an fsync fails."""
        module: Any = eventfile.os
        write = os.write
        what = rng.choice(["full", "full and cannot be cut", "fsync"])
        torn = rng.random() < 0.9

        def broken_write(descriptor: int, data: memoryview) -> int:
            if torn and len(data) > 1:
                write(descriptor, data[: rng.randrange(len(data))])
            raise OSError(errno.ENOSPC, "No space left on device")

        def broken_fsync(descriptor: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        def broken_truncate(descriptor: int, length: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        fake = type(sys)("os")
        fake.__dict__.update(module.__dict__)
        if what == "fsync":
            fake.fsync = broken_fsync  # type: ignore[attr-defined]
        else:
            fake.write = broken_write  # type: ignore[attr-defined]
        if "cannot" in what:
            fake.ftruncate = broken_truncate  # type: ignore[attr-defined]
        eventfile.os = fake  # type: ignore[assignment]

        def lift() -> None:
            eventfile.os = os

        return what, lift

    def held(self, run: RunDirectory, series: set[str]) -> Held:
        from tensorboard.backend.event_processing.event_accumulator import STORE_EVERYTHING_SIZE_GUIDANCE, EventAccumulator

        root = run.path.parent / "logdir" / run.path.name
        found: Points = {}
        status = None
        for path in sorted(root.glob("events.out.tfevents.*")):
            reader = EventAccumulator(str(path), size_guidance=STORE_EVERYTHING_SIZE_GUIDANCE).Reload()
            for tag in reader.Tags()["scalars"]:
                found.setdefault(tag, []).extend((event.step, event.value) for event in reader.Scalars(tag))
            if "status" in reader.Tags()["tensors"]:
                text = reader.Tensors("status")[-1].tensor_proto.string_val[0].decode()
                status = next(line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| status"))
        folders = [path for path in (root / "artifacts").glob("*") if path.is_dir() and not path.name.startswith(".")]
        return Held(found, {path.name: folder_of(path) for path in folders}, status)

    def close(self) -> None:
        eventfile.os = os


# -- MLflow


class NarrowBackend(MlflowBackend):
    """Its requests hold so few points that a group of a schedule's narrow rows takes several, as one of a wide run's does."""

    room = 20


class NarrowConfig(MlflowConfig):
    def build(self) -> MlflowBackend:
        return NarrowBackend(self)


class Mlflow:
    """A real `mlflow server` behind a network that breaks, killed and started again now and then."""

    name, single, lives, trouble_seconds = "mlflow", False, 2, 1.0

    def __init__(self, folder: Path, *, kills: float = 0.08) -> None:
        self._folder = folder
        self._kills = kills
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.proxy = Proxy(self._port)
        self._start()

    def config(self, run: RunDirectory) -> BackendConfig:
        return NarrowConfig(tracking_uri=self.proxy.url, experiment=run.path.name)

    def disturb(self, rng: random.Random) -> tuple[str, Callable[[], None]]:
        if rng.random() < self._kills:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
            return "killed", self._start
        mode = rng.choice(MODES)
        self.proxy.set(mode)
        return mode, lambda: self.proxy.set("pass")

    def held(self, run: RunDirectory, series: set[str]) -> Held:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(f"http://127.0.0.1:{self._port}")
        experiment = client.get_experiment_by_name(run.path.name)
        (found,) = client.search_runs([experiment.experiment_id], f"tags.`trackbridge.run_id` = '{run.path.name}'")
        points = {
            key: [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, key)]
            for key in found.data.metrics
            if key in series
        }
        prefix = "trackbridge.artifact."
        names = [tag.removeprefix(prefix) for tag in found.data.tags if tag.startswith(prefix)]
        artifacts = {}
        for name in names:
            artifacts[name] = folder_of(self._downloaded(client, found.info.run_id, name, run.path.parent))
        return Held(points, artifacts, found.info.status.lower())

    def _downloaded(self, client: Any, run: str, name: str, folder: Path) -> Path:
        """MLflow's client says of a download that failed only that it did: what is listed tells whether anything is missing."""
        from mlflow.exceptions import MlflowException

        try:
            return Path(client.download_artifacts(run, name, str(folder)))
        except MlflowException as error:
            listed = [(item.path, item.file_size) for item in client.list_artifacts(run, name)]
            raise AssertionError(f"{error}; listed are {listed}") from error

    def close(self) -> None:
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()

    def _start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1", "--port", str(self._port),
                   "--backend-store-uri", f"sqlite:///{self._folder}/mlflow.db",
                   "--artifacts-destination", str(self._folder / "artifacts")]  # fmt: skip
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self._folder / "server.log").open("ab") as log:
            self._server = subprocess.Popen(
                command, cwd=self._folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + 90
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5).close()
                return
            except OSError:
                assert self._server.poll() is None and time.monotonic() < deadline, (self._folder / "server.log").read_text()
                time.sleep(0.05)


# -- W&B


class Forked:
    """What `wandb_process.Process` needs of a child, of one that was forked with wandb already imported."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


def _serve(pipe: Connection, env: dict[str, str], log: str) -> None:
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(env)
    serve(os.dup(pipe.fileno()))


class QuickProcess(Process):
    """The client's process, ready in milliseconds instead of seconds."""

    def _start(self, theirs: socket.socket, env: dict[str, str]) -> Any:
        pipe = Connection(os.dup(theirs.fileno()))
        process = FORK.Process(target=_serve, args=(pipe, env, str(self._folder / "client.log")), daemon=True)
        process.start()
        pipe.close()
        return Forked(process)


class QuickBackend(WandbBackend):
    def _client(self, run: RunInfo) -> Any:
        return QuickProcess(Path(run.directory) / "wandb")


class QuickConfig(WandbConfig):
    def build(self) -> WandbBackend:
        return QuickBackend(self, Pace(init=20.0, poll=0.1, transmit=1, flush=0.1, stall=4.0))


@dataclass
class Wandb:
    """The real client against the loopback server and its faults."""

    name: str = "wandb"
    single: bool = False
    lives: int = 2
    trouble_seconds: float = 1.0
    server: Any = field(default=None)

    def __post_init__(self) -> None:
        from tests.wandb_server import KEY, WandbServer

        FORK.set_forkserver_preload(["wandb", "trackbridge.backends.wandb_client", "tests.faults.trackers"])
        self.server = WandbServer()
        os.environ["WANDB_API_KEY"] = KEY
        for what in ("FILE_STREAM", "GRAPHQL", "FILE_TRANSFER"):
            os.environ[f"WANDB__{what}_RETRY_WAIT_MIN_SECONDS"] = "1"

    def config(self, run: RunDirectory) -> BackendConfig:
        return QuickConfig(base_url=self.server.url, entity="team", project=run.path.name, mode="online")

    def disturb(self, rng: random.Random) -> tuple[str, Callable[[], None]]:
        from tests.wandb_server import Cut, Drop, Status
        from tests.wandb_server.faults import Fault, Stall

        if rng.random() < 0.25:
            self.server.stop()
            return "server stopped", self.server.start
        where: dict[str, str] = rng.choice(
            [*2 * [{"path": ".*/file_stream"}], {"path": "/storage/.*", "method": "PUT"}, {"path": "/graphql"}]
        )
        actions = [Status(503), Status(429), Drop(), Drop(after=True), Cut(rng.randrange(2000)), Stall(3.0)]
        if "file_stream" in where["path"]:
            actions.append(Status(401))
        action = rng.choice(actions)
        fault = Fault(action, **where, times=rng.randrange(1, 4))
        self.server.faults.add(fault)
        return f"{action} {where['path']}", lambda: self.server.faults.remove(fault)

    def held(self, run: RunDirectory, series: set[str]) -> Held:
        found: Points = {}
        for row in self.server.run(run.path.name, run.path.name).history():
            for key, value in row.items():
                if key in series:
                    found.setdefault(key, []).append((int(row[STEP]), float(value)))
        artifacts = {}
        for (_, project, name), collection in self.server.artifacts.collections.items():
            if project == run.path.name and (run.artifacts / name).exists():
                assert len(collection.versions) == 1, f"{name} has {len(collection.versions)} versions"
                step = name.rsplit("-", 1)[1]
                artifacts[name] = self.server.artifacts.files(("team", project, name), f"step-{step}")
        return Held(found, artifacts)

    def close(self) -> None:
        self.server.stop()
