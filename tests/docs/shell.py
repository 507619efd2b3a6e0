"""A reader's shell: the commands of a page, one after the other, in one folder.

``trackbridge`` runs in this process (its imports would be most of the time), scripts in processes of their own. What would
serve until it is stopped, or take minutes, is held to be there and to be asked for rightly, no more.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.docs.pages import ROOT
from trackbridge import plugins
from trackbridge.cli import app

SERVERS = ("tensorboard", "mlflow", "wandb")


class Shell:
    """Its `said` is what the newest command printed, stdout and stderr together."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.patch = patch
        self.said = ""

    def run(self, line: str) -> None:
        """Raises `AssertionError` with what a command said if it did not end well."""
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            self.patch.setenv(*words.pop(0).split("=", 1))
        if not words:
            return
        place = words.index(">") if ">" in words else len(words)
        command, target = words[:place], words[place + 1 :]
        commands: dict[str, Callable[[list[str]], None]] = {
            "trackbridge": self._trackbridge, "python": self._process, "torchrun": self._process, "pytest": self._process,
            "make": self._make, "pip": self._pip, "cd": self._cd, "cat": self._process, "git": self._process,
        }  # fmt: skip
        if command[0] in SERVERS:
            assert shutil.which(command[0], path=self._path()), f"no {command[0]} here"
            return
        assert command[0] in commands, f"no way to run {command[0]!r} from the docs: {line}"
        commands[command[0]](command)
        if target:
            (self.folder / target[0]).write_text(self.said, encoding="utf-8")

    def _trackbridge(self, command: list[str]) -> None:
        self.patch.chdir(self.folder)
        self.patch.syspath_prepend(str(self.folder))
        result = CliRunner().invoke(app, command[1:])
        self.said = result.output
        assert result.exit_code == 0, f"{shlex.join(command)}: status {result.exit_code}\n{result.output}\n{result.exception!r}"

    def _process(self, command: list[str]) -> None:
        if command[0] == "python":
            command = [sys.executable, "-W", "error", *command[1:]]
        environment = {**os.environ, "PATH": self._path(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        self.said = done.stdout + done.stderr
        assert done.returncode == 0, f"{shlex.join(command)}: status {done.returncode}\n{self.said[-3000:]}"

    def _make(self, command: list[str]) -> None:
        done = subprocess.run([command[0], "--dry-run", *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def _pip(self, command: list[str]) -> None:
        """Extras that are asked for exist. A package in this folder is found as an installed one is, by its entry points."""
        assert command[1] == "install", command
        known = set(re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M))
        for word in command[2:]:
            assert set(re.findall(r"[a-z]+", word.partition("[")[2])) <= known, f"{word}: no such extra"
        if command[2:] == ["-e", "."]:
            self._install()

    def _install(self) -> None:
        given = (self.folder / "pyproject.toml").read_text(encoding="utf-8")
        points = re.sub(r'^\[project\.entry-points\."(.+)"\]$', r"[\1]", given.partition("\n\n")[2], flags=re.M).replace(
            '"', ""
        )
        facts = self.folder / "my_package-1.0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n", encoding="utf-8")
        (facts / "entry_points.txt").write_text(points, encoding="utf-8")
        self.patch.syspath_prepend(str(self.folder))
        plugins.available.cache_clear()

    def _cd(self, command: list[str]) -> None:
        self.folder = (self.folder / command[1]).resolve()
        assert self.folder.is_dir(), command

    def _path(self) -> str:
        return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
