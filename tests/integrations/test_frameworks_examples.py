"""The examples of Lightning and Accelerate: the script, then the command that it prints."""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.integrations.accelerate_kit import fresh
from trackbridge.cli import app

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_the_example_trains_finds_its_bad_batch_and_replays_it(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh()
    shutil.copy(EXAMPLES / framework / "train.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.delitem(sys.modules, "train", raising=False)
    runpy.run_path("train.py", run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    assert any("spike in train/loss at step 66" in line for line in said), said
    program, *command = said[-1].split()
    assert program == "trackbridge"
    monkeypatch.syspath_prepend(str(tmp_path))
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and "exact" in done.output, done.output
    monkeypatch.delitem(sys.modules, "train", raising=False)
