"""The wheel alone and with each extra alone: ``make wheel-matrix``, or ``python -m tests.wheel_matrix [EXTRA ...]``.

For each extra: an empty environment, the wheel with that extra and nothing else, and what that extra is for, done once. A run
is recorded beforehand, here, so that what needs no torch is shown to need none. Minutes and gigabytes, hence not in the suite.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = """
import torch, trackbridge
{extra}
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
run = trackbridge.init(id={run!r}, dir="runs", config={{"lr": 0.05}})
run.watch(model, optimizer)
for step in range(60):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean() + (9 if step == 40 else 0)
    loss.backward()
    optimizer.step()
    run.step(loss=loss)
assert run.finish(), "not everything was delivered"
"""
BASE = (
    "runs",
    "show before",
    "show before --findings",
    "export before --to csv --out rows.csv",
    "view before --no-open --out page.html",
    "pull runs/before --dest pulled",
    "init-config -",
)


@dataclass(frozen=True)
class Case:
    """`commands` of trackbridge and `python` code that must work with this extra alone; `torch`: it brings torch."""

    commands: tuple[str, ...] = ()
    python: str = ""
    torch: bool = False


CASES: dict[str, Case] = {
    "": Case(("doctor --json",)),
    "torch": Case(python=RECORD.format(extra="", run="torch"), torch=True),
    "wandb": Case(("sync runs/before --to wandb",)),
    "mlflow": Case(("sync runs/before --to mlflow", "pull mlflow:before@40 --dest from-mlflow")),
    "tensorboard": Case(("sync runs/before --to tensorboard", "pull tensorboard:runs/before@40 --dest from-tensorboard")),
    "prometheus": Case(("sync runs/before --to prometheus --timeout 20",)),
    "reports": Case(("report before --template spike-forensics --dry-run",)),
    "alerts": Case(("doctor --json",), python="import trackbridge.backends.alerts as a, apprise; a.AlertsConfig().build"),
    "hf": Case(python=RECORD.format(extra="trackbridge.hf.Callback", run="hf"), torch=True),
    "lightning": Case(python=RECORD.format(extra="trackbridge.lightning.Callback", run="lightning"), torch=True),
    "accelerate": Case(python=RECORD.format(extra="trackbridge.accelerate.watch", run="accelerate"), torch=True),
    "all": Case(("sync runs/before --to tensorboard", "doctor --json"), python=RECORD.format(extra="", run="all"), torch=True),
}


def call(command: list[str | Path], cwd: Path, path: str = "") -> None:
    """Runs `command` in `cwd`, away from this repository unless `path` is it. Raises `RuntimeError` with what it said."""
    environment = os.environ | {
        "PYTHONPATH": path,
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{cwd}/mlflow.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))[:300]}\n{done.stdout[-1500:]}{done.stderr[-1500:]}")


def check(extra: str, wheel: Path, folder: Path, torch: str | None) -> str:
    """Installs the wheel with `extra` into an empty environment and does what it is for; a line about it."""
    began = time.monotonic()
    venv.create(folder / "venv", with_pip=True, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    case = CASES[extra]
    if case.torch and torch:
        call([*pip, torch], folder)
    call([*pip, f"trackbridge[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)], folder)
    installed = time.monotonic()
    call([sys.executable, "-c", RECORD.format(extra="", run="before")], folder, str(ROOT))
    call([python, "-m", "pip", "check", "--disable-pip-version-check"], folder)
    for command in (*BASE, *case.commands):
        call([python, "-m", "trackbridge.cli", *command.split()], folder)
    if case.python:
        call([python, "-c", case.python], folder)
    return f"installed in {installed - began:.0f} s, {len(BASE) + len(case.commands) + bool(case.python)} things done"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("extras", nargs="*", metavar="EXTRA", help='default: all, and "none"')
    arguments.add_argument("--torch", default=os.environ.get("TORCH_CPU"), help="a requirement to install torch by")
    given = arguments.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="wheel-matrix-") as place:
        root = Path(place)
        call([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", root, ROOT], root)
        (wheel,) = root.glob("trackbridge-*.whl")
        for extra in ["" if name == "none" else name for name in given.extras] or CASES:
            folder = root / (extra or "none")
            folder.mkdir()
            try:
                said = check(extra, wheel, folder, given.torch)
            except RuntimeError as error:
                failed += 1
                said = f"FAILED: {error}"
            print(f"trackbridge[{extra}]" if extra else "trackbridge", said, sep="  ", flush=True)
            subprocess.run(["rm", "-rf", folder / "venv"], check=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
