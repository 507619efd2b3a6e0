"""Weights, moments, update sizes; applied and skipped updates under GradScaler."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.probes.kit import Lab, sgd
from tests.probes.test_gradients import data, layer, linear, norms, total


def test_weights_moments_and_the_real_size_of_the_update() -> None:
    model = linear()
    lab = Lab(model, optimizer := torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(data()).square().mean().backward()
    optimizer.step()
    found = lab.close()
    after = {name: p.detach() for name, p in model.named_parameters()}
    weights = {name: p.norm().item() for name, p in after.items()}
    updates = {name: (after[name] - before[name]).norm().item() for name in after}
    assert layer(found, "weight_norm") == pytest.approx(weights, rel=1e-6)
    assert layer(found, "update_ratio") == pytest.approx({n: updates[n] / weights[n] for n in after}, rel=1e-5)
    for kind in ("exp_avg", "exp_avg_sq"):
        states = {name: optimizer.state[p][kind].norm().item() for name, p in model.named_parameters()}
        assert layer(found, f"{kind}_norm") == pytest.approx(states, rel=1e-6)
        assert found[f"optim/{kind}_norm"] == pytest.approx(total(states), rel=1e-6)
    assert found["param/norm"] == pytest.approx(total(weights), rel=1e-6)
    assert found["optim/update_ratio"] == pytest.approx(total(updates) / total(weights), rel=1e-5)


def test_an_update_too_small_for_the_weights_dtype_is_zero() -> None:
    model = nn.Linear(4, 4, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    lab = Lab(model, optimizer := sgd(model, lr=1e-5))
    model(torch.ones(2, 4).bfloat16()).sum().backward()
    optimizer.step()
    assert lab.close()["optim/update_ratio"] == 0.0


def test_an_optimizer_without_moments_has_none() -> None:
    model = linear()
    lab = Lab(model, optimizer := sgd(model))
    model(data()).mean().backward()
    optimizer.step()
    assert not {"optim/exp_avg_norm", "optim/exp_avg_sq_norm"} & lab.close().keys()


def test_weights_of_zero_have_no_update_ratio_before_they_move() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    lab = Lab(model, optimizer := sgd(model))
    (0 * model(torch.ones(1, 2)).sum()).backward()
    optimizer.step()
    found = lab.close()
    assert layer(found, "weight_norm") == {"weight": 0.0}
    assert "optim/update_ratio" not in found and not layer(found, "update_ratio")


class Scaled:
    """A Linear(4, 1) trained under GradScaler; `poison` makes the loss overflow in chosen steps."""

    def __init__(self, fused: bool = False, init_scale: float = 1024.0) -> None:
        self.model = nn.Linear(4, 1, bias=False)
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.Adam(self.model.parameters(), fused=True) if fused else sgd(self.model)
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3)
        self.lab = Lab(self.model, self.optimizer, self.scaler)

    def step(self, *, poison: bool = False, clip: bool = False, unscale: bool = False) -> dict[str, float]:
        loss = self.model(torch.ones(8, 4)).mean() * (float("inf") if poison else 1.0)
        self.scaler.scale(loss).backward()
        if unscale or clip:
            self.scaler.unscale_(self.optimizer)
        if clip:
            self.lab.instruments.clip_grad_norm_(10.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return self.lab.close()


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("how", ["plain", "unscale", "clip"])
def test_gradients_are_reported_unscaled(fused: bool, how: str) -> None:
    scaled = Scaled(fused)
    found = scaled.step(**{} if how == "plain" else {how: True})
    assert layer(found) == {"weight": pytest.approx(2.0)}
    assert found["grad/norm"] == pytest.approx(2.0)
    assert layer(found, "grad_max") == {"weight": 1.0}
    assert found["train/loss_scale"] == 1024
    assert (found["optim/applied"], found["optim/skipped"]) == (1, 0)


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("clip", [False, True])
def test_a_skipped_step_is_counted_and_is_no_spike(fused: bool, clip: bool) -> None:
    scaled = Scaled(fused)
    rows = [scaled.step(poison=step in (1, 3), clip=clip) for step in range(9)]
    assert [row["optim/applied"] for row in rows] == [1, 1, 2, 2, 3, 4, 5, 6, 7]
    assert [row["optim/skipped"] for row in rows] == [0, 1, 1, 2, 2, 2, 2, 2, 2]
    assert [row["train/loss_scale"] for row in rows] == [1024, 512, 512, 256, 256, 256, 512, 512, 512]
    for step, row in enumerate(rows):
        if step in (1, 3):
            assert "grad/norm" not in row and not layer(row)
        else:
            assert row["grad/norm"] == pytest.approx(2.0)


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("backoff", [0.5, 0.25])
@pytest.mark.parametrize("dropped", [(2,), (4,), (1, 3), (0, 1, 2, 3, 4)], ids=str)
def test_of_a_critics_five_updates_each_dropped_one_is_counted(fused: bool, backoff: float, dropped: tuple[int, ...]) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, backoff_factor=backoff)
    lab = Lab(model, optimizer, scaler)
    for step in range(2):
        for update in range(5):
            scaler.scale(model(torch.ones(2, 4)).mean()).backward()
            if step and update in dropped:
                model.weight.grad[0, 0] = float("inf")  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found = lab.close()
    assert (found["optim/applied"], found["optim/skipped"]) == (10 - len(dropped), len(dropped))
    assert found["train/loss_scale"] == 2.0**20 * backoff ** len(dropped)
    if dropped != (4,) or not fused:
        assert ("grad/norm" in found) == (len(dropped) < 5)


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_an_overflow_is_located(fused: bool) -> None:
    row = Scaled(fused).step(poison=True, clip=True)
    assert layer(row, "grad_nonfinite") == {"weight": 4}


def test_a_growing_scale_skips_nothing_and_a_missing_step_is_not_a_skip() -> None:
    scaled = Scaled()
    for _ in range(5):
        scaled.step()
    assert scaled.lab.close()["optim/skipped"] == 0


def test_what_a_step_was_told_goes_on_when_something_else_is_watched() -> None:
    """Its loss is the mean of all of its micro-batches, also of those before `watch`."""
    lab = Lab({}, {})
    lab.instruments.micro(2.0, 1.0, torch.tensor([9.0, 1.0]))
    lab.instruments.set("train/loss/part", torch.tensor(7.0))
    lab.instruments.attach({"": linear()}, {})
    lab.instruments.micro(torch.tensor(4.0), 1.0)
    lab.instruments.attach({"": (model := linear())}, {"": sgd(model)})
    lab.instruments.micro(6.0, 2.0, torch.tensor([3.0]))
    found = lab.close()
    assert found["train/loss"] == (2 + 4 + 2 * 6) / 4
    assert found["train/loss/part"] == 7 and found["train/sample_loss_max"] == 9 and found["train/sample_loss_p50"] == 3
    lab.instruments.micro(5.0, 1.0)
    assert lab.close()["train/loss"] == 5


def test_counts_go_on_when_something_else_is_watched() -> None:
    scaled = Scaled()
    scaled.step()
    scaled.step(poison=True)
    other = linear()
    scaled.lab.instruments.attach({"": other}, {"": sgd(other)})
    found = scaled.lab.close()
    assert (found["optim/applied"], found["optim/skipped"]) == (1, 1)


def test_a_step_the_user_declined() -> None:
    model = linear()
    lab = Lab(model, sgd(model))
    lab.instruments.skipped()
    assert lab.close()["optim/skipped"] == 1


def test_a_disabled_scaler_is_none() -> None:
    model = linear()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    lab = Lab(model, optimizer := sgd(model), scaler)
    scaler.scale(model(data()).square().mean()).backward()
    true = norms(model)
    scaler.step(optimizer)
    scaler.update()
    found = lab.close()
    assert "train/loss_scale" not in found
    assert layer(found) == pytest.approx(true, rel=1e-6)


def test_learning_rates() -> None:
    model = linear()
    groups = [
        {"params": model[0].parameters(), "lr": 0.5, "name": "body"},
        {"params": model[2].parameters(), "lr": torch.tensor(0.25)},
    ]
    lab = Lab(model, torch.optim.SGD(groups, lr=1.0))
    assert lab.instruments.lr() == {"train/lr": 0.5, "train/lr/1": 0.25}
    lab = Lab({"g": model, "d": linear()}, {"g": sgd(model, lr=1.0), "d": sgd(linear(), lr=2.0)})
    assert lab.instruments.lr() == {"train/lr": 1.0, "train/lr/d.0": 2.0}


def test_scalars() -> None:
    lab = Lab(linear())
    lab.instruments.set("train/loss", torch.tensor(3.5, dtype=torch.float16, requires_grad=True))
    lab.instruments.set("train/loss/aux", torch.tensor([2.0]))
    found = lab.close()
    assert (found["train/loss"], found["train/loss/aux"]) == (3.5, 2.0)
    assert not {"train/loss", "train/loss/aux"} & lab.close().keys()


def test_micro_batches_are_weighted_by_tokens() -> None:
    lab = Lab(linear())
    lab.instruments.micro(torch.tensor(9.0), 1)
    lab.instruments.micro(1.0, 99)
    assert lab.close()["train/loss"] == pytest.approx(1.08)
    lab.instruments.micro(torch.tensor(9.0), torch.tensor(1))
    lab.instruments.micro(torch.tensor(1.0), torch.tensor(99))
    assert lab.close()["train/loss"] == pytest.approx(1.08)
    lab.instruments.micro(torch.tensor(2.0), None)
    lab.instruments.micro(4.0, None)
    assert lab.close()["train/loss"] == 3.0


def test_losses_that_add_up_to_nothing_finite_are_recorded_without_a_warning() -> None:
    lab = Lab(linear())
    for losses, expected in (((math.inf, -math.inf), math.nan), ((1e308, 1e308), math.inf)):
        for loss in losses:
            lab.instruments.micro(torch.tensor(loss, dtype=torch.float64), None)
        assert lab.close()["train/loss"] == pytest.approx(expected, nan_ok=True)


def test_an_explicit_loss_wins_over_the_micro_batches() -> None:
    lab = Lab(linear())
    lab.instruments.micro(torch.tensor(2.0), None)
    lab.instruments.set("train/loss", torch.tensor(7.0))
    assert lab.close()["train/loss"] == 7.0


def test_the_worst_sample_of_the_step() -> None:
    lab = Lab(linear())

    def worst(*losses: Tensor) -> tuple[float, float]:
        for part in losses:
            lab.instruments.micro(part.mean(), None, part)
        found = lab.close()
        return found["train/sample_loss_max"], found["train/sample_loss_argmax"]

    assert worst(torch.tensor([1.0, 5.0, 2.0]), torch.tensor([4.0, 3.0])) == (5.0, 1.0)
    assert worst(torch.tensor([1.0, 5.0, 2.0]), torch.tensor([4.0, 6.0])) == (6.0, 4.0)
    assert worst(torch.tensor([1.0, 5.0]), torch.tensor([5.0])) == (5.0, 1.0)
    assert worst(torch.tensor([-1.0]), torch.tensor([-2.0])) == (-1.0, 0.0)
    value, row = worst(torch.tensor([1.0, float("nan")]), torch.tensor([4.0, 6.0]))
    assert math.isnan(value) and row == 1.0
    assert "train/sample_loss_max" not in lab.close()


def sampled(*losses: Tensor) -> dict[str, float]:
    lab = Lab(linear())
    for part in losses:
        lab.instruments.micro(part.mean(), None, part)
    return {name[len("train/sample_loss_") :]: v for name, v in lab.close().items() if name.startswith("train/sample_loss_")}


def test_quantiles_and_the_worst_rows_of_all_micro_batches() -> None:
    parts = [torch.tensor([[1.0, 5.0], [2.0, 0.5]]), torch.tensor([4.0, 3.0, 9.0])]
    found = sampled(*parts)
    every = torch.cat([part.flatten() for part in parts]).double()
    assert found["p50"] == every.quantile(0.5) and found["p90"] == pytest.approx(every.quantile(0.9).item())
    assert [found["max"], *(found[f"max/{k}"] for k in (2, 3, 4))] == [9.0, 5.0, 4.0, 3.0]
    assert [found["argmax"], *(found[f"argmax/{k}"] for k in (2, 3, 4))] == [6.0, 1.0, 4.0, 5.0]


def test_few_samples_and_many() -> None:
    assert sampled(torch.tensor([3.0, 7.0])) == {"max": 7, "argmax": 1, "p50": 5, "p90": 6.6, "max/2": 3, "argmax/2": 0}
    many = torch.randn(3, 500)
    found = sampled(*many)
    assert found == {"max": many.max().item(), "argmax": many.argmax().item()}


def test_samples_that_are_not_finite() -> None:
    found = sampled(torch.tensor([1.0, float("nan"), float("inf"), 2.0]))
    assert (found["argmax"], found["argmax/2"], found["max/3"]) == (1, 2, 2.0)
    assert math.isnan(found["max"]) and math.isinf(found["max/2"]) and math.isnan(found["p50"])


def test_rows_of_one_rank_are_not_shown_as_those_of_all() -> None:
    from trackbridge.shares import Share, by_name

    names = ("train/sample_loss_max", "train/sample_loss_argmax", "train/sample_loss_max/2", "trackbridge/thinning")
    shares = [Share(b"layout", 0, 1.0, False, names, np.array(v), np.zeros(0)) for v in ([7.0, 3, 2, 4], [9.0, 5, 2, 4])]
    found = by_name(shares)
    assert (found["train/sample_loss_max"], found["train/sample_loss_argmax"], found["trackbridge/thinning"]) == (9, 5, 4)
    assert "train/sample_loss_max/2" not in found
