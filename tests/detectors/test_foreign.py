"""Further detectors by name: published scores, and one of a third party as the docs write it, installed as packages are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.detectors.kit import loss_curve, rows, watch_all
from trackbridge.config import DetectionConfig
from trackbridge.detectors import Watch, detect
from trackbridge.errors import ConfigError

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
import numpy as np
import trackbridge
loss = np.full(200, 2.0) + 0.01 * np.random.default_rng(0).standard_normal(200)
loss[5] = 5.0  # the band is still learning
loss[150] = 5.0
found = trackbridge.detect(np.arange(200), loss, settings={"detectors": sys.argv[1:]})
print(json.dumps([(a.kind, a.onset, a.notes) for a in found]))
"""
BROKEN = """

class Broken:
    def bind(self, series):
        raise RuntimeError("a bug of theirs")
"""


def spiked(at: int = 600) -> np.ndarray:
    loss = loss_curve(1000, seed=3)
    loss[at] += 3.0
    return loss


def example() -> str:
    """The code of the section in docs/detection.md."""
    section = (ROOT / "docs/detection.md").read_text(encoding="utf-8").split("### A detector of your own")[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


def run(folder: Path, *names: str) -> tuple[list[tuple[str, int, list[str]]], str]:
    """What a process that finds the package in `folder` tells, and what it logs."""
    (folder / "my_package.py").write_text(example() + BROKEN)
    metadata = folder / "my_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    points = "[trackbridge.detectors]\ndoubled = my_package:Doubled\nbroken = my_package:Broken\n"
    (metadata / "entry_points.txt").write_text(points)
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *names], env={**environment, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_the_documented_detector_is_found_by_its_name_and_joins_our_event(tmp_path: Path) -> None:
    told, _ = run(tmp_path, "doubled")
    assert [(kind, onset) for kind, onset, _ in told] == [("spike", 5), ("spike", 150)]
    assert all(any(note.startswith("doubled: train/loss is 5") for note in notes) for _, _, notes in told)


def test_a_broken_detector_is_left_out_and_costs_nothing(tmp_path: Path) -> None:
    told, log = run(tmp_path, "broken")
    assert [(kind, onset) for kind, onset, _ in told] == [("spike", 150)]
    assert log.count("the detector broken failed and is left out") == 1 and "a bug of theirs" in log


def test_published_scores_are_there_by_name_and_several_tell_one_event() -> None:
    found = detect(np.arange(1000), spiked(), settings={"detectors": ["olmo", "trainscope"]})
    (event,) = [a for a in found if a.onset == 600]
    assert {note.partition(":")[0] for note in event.notes} >= {"olmo", "trainscope"}
    assert event.recovered_after is not None
    assert [a.onset for a in detect(np.arange(1000), spiked())] == [600]


def test_an_unknown_name_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'olmo'"):
        Watch(DetectionConfig(detectors=("olmoo",)))


@pytest.mark.parametrize("cut", [300, 600, 601])
def test_resume_equals_no_resume(cut: int) -> None:
    settings = DetectionConfig(detectors=("z-100",), threshold=50.0)  # ours is silent: only the other is compared
    data = rows({"train/loss": spiked()})
    whole = watch_all(Watch(settings), data)
    first, second = Watch(settings), Watch(settings)
    found = {a.id: a for row in data[:cut] for a in first.update(row)}
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found |= {a.id: a for a in watch_all(second, data[cut:])}
    assert [(a.id, a.onset, a.recovered_after) for a in found.values()] == [(a.id, a.onset, a.recovered_after) for a in whole]


def test_resume_equals_no_resume_where_the_next_row_lacks_a_series() -> None:
    """The columns are those of the state, in its order: each keeps its past, and of two as far out the same one is named."""
    settings = DetectionConfig(detectors=("z-100",), threshold=50.0)
    loss, norm = spiked(), spiked()[::-1].copy()
    here = [None if i == 500 else value for i, value in enumerate(norm)]
    data = rows({"grad/norm": here, "train/loss": loss})
    whole = watch_all(Watch(settings), data)
    first, second = Watch(settings), Watch(settings)
    found = {a.id: a for row in data[:500] for a in first.update(row)}
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found |= {a.id: a for a in watch_all(second, data[500:])}
    assert list(found.values()) == whole
