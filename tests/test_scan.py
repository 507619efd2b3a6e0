"""`scan`: what a column is, CSV files, the command, the plot."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.detectors.kit import loss_curve
from trackbridge import detect
from trackbridge.cli import app
from trackbridge.errors import ReferenceNotFoundError, TrackbridgeError, UsageError
from trackbridge.scan import scan
from trackbridge.scan.columns import Choice, choose, step_column
from trackbridge.scan.plot import page, thinned


def spiked(steps: int = 600) -> np.ndarray:
    loss = loss_curve(steps)
    loss[400:403] += 2
    return loss


def table(path: Path, header: str, rows: list[str]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("columns", "loss", "norm"),
    [
        (["loss"], "loss", None),
        (["val_loss", "loss", "grad_norm"], "loss", "grad_norm"),
        (["train/loss", "eval/loss", "train/grad_norm"], "train/loss", "train/grad_norm"),
        (["Loss/train", "Loss/validation"], "Loss/train", None),
        (["trainLoss", "testLoss", "gradNorm"], "trainLoss", "gradNorm"),
        (["train_loss_epoch", "train_loss_step"], "train_loss_step", None),
        (["lm loss", "lm loss validation", "grad-norm", "loss-scale"], "lm loss", "grad-norm"),
        (["train/loss", "train/loss/aux", "layer/a/grad_norm", "grad/norm", "grad/norm_clipped"], "train/loss", "grad/norm"),
        (["training_loss", "loss_weight", "total_norm", "learning_rate"], "training_loss", "total_norm"),
    ],
)
def test_columns_are_known_by_their_names(columns: list[str], loss: str, norm: str | None) -> None:
    found = choose(columns, Choice())
    assert (found["train/loss"], found.get("grad/norm")) == (loss, norm)


def test_no_loss_is_an_error_that_lists_the_columns() -> None:
    with pytest.raises(UsageError, match="name it with --loss, one of: val_loss, reward"):
        choose(["val_loss", "reward"], Choice())
    with pytest.raises(UsageError, match="no such column \\(did you mean 'reward'"):
        choose(["val_loss", "reward"], Choice("rewrd"))
    assert choose(["val_loss", "reward"], Choice("reward", "val_loss")) == {"train/loss": "reward", "grad/norm": "val_loss"}


def test_the_step_column() -> None:
    assert step_column(["loss", "Step"], None) == "Step" and step_column(["loss", "_step", "step"], None) == "_step"
    assert step_column(["loss", "tokens"], None) is None and step_column(["loss", "tokens"], "tokens") == "tokens"


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_table_is_judged_as_detect_judges_arrays(tmp_path: Path, separator: str) -> None:
    loss = spiked()
    norm = np.exp(0.1 * np.random.default_rng(0).standard_normal(600))
    pairs = enumerate(zip(loss.tolist(), norm.tolist(), strict=True))
    rows = [separator.join((str(10 * i), repr(v), repr(g))) for i, (v, g) in pairs]
    found = scan(table(tmp_path / "log.csv", separator.join(("step", "train loss", "grad_norm")), rows))
    assert found.columns == {"train/loss": "train loss", "grad/norm": "grad_norm"}
    assert found.anomalies == detect(np.arange(0, 6000, 10), loss, norm)
    assert [a.onset for a in found.anomalies] == [4000]


def test_blanks_words_repeated_steps_and_nan(tmp_path: Path) -> None:
    loss = spiked()
    rows = [f"{i},{v!r},text" for i, v in enumerate(loss.tolist())]
    rows[100], rows[200], rows[300] = "100,,text", "200,nan,text", "300,none,"
    rows += ["599,2.1,again", ""]
    found = scan(table(tmp_path / "log.csv", "iteration,loss,note", rows))
    assert len(found.steps) == 598 and found.loss[-1] == 2.1
    assert [(a.kind, a.onset) for a in found.anomalies] == [("nonfinite", 200), ("spike", 400)]


def test_values_that_have_no_step_of_their_own_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.csv"
    lines = [f"{epoch},{step},{2 + 0.001 * step}" for epoch in range(3) for step in range(50)]
    path.write_text("\n".join(["epoch,step,loss", *lines, '3,"1,000",2.0', "3,1e300,2.0"]))
    assert len(scan(path).steps) == 50
    (record,) = caplog.records
    assert "of 152 values of 'loss' 2 have no step that is a number, and 100 have one that comes again" in record.getMessage()
    caplog.clear()
    path.write_text("\n".join(["step,loss", *[f"{step},2.0" for step in range(50)]]))
    assert len(scan(path).steps) == 50 and not caplog.records


def test_rows_are_counted_where_no_column_is_the_step(tmp_path: Path) -> None:
    found = scan(table(tmp_path / "log.csv", "loss", [repr(v) for v in spiked().tolist()]))
    assert found.steps.tolist() == list(range(600)) and [a.onset for a in found.anomalies] == [400]


def test_what_is_not_there_or_no_curve(tmp_path: Path) -> None:
    with pytest.raises(ReferenceNotFoundError, match="does not exist; give a CSV file"):
        scan(tmp_path / "absent.csv")
    with pytest.raises(ReferenceNotFoundError, match="holds no run"):
        scan(tmp_path)
    with pytest.raises(UsageError, match="no reference of a known form"):
        scan("comet:team/run")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00loss")
    with pytest.raises(UsageError, match="cannot be read as a table"):
        scan(tmp_path / "bytes.csv")
    with pytest.raises(UsageError, match="holds no number"):
        scan(table(tmp_path / "words.csv", "step,loss", ["1,low"]))


def test_a_folder_of_several_runs_is_an_error_that_lists_them(tmp_path: Path) -> None:
    """Not a scan of one of them, nor of all mixed."""
    from torch.utils.tensorboard import SummaryWriter

    for name in ("a", "b"):
        table(tmp_path / "tables" / f"{name}.csv", "loss", ["1"])
        with SummaryWriter(tmp_path / "logs" / name) as writer:
            writer.add_scalar("loss", 1.0, 0)
        file = tmp_path / "wandb" / f"offline-run-20261128_101500-{name}" / f"run-{name}.wandb"
        file.parent.mkdir(parents=True)
        file.touch()
    for folder, listed in (
        ("tables", "tables/a.csv, .*tables/b.csv"),
        ("logs", "logs/a, .*logs/b"),
        ("wandb", "offline-run-20261128_101500-a, .*offline-run-20261128_101500-b"),
    ):
        with pytest.raises(UsageError, match=f"holds 2 (runs|tables), scan one of: .*{listed}$"):
            scan(tmp_path / folder)
    assert len(scan(tmp_path / "tables" / "a.csv").steps) == len(scan(f"tensorboard:{tmp_path / 'logs' / 'a'}").steps) == 1


def test_a_log_folder_of_one_run_in_parts_is_one_run(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for part in ("train", "validation"):
        with SummaryWriter(tmp_path / part) as writer:
            writer.add_scalar("loss", 1.0, 0)
    assert scan(tmp_path).columns == {"train/loss": "train:loss"}


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("tensorboard:nowhere", "there is no TensorBoard log folder nowhere"),
        ("wnadb:team/project/run", "did you mean 'wandb'"),
        ("mlflow:abc@160", "leave @160 away"),
        ("wandb:team/project/run@160", "leave @160 away"),
        ("wandb:team/project/spike:latest", "is an artifact, which `trackbridge pull` brings"),
        ("log.csv@3", "leave @3 away"),
    ],
)
def test_a_wrong_reference_names_the_fix(reference: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "log.csv", "loss", ["1"])
    with pytest.raises(TrackbridgeError, match=re.escape(words)) as caught:
        scan(reference)
    assert "\n" not in str(caught.value)


def test_rows_of_ours_in_a_tracker_have_our_step(tmp_path: Path) -> None:
    """W&B's own step goes on with records of other kinds. Rows of somebody else's loss beside ours have only that."""
    rows = [f"{i + i // 100},{i},{v!r}," for i, v in enumerate(spiked().tolist())]
    theirs = [f"{1000 + i},,,{v!r}" for i, v in enumerate(spiked().tolist())]
    path = table(tmp_path / "log.csv", "_step,trackbridge/step,train/loss,own", [*rows, *theirs])
    assert [a.onset for a in scan(path).anomalies] == [400]
    assert [a.onset for a in scan(path, loss="own").anomalies] == [1400]
    assert [a.onset for a in scan(path, step="_step").anomalies] == [404]


@pytest.mark.parametrize("text", ["", "\n", "step,loss\n", "step\n1\n"])
def test_a_table_without_rows_or_columns_is_said_to_be_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / "empty.csv").write_text(text)
    with pytest.raises(UsageError, match=r"empty\.csv has no columns or no rows"):
        scan(tmp_path / "empty.csv")
    with pytest.raises(UsageError, match=r"empty\.csv has no columns or no rows"):
        scan(tmp_path / "empty.csv", loss="loss")


def test_the_command(tmp_path: Path) -> None:
    path = table(tmp_path / "log.csv", "step,loss", [f"{i},{v!r}" for i, v in enumerate(spiked().tolist())])
    plot = tmp_path / "out.html"
    shown = CliRunner().invoke(app, ["scan", str(path), "--plot", str(plot)])
    assert shown.exit_code == 0, shown.output
    assert "600 steps, 0 to 599" in shown.output and re.search(r"400 .*spike .*train/loss .*3 steps", shown.output)
    told = json.loads(CliRunner().invoke(app, ["scan", str(path), "--json"]).stdout)
    assert [a["onset"] for a in told["anomalies"]] == [400] and told["columns"] == {"train/loss": "loss"}
    quiet = json.loads(CliRunner().invoke(app, ["scan", str(path), "--json", "--threshold", "500"]).stdout)
    assert quiet["anomalies"] == []
    wrong = CliRunner().invoke(app, ["scan", str(path), "--loss", "los"])
    assert wrong.exit_code == 2 and "did you mean 'loss'" in wrong.output
    nowhere = CliRunner().invoke(app, ["scan", str(path), "--plot", str(tmp_path / "no" / "out.html")])
    assert nowhere.exit_code == 2 and "cannot write" in nowhere.output


def test_the_plot_needs_nothing_and_keeps_every_spike(tmp_path: Path) -> None:
    loss = loss_curve(60_000)
    loss[43_210] += 30
    loss[50_000] = math.nan
    found = scan(table(tmp_path / "a<b.csv", "step,loss", [f"{i},{v!r}" for i, v in enumerate(loss.tolist())]))
    text = page(found)
    assert "<script" not in text and "http" not in text.replace("http-equiv", "") and "a&lt;b.csv" in text
    assert len(text) < 100_000 and text.count('class="span"') == len(found.anomalies) >= 2
    kept = thinned(found.steps, found.loss)
    assert len(kept) <= 2000 and (43_210.0, float(loss[43_210])) in kept


@pytest.mark.parametrize("far", [1e308, -1e308, 1e300])
def test_a_value_beside_which_all_others_are_nothing_is_shown(tmp_path: Path, far: float) -> None:
    """No slope through what is so close together, beside it, is a number."""
    loss = spiked()
    loss[300] = far
    path = table(tmp_path / "run.csv", "step,loss", [f"{i},{value}" for i, value in enumerate(loss)])
    done = CliRunner().invoke(app, ["scan", str(path), "--plot", str(tmp_path / "out.html")])
    assert done.exit_code == 0, done.exception
    assert "600 steps" in done.output


def test_a_name_that_commands_the_terminal_is_shown_instead(tmp_path: Path) -> None:
    name = "\x1b]0;mine\x07\u202eloss\x9b2J"
    path = table(tmp_path / "run.csv", f"step,{name}", [f"{i},{value}" for i, value in enumerate(spiked())])
    done = CliRunner().invoke(app, ["scan", str(path)])
    assert done.exit_code == 0 and r"\x1b]0;mine\x07\u202eloss\x9b2J" in done.output
    wrong = CliRunner().invoke(app, ["scan", str(path), "--loss", "\x1b[2J"])
    assert wrong.exit_code == 2 and not {"\x1b", "\x07", "\x9b", "\u202e"} & set(done.output + wrong.output)
