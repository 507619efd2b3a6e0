"""Every python block and every command of README and docs, run: page by page, in the order in which a reader meets them.

The run that the pages speak of, ``my-run``, is the quick start's own: its two files are written and run once, and each page
gets a copy of that folder. Fragments (a line of somebody's loop) get what they need from `preludes`.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trackbridge
from tests.docs import preludes
from tests.docs.pages import ROOT, RUN, SHOWN, Block, blocks, name, pages
from tests.docs.shell import Shell

PAGES = {name(page): blocks(page) for page in pages()}
QUICK = "docs/quickstart.md"
FEW = 12
"""Blocks that may be left out, in all."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the quick start's training has run."""
    folder = tmp_path_factory.mktemp("docs")
    patch = pytest.MonkeyPatch()
    for block in PAGES[QUICK]:
        if block.file:
            (folder / block.file).write_text(block.body, encoding="utf-8")
    Shell(folder, patch).run("python train.py")
    patch.undo()
    return folder


@pytest.fixture
def shell(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    folder = Path(shutil.copytree(recorded, tmp_path / "reader"))
    for variable in ("MLFLOW_TRACKING_URI", "WANDB_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("BROWSER", "true")  # the program: a page is shown to nobody
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(folder)
    yield Shell(folder, monkeypatch)


@pytest.mark.parametrize("page", [page for page, found in PAGES.items() if any(b.language in RUN for b in found)])
def test_a_page_does_what_it_says(page: str, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    if page == QUICK:  # its reader has no run yet
        shutil.rmtree(shell.folder / "runs")
    space: dict[str, object] = {"__name__": "docs"}
    runs: list[Any] = []
    begin = trackbridge.Run.__init__

    def begun(run: Any, *given: Any, **more: Any) -> None:
        begin(run, *given, **more)
        runs.append(run)

    monkeypatch.setattr(trackbridge.Run, "__init__", begun)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        exec(compile(preludes.of(page), f"prelude of {page}", "exec"), space)
        try:
            for block in PAGES[page]:
                if block.left_out is None:
                    perform(block, shell, space)
        finally:
            preludes.close(runs)


def perform(block: Block, shell: Shell, space: dict[str, object]) -> None:
    where = f"{block.page}:{block.line}"
    if block.file:
        (shell.folder / block.file).write_text(block.body, encoding="utf-8")
        if block.file.endswith(".py"):
            compile(block.body, where, "exec")
    elif block.language == "python":
        exec(compile("\n" * block.line + block.body, str(ROOT / block.page), "exec"), space)
    elif block.language == "bash":
        for line in block.body.replace("\\\n", " ").splitlines():
            shell.run(line)
    elif block.language == "console":
        session(block, shell)


def session(block: Block, shell: Shell) -> None:
    """Commands after ``$``, and below each what it prints: every line shown is printed, numbers and padding aside."""
    for part in re.split(r"^\$ ", block.body, flags=re.M)[1:]:
        command, _, shown = part.partition("\n")
        shell.run(command)
        printed = {like(line, shell) for line in shell.said.splitlines()}
        for line in shown.splitlines():
            if line.strip() and line.strip() != "...":
                assert like(line, shell) in printed, (
                    f"{block.page}:{block.line}: {command} does not print {line!r}\n{shell.said}"
                )


def like(line: str, shell: Shell) -> str:
    """`line` without what differs from machine to machine: numbers, bars, folders, padding."""
    line = re.sub(r"\S*/(?=(?:runs|pulled|checkpoint|skip)\b)", "", line.replace(str(shell.folder), ""))
    line = re.sub(r"[▁▂▃▄▅▆▇█!]{3,}", "~", line)
    line = re.sub(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", "#", line)
    return " ".join(line.split())


@pytest.mark.parametrize(
    "block", [b for found in PAGES.values() for b in found if b.left_out], ids=lambda b: f"{b.page}:{b.line}"
)
def test_left_out(block: Block) -> None:
    pytest.skip(str(block.left_out))


def test_few_blocks_are_left_out_and_every_fence_says_what_it_is() -> None:
    every = [block for found in PAGES.values() for block in found]
    reasons = [block.left_out for block in every if block.left_out is not None]
    assert len(reasons) <= FEW
    for reason in reasons:  # a test that is named in its place is there
        assert all((ROOT / file).exists() for file in re.findall(r"tests/[\w/]+\.py", reason)), reason
    unknown = [f"{b.page}:{b.line} {b.language!r}" for b in every if b.language not in (*RUN, *SHOWN)]
    assert unknown == [], "a fence is python, bash or console, which are run, or one of " + ", ".join(SHOWN)


def test_a_block_that_fails_is_seen(shell: Shell) -> None:
    with pytest.raises(AssertionError, match="status 2"):
        perform(Block("p", 1, "bash", "trackbridge show nowhere\n"), shell, {})
    with pytest.raises(AssertionError, match="does not print"):
        perform(Block("p", 1, "console", "$ trackbridge --version\ntrackbridge 0 and more\n"), shell, {})
    with pytest.raises(ZeroDivisionError):
        perform(Block("p", 1, "python", "1 / 0\n"), shell, {})
