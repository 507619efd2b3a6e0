"""The integrations with the lowest and the newest version of each framework: ``make matrix``, or ``tools/matrix.py hf``.

Each row's packages go into a folder of their own, in front of what is installed (torch is not installed again), and its tests
run with that. A table says what passed; the exit code is 1 if anything did not. It takes some minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Row:
    """`packages` are pip requirements, installed without their dependencies: name those that must be of another version, too.
    `shows` is the module whose version the table shows."""

    framework: str
    which: str
    packages: tuple[str, ...]
    tests: tuple[str, ...]
    shows: str


HF = ("test_hf.py", "test_hf_replay.py", "test_hf_around.py", "test_hf_public_reports.py")
LIGHTNING = ("test_lightning.py", "test_lightning_ways.py", "test_lightning_resume.py")
ACCELERATE = ("test_accelerate.py", "test_accelerate_ways.py")
ROWS = (
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


def run(row: Row, folder: Path) -> tuple[str, bool, str]:
    """(version, passed, pytest's last line) of one row."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *row.packages]
    subprocess.run(pip, check=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}
    ask = f"import importlib.metadata; print(importlib.metadata.version({row.shows!r}))"
    version = subprocess.run([sys.executable, "-c", ask], env=environment, check=True, capture_output=True, text=True).stdout
    tests = [str(ROOT / "tests" / "integrations" / name) for name in row.tests]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=environment,
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
