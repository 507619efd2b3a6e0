"""The checkpoint to go back to is the newest clean one, and every newer one is refused with its reason."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from trackbridge import rollback
from trackbridge.cli import app
from trackbridge.errors import ReferenceNotFoundError
from trackbridge.journal import JournalWriter
from trackbridge.records import Anomaly, Params, Row, Schema
from trackbridge.rundir import Attempt, RunDirectory, RunFile


def anomaly(onset: int, **changes: object) -> Anomaly:
    known = {
        "id": f"a-{onset}", "kind": "spike", "step": onset, "onset": onset, "severity": 0.8, "series": "train/loss",
        "value": 9.0, "expected": 2.0, "score": 30.0,
    }  # fmt: skip
    return Anomaly(**{**known, **changes})  # type: ignore[arg-type]


class Recording:
    """A run directory written record by record."""

    def __init__(self, path: Path, starts: tuple[int, ...] = (0,)) -> None:
        self.directory = RunDirectory(path)
        attempts = [Attempt(number=i, start_step=s, time=1.75e9, pid=1, host="h") for i, s in enumerate(starts)]
        path.mkdir(parents=True, exist_ok=True)
        self.directory.write(RunFile(project="p", run_id="r", name="r", created=1.75e9, attempts=attempts))
        self.writer = JournalWriter(self.directory.rows(), segment_bytes=1 << 20, fsync_seconds=60.0)

    def steps(self, first: int, last: int, attempt: int = 0, **values: float) -> None:
        """Rows of `first` up to, not including, `last`."""
        names = {"train/loss": 2.0, **{name.replace("__", "/"): value for name, value in values.items()}}
        for step in range(first, last):
            self.writer.append(Row(-1, step, 1.75e9 + step, attempt, Schema(tuple(names)), np.array(list(names.values()))))

    def save(self, step: int) -> Path:
        path = self.directory.path / f"step-{step}.pt"
        path.write_bytes(b"weights")
        self.writer.append(Params(-1, 1.75e9, {"checkpoint": {"path": str(path), "step": step}}))
        return path

    def tell(self, *anomalies: Anomaly) -> Path:
        for one in anomalies:
            self.writer.append(one)
        self.writer.close()
        return self.directory.path


def test_not_merely_the_newest_but_the_newest_before_the_first_sign(tmp_path: Path) -> None:
    run = Recording(tmp_path / "r")
    for step in (100, 200, 300):
        run.steps(step - 100, step)
        run.save(step)
    run.steps(300, 320)
    path = run.tell(anomaly(312, first_mover=("grad/norm", 298), cascade=(("grad/norm", 298), ("train/loss", 312))))
    found = rollback(path)
    assert found.checkpoint is not None and found.checkpoint.step == 200
    assert found.precursor == ("grad/norm", 298)
    assert [rejected.saved.step for rejected in found.rejected] == [300]
    assert "after grad/norm began to move at step 298" in found.rejected[0].why


def test_the_state_before_the_first_bad_step_is_clean(tmp_path: Path) -> None:
    run = Recording(tmp_path / "r")
    run.steps(0, 50)
    run.save(50)
    run.steps(50, 60)
    assert rollback(run.tell(anomaly(50))).checkpoint is not None


def test_a_drift_that_led_into_it_counts(tmp_path: Path) -> None:
    run = Recording(tmp_path / "r")
    run.steps(0, 100)
    run.save(100)
    run.steps(100, 200)
    run.save(200)
    run.steps(200, 260)
    drift = anomaly(150, kind="drift", id="d", series="grad/norm", step=190)
    found = rollback(run.tell(drift, anomaly(250)))
    assert found.precursor == ("grad/norm", 150)
    assert found.checkpoint is not None and found.checkpoint.step == 100


def test_a_recovered_spike_taints_only_its_own_time(tmp_path: Path) -> None:
    run = Recording(tmp_path / "r")
    run.steps(0, 105)
    run.save(105)  # within it
    run.steps(105, 200)
    run.save(200)  # long after
    run.steps(200, 305)
    found = rollback(run.tell(anomaly(100, recovered_after=20), anomaly(300)))
    assert found.checkpoint is not None and found.checkpoint.step == 200
    earlier = rollback(tmp_path / "r", step=100)
    assert earlier.anomaly is not None and earlier.anomaly.onset == 100
    with pytest.raises(ReferenceNotFoundError, match="there are some at: 100, 300"):
        rollback(tmp_path / "r", step=7)


def test_a_value_that_was_not_finite_and_reached_the_weights(tmp_path: Path) -> None:
    run = Recording(tmp_path / "r")
    run.steps(0, 40)
    run.save(40)
    run.steps(40, 45, grad__nonfinite=3.0)
    run.save(45)
    found = rollback(run.tell())
    assert found.checkpoint is not None and found.checkpoint.step == 40 and found.anomaly is None
    assert "grad/nonfinite was not finite (step 44)" in found.rejected[0].why


def test_an_update_that_was_left_out_taints_nothing(tmp_path: Path) -> None:
    run = Recording(tmp_path / "r")
    run.steps(0, 40, optim__skipped=0.0)
    run.steps(40, 41, optim__skipped=1.0, grad__nonfinite=3.0)
    run.save(41)
    assert rollback(run.tell()).checkpoint is not None


def test_a_checkpoint_whose_next_loss_is_not_finite_is_not_clean(tmp_path: Path) -> None:
    run = Recording(tmp_path / "r")
    run.steps(0, 30)
    run.save(30)
    run.steps(30, 60)
    run.save(60)
    run.steps(60, 61, train__loss=float("nan"))
    found = rollback(run.tell())
    assert found.checkpoint is not None and found.checkpoint.step == 30
    assert "in the very next step (60)" in found.rejected[0].why


def test_a_life_that_was_left_behind(tmp_path: Path) -> None:
    """Attempt 0 went wrong at 150; attempt 1 went on from 100. What attempt 1 saved at 180 does not come from that spike."""
    run = Recording(tmp_path / "r", starts=(0, 100))
    run.steps(0, 160)
    run.save(160)
    run.steps(100, 180, attempt=1)
    run.save(180)
    run.steps(180, 260, attempt=1)
    path = run.tell(anomaly(150), anomaly(250, attempt=1))
    found = rollback(path)
    assert found.checkpoint is not None and (found.checkpoint.step, found.checkpoint.attempt) == (180, 1)
    assert rollback(path, step=150).checkpoint == found.checkpoint


def test_a_process_that_went_back_by_itself(tmp_path: Path) -> None:
    """What the guard asks for: the same attempt goes on from an earlier step. What went wrong before is not in what it saves
    from then on, and what it saved before is still not clean."""
    run = Recording(tmp_path / "r")
    run.steps(0, 100)
    run.save(100)
    run.steps(100, 155)
    run.writer.append(anomaly(150))
    run.steps(155, 158, grad__nonfinite=2.0)
    run.save(158)
    run.steps(100, 160)
    again = run.save(160)
    run.steps(160, 170)
    found = rollback(run.tell())
    assert found.checkpoint is not None and (found.checkpoint.path, found.rejected) == (again, ())
    again.unlink()
    found = rollback(tmp_path / "r")
    assert found.checkpoint is not None and found.checkpoint.step == 100
    assert [rejected.saved.step for rejected in found.rejected] == [160, 158]


@pytest.mark.parametrize(
    ("kind", "series"),
    [("throughput", "perf/tokens_per_s"), ("memory", "mem/allocated_bytes"), ("stall", "perf/step_s"),
     ("plateau", "train/loss"), ("rule", "host/rss_bytes")],
)  # fmt: skip
def test_what_says_nothing_of_the_weights_taints_nothing(tmp_path: Path, kind: str, series: str) -> None:
    run = Recording(tmp_path / "r")
    run.steps(0, 200)
    run.save(200)
    found = rollback(run.tell(anomaly(50, kind=kind, series=series)))
    assert found.anomaly is None and found.checkpoint is not None and found.checkpoint.step == 200


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    run = Recording(tmp_path / "r")
    run.steps(0, 10)
    run.save(5)
    run.save(10).unlink()
    found = rollback(run.tell())
    assert found.checkpoint is not None and found.checkpoint.step == 5
    assert found.rejected[0].why == "is not on this disk"


def test_the_command(tmp_path: Path) -> None:
    run = Recording(tmp_path / "r")
    run.steps(0, 100)
    run.save(100)
    run.steps(100, 200)
    run.save(200)
    run.steps(200, 210)
    path = run.tell(anomaly(180, first_mover=("layer/h.0.weight/grad_norm", 175)))
    shown = CliRunner().invoke(app, ["rollback", str(path)])
    assert shown.exit_code == 0 and "step-100.pt (after 100 steps)" in shown.stdout
    assert "it was saved after layer/h.0.weight/grad_norm began to move at step 175" in shown.stdout
    told = json.loads(CliRunner().invoke(app, ["rollback", str(path), "--json"]).stdout)
    assert told["checkpoint"]["step"] == told["before"]["step"] == 100 and told["rejected"][0]["step"] == 200
    assert "has that step in it" not in shown.stdout

    empty = Recording(tmp_path / "e")
    empty.steps(0, 3)
    nothing = CliRunner().invoke(app, ["rollback", str(empty.tell())])
    assert nothing.exit_code == 1 and "no checkpoint was told of" in nothing.stdout


def test_a_checkpoint_from_after_a_spike_that_was_over_comes_with_the_one_from_before_it(tmp_path: Path) -> None:
    run = Recording(tmp_path / "r")
    for step in (100, 200, 300):
        run.steps(step - 100, step)
        run.save(step)
    run.steps(300, 310)
    path = run.tell(anomaly(220, recovered_after=2))
    found = rollback(path)
    assert found.checkpoint is not None and found.checkpoint.step == 300 and found.after
    assert found.before is not None and found.before.step == 200 and not found.rejected
    shown = CliRunner().invoke(app, ["rollback", str(path)])
    words = " ".join(shown.stdout.split())
    assert "the spike of step 220 was over, and has that step in it; from before it:" in words
    assert json.loads(CliRunner().invoke(app, ["rollback", str(path), "--json"]).stdout)["before"]["step"] == 200


def test_where_none_is_from_before_the_spike_that_is_said(tmp_path: Path) -> None:
    run = Recording(tmp_path / "r")
    run.steps(0, 100)
    run.save(100)
    run.steps(100, 110)
    path = run.tell(anomaly(50, recovered_after=2))
    found = rollback(path)
    assert found.checkpoint is not None and found.before is None and found.after
    words = " ".join(CliRunner().invoke(app, ["rollback", str(path)]).stdout.split())
    assert "no clean checkpoint is from before it" in words


def test_a_path_is_one_line_however_narrow_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there to be copied."""
    monkeypatch.setenv("COLUMNS", "40")
    run = Recording(tmp_path / ("long name " * 8).strip())
    run.steps(0, 100)
    saved = run.save(100)
    shown = CliRunner().invoke(app, ["rollback", str(run.tell())])
    assert f"go back to: {saved} (after 100 steps)" in shown.stdout.splitlines()
