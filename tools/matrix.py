"""The tests with the lowest and the newest version of torch and of each framework: ``make matrix``, or ``tools/matrix.py hf``.

Each row's packages go into an environment of their own, in front of what is installed, and its tests run there. A table says
what passed; the exit code is 1 if anything did not. Frameworks take some minutes. Each row of torch takes a quarter of an hour
and 5 GB of disk: its wheels for Linux are those for CUDA. The newest is what pip gives; lift a cap with ``PIP_CONSTRAINT=``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Row:
    """`packages` are pip requirements, installed without their dependencies unless `with_dependencies`: name those that must be
    of another version, too. `tests` are paths under tests/, `shows` is the package whose version the table shows."""

    framework: str
    which: str
    packages: tuple[str, ...]
    tests: tuple[str, ...]
    shows: str
    with_dependencies: bool = False


TORCH = (
    "probes", "flops", "replay", "test_run.py", "test_observer_law.py", "test_rng.py", "test_watching.py", "test_recorder.py",
    "test_guard.py", "test_batches.py", "test_snapshots.py", "test_ranks.py", "test_merged.py", "integrations/test_plain.py",
)  # fmt: skip
HF = (
    "integrations/test_hf.py", "integrations/test_hf_replay.py", "integrations/test_hf_around.py",
    "integrations/test_hf_public_reports.py",
)  # fmt: skip
LIGHTNING = ("integrations/test_lightning.py", "integrations/test_lightning_ways.py", "integrations/test_lightning_resume.py")
ACCELERATE = ("integrations/test_accelerate.py", "integrations/test_accelerate_ways.py")
ROWS = (
    Row("torch", "lowest", ("torch==2.6.0",), TORCH, "torch", with_dependencies=True),
    Row("torch", "newest", ("torch",), TORCH, "torch", with_dependencies=True),
    Row(
        "hf",
        "lowest",
        ("transformers==4.48.3", "accelerate==1.1.0", "tokenizers==0.21.0", "huggingface_hub==0.27.1", "datasets==3.2.0"),
        HF,
        "transformers",
    ),
    Row("hf", "newest", ("transformers", "accelerate", "tokenizers", "huggingface_hub", "datasets", "trl"), HF, "transformers"),
    Row("lightning", "lowest", ("lightning==2.4.0", "pytorch-lightning==2.4.0"), LIGHTNING, "lightning"),
    Row("lightning", "newest", ("lightning", "pytorch-lightning"), LIGHTNING, "lightning"),
    Row("accelerate", "lowest", ("accelerate==1.1.0",), ACCELERATE, "accelerate"),
    Row("accelerate", "newest", ("accelerate",), ACCELERATE, "accelerate"),
)


def environment(folder: Path) -> Path:
    """The interpreter of a new environment in `folder`. Behind what will be installed there it has what is installed here."""
    venv.create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "installed_here.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return folder / "bin" / "python"


def run(row: Row, folder: Path) -> tuple[str, bool, str]:
    """(version, passed, pytest's last line) of one row."""
    python = environment(folder)
    pip = [python, "-m", "pip", "install", "--quiet", "--ignore-installed"]
    subprocess.run([*pip, *([] if row.with_dependencies else ["--no-deps"]), *row.packages], check=True)
    ask = f"import importlib.metadata; print(importlib.metadata.version({row.shows!r}))"
    version = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout
    tests = [str(ROOT / "tests" / name) for name in row.tests]
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.stdout.write(done.stdout[-8000:])
    return version.strip(), done.returncode == 0, (done.stdout.strip().splitlines() or [done.stderr[-200:]])[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", nargs="*", help="only these rows")
    wanted = parser.parse_args().framework
    failed = False
    for row in ROWS:
        if wanted and row.framework not in wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            version, passed, said = run(row, Path(folder))
        failed |= not passed
        sys.stdout.write(
            f"{row.framework:10} {row.which:7} {row.shows} {version:10} {'passed' if passed else 'FAILED'}  {said}\n"
        )
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
