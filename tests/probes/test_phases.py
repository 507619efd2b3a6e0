"""The phases of a step: each moment belongs to one of them, and together with the waiting and the rest they are the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import trackbridge
from tests.probes.kit import Lab, sgd

PHASES = ("fetch", "forward", "backward", "optimizer", "other")


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr("trackbridge.probes.phases.time", CLOCK)
    return CLOCK


class Slow(torch.autograd.Function):
    """The identity; its forward and its backward pass take time."""

    @staticmethod
    def forward(context: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        CLOCK.now += forward_s
        context.backward_s = backward_s
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        CLOCK.now += context.backward_s
        return gradient, None, None


class Model(nn.Module):
    def __init__(self, forward_s: float = 1.0, backward_s: float = 2.0) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.inner: nn.Module | None = None
        self.seconds = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        x = Slow.apply(self.linear(x), *self.seconds)
        return x if self.inner is None else self.inner(x)


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        CLOCK.now += 4.0
        return super().step(closure)


X = torch.ones(3, 2)


def found(lab: Lab, step_s: float, fetch_s: float = 0.0) -> dict[str, float]:
    lab.instruments.spent(step_s, fetch_s)
    return {name[5:-2]: v for name, v in lab.close().items() if name.startswith("perf/")}


def test_a_step() -> None:
    model = Model()
    lab = Lab(model, optimizer := SlowSGD(model.parameters(), lr=0.1))
    CLOCK.now += 0.5
    model(X).sum().backward()
    CLOCK.now += 0.25  # ours, or the user's
    optimizer.step()
    assert found(lab, 10.0, 0.5) == pytest.approx({"forward": 1, "backward": 2, "optimizer": 4, "other": 2.5})


def test_a_closure_is_forward_and_backward_not_optimizer() -> None:
    model = Model()
    lab = Lab(model, optimizer := SlowSGD(model.parameters(), lr=0.1))

    def closure() -> Tensor:
        loss = model(X).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert found(lab, 7.0) == pytest.approx({"forward": 1, "backward": 2, "optimizer": 4, "other": 0})


def test_an_optimizer_that_calls_its_base_class_steps_once() -> None:
    """torch calls the hooks once for each class whose `step` is on the way, as soon as an instance of it was made."""
    model = Model()
    torch.optim.SGD(model.parameters(), lr=0.1)
    lab = Lab(model, optimizer := SlowSGD(model.parameters(), lr=0.1))
    fired: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: fired.append(1))
    model(X).sum().backward()
    optimizer.step()
    assert len(fired) == 2
    lab.instruments.spent(7.0, 0.0)
    seen = lab.close()
    assert seen["optim/applied"] == 1 and seen["perf/optimizer_s"] == 4 and seen["layer/linear.weight/update_ratio"] > 0


def test_a_model_inside_a_model_is_counted_once() -> None:
    outer, inner = Model(1.0), Model(8.0)
    outer.inner = inner
    lab = Lab({"outer": outer, "inner": inner})
    outer(X).sum().backward()
    assert found(lab, 13.0) == pytest.approx({"forward": 9, "backward": 4, "other": 0})


def test_an_optimizer_inside_the_backward_pass() -> None:
    model = Model()
    lab = Lab(model, optimizer := SlowSGD([model.linear.weight], lr=0.1))
    model.linear.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    model(X).sum().backward()
    assert found(lab, 7.0) == pytest.approx({"forward": 1, "backward": 2, "optimizer": 4, "other": 0})


def test_an_evaluation_in_the_middle_of_a_pass() -> None:
    model = Model()
    lab = Lab(model, sgd(model))

    def evaluate(*_: Any) -> None:
        lab.instruments.pause()
        lab.instruments.pause()
        CLOCK.now += 60
        lab.instruments.resume()
        CLOCK.now += 60
        lab.instruments.resume()

    model.linear.register_forward_hook(evaluate)
    model(X).sum().backward()
    assert found(lab, 3.0) == pytest.approx({"forward": 1, "backward": 2, "other": 0})


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_pass_that_raised_is_over(where: str) -> None:
    """Out of memory, caught, tried again with less."""
    model = Model()
    lab = Lab(model, sgd(model))

    def fail(*_: Any) -> None:
        raise MemoryError

    if where == "forward":
        handle = model.linear.register_forward_pre_hook(fail)
    else:
        handle = model.linear.weight.register_hook(fail)
    with pytest.raises(MemoryError):
        model(X).sum().backward()
    handle.remove()
    begun = CLOCK.now
    CLOCK.now += 100  # the handler
    model(X).sum().backward()
    seen = found(lab, CLOCK.now - begun + 5)
    assert seen["forward"] <= 2 and seen["backward"] <= 4 and seen["other"] >= 100


def test_what_is_counted_twice_is_told() -> None:
    """On a GPU the host fetches while the device works; here the fetch is only said to have been that long."""
    model = Model()
    lab = Lab(model, sgd(model))
    model(X).sum().backward()
    assert found(lab, 3.5, 2.0) == pytest.approx({"forward": 1, "backward": 2, "other": 0, "overlap": 1.5})


def test_without_passes_there_is_nothing_to_divide() -> None:
    model = Model()
    assert found(Lab(model, sgd(model)), 3.5, 2.0) == {}


Doing = st.recursive(
    st.sampled_from(["work", "pause", "raise"]),
    lambda inner: st.tuples(st.sampled_from(["forward", "backward", "optimizer"]), st.lists(inner, max_size=3)),
    max_leaves=8,
)


@given(st.lists(Doing, max_size=6), st.floats(0, 5))
@settings(max_examples=60, deadline=None)
def test_however_they_nest_the_sum_is_the_step(program: list[Any], fetch_s: float) -> None:
    """Phases begin, nest, are interrupted by pauses, and end or are left by an exception; the clock moves by 1 in between."""
    from trackbridge.probes.phases import BACKWARD, FORWARD, OPTIMIZER

    model = Model()
    lab = Lab(model, sgd(model))
    probe = lab.instruments._session.phases  # type: ignore[union-attr]
    paused = 0.0
    numbers = iter(range(1000))

    def run(doing: Any) -> None:
        nonlocal paused
        CLOCK.now += 1
        if doing == "pause":
            lab.instruments.pause()
            CLOCK.now += 7
            paused += 7
            lab.instruments.resume()
        elif doing == "raise":
            raise RuntimeError
        elif doing != "work":
            phase = {"forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER}[doing[0]]
            number = next(numbers)
            probe.start(phase, number)
            for inner in doing[1]:
                run(inner)
            probe.stop(phase, number)
        CLOCK.now += 1

    begun = CLOCK.now
    for doing in program:
        try:
            run(doing)
        except RuntimeError:
            pass
    step_s = CLOCK.now - begun - paused + fetch_s
    seen = found(lab, step_s, fetch_s)
    assert "overlap" not in seen
    if seen:
        assert fetch_s + sum(seen.values()) == pytest.approx(step_s, abs=1e-6)


def test_every_row_of_a_run_adds_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the real clock, rows with histograms, losses of samples, an evaluation and an anomaly among them."""
    monkeypatch.undo()
    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(torch.randn(80, 2), batch_size=4)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    run = trackbridge.init(dir=tmp_path, parameters={"histograms_every": 5})
    run.watch(model, optimizer)
    for step, batch in enumerate(run.batches(data)):
        rows = model(batch).square().mean(1) * (float("nan") if step == 12 else 1.0)
        rows.mean().backward()
        run.micro(rows.mean().detach(), sample_loss=rows.detach())
        optimizer.step()
        optimizer.zero_grad()
        if step % 7 == 3:
            with run.pause("eval"):
                model(batch)
        run.step()
    run.finish()
    record = trackbridge.load(tmp_path)
    rows_of_steps = [row for row in record.rows() if "perf/step_s" in row.schema.names]
    assert len(rows_of_steps) == 20
    for row in rows_of_steps:
        values = dict(zip(row.schema.names, row.values.tolist(), strict=True))
        assert "perf/overlap_s" not in values
        assert sum(values[f"perf/{phase}_s"] for phase in PHASES) == pytest.approx(values["perf/step_s"], abs=1e-6)
        assert all(values[f"perf/{phase}_s"] >= 0 for phase in PHASES)
