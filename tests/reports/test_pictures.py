"""Heatmaps: every layer's row is there, the layer that moved is the one that is coloured, and odd values cannot break them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from trackbridge import panels
from trackbridge.panels import PANELS
from trackbridge.reports import pictures
from trackbridge.reports.pictures import Matrix, around, draw

GRADIENTS = next(panel for panel in PANELS if panel.id == "gradient-map")
KURTOSIS = next(panel for panel in PANELS if panel.id == "kurtosis-map")


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def cell(data: bytes, row: int, column: int, columns: int) -> tuple[int, ...]:
    """The colour in the middle of a cell."""
    wide = max(1, min(24, (pictures._WIDTH - pictures._LEFT - pictures._RIGHT) // columns))
    at = (pictures._LEFT + wide * column + wide // 2, pictures._TOP + 12 * row + 6)
    colour = opened(data).convert("RGB").getpixel(at)
    assert isinstance(colour, tuple)
    return colour


def recorded(steps: int = 12, layers: int = 4) -> dict[int, dict[str, float]]:
    return {step: {f"layer/h.{k}.w/grad_norm": 1.0 + k for k in range(layers)} for step in range(100, 100 + steps)}


def test_the_layer_that_moved_is_red_at_the_onset_and_no_other() -> None:
    series = recorded()
    series[106]["layer/h.2.w/grad_norm"] *= 50
    data = around(series, onset=106)["pictures/gradient-map"]
    assert cell(data, 2, 6, 12)[0] > 150 > cell(data, 2, 6, 12)[1], "red"
    for row, column in ((2, 5), (2, 7), (1, 6), (3, 6)):
        assert min(cell(data, row, column, 12)) > 230, "as before: near white"


def test_what_is_not_finite_is_magenta_and_what_is_absent_is_blank() -> None:
    series = recorded()
    series[107]["layer/h.1.w/grad_norm"] = float("nan")
    del series[108]["layer/h.1.w/grad_norm"]
    data = around(series, onset=106)["pictures/gradient-map"]
    assert cell(data, 1, 7, 12) == (255, 0, 255)
    assert cell(data, 1, 8, 12) == (214, 214, 214)


def test_a_picture_for_every_heatmap_panel_that_has_series() -> None:
    assert set(around(recorded(), 106)) == {"pictures/gradient-map"}
    assert around({}, 3) == {} and around({1: {"train/loss": 1.0}}, 1) == {}
    both = around({1: {"layer/w/grad_norm": 1.0, "act/h/kurtosis": -0.5}, 2: {"act/h/kurtosis": 3.0}}, 2)
    assert set(both) == {"pictures/gradient-map", "pictures/kurtosis-map"}


def test_a_statistic_on_a_cadence_has_no_empty_columns() -> None:
    series = {step: ({"layer/w/weight_norm": 1.0} if step % 5 == 0 else {"train/loss": 1.0}) for step in range(21)}
    found = {panel.id: matrix for panel, matrix in pictures._matrices(series)}
    assert list(found["weight-map"].steps) == [0, 5, 10, 15, 20]


def test_thousands_of_layers_leave_those_that_moved() -> None:
    series = recorded(steps=6, layers=2000)
    series[103]["layer/h.1234.w/grad_norm"] *= 9
    data = around(series, onset=103)["pictures/gradient-map"]
    assert opened(data).height <= pictures._TOP + 12 * pictures.MAX_ROWS + pictures._BOTTOM
    assert len(data) < 100_000
    reds = [row for row in range(pictures.MAX_ROWS) if cell(data, row, 3, 6)[0] > 150 > cell(data, row, 3, 6)[1]]
    assert len(reds) == 1


def test_without_an_onset_colours_are_values() -> None:
    values = np.array([[1.0, 10.0, 100.0]])
    data = draw(GRADIENTS, Matrix(["layer/w/grad_norm"], [0, 50, 100], values, np.ones((1, 3), bool)))
    first, middle, last = (cell(data, 0, column, 3) for column in range(3))
    assert first == (68, 1, 84) and last == (253, 231, 37)
    assert middle not in (first, last), "a log scale has a middle"


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(width=32) | st.just(float("nan")), min_size=1, max_size=24),
    st.integers(-3, 30),
    st.sampled_from([GRADIENTS, KURTOSIS]),
)
def test_any_values_give_a_picture(values: list[float], onset: int, panel: panels.Panel) -> None:
    row = panel.series[0].replace("<parameter>", "w").replace("<module>", "m")
    matrix = Matrix([row], list(range(len(values))), np.array([values]), np.ones((1, len(values)), bool))
    for given_onset in (onset, None):
        assert opened(draw(panel, matrix, given_onset)).format == "PNG"


def test_a_new_heatmap_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    new = panels.Panel("new-map", "layers", "A new one", ("layer/<parameter>/grad_max",), "heatmap", "log")
    monkeypatch.setattr(panels, "PANELS", (*PANELS, new))
    assert "pictures/new-map" in around({1: {"layer/w/grad_max": 1.0}}, 1)


def test_every_sealed_capsule_has_them(recorded: Path) -> None:
    (capsule,) = (recorded / "capsules").glob("spike-*[0-9]")
    there = {f"pictures/{path.stem}" for path in (capsule / "pictures").glob("*.png")}
    assert there == {panels.picture(panel) for panel in PANELS if panel.view == "heatmap"}
