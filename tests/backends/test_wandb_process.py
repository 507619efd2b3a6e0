"""W&B's client process: bounded at open and at close, replaced when it dies, and never left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner
from wandb_kit import QUICK, Connect, QuickConfig, seqs

from tests.wandb_server import Stall, WandbServer
from trackbridge.backends.wandb import WandbBackend
from trackbridge.backends.wandb_file import load
from trackbridge.cli import app
from trackbridge.errors import RetryLater, TrackbridgeError
from trackbridge.records import RunInfo
from trackbridge.testing import anomaly, artifact, deliver, end, rows


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def family() -> set[int]:
    """Processes below us."""
    return {child.pid for child in psutil.Process().children(recursive=True) if alive(child.pid)}


def lasting(before: set[int]) -> set[int]:
    """Those that are there now, were not before and do not end by themselves: one that was killed takes a moment."""
    psutil.wait_procs([child for child in psutil.Process().children(recursive=True) if child.pid not in before], timeout=10)
    return family() - before


def test_a_server_that_is_away_at_open_is_waited_for(wandb_server: WandbServer, run: RunInfo) -> None:
    backend = QuickConfig(base_url=wandb_server.url).build()
    wandb_server.stop()
    before = family()
    with pytest.raises(RetryLater, match="connection refused"):
        backend.open(run)
    assert not lasting(before)
    wandb_server.start()
    assert backend.open(run) == -1
    deliver(backend, rows(range(5)))
    assert backend.close(end(5), timeout=20) == 5
    assert seqs(wandb_server, run) == [0, 1, 2, 3, 4]


def test_a_wrong_key_names_the_fix(wandb_server: WandbServer, run: RunInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "wrong" * 8)
    with pytest.raises(TrackbridgeError, match="wandb login"):
        QuickConfig(base_url=wandb_server.url).build().open(run)


@pytest.mark.parametrize("command", ["scan", "pull", "report", "view"])
def test_no_key_is_said_once_with_the_fix(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not W&B's own advice with ours behind it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for variable in ("HOME", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    result = CliRunner().invoke(app, [command, "wandb:team/project/run"])
    assert result.exit_code == 2
    assert result.stderr.strip() == "trackbridge: W&B: no API key is configured; run: wandb login, or set WANDB_API_KEY"


SHOWS = """
import sys
from pathlib import Path
from trackbridge.backends.wandb_client import Client, Target
from trackbridge.backends.wandb_rows import Keys
client = Client(process=True)
client.open(Target(folder=sys.argv[1], project="p", run_id="a", name="a", keys=Keys(), mode="offline"))
client._show(Path(sys.argv[2]), 0)
client.finish(0, False, -1)
print("pandas" in sys.modules, flush=True)
"""


def test_a_page_is_shown_without_pandas(tmp_path: Path) -> None:
    """The SDK imports it to see whether a value is a table: a quarter to half a second of CPU and 70 MB for each run."""
    pytest.importorskip("pandas")
    shown = tmp_path / "views"
    shown.mkdir()
    (shown / "report.html").write_text("<p>a page</p>")
    (tmp_path / "run" / "wandb").mkdir(parents=True)
    command = [sys.executable, "-c", SHOWS, str(tmp_path / "run" / "wandb"), str(shown)]
    done = subprocess.run(command, env={**os.environ, "WANDB_SILENT": "true"}, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["False"], done.stdout + done.stderr
    assert any("html" in str(row) for row in load(tmp_path / "run" / "wandb").history)


def test_close_keeps_to_its_time_and_leaves_no_process(wandb_server: WandbServer, connect: Connect, run: RunInfo) -> None:
    before = family()
    backend = connect(run)
    with wandb_server.fault(Stall()):
        backend.write([*rows(range(5)), anomaly(5, 3), artifact(6, 4, run, "a", {"x": b"1"})], timeout=5)
        start = time.monotonic()
        assert backend.close(end(7), timeout=3) < 0
        assert time.monotonic() - start < 5
    assert not lasting(before)


def test_the_client_process_dies_and_is_replaced(wandb_server: WandbServer, connect: Connect, run: RunInfo) -> None:
    others = family()
    backend = connect(run)
    records = rows(range(20))
    deliver(backend, records[:10])
    for pid in family() - others:
        psutil.Process(pid).kill()
    with pytest.raises(RetryLater, match="ended"):
        backend.write(records, timeout=5)
    deliver(backend, records)
    assert backend.close(end(20), timeout=20) == 20
    assert seqs(wandb_server, run) == list(range(20))


DIES = """
import os, psutil, signal, sys
from pathlib import Path
from wandb_kit import QuickConfig
from trackbridge.testing import deliver, rows, run_info
backend = QuickConfig(base_url=sys.argv[1]).build()
backend.open(run_info(Path(sys.argv[2])))
deliver(backend, rows(range(40)))
print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_sigkill_of_the_shipper_then_open_again(wandb_server: WandbServer, connect: Connect, run: RunInfo) -> None:
    """The client sees that we are gone and takes its service with it: nobody writes beside the next shipper."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", DIES, wandb_server.url, run.directory]
    with wandb_server.fault(Stall(), path=".*/file_stream"):  # with rows on their way, W&B's service would live on for minutes
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=False)
        assert done.returncode == -9
        left_behind = [int(pid) for pid in done.stdout.split()]
        assert len(left_behind) == 2
        deadline = time.monotonic() + 10
        while any(map(alive, left_behind)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(alive, left_behind))
    backend = connect(run)
    deliver(backend, rows(range(60)))
    assert backend.close(end(60), timeout=20) == 60
    assert seqs(wandb_server, run) == list(range(60))


def test_quick_pace_is_only_for_tests() -> None:
    assert QUICK.stall < WandbBackend(QuickConfig())._pace.stall
