"""Our copy of what the user logs: taken at once, whatever happens to the original afterwards."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from trackbridge import keep
from trackbridge.errors import UsageError
from trackbridge.keep import Keeper
from trackbridge.records import Artifact
from trackbridge.rundir import RunDirectory


@pytest.fixture
def kept() -> list[Artifact]:
    return []


@pytest.fixture
def keeper(tmp_path: Path, kept: list[Artifact]) -> Keeper:
    return Keeper(RunDirectory(tmp_path / "run"), kept.append)


def test_a_small_file_may_be_written_to_in_place_right_after(tmp_path: Path, keeper: Keeper, kept: list[Artifact]) -> None:
    file = tmp_path / "metrics.json"
    file.write_text("first")
    keeper.keep(file, kind="file", name=None, step=3)
    file.write_text("second")
    assert keeper.wait(10)
    (artifact,) = kept
    assert (artifact.name, artifact.step, artifact.kind) == ("metrics.json-3", 3, "file")
    assert (tmp_path / "run" / artifact.path / "metrics.json").read_text() == "first"
    assert not list((tmp_path / "run" / "artifacts" / ".incoming").iterdir())


def test_a_large_file_is_not_copied_on_the_callers_thread(
    tmp_path: Path, keeper: Keeper, kept: list[Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be deleted, or replaced as checkpoints are, before anybody copied it."""
    copying, go = threading.current_thread(), threading.Event()
    threads: list[threading.Thread] = []
    copy2 = shutil.copy2

    def slowly(*arguments: object) -> object:
        threads.append(threading.current_thread())
        go.wait(30)
        return copy2(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(keep.shutil, "copy2", slowly)
    folder = tmp_path / "checkpoint"
    (folder / "deep").mkdir(parents=True)
    content = os.urandom(keep._SMALL + 1)
    (folder / "deep" / "model.bin").write_bytes(content)
    keeper.keep(folder, kind="checkpoint", name="best model", step=7)
    shutil.rmtree(folder)
    assert not keeper.wait(0.0)
    go.set()
    assert keeper.wait(10)
    assert threads and copying not in threads
    (artifact,) = kept
    assert artifact.name == "best-model-7"
    assert (tmp_path / "run" / artifact.path / "deep" / "model.bin").read_bytes() == content


def test_the_same_name_twice_is_two_artifacts(tmp_path: Path, keeper: Keeper, kept: list[Artifact]) -> None:
    file = tmp_path / "a.txt"
    for text in ("one", "two"):
        file.write_text(text)
        keeper.keep(file, kind="file", name=None, step=0)
    assert keeper.wait(10)
    assert [(tmp_path / "run" / a.path / "a.txt").read_text() for a in kept] == ["one", "two"]


def test_what_cannot_be_read_is_an_error_on_the_callers_thread(tmp_path: Path, keeper: Keeper, kept: list[Artifact]) -> None:
    with pytest.raises(UsageError, match=r"cannot log artifact .*nothing\.bin"):
        keeper.keep(tmp_path / "nothing.bin", kind="file", name=None, step=0)
    assert keeper.wait(1) and not kept


def test_a_file_that_changes_while_it_is_copied_is_said(
    tmp_path: Path, keeper: Keeper, kept: list[Artifact], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "growing.bin"
    file.write_bytes(b"x" * (keep._SMALL + 1))
    copy2 = shutil.copy2

    def meanwhile(source: Path, target: Path) -> object:
        with file.open("ab") as handle:
            handle.write(b"more")
        return copy2(source, target)

    monkeypatch.setattr(keep.shutil, "copy2", meanwhile)
    keeper.keep(file, kind="file", name=None, step=0)
    assert keeper.wait(10)
    assert "was written to while it was copied" in caplog.text
    assert len(kept) == 1


def test_a_disk_that_fills_up_loses_the_artifact_loudly(
    tmp_path: Path, keeper: Keeper, kept: list[Artifact], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "large.bin"
    file.write_bytes(b"x" * (keep._SMALL + 1))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keep.shutil, "copy2", full)
    keeper.keep(file, kind="file", name=None, step=0)
    assert keeper.wait(10)
    assert not kept
    assert "artifact large.bin-0 is lost: No space left" in caplog.text


@pytest.mark.parametrize("name", ["n" * 255, "n" * 250 + ".json"])
def test_a_name_as_long_as_can_be_is_a_shorter_label(name: str, tmp_path: Path, keeper: Keeper, kept: list[Artifact]) -> None:
    """A folder of ours called like it would be too long, and W&B takes 128 characters."""
    (tmp_path / name).write_text("content")
    for step in (2**53 - 1, 2**53 - 1):
        keeper.keep(tmp_path / name, kind="file", name=None, step=step)
    assert keeper.wait(10)
    assert len({artifact.name for artifact in kept}) == 2 and all(len(artifact.name) <= 128 for artifact in kept)
    assert [(tmp_path / "run" / artifact.path / name).read_text() for artifact in kept] == ["content"] * 2


def test_file_names_that_are_no_text_are_spelled_out(tmp_path: Path, keeper: Keeper, kept: list[Artifact]) -> None:
    """Linux takes any bytes as a name; trackers and JSON take text."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / os.fsdecode(b"\xff.bin")).write_text("content")
    keeper.keep(tmp_path / "folder", kind="file", name=os.fsdecode(b"\xfe"), step=0)
    assert keeper.wait(10)
    (file,) = (tmp_path / "run" / kept[0].path).iterdir()
    assert file.name == "\\udcff.bin" and file.read_text() == "content"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes in this file system")
def test_a_pipe_is_not_waited_for(tmp_path: Path, keeper: Keeper, kept: list[Artifact]) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="neither a file nor a folder"):
        keeper.keep(tmp_path / "pipe", kind="file", name=None, step=0)
    assert not kept
