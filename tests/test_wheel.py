"""The wheel, built and installed into an empty environment, run from there and not from this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    """Run `command` away from the repository; its stdout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (built,) = out.glob("trackbridge-*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel in it; its dependencies are seen in ours, which are not installed a second time."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel, cwd=folder)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return folder


def test_what_the_package_reads_at_run_time_is_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "trackbridge/py.typed" in names
    assert "trackbridge/reports/assets/uPlot.iife.min.js" in names
    assert "trackbridge/reports/assets/uPlot-LICENSE.txt" in names
    assert {f"trackbridge/reports/assets/page/{name}" for name in ("main.js", "parts.css")} <= set(names)
    for file in (ROOT / "dashboards").rglob("*"):
        if file.is_file() and file.suffix != ".pyc":
            assert f"trackbridge/dashboards/{file.relative_to(ROOT / 'dashboards').as_posix()}" in names
    assert any(name.startswith("trackbridge/dashboards/") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "docs/", "benchmarks/"))]


def test_every_extra_is_in_the_wheel_and_in_the_matrix(wheel: Path) -> None:
    """What each is for is done with it alone by ``make wheel-matrix``."""
    from tests.wheel_matrix import CASES

    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        facts = file.read(name).decode().partition("\n\n")[0].splitlines()
    extras = {line.removeprefix("Provides-Extra: ") for line in facts if line.startswith("Provides-Extra: ")}
    assert extras == (set(CASES) - {""}) | {"docs", "dev"}
    alone = {
        line.split()[1].split(">")[0].split("[")[0]
        for line in facts
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    }
    assert not alone & {"torch", "wandb", "mlflow", "tensorboard", "transformers", "lightning", "accelerate"}, (
        "heavy for a login node"
    )


def test_it_runs_from_an_empty_environment(environment: Path, tmp_path: Path) -> None:
    python = environment / "bin" / "python"
    where = run(python, "-c", "import trackbridge; print(trackbridge.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(environment)
    version = run(python, "-m", "trackbridge.cli", "--version", cwd=tmp_path)
    assert version.startswith("trackbridge ")
    findings = json.loads(run(python, "-m", "trackbridge.cli", "doctor", "--json", cwd=tmp_path))
    assert {"trackbridge", "torch", "wandb", "mlflow", "tensorboard", "disk", "run folder"} <= {f["what"] for f in findings}


def test_it_records_from_an_empty_environment(environment: Path, tmp_path: Path) -> None:
    program = """
import torch, trackbridge
run = trackbridge.init(project="wheel", id="one")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.watch(model, optimizer)
for _ in range(3):
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.step(loss=loss)
assert run.finish(), "not everything was delivered"
print(len(trackbridge.load("runs/one").series("train/loss")[0]))
"""
    assert run(environment / "bin" / "python", "-c", program, cwd=tmp_path).split() == ["3"]
