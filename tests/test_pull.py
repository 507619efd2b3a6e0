"""`pull`: every form of reference, what it says when there is nothing, and that nothing unverified arrives."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.capsules import adopt, an_anomaly, edit, make
from trackbridge import fetch
from trackbridge.backends import folders
from trackbridge.errors import CapsuleError, ReferenceNotFoundError, TrackbridgeError, UsageError
from trackbridge.fetch import Reference, pull
from trackbridge.rundir import Attempt, RunDirectory, RunFile


@pytest.mark.parametrize(
    ("text", "kind", "where", "step"),
    [
        ("runs/r1", "local", "runs/r1", None),
        ("runs/r1@160", "local", "runs/r1", 160),
        ("C:\\runs\\r1@160", "local", "C:\\runs\\r1", 160),
        (Path("mlflow:odd"), "local", "mlflow:odd", None),
        ("mlflow:abc", "mlflow", "abc", None),
        ("mlflow:abc@7", "mlflow", "abc", 7),
        ("wandb:e/p/r@7", "wandb", "e/p/r", 7),
        ("wandb:e/p/spike-r-7:latest", "wandb", "e/p/spike-r-7:latest", None),
        ("wandb:e/p/spike-r-7:v0", "wandb", "e/p/spike-r-7:v0", None),
        ("tensorboard:/a/b c", "tensorboard", "/a/b c", None),
        ("tensorboard:/a/b@c@12", "tensorboard", "/a/b@c", 12),
        ("runs/me@home", "local", "runs/me@home", None),
        ("/data/lr:0.1/run@160", "local", "/data/lr:0.1/run", 160),
    ],
)
def test_forms(text: str | Path, kind: str, where: str, step: int | None) -> None:
    assert Reference.parse(text) == Reference(kind, where, step)


@pytest.mark.parametrize("text", ["s3://bucket/x", "wanbd:e/p/r", "mlflow:", "tensorboard://x", "http://host/x"])
def test_other_forms_are_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match=r"is no capsule reference.*mlflow:RUN_ID\[@STEP\]") as caught:
        pull(text)
    assert "\n" not in str(caught.value)


def test_a_destination_that_is_a_file(tmp_path: Path) -> None:
    path = make(tmp_path / "here")
    (tmp_path / "taken").write_text("x")
    with pytest.raises(UsageError, match=r"cannot put a capsule into .*taken: File exists; choose another destination"):
        pull(path, tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "x"


def test_a_link_to_a_capsule_is_the_capsule(tmp_path: Path) -> None:
    path = make(tmp_path / "here")
    (tmp_path / "link").symlink_to(path)
    assert pull(tmp_path / "link").path == path


def test_a_near_miss_is_named() -> None:
    with pytest.raises(UsageError, match="did you mean 'mlflow'"):
        pull("mlfow:abc")


def test_a_tracker_without_capsules() -> None:
    with pytest.raises(UsageError, match="cannot be pulled from console"):
        pull("console:x")


def test_a_path_with_an_at_sign_that_exists(tmp_path: Path) -> None:
    path = make(tmp_path / "me@12")
    assert pull(str(path)).path == path


def a_run(path: Path, *steps: int) -> RunDirectory:
    directory = RunDirectory(path)
    life = Attempt(number=0, start_step=0, time=0.0, pid=1, host="h")
    directory.write(RunFile(project="p", run_id=path.name, name="n", created=0.0, attempts=[life]))
    for created, step in enumerate(steps, 100):
        capsule = make(directory.capsules / f"spike-{step}", anomaly=an_anomaly(step=step, onset=step))
        edit(capsule, lambda manifest, created=created: manifest.update(created=float(created)))
    return directory


def test_from_a_run_directory(tmp_path: Path) -> None:
    directory = a_run(tmp_path / "r1", 13, 15, 12)
    assert pull(directory.path).step == 12, "the newest"
    assert pull(f"{directory.path}@15").step == 15
    assert pull(directory.capsules).step == 12
    assert pull(directory.capsules / "spike-13").path == directory.capsules / "spike-13"
    with pytest.raises(ReferenceNotFoundError, match=r"no capsule of step 14; it has steps 12, 13, 15"):
        pull(f"{directory.path}@14")


def test_a_runs_id_is_that_run_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_run(tmp_path / "runs" / "r1", 13, 15)
    monkeypatch.chdir(tmp_path)
    assert pull("r1@13").step == 13 and pull("r1").step == 15
    with pytest.raises(ReferenceNotFoundError, match="no capsule of step 14; it has steps 13, 15"):
        pull("r1@14")
    with pytest.raises(ReferenceNotFoundError, match="there is no r2; a capsule reference is one of"):
        pull("r2@13")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ReferenceNotFoundError, match=r"there is no .*nowhere; a capsule reference is one of"):
        pull(tmp_path / "nowhere")
    with pytest.raises(ReferenceNotFoundError, match="neither a capsule nor a run directory"):
        pull(tmp_path)
    with pytest.raises(ReferenceNotFoundError, match="holds no spike capsule"):
        pull(a_run(tmp_path / "r1").path)


def test_a_copy_takes_the_local_batches_along(tmp_path: Path) -> None:
    make(tmp_path / "run" / "spike-13", local=True)
    copy = pull(tmp_path / "run" / "spike-13", tmp_path / "here")
    assert copy.path == tmp_path / "here" / "spike-13" and copy.joined and copy.batches[12][0].tensors is not None
    assert sorted(p.name for p in (tmp_path / "here").iterdir()) == ["spike-13", "spike-13.local"]
    assert pull(tmp_path / "run" / "spike-13", tmp_path / "here").verify() == copy.verify(), "again: replaced"


def tensorboard(tmp_path: Path, capsule: Path) -> str:
    """A logdir that holds the capsule as the backend keeps it."""
    folder = tmp_path / "logs" / "artifacts" / "spike-r-13"
    folder.parent.mkdir(parents=True)
    shutil.copytree(capsule, folder, symlinks=True)
    return f"tensorboard:{tmp_path / 'logs'}"


def test_from_a_tracker_into_dest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = tensorboard(tmp_path, make(tmp_path / "made"))
    capsule = pull(reference, tmp_path / "here")
    assert capsule.path == tmp_path / "here" / "spike-r-13" and capsule.step == 13
    assert [p.name for p in (tmp_path / "here").iterdir()] == ["spike-r-13"]
    monkeypatch.chdir(tmp_path)
    assert pull(f"{reference}@13").path == tmp_path / "capsules" / "spike-r-13"


def test_a_damaged_one_does_not_arrive(tmp_path: Path) -> None:
    good = pull(tensorboard(tmp_path, make(tmp_path / "made")), tmp_path / "here")
    held = tmp_path / "logs" / "artifacts" / "spike-r-13"
    (held / "window.parquet").write_bytes(b"x" * (held / "window.parquet").stat().st_size)
    with pytest.raises(CapsuleError, match="does not match its digest"):
        pull(f"tensorboard:{tmp_path / 'logs'}", tmp_path / "here")
    assert [p.name for p in (tmp_path / "here").iterdir()] == ["spike-r-13"] and good.verify()


def test_a_hostile_one_does_not_arrive(tmp_path: Path) -> None:
    made = make(tmp_path / "made")
    adopt(made, "state.pkl", b"x")
    with pytest.raises(CapsuleError, match="does not belong in a capsule"):
        pull(tensorboard(tmp_path, made), tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_a_limit_on_what_comes(tmp_path: Path) -> None:
    with pytest.raises(CapsuleError, match="more than the limit of 100"):
        pull(tensorboard(tmp_path, make(tmp_path / "made")), tmp_path / "here", max_bytes=100)


def interrupted(monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException) -> list[str]:
    """The copying of files out of a logdir fails after so many; returns the names of those that were copied."""
    copied: list[str] = []
    real = folders._copy_checked

    def copy(path: Path, target: Path) -> None:
        if len(copied) == after:
            raise error
        real(path, target)
        copied.append(path.name)

    monkeypatch.setattr(folders, "_copy_checked", copy)
    return copied


@pytest.mark.parametrize("error", [TrackbridgeError("the tracker is down"), KeyboardInterrupt(), OSError(28, "No space")])
def test_an_interrupted_pull_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    reference = tensorboard(tmp_path, make(tmp_path / "made"))
    with monkeypatch.context() as patch:
        first = interrupted(patch, 4, error)
        with pytest.raises(type(error), match="pull again to go on" if isinstance(error, TrackbridgeError) else None):
            pull(reference, tmp_path / "here")
    (kept,) = (tmp_path / "here").iterdir()
    assert kept.name.startswith(".pull-") and len(first) == 4
    with monkeypatch.context() as patch:
        second = interrupted(patch, 100, error)
        assert pull(reference, tmp_path / "here").verify()
    assert sorted(first[1:] + second[1:]) == sorted(set(first[1:] + second[1:])), "only the manifest came twice"
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["spike-r-13"]


def test_what_was_kept_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a file, another version of one, and a file that no longer belongs there: fetched again, or gone."""
    reference = tensorboard(tmp_path, make(tmp_path / "made"))
    with monkeypatch.context() as patch:
        interrupted(patch, 5, TrackbridgeError("down"))
        with pytest.raises(TrackbridgeError):
            pull(reference, tmp_path / "here")
    (part,) = (tmp_path / "here").glob(".pull-*/.spike-r-13.part")
    files = [path for path in part.rglob("*") if path.is_file() and path.name != "manifest.json"]
    files[0].write_bytes(files[0].read_bytes()[:-1])
    files[1].write_bytes(b"x" * files[1].stat().st_size)
    (part / "older.json").write_text("{}")
    assert pull(reference, tmp_path / "here").verify()


def test_two_pulls_at_once_do_not_share_a_quarantine(tmp_path: Path) -> None:
    reference = tensorboard(tmp_path, make(tmp_path / "made"))
    with fetch._locked(tmp_path / ".pull-x") as one, fetch._locked(tmp_path / ".pull-x") as two:
        assert one != two and two.is_dir()
    assert not two.exists(), "no later pull would go on from there"
    assert pull(reference, tmp_path / "here").verify()


def test_an_equal_capsule_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    """Each rank of a replay pulls; none pulls the rug from under another. A damaged one is replaced."""
    reference = tensorboard(tmp_path, make(tmp_path / "made"))
    first = pull(reference, tmp_path / "here")
    before = first.path.stat().st_ino
    assert pull(reference, tmp_path / "here").path.stat().st_ino == before
    (first.path / "window.parquet").write_bytes(b"x")
    again = pull(reference, tmp_path / "here")
    assert again.path.stat().st_ino != before and again.verify()
