"""A third party's rule takes part where sealing runs: in a process that has not imported its package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.capsules import an_anomaly
from tests.test_seal import a_run
from trackbridge.capsule import load

RULES = '''
from trackbridge.diagnosis import rule

@rule("cosmic-ray", intervention="rerun")
def cosmic_ray(view, case):
    case.add(100, f"a flash at step {view.onset}")

@rule("broken-rule", intervention="rerun")
def broken(view, case):
    raise RuntimeError("a bug of theirs")
'''


def install(folder: Path, **points: str) -> None:
    """A tiny distribution, as pip would leave it."""
    (folder / "their_rules.py").write_text(RULES)
    metadata = folder / "their_rules-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-rules\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[trackbridge.rules]", *lines, ""]))


def seal(run: Path, plugins: Path) -> subprocess.CompletedProcess[str]:
    """As the trainer does it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return subprocess.run(
        [sys.executable, "-m", "trackbridge.seal", str(run), "a-20"],
        env={**environment, "PYTHONPATH": f"{plugins}{os.pathsep}{Path(__file__).parents[2]}"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def test_an_installed_rule_names_its_cause_and_a_broken_one_costs_nothing(tmp_path: Path) -> None:
    plugins = tmp_path / "site"
    plugins.mkdir()
    install(plugins, ray="their_rules:cosmic_ray", gone="no_such_module:rule")
    directory = a_run(tmp_path / "run-1", anomaly=an_anomaly(id="a-20", step=21, onset=20, hypotheses=()))
    done = seal(directory.path, plugins)
    assert done.returncode == 0, done.stderr
    hypotheses = load(directory.capsules / "spike-21").anomaly.hypotheses
    assert hypotheses[0].name == "cosmic-ray" and hypotheses[0].evidence_for == ("a flash at step 20",)
    assert "broken-rule" not in {hypothesis.name for hypothesis in hypotheses}
    assert "the diagnosis rule broken-rule failed" in done.stderr and "the diagnosis rule gone failed" in done.stderr
