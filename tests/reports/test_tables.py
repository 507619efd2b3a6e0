"""The table of layers of a capsule: what grew most comes first, and what is absent is empty, not zero."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import capsules as made
from trackbridge import capsule as capsules
from trackbridge.records import Row, Schema
from trackbridge.reports import tables

ONSET = 12


def rows() -> list[Row]:
    """Two parameters and a module; ``b`` grows fortyfold at the onset, ``c`` is not recorded there."""
    out = []
    for step in made.STEPS:
        values = {
            "layer/a/grad_norm": 2.0,
            "layer/b/grad_norm": 0.5 * (40.0 if step == ONSET else 1.0),
            "act/m/kurtosis": -1.0 if step < ONSET else 3.0,
        }
        if step < ONSET:
            values["layer/c/grad_norm"] = 1.0
        out.append(Row(step, step, 1.75e9 + step, 0, Schema(tuple(values)), np.array(list(values.values()))))
    return out


@pytest.fixture
def capsule(tmp_path: Path) -> Any:
    return capsules.load(made.make(tmp_path / "spike-13", rows=rows()))


def test_what_grew_most_comes_first(capsule: Any) -> None:
    columns, found = tables.layers(capsule)
    assert columns[:4] == ["layer", "statistic", "before", "at the onset"]
    assert found[0] == ["b", "grad_norm", 0.5, 20.0, 40.0, 20.0]
    assert ["m", "kurtosis", -1.0, 3.0, -3.0, 3.0] in found
    assert found[-1] == ["c", "grad_norm", 1.0, None, None, None]
    assert len(found) == 4


def test_it_is_json_with_columns_and_data(capsule: Any, tmp_path: Path) -> None:
    tables.write(tmp_path, capsule)
    held = json.loads((tmp_path / tables.LAYERS).read_text(encoding="utf-8"), parse_constant=lambda name: pytest.fail(name))
    assert held["columns"][0] == "layer" and len(held["data"]) == 4


def test_a_capsule_without_layers_has_no_table(tmp_path: Path) -> None:
    plain = [Row(s, s, 1.75e9 + s, 0, Schema(("train/loss",)), np.array([1.0])) for s in made.STEPS]
    tables.write(tmp_path, capsules.load(made.make(tmp_path / "spike-13", rows=plain)))
    assert not (tmp_path / "tables").exists()
