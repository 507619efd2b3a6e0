"""W&B: which mode, where to look, what is said once, and what never leaves."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from wandb_kit import Connect, QuickConfig

from tests.wandb_server import KEY, Stall, WandbServer
from trackbridge import plugins
from trackbridge.backends import wandb_file
from trackbridge.backends.wandb import WandbConfig
from trackbridge.backends.wandb_rows import ANOMALY
from trackbridge.errors import ConfigError, MissingExtraError
from trackbridge.names import SEQ
from trackbridge.records import Params, RunInfo
from trackbridge.testing import T0, anomaly, artifact, deliver, end, rows


@pytest.mark.parametrize("run_id", ["run-0001", "A", "I"])
def test_without_a_key_it_is_offline_and_says_so_once(
    wandb_server: WandbServer, run: RunInfo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, run_id: str
) -> None:
    run = replace(run, run_id=run_id)
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", str(Path(run.directory) / "no-netrc"))
    config = QuickConfig(base_url=wandb_server.url)
    assert config.where(run) is None
    with caplog.at_level(logging.WARNING, "trackbridge"):
        backend = config.build()
        backend.open(run)
        deliver(backend, rows(range(3)))
        backend.close(end(3), timeout=20)
    assert [record.getMessage().count("wandb login") for record in caplog.records] == [1]
    assert len(wandb_file.load(Path(run.directory) / "wandb").history) == 3
    assert not wandb_server.runs.all


def test_netrc_counts_as_a_key(
    wandb_server: WandbServer, run: RunInfo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine 127.0.0.1:{wandb_server.port}\n  login user\n  password {KEY}\n")
    monkeypatch.setenv("NETRC", str(netrc))
    config = QuickConfig(base_url=wandb_server.url)
    backend = config.build()
    backend.open(run)
    backend.close(None, timeout=5)
    assert config.where(run) == f"{wandb_server.url}/team/contract/runs/run-0001"


def test_wandb_mode_is_obeyed(wandb_server: WandbServer, run: RunInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    backend = QuickConfig(base_url=wandb_server.url).build()
    with wandb_server.fault(Stall()) as asked:
        backend.open(run)
        backend.close(end(0), timeout=20)
    assert asked.hits == 0


def test_what_where_says_offline_uploads_all_lives(
    wandb_server: WandbServer, run: RunInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very command, run by a shell: rows of two lives once each, the artifact, the alert, the end."""
    config = QuickConfig(mode="offline")
    for life in range(2):
        backend = config.build()
        backend.open(run)
        deliver(backend, [*rows(range(4 + life * 4)), artifact(8, 3, run, "a", {"x": b"1"}), anomaly(9, 3)][: 4 + 6 * life])
        backend.close(end(10, "failed") if life else None, timeout=20)
    command = config.where(run)
    assert command is not None and command.startswith("wandb sync ")
    monkeypatch.setenv("WANDB_BASE_URL", wandb_server.url)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    subprocess.run(command, shell=True, check=True, capture_output=True)
    held = wandb_server.run("contract", "run-0001")
    assert [row[SEQ] for row in held.history()] == list(range(8))
    assert wandb_server.artifacts.files(("team", "contract", "a")) == {"x": b"1"}
    assert (held.state, held.exit_code, len(held.alerts)) == ("failed", 1, 1)


def test_an_alert_is_raised_once_an_anomaly(wandb_server: WandbServer, connect: Connect, run: RunInfo) -> None:
    first = anomaly(3, 2)
    again = first.updated(seq=4, recovered_after=2)
    for records, final in (([*rows(range(3)), first], None), ([*rows(range(3)), first, again, anomaly(5, 9)], end(6))):
        backend = connect(run)
        deliver(backend, records)
        assert backend.close(final, timeout=20) == (final or records[-1]).seq
    held = wandb_server.run("contract", "run-0001")
    assert [alert["title"] for alert in held.alerts] == ["spike at step 2: train/loss", "spike at step 9: train/loss"]
    assert held.summary[f"{ANOMALY}spike-2"]["recovered_after"] == 2


def test_the_run_is_found_as_it_was_described(wandb_server: WandbServer, connect: Connect, run: RunInfo) -> None:
    backend = connect(replace(run, group="ablation"))
    deliver(
        backend, [Params(0, T0, {"config": {"lr": float("nan")}, "provenance": {"git": "abc"}}), *rows(range(2), first_seq=1)]
    )
    backend.close(end(3, "killed"), timeout=20)
    held = wandb_server.run("contract", "run-0001")
    assert (held.display, held.group, held.tags, held.exit_code) == ("a run", "ablation", ["t", "killed"], 255)
    assert held.settings()["lr"] == "NaN" and held.settings()["trackbridge/provenance"] == {"git": "abc"}
    assert not held.files.keys() & {"requirements.txt", "wandb-metadata.json", "output.log"}
    held.tags.append("mine")
    held.display = "renamed by hand"
    backend = connect(run)
    deliver(backend, rows([5], first_seq=4))
    backend.close(end(5), timeout=20)
    assert held.tags == ["t", "mine"], "a run that goes on is not killed any more"
    assert held.display == "renamed by hand"


@pytest.mark.parametrize(("run_id", "note_lost"), [("run-0001", False), ("No API key", True)])
def test_another_recording_of_the_same_id_is_another_run(
    wandb_server: WandbServer, connect: Connect, run: RunInfo, tmp_path: Path, run_id: str, note_lost: bool
) -> None:
    """An id is used again when the run's directory was deleted, or on another machine: what the first one's run holds must not
    be taken for what the second one has delivered."""
    run = replace(run, run_id=run_id)
    other = replace(run, directory=str(tmp_path / "elsewhere"), created=run.created + 3600.5)
    first = connect(run)
    deliver(first, rows(range(9)))
    first.close(end(9), timeout=20)
    second = connect(other)
    deliver(second, rows(range(3)))
    second.close(end(3), timeout=20)
    if note_lost:
        (tmp_path / "elsewhere" / "wandb" / "where.json").unlink()
    second = QuickConfig(base_url=wandb_server.url).build()
    assert second.open(other) >= 2
    deliver(second, rows(range(3, 5), first_seq=4))
    second.close(end(6), timeout=20)
    for run_id, seqs in ((run.run_id, [*range(9)]), (f"{run.run_id}-{int(other.created)}", [0, 1, 2, 4, 5])):
        assert [row[SEQ] for row in wandb_server.run(run.project, run_id).history()] == seqs


def test_a_new_run_is_not_looked_up_before_it_opens(wandb_server: WandbServer, connect: Connect, run: RunInfo) -> None:
    """Whose an id is, is asked where there is a run of that id: the question costs a new run a third of a second."""
    asked = ("TrackbridgeOwner", "TrackbridgeReadBack")
    before = {name: wandb_server.operations[name] for name in asked}
    first = connect(run)
    assert {name: wandb_server.operations[name] for name in asked} == before
    deliver(first, rows(range(3)))
    assert first.close(end(3), timeout=20) == 3
    again = replace(run, directory=f"{run.directory}-copy")  # without the note of the first: is it ours?
    second = connect(again)
    assert wandb_server.operations["TrackbridgeOwner"] == before["TrackbridgeOwner"] + 1
    assert second.close(None, timeout=20) == -1
    assert [row[SEQ] for row in wandb_server.run(run.project, run.run_id).history()] == [0, 1, 2]


def test_names_that_wandb_refuses(wandb_server: WandbServer, connect: Connect, run: RunInfo) -> None:
    """A project, tag or artifact kind of ours is any text. One that W&B refuses would hold up the run, or all its tags."""
    odd = replace(run, project="team/exp #1: 50%?\\" + "p" * 200, tags=("t" * 100, "", "fine"), group="g" * 200, name="n" * 300)
    backend = connect(odd)
    kinds = ("job", "code", "wandb-history", "a/b:c", "k" * 300, "")
    deliver(backend, [artifact(seq, 0, run, f"file-{seq}", {"x.txt": b"content"}, kind) for seq, kind in enumerate(kinds)])
    backend.close(end(len(kinds)), timeout=20)
    held = wandb_server.run(("team-exp -1- 50---" + "p" * 200)[:128], run.run_id)
    assert {f"file-{seq}" for seq in range(len(kinds))} <= {name for _, _, name in wandb_server.artifacts.collections}
    assert (held.tags, held.group, held.display) == (["t" * 64, "fine"], "g" * 128, "n" * 128)
    with pytest.raises(ConfigError, match="wandb project 'team/exp': W&B takes up to 128 characters"):
        WandbConfig(project="team/exp")


def test_no_key_is_written_down(wandb_server: WandbServer, connect: Connect, run: RunInfo) -> None:
    backend = connect(run)
    deliver(backend, [*rows(range(3)), artifact(3, 1, run, "a", {"x": b"1"})])
    backend.close(end(4), timeout=20)
    files = [path for path in Path(run.directory).rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert "key" not in WandbConfig.model_fields


def test_everything_stays_in_the_run_directory(
    wandb_server: WandbServer, run: RunInfo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    backend = QuickConfig(mode="offline").build()
    backend.open(run)
    deliver(backend, [*rows(range(3)), artifact(3, 1, run, "a", {"x": b"1"})])
    assert backend.close(end(4), timeout=20) == 4
    assert list(home.rglob("*")) == []


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'trackbridge\[wandb\]'"):
        WandbConfig().check()
    assert plugins.load(plugins.BACKENDS, "wandb") is WandbConfig
