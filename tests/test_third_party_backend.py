"""The example of a third party's backend: built as a wheel, installed into a folder, its own tests run there."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "third_party_backend"


def run(command: list[str], cwd: Path, path: Path | None = None) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path) if path is not None else ""}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=environment, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the example is installed, as pip does it: the unpacked wheel."""
    folder = tmp_path_factory.mktemp("example")
    build = "from hatchling.build import build_wheel; print(build_wheel(__import__('sys').argv[1]))"
    name = run([sys.executable, "-c", build, str(folder)], EXAMPLE).strip().splitlines()[-1]
    with zipfile.ZipFile(folder / name) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def test_it_passes_the_contract_by_its_own_tests(site: Path, tmp_path: Path) -> None:
    out = run([sys.executable, "-m", "pytest", str(EXAMPLE / "tests"), "-q", "-p", "no:cacheprovider", "-c", "/dev/null"],
              tmp_path, site)  # fmt: skip
    assert " passed" in out and "failed" not in out


def test_a_run_reaches_it_and_sync_fills_it(site: Path, tmp_path: Path) -> None:
    script = (
        "import torch, trackbridge\n"
        "run = trackbridge.init(backend={'kind': 'sqlite', 'path': 'runs.db'}, id='r', config={'lr': 0.1})\n"
        "for step in range(20): run.step(loss=1.0 / (step + 1))\n"
        "report = run.finish(60)\n"
        "assert report, str(report)\n"
    )
    run([sys.executable, "-c", script], tmp_path, site)
    assert losses(tmp_path / "runs.db") == 20
    script = "import trackbridge; r = trackbridge.init(id='later'); [r.step(loss=1.0) for _ in range(5)]; r.finish()"
    run([sys.executable, "-c", script], tmp_path, site)
    run([sys.executable, "-m", "trackbridge.cli", "sync", "runs/later", "--to", "sqlite"], tmp_path, site)
    assert losses(tmp_path / "runs.db") == 25


def losses(path: Path) -> int:
    with sqlite3.connect(path) as db:
        return int(db.execute("SELECT COUNT(*) FROM points WHERE name = 'train/loss'").fetchone()[0])


def test_it_is_as_small_as_the_docs_say() -> None:
    lines = (EXAMPLE / "src" / "trackbridge_sqlite" / "__init__.py").read_text().splitlines()
    code = [line for line in lines if line.strip() and not line.strip().startswith(("#", '"""'))]
    assert len(code) <= 80
