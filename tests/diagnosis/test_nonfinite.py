"""Values that are not finite, in a step whose batch is not recorded: of the batch, of a weight, or not to be told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import trackbridge
from tests.detectors.kit import rows
from trackbridge import tree
from trackbridge.diagnosis import diagnose
from trackbridge.diagnosis.batch import Batches
from trackbridge.explain import explain
from trackbridge.records import Anomaly, Hypothesis, MicroBatch, StepContext
from trackbridge.rundir import RunDirectory

STEPS, AT = 80, 65
ROWS, UNITS = 32, 12
TOLD = ["corrupt-batch", "hardware-fault"]


class Broken:
    """A net of two layers, of which the elements `first` and `last` of what they put out at `AT` are not finite; then an update
    breaks all weights, and with them every element, or is left out. `leaf`: the first module is one layer."""

    def __init__(self, first: int, last: int, *, updated: bool = True, leaf: bool = True, units: int = UNITS) -> None:
        random = np.random.default_rng(0)
        self.sites = ("inputs", "head") if leaf else ("block.0", "block.1")
        parameters = ("inputs.weight", "inputs.bias", "head.weight", "head.bias")
        whole = dict(zip(self.sites, (ROWS * units, ROWS * 4), strict=True))
        size = dict(zip(parameters, (8 * units, units, 4 * units, 4), strict=True))
        self.series: dict[str, list[float | None]] = {"train/loss": [*(2 + 0.02 * random.standard_normal(STEPS))]}
        self.series["train/loss"][AT] = np.nan
        for site, count in zip(self.sites, (first, last), strict=True):
            for name, usual in (("rms", 1.0), ("max", 4.0), ("kurtosis", 3.0)):
                values: list[float | None] = [*(usual * np.exp(0.03 * random.standard_normal(STEPS)))]
                values[AT] = None
                self.series[f"act/{site}/{name}"] = values
            after = whole[site] if updated else 0.0
            self.series[f"act/{site}/nonfinite"] = [0.0] * AT + [float(count)] + [float(after)] * (STEPS - AT - 1)
        for name in parameters:
            bad = float(size[name]) if updated else 0.0
            self.series[f"layer/{name}/grad_norm"] = [*np.exp(0.1 * random.standard_normal(AT))] + [None] * (STEPS - AT)
            self.series[f"layer/{name}/grad_nonfinite"] = [0.0] * AT + [bad] * (STEPS - AT)
            self.series[f"layer/{name}/weight_nonfinite"] = [
                0.0 if s < AT else bad if s % 10 == 9 else None for s in range(STEPS)
            ]

    def told(self) -> tuple[Hypothesis, ...]:
        anomaly = Anomaly("a", "nonfinite", AT, AT, 0.9, "train/loss", np.nan, 2.0, np.inf, ("train/loss", AT))
        return diagnose(anomaly, rows(self.series)[: AT + 9])

    def names(self) -> list[str]:
        """What stands above "unknown", and what is listed at all where nothing does."""
        found = [hypothesis.name for hypothesis in self.told()]
        return found[: found.index("unknown")] or found


def test_some_samples_that_broke_in_all_units_are_the_batch() -> None:
    assert Broken(2 * UNITS, 2 * 4).names() == ["corrupt-batch"]
    first = Broken(2 * UNITS, 2 * 4).told()[0]
    assert first.evidence_for[0] == "2 of 32 samples broke in all 12 units of inputs; a weight breaks one unit in all samples"
    assert Broken(8 * UNITS, 8 * 4).names() == ["corrupt-batch"], "three whole units as well, but the samples pass on"


def test_all_samples_in_all_units_are_the_batch() -> None:
    assert Broken(ROWS * UNITS, ROWS * 4).names() == ["corrupt-batch"]
    assert "hardware-fault" not in [hypothesis.name for hypothesis in Broken(ROWS * UNITS, ROWS * 4).told()]
    assert Broken(ROWS, ROWS * 4, units=1).names() == ["unknown", *TOLD], "all of its units are one, which a weight breaks too"


def test_one_unit_that_broke_in_all_samples_is_a_weight() -> None:
    assert Broken(ROWS, ROWS * 4).names() == ["hardware-fault"]
    assert Broken(1, 4).names() == ["hardware-fault"], "one element"


def test_where_whole_samples_are_whole_units_too_both_are_listed_and_none_is_named() -> None:
    """Three units in all samples or eight samples in all units, and what comes after mixes samples."""
    found = Broken(8 * UNITS, ROWS * 4).told()
    assert [hypothesis.name for hypothesis in found] == ["unknown", *TOLD]
    assert found[0].evidence_for == ("as much speaks for corrupt-batch as for hardware-fault",)
    assert Broken(8 * UNITS, 16 * 4).names() == ["unknown", *TOLD]


def test_of_a_block_some_samples_speak_for_the_batch_and_a_weight_stays_listed() -> None:
    assert Broken(2 * UNITS, 2 * 4, leaf=False).names() == TOLD
    assert Broken(ROWS * UNITS, ROWS * 4, leaf=False).names() == ["unknown", *TOLD]


def test_what_is_finite_again_is_no_weight_unless_it_was_one_element() -> None:
    story = Broken(2 * UNITS, 2 * 4, updated=False)
    assert story.names() == ["corrupt-batch"]
    assert "are finite, as measured since" in story.told()[0].evidence_for[0]
    assert Broken(1, 4, updated=False).names() == ["unknown", *TOLD]
    for name in story.series:
        if name.endswith("weight_nonfinite"):
            story.series[name] = story.series[name][:AT] + [None] * (STEPS - AT)
    assert story.names() == ["corrupt-batch"]
    assert "finite again 1 step later" in story.told()[0].evidence_for[0]
    story.series["act/inputs/nonfinite"][AT] = 1.0
    assert story.names() == ["unknown", *TOLD]


def test_a_weight_that_is_measured_to_be_broken_alone_is_the_cause() -> None:
    story = Broken(ROWS * UNITS, ROWS * 4)
    for name in story.series:
        if name.endswith(("weight_nonfinite", "grad_nonfinite")):
            story.series[name] = [0.0 if value is not None else None for value in story.series[name]]
    story.series["layer/inputs.weight/weight_nonfinite"][69] = 1.0
    assert story.names() == ["hardware-fault"]


@pytest.mark.parametrize("why", ["earlier", "long", "embedding", "resumed"])
def test_it_says_nothing_of_inputs_where_it_did_not_begin_with_them(why: str) -> None:
    story = Broken(2 * UNITS, 2 * 4)
    if why == "earlier":
        story.series["act/inputs/nonfinite"][AT - 30] = 3.0
    if why == "embedding":
        story.series = {name.replace("inputs", "embed"): values for name, values in story.series.items()}
    anomaly = Anomaly("a", "nonfinite", AT, AT, 0.9, "train/loss", np.nan, 2.0, np.inf, ("train/loss", AT))
    if why == "long":
        anomaly = anomaly.updated(first_mover=("grad/norm", AT - 5))
    if why == "resumed":
        anomaly = anomaly.updated(notes=("after_resume", "changed: torch 2.6.0 -> 2.7.1"))
        assert "config-change" in [hypothesis.name for hypothesis in diagnose(anomaly, rows(story.series))[:2]]
        return
    assert all("the first module" not in text for h in diagnose(anomaly, rows(story.series)) for text in h.evidence_for)


def test_half_precision_does_not_break_a_module_that_was_far_from_its_end() -> None:
    story = Broken(2 * UNITS, 2 * 4, updated=False)
    story.series["train/loss_scale"] = [1024.0 if step < AT else 512.0 for step in range(STEPS)]
    story.series["optim/skipped"] = [float(step >= AT) for step in range(STEPS)]
    assert story.names() == ["corrupt-batch"]
    story.series["act/inputs/max"] = [60000.0 if value is not None else None for value in story.series["act/inputs/max"]]
    (overflow,) = (hypothesis for hypothesis in story.told() if hypothesis.name == "fp16-overflow")
    assert not any("where it began" in text for text in overflow.evidence_against)


def test_of_a_kept_batch_every_element_is_looked_at() -> None:
    """The recorded count ends after a million elements."""
    x = np.ones((4, 8), np.float32)
    contexts = []
    for step in range(AT - 20, AT + 9):
        skeleton, leaves = tree.pack({"x": np.where((np.arange(32).reshape(4, 8) > 29) & (step == AT), np.float32(np.nan), x)})
        tokens = {"x": {"length": 32, "counted": 16, "nonfinite": 0}}
        micro = MicroBatch(0, 0, step, None, f"{step}", tokens, None, skeleton, tree.to_numpy(leaves))
        contexts.append(StepContext(step, step, 0, {}, (micro,)))
    assert Batches(contexts, AT).nonfinite() == (2, AT)
    assert Batches(contexts, AT - 1).nonfinite() == (0, AT - 1)


@pytest.mark.parametrize(("through", "skip"), [(False, False), (False, True), (True, False)])
def test_in_a_loop_of_its_own(tmp_path: Path, through: bool, skip: bool) -> None:
    """Of 30 samples two have a NaN: in a plain loop, in one that leaves a bad step out, and where the batches are recorded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, UNITS), nn.ReLU(), nn.Linear(UNITS, 4))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    run = trackbridge.init(dir=tmp_path, recorder={"max_capsules": 0})
    run.watch(model, optimizer)

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for step in range(AT + 10):
            x, y = torch.randn(30, 8), torch.randint(0, 4, (30,))
            x[(3, 7), (2, 5)] = torch.nan if step == AT else 0.0
            yield x, y

    for x, y in run.batches(batches()) if through else batches():
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if not skip or torch.isfinite(loss):
            optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss)
    run.finish()
    (anomaly,) = (one for one in run.anomalies if one.kind == "nonfinite" and one.series == "train/loss")
    found = explain(RunDirectory(run.dir), anomaly)
    assert [hypothesis.name for hypothesis in found][:2] == ["corrupt-batch", "unknown"]
    assert ("holds 2 non-finite values" in found[0].evidence_for[0]) is through
