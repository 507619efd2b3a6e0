"""The README's commands and snippets work as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced code blocks of `language`, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def run(command: list[str], cwd: Path) -> str:
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "160"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the example has run."""
    where = tmp_path_factory.mktemp("readme")
    (example,) = blocks("python")
    run([sys.executable, "-W", "error", "-c", example], where)
    return where


def test_the_example_leaves_what_the_readme_says(folder: Path) -> None:
    assert (folder / "runs" / "first" / "run.json").exists()
    assert list((folder / "runs" / "first" / "tensorboard").glob("events.out.tfevents.*"))


def test_the_commands_after_it_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = blocks("bash")
    commands = [shlex.split(line, comments=True) for line in text.splitlines()]
    names = ("runs", "show", "view", "sync", "doctor")
    assert [command[:2] for command in commands] == [["trackbridge", name] for name in names]
    monkeypatch.setenv("BROWSER", "true")  # the program: a page is shown to nobody
    said = {command[1]: run(command, folder) for command in commands}
    assert "first" in said["runs"]
    assert "train/loss" in said["show"]
    assert (folder / "runs" / "first" / "report.html").exists()


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    assert "make demo\nmake test\n" in README
    for target in ("demo", "test", "check", "docs"):
        run(["make", "--dry-run", target], ROOT)


def test_every_link_and_picture_is_there() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
