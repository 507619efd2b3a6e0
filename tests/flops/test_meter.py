"""From counts to series, in real runs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import trackbridge
from trackbridge.clock import StepClock
from trackbridge.pace import Pace

PEAK = 1e12


def train(
    tmp_path: Path, model: nn.Module, steps: int = 5, micro: int = 1, batches: tuple[int, ...] = (4,), **perf: Any
) -> trackbridge.RunRecord:
    """Every step has the next of the sizes in `batches`."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with trackbridge.init(dir=tmp_path, perf={"peak_flops": PEAK, **perf}, strict=True) as run:
        run.watch(model, optimizer)
        for step in range(steps):
            batch = batches[step % len(batches)]
            for _ in range(micro):
                loss = model(torch.randn(batch, 8)).square().mean()
                loss.backward()
                run.micro(loss, tokens=batch)
            optimizer.step()
            optimizer.zero_grad()
            run.step()
    return trackbridge.load(run.dir)


def flops_of(record: trackbridge.RunRecord) -> np.ndarray:
    """FLOPs of each step that has a rate."""
    steps, rate = record.series("perf/flops_per_s")
    at, seconds = record.series("perf/step_s")
    return np.asarray(rate) * np.asarray(seconds)[np.isin(at, steps)]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


SMALL = 2 * 4 * 8 * 16 * 2 + 2 * 4 * 16 * 4 * 3  # the input has no gradient


def test_mfu_is_the_count_over_the_peak(tmp_path: Path) -> None:
    record = train(tmp_path, small())
    assert np.allclose(flops_of(record), SMALL)
    (steps, mfu), (_, rate) = record.series("perf/mfu"), record.series("perf/flops_per_s")
    assert list(steps) == [1, 2, 3, 4]  # the first step is no rate
    assert np.allclose(mfu, np.asarray(rate) / PEAK)
    assert np.allclose(record.series("perf/hfu")[1], mfu)


def test_micro_batches_add_up(tmp_path: Path) -> None:
    assert np.allclose(flops_of(train(tmp_path, small(), micro=4)), 4 * SMALL)


def test_what_is_unfrozen_later_is_counted_from_then_on(tmp_path: Path) -> None:
    """And a part that is frozen for one pass of each step, as a GAN's critic is, in that pass only."""
    model = small()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with trackbridge.init(dir=tmp_path, perf={"peak_flops": PEAK}, strict=True) as run:
        run.watch(model, optimizer)
        for step in range(12):
            if step >= 4:
                model[0].requires_grad_(step < 8)
            model(torch.randn(4, 8)).square().mean().backward()
            if step >= 8:
                model[0].requires_grad_(True)
                model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
    steps, _ = (record := trackbridge.load(run.dir)).series("perf/flops_per_s")
    found = dict(zip(steps, flops_of(record), strict=True))
    frozen = 2 * 4 * 8 * 16 + 2 * 4 * 16 * 4 * 2
    assert [round(found[step]) for step in (2, 3)] == [frozen] * 2
    assert [round(found[step]) for step in (6, 7)] == [SMALL] * 2
    assert [round(found[step]) for step in (10, 11)] == [frozen + SMALL] * 2


def test_evaluation_is_not_counted(tmp_path: Path) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with trackbridge.init(dir=tmp_path, strict=True) as run:
        run.watch(model, optimizer)
        for _ in range(4):
            model(torch.randn(4, 8)).mean().backward()
            optimizer.step()
            with torch.no_grad():
                model(torch.randn(4, 8))
            with run.pause("eval"):
                model(torch.randn(4, 8))
            model.eval()
            model(torch.randn(4, 8))
            model.train()
            run.step()
    assert np.allclose(flops_of(trackbridge.load(run.dir)), SMALL)


def test_e4_checkpointing_raises_hfu_only(tmp_path: Path) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    record = train(tmp_path, Checkpointed())
    assert np.allclose(flops_of(record), SMALL)
    forward = 2 * 4 * (8 * 16 + 16 * 4)
    ratio = np.asarray(record.series("perf/hfu")[1]) / np.asarray(record.series("perf/mfu")[1])
    assert np.allclose(ratio, (SMALL + forward) / SMALL)


def test_selective_checkpointing_has_no_hfu(tmp_path: Path) -> None:
    """What runs again is decided by product: not known, and not as much as nothing."""

    class Selective(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small()

        def forward(self, x: Tensor) -> Tensor:
            how: Any = {"use_reentrant": False, "context_fn": lambda: create_selective_checkpoint_contexts([])}
            return checkpoint(self.inner, x, **how)  # type: ignore[no-any-return]

    names = train(tmp_path, Selective()).names
    assert "perf/mfu" in names and "perf/hfu" not in names


def test_a_step_that_compiled_something_has_no_rate(tmp_path: Path) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with trackbridge.init(dir=tmp_path, perf={"peak_flops": PEAK}, strict=True) as run:
        run.watch(model, optimizer)
        for step in range(6):
            model(torch.randn(4, 8)).mean().backward()
            optimizer.step()
            if step == 3:
                torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
            run.step()
    record = trackbridge.load(run.dir)
    assert [record.series(f"perf/{name}")[0].tolist() for name in ("mfu", "flops_per_s")] == [[1, 2, 4, 5]] * 2


def test_a_compiled_model_is_counted_without_another_compilation(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = small()
    record = train(tmp_path, torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    assert counters["stats"]["unique_graphs"] == 1
    assert np.allclose(flops_of(record), SMALL)
    (perf,) = (params.values["perf"] for params in record.params if "perf" in params.values)
    assert perf["attention"].endswith("every pair where the mask is a tensor")  # it had no values


def test_e2_without_a_peak_there_is_a_rate_and_no_mfu(tmp_path: Path) -> None:
    record = train(tmp_path, small(), peak_flops=None)
    assert len(record.series("perf/flops_per_s")[0])
    assert "perf/mfu" not in record.names and "perf/hfu" not in record.names


def test_e2_more_than_the_peak_is_said_and_not_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trackbridge"):
        record = train(tmp_path, small(), peak_flops=1.0)
    assert max(record.series("perf/mfu")[1]) > 1
    assert sum("MFU is" in message for message in caplog.messages) == 1


def test_what_cannot_be_counted_is_absent_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x[(x[:, 0] > 0).nonzero()[:, 0]])  # type: ignore[no-any-return]

    torch._dynamo.reset()
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.randn(1, 2))  # from now on shapes only
    with caplog.at_level(logging.WARNING, "trackbridge"):
        record = train(tmp_path, Routed(), steps=6, batches=(4, 5))
    assert "perf/flops_per_s" not in record.names
    assert sum("flops_per_token" in message for message in caplog.messages) == 1
    given = train(tmp_path, Routed(), flops_per_token=100.0)
    assert np.allclose(flops_of(given), 400.0)


def test_a_forward_pass_that_raises_leaves_nothing_behind(tmp_path: Path) -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(8, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 2:  # the pass that is counted
                raise RuntimeError("out of memory")
            return self.layer(x)  # type: ignore[no-any-return]

    model = Breaks()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with trackbridge.init(dir=tmp_path, strict=True) as run:
        run.watch(model, optimizer)
        model(torch.randn(4, 8))
        with pytest.raises(RuntimeError, match="out of memory"):
            model(torch.randn(4, 8))
        assert not torch.overrides._get_current_function_mode_stack()
        model(torch.randn(4, 8)).mean().backward()
        run.step()


def test_the_convention_travels_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trackbridge.flops.meter.compiled_graphs", lambda: 0)  # by tests before this one
    record = train(tmp_path, small(), full_attention=True)
    (perf,) = (params.values["perf"] for params in record.params if "perf" in params.values)
    assert perf["attention"] == "every (query, key) pair"
    assert perf["peak_flops"] == PEAK
    record = train(tmp_path, small())
    (perf,) = (params.values["perf"] for params in record.params if "perf" in params.values)
    assert perf["attention"] == "the pairs that the mask shows"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_e6_rates_are_of_the_whole_step_without_pauses_and_warm_up() -> None:
    clock = Clock()
    pace = Pace(StepClock(clock), steps=10)
    for step in range(3):
        for _ in range(4):
            pace.consumed(25, 1)
        clock.now += 2.0
        pace.pause()
        clock.now += 60.0
        pace.resume("perf/paused_s/eval")
        found = pace.close(None, None, step)
        if step == 0:
            assert "perf/tokens_per_s" not in found
        else:
            assert found["perf/tokens_per_s"] == 50.0
            assert found["perf/samples_per_s"] == 2.0
            assert found["perf/eta_s"] == 2.0 * (9 - step)
