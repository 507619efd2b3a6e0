"""A capsule comes back from W&B by every form of reference, from a server and from an offline run, moved or not."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from wandb_kit import Connect, QuickConfig

from tests.wandb_server import Status, WandbServer
from trackbridge.backends.wandb_fetch import KIND, download, fetch_capsule
from trackbridge.errors import CapsuleError, ReferenceNotFoundError, TrackbridgeError, UsageError
from trackbridge.records import Artifact, RunInfo
from trackbridge.seal import KIND as SEALED
from trackbridge.testing import artifact, deliver, end, rows


def capsule(seq: int, step: int, run: RunInfo) -> tuple[Artifact, dict[str, bytes]]:
    files = {
        "manifest.json": json.dumps({"format_version": 1, "step": step}).encode(),
        "rank-0000/rng.safetensors": bytes([step]),
    }
    made = artifact(seq, step, run, f"spike-{run.run_id}-{step}", files, kind=KIND)
    return Artifact(made.seq, made.step, made.time, made.name, made.kind, made.path, {"step": step}), files


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_kind_is_what_the_sealer_writes() -> None:
    assert KIND == SEALED


def test_every_form_of_reference(
    wandb_server: WandbServer, connect: Connect, run: RunInfo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backend = connect(run)
    (one, files_one), (two, files_two) = capsule(2, 1, run), capsule(3, 7, run)
    other = artifact(4, 7, run, "notes", {"manifest.json": b"{}"}, kind="file")
    deliver(backend, [*rows(range(2)), one, two, other])
    assert backend.close(end(5), timeout=30) == 5
    monkeypatch.setenv("WANDB_BASE_URL", wandb_server.url)
    where = "team/contract/run-0001"
    for ref, step, files in [
        (where, 1, files_one),
        (where, None, files_two),
        ("team/contract/spike-run-0001-1:latest", None, files_one),
        ("team/contract/spike-run-0001-7:step-7", 7, files_two),
    ]:
        found = fetch_capsule(ref, step, tmp_path / "back")
        assert content(found) == files
        assert found.name == f"spike-run-0001-{files['rank-0000/rng.safetensors'][0]}"
    light = download(where, 1, str(tmp_path / "light"), 1 << 20, to_read=True)
    assert set(content(Path(light))) == {"manifest.json"}, "what people read: no weights, no random states"
    with pytest.raises(ReferenceNotFoundError, match=r"no capsule of step 5; it has steps 1, 7"):
        fetch_capsule(where, 5, tmp_path / "back")
    with pytest.raises(ReferenceNotFoundError, match="is the capsule of step 7, not 1"):
        fetch_capsule("team/contract/spike-run-0001-7:step-7", 1, tmp_path / "back")
    for nothing in ("team/contract/run-9999", "team/contract/spike-run-0001-1:step-3"):
        with pytest.raises(ReferenceNotFoundError, match=f"there is no .* {re.escape(nothing)}"):
            fetch_capsule(nothing, None, tmp_path / "back")
    with pytest.raises(UsageError, match="ENTITY/PROJECT/RUN_ID"):
        fetch_capsule("contract/run-0001", None, tmp_path / "back")
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["spike-run-0001-1", "spike-run-0001-7"]


def test_a_server_that_does_not_let_us_in_is_not_a_missing_run(
    wandb_server: WandbServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", wandb_server.url)
    with wandb_server.fault(Status(401)), pytest.raises(TrackbridgeError, match="401") as caught:
        fetch_capsule("team/contract/run-0001", None, tmp_path)
    assert not isinstance(caught.value, ReferenceNotFoundError)


def test_a_hostile_artifact_writes_nothing_outside(
    wandb_server: WandbServer, connect: Connect, run: RunInfo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backend = connect(run)
    deliver(backend, [*rows(range(2)), capsule(2, 1, run)[0]])
    backend.close(end(3), timeout=30)
    monkeypatch.setenv("WANDB_BASE_URL", wandb_server.url)
    (path,) = {version.manifest for version in wandb_server.artifacts.versions.values()}
    manifest = json.loads(wandb_server.storage[path or ""])
    good = manifest["contents"]["manifest.json"]
    for name, entry in {
        "../../outside.json": good,
        "/abs.json": good,
        "passwd.json": {**good, "ref": "file:///etc/hostname"},
    }.items():
        manifest["contents"] = {name: entry}
        wandb_server.storage[path or ""] = json.dumps(manifest).encode()
        with pytest.raises(CapsuleError):
            fetch_capsule("team/contract/run-0001", 1, tmp_path / "in" / "side")
    assert not list(tmp_path.rglob("*outside*")) and not (tmp_path / "in").exists()


def test_an_offline_run_also_when_it_was_moved(run: RunInfo, tmp_path: Path) -> None:
    info = RunInfo("contract", "run-0001", "a run", str(tmp_path / "runs" / "run-0001"))
    backend = QuickConfig(mode="offline").build()
    backend.open(info)
    (one, files_one), (two, files_two) = capsule(2, 1, info), capsule(3, 7, info)
    deliver(backend, [*rows(range(2)), one, two])
    assert backend.close(end(4), timeout=20) == 4
    assert content(fetch_capsule(f"{info.directory}/wandb", 1, tmp_path / "back")) == files_one
    moved = shutil.move(info.directory, tmp_path / "elsewhere")
    (folder,) = Path(moved).glob("wandb/offline-run-*-run-0001")
    assert content(fetch_capsule(str(folder), None, tmp_path / "back")) == files_two
    (Path(moved) / one.path / "manifest.json").write_bytes(b"{}")
    with pytest.raises(ReferenceNotFoundError, match=r"manifest.json of spike-run-0001-1 is neither at"):
        fetch_capsule(str(folder), 1, tmp_path / "back")
