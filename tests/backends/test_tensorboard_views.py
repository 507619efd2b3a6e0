"""TensorBoard's tabs without any set-up: custom scalars, images, text and histograms, read with TensorBoard's own reader."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import STORE_EVERYTHING_SIZE_GUIDANCE, EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.util import tensor_util

from trackbridge import panels
from trackbridge.backends import exhibits
from trackbridge.backends.tensorboard import TensorboardConfig
from trackbridge.histograms import EDGES, ZERO, count
from trackbridge.panels import PANELS, Panel
from trackbridge.records import Histograms, Record, RunInfo
from trackbridge.testing import anomaly, artifact, deliver, row, rows, run_info


def ship(run: RunInfo, *records: Record) -> EventAccumulator:
    config = TensorboardConfig()
    backend = config.build()
    backend.open(run)
    deliver(backend, records)
    backend.close(None, timeout=9)
    return EventAccumulator(str(config.root(run)), size_guidance=STORE_EVERYTHING_SIZE_GUIDANCE).Reload()


def of_plugin(reader: EventAccumulator, plugin: str) -> set[str]:
    return {tag for tag in reader.Tags()["tensors"] if reader.SummaryMetadata(tag).plugin_data.plugin_name == plugin}


def charts(reader: EventAccumulator) -> dict[str, dict[str, list[str]]]:
    """Of the custom-scalars page: category -> title -> expressions."""
    event = reader.Tensors("custom_scalars__config__")[0]
    found = layout_pb2.Layout.FromString(tensor_util.make_ndarray(event.tensor_proto).item())
    return {c.title: {chart.title: list(chart.multiline.tag) for chart in c.chart} for c in found.category}


def png(width: int = 7, height: int = 5) -> bytes:
    out = io.BytesIO()
    Image.new("P", (width, height)).save(out, "PNG")
    return out.getvalue()


SERIES = ("train/loss", "grad/norm", "perf/step_s", "act/h.0/kurtosis", "train/loss_scale", "host/rss_bytes")


def test_every_chart_of_the_layout_has_a_series_in_the_run_or_in_any_run(tmp_path: Path) -> None:
    reader = ship(run_info(tmp_path), *rows(range(3), SERIES))
    there = reader.Tags()["scalars"]
    found = {title: tags for category in charts(reader).values() for title, tags in category.items()}
    drawn = {title for title, (tag,) in found.items() if any(re.match(tag, name) for name in there)}
    assert {"Loss", "Gradient norm", "Step time and its parts (s)", "Kurtosis by module", "Loss scale"} <= drawn
    for title in found.keys() - drawn:
        (panel,) = (panel for panel in PANELS if title.startswith(panel.title) and panel.view in ("line", "scalar"))
        assert any(series not in panels.CONDITIONAL for series in panel.series), title
    absent = {
        "Gradient norm by parameter",
        "Device memory (B)",
        "Terms of the loss",
        "Series that were NaN or infinite (steps)",
    }
    assert not absent & found.keys(), "this run will never have them"
    assert list(charts(reader))[:2] == [panels.SECTIONS["outcome"], panels.SECTIONS["movers"]], "as on a page"


def test_expressions_match_the_series_and_nothing_else(tmp_path: Path) -> None:
    names = ("train/loss", "train/loss_scale", "eval/train/loss", "grad/norm_local", "grad/norm_clipped", "grad/normal")
    reader = ship(run_info(tmp_path), *rows(range(2), names))
    outcome = charts(reader)[panels.SECTIONS["outcome"]]
    matched = {title: [name for name in names if re.match(tag, name)] for title, (tag,) in outcome.items()}
    assert matched["Loss"] == ["train/loss"]
    assert matched["Gradient norm"] == ["grad/norm_local", "grad/norm_clipped"]


def test_a_new_panel_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = Panel("new", "speed", "Something new", ("train/tokens",))
    monkeypatch.setattr(panels, "PANELS", (*PANELS, new))
    monkeypatch.setattr("trackbridge.backends.tensorboard_layout.PANELS", panels.PANELS)
    reader = ship(run_info(tmp_path), *rows(range(2), ("train/loss", "train/tokens")))
    assert charts(reader)[panels.SECTIONS["speed"]]["Something new (tokens)"] == ["^(train/tokens)(_local)?$"]


def test_a_new_attempt_has_its_layout_too(tmp_path: Path) -> None:
    run = run_info(tmp_path)
    ship(run, *rows(range(3), ("train/loss",)))
    reader = ship(run_info(tmp_path, attempt=1, start_step=2), *rows(range(2, 4), SERIES, first_seq=3, attempt=1))
    assert len(reader.Tensors("custom_scalars__config__")) >= 1


def test_a_capsule_shows_its_pictures_and_its_post_mortem(tmp_path: Path) -> None:
    run = run_info(tmp_path)
    one, two = (
        artifact(seq, step, run, f"spike-{step}", {
            "manifest.json": b"{}", "post-mortem.md": f"# Post-mortem {step}".encode(), "pictures/gradient-map.png": png(step),
            "pictures/broken.png": b"no picture", "report.html": b"<p>",
        })
        for seq, step in ((3, 7), (5, 9))
    )  # fmt: skip
    reader = ship(run, *rows(range(3)), one, anomaly(4, 7), two)
    assert of_plugin(reader, "images") == {"pictures/gradient-map"}
    events = reader.Tensors("pictures/gradient-map")
    assert [event.step for event in events] == [7, 9], "a slider over the spikes"
    width, height, data = tensor_util.make_ndarray(events[1].tensor_proto).tolist()
    assert (int(width), int(height)) == Image.open(io.BytesIO(data)).size == (9, 5)
    text = {tag: reader.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in of_plugin(reader, "text")}
    assert text["post-mortem/spike-7"] == "# Post-mortem 7"
    assert text["anomaly/spike-7"].startswith("**What happened.** **train/loss** was **9.5**")
    assert "kind" in text["artifact/spike-9"]
    again = ship(run, two)
    assert len(again.Tensors("pictures/gradient-map")) == 2, "nothing twice"


def test_what_cannot_be_shown_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").symlink_to("/etc/passwd")
    (tmp_path / "pictures" / "b.png").write_bytes(png())
    assert set(exhibits.of(tmp_path)[1]) == {"pictures/b"}
    monkeypatch.setattr(exhibits, "_LARGEST", 10)
    assert exhibits.of(tmp_path) == ({}, {}) and exhibits.page(tmp_path) is None
    (tmp_path / "report.html").write_text("<p>a page of more than ten bytes</p>")
    assert exhibits.page(tmp_path) == tmp_path / "report.html", "a page may be larger than a picture"


def histograms(seq: int, step: int, **tensors: Any) -> Histograms:
    counts = np.stack([count(np.asarray(values, np.float64)) for values in tensors.values()])
    names = tuple(f"layer/{name}/weight" for name in tensors)
    return Histograms(seq, step, 1.75e9 + step, 0, names, counts, np.ones(len(names)))


def test_histograms_count_every_finite_element_where_it_is(tmp_path: Path) -> None:
    values = np.concatenate([np.linspace(-3.0, 3.0, 1001), [np.nan, np.inf, 1e9, -1e9]])
    reader = ship(
        run_info(tmp_path), row(0, 0, {"train/loss": 1.0}), histograms(1, 0, w=values, z=[0.0] * 4, empty=[]),
        histograms(2, 10, w=values[:1001]),
    )  # fmt: skip
    assert of_plugin(reader, "histograms") == {"layer/w/weight", "layer/z/weight", "layer/empty/weight"}
    events = reader.Tensors("layer/w/weight")
    assert [event.step for event in events] == [0, 10]
    first, second = (tensor_util.make_ndarray(event.tensor_proto) for event in events)
    assert first.shape[1] == second.shape[1] == 3 and first.dtype == np.float32
    assert (first[:, 2].sum(), second[:, 2].sum()) == (1003, 1001)
    for left, right, number in second:
        inside = ((values[:1001] > left) if left < 0 else (values[:1001] >= left)) & (
            (values[:1001] <= right) if right <= 0 else (values[:1001] < right)
        )
        if left < 0 < right:
            inside = np.abs(values[:1001]) < right
        assert inside.sum() == number, (left, right)
    assert (first[1:, 0] == first[:-1, 1]).all() and (first[:, 0] < first[:, 1]).all(), "no gap, no step back"
    (zeros,) = tensor_util.make_ndarray(reader.Tensors("layer/z/weight")[0].tensor_proto)
    assert (zeros[0], zeros[1], zeros[2]) == (np.float32(EDGES[ZERO]), np.float32(EDGES[ZERO + 1]), 4)
    assert tensor_util.make_ndarray(reader.Tensors("layer/empty/weight")[0].tensor_proto).shape == (0, 3)
