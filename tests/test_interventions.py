"""Acting live: momentum reset and spike-aware clipping, to the formulas of arXiv:2501.06842."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trackbridge.errors import UsageError
from trackbridge.interventions import Spam, clip_spikes_, reset_momentum_


def trained(steps: int = 3, **more: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **more)
    for _ in range(steps):
        backward(model)
        optimizer.step()
    return model, optimizer


def backward(model: nn.Linear, scale: float = 1.0) -> None:
    model.zero_grad()
    (scale * model(torch.randn(8, 5)).square().mean()).backward()


# -- reset


@pytest.mark.parametrize("more", [{}, {"amsgrad": True}, {"foreach": True}, {"fused": True}], ids=str)
def test_after_a_reset_the_optimizer_is_like_new(more: dict[str, Any]) -> None:
    model, optimizer = trained(**more)
    assert reset_momentum_(optimizer) == 2
    twin = nn.Linear(5, 4)
    twin.load_state_dict(model.state_dict())
    fresh = torch.optim.AdamW(twin.parameters(), lr=0.01, **more)
    for step in range(4):
        for one, own in ((model, optimizer), (twin, fresh)):
            torch.manual_seed(step)
            backward(one)
            own.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_sgds_momentum_and_foreign_state() -> None:
    parameter = nn.Parameter(torch.ones(3))
    sgd = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(3)
    sgd.step()
    assert reset_momentum_(sgd) == 1 and not sgd.state[parameter]["momentum_buffer"].any()
    adagrad = torch.optim.Adagrad([parameter], initial_accumulator_value=0.5)
    reset_momentum_(adagrad)
    assert not adagrad.state[parameter], "a state with a start value of its own is dropped, not set to zero"
    assert reset_momentum_(torch.optim.AdamW([nn.Parameter(torch.ones(1))])) == 0


# -- clipping


@settings(max_examples=50, deadline=None)
@given(st.floats(1.5, 1e4), st.integers(0, 2**31), st.floats(0.1, 1e6))
def test_clipping_is_the_papers_formula(theta: float, seed: int, spike: float) -> None:
    model, optimizer = trained()
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * spike ** torch.rand_like(parameter)
    before = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    count = clip_spikes_(optimizer, theta)
    least = most = 0
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        moment = optimizer.state[parameter]["exp_avg_sq"]
        spikes = gradient.double() ** 2 > theta * moment.double() * (1 + 1e-5)
        kept = gradient.double() ** 2 < theta * moment.double() * (1 - 1e-5)
        wanted = gradient.sign() * (theta * moment).sqrt()
        torch.testing.assert_close(parameter.grad[spikes], wanted[spikes])  # type: ignore[index]
        assert torch.equal(parameter.grad[kept], gradient[kept])  # type: ignore[index]
        least, most = least + int(spikes.sum()), most + int((~kept).sum())
    assert count is not None and least <= int(count) <= most


def test_what_has_no_past_or_is_not_finite_is_left_alone() -> None:
    model, optimizer = trained()
    weight = model.weight
    weight.grad = torch.full_like(weight, 1e6)
    weight.grad[0, 0], weight.grad[1, 1] = float("nan"), float("inf")
    optimizer.state[weight]["exp_avg_sq"][2, 2] = 0.0
    clip_spikes_(optimizer)
    assert weight.grad[0, 0].isnan() and weight.grad[1, 1].isinf() and weight.grad[2, 2] == 1e6
    assert weight.grad[3, 3] < 1e6
    assert clip_spikes_(torch.optim.AdamW([nn.Parameter(torch.ones(1))])) is None


def test_scaled_gradients_are_compared_scaled() -> None:
    """A gradient scaler hands a fused optimizer gradients that are still multiplied by the scale."""
    model, optimizer = trained(fused=True)
    backward(model, 1e4)
    plain = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    clip_spikes_(optimizer)
    wanted = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    assert not all(map(torch.equal, plain, wanted))
    for parameter, gradient in zip(model.parameters(), plain, strict=True):
        parameter.grad = gradient * 1024.0
    optimizer.grad_scale = torch.tensor(1024.0)  # type: ignore[attr-defined]
    clip_spikes_(optimizer)
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient * 1024.0)


# -- the rule


def rates(spam: Spam, optimizer: torch.optim.Optimizer, model: nn.Linear, steps: int) -> list[float]:
    """The learning rate of each step, as the optimizer sees it."""
    seen: list[float] = []
    handle = optimizer.register_step_pre_hook(lambda it, *_: seen.append(it.param_groups[0]["lr"]))
    for _ in range(steps):
        backward(model)
        optimizer.step()
    handle.remove()
    return seen


def test_moments_are_forgotten_every_n_steps_and_the_rate_comes_back_along_half_a_cosine() -> None:
    model, optimizer = trained(0)
    with Spam(optimizer, reset_every=6, warmup=4) as spam:
        seen = rates(spam, optimizer, model, 14)
        assert spam.resets == 2 and spam.steps == 14
    ramp = [0.01 * (1 - math.cos(math.pi * t / 4)) / 2 for t in (1, 2, 3, 4)]
    assert seen == pytest.approx([0.01] * 6 + ramp + [0.01] * 2 + ramp[:2])
    assert optimizer.param_groups[0]["lr"] == 0.01, "the scheduler's rate is its own"
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_it_goes_on_from_its_state() -> None:
    def run(stop: int | None) -> list[Tensor]:
        model, optimizer = trained(0)
        spam = Spam(optimizer, reset_every=4, warmup=3).attach()
        for step in range(10):
            if step == stop:
                state = json.loads(json.dumps(spam.state_dict()))
                spam.detach()
                spam = Spam(optimizer, reset_every=4, warmup=3)
                spam.load_state_dict(state)
                spam.attach()
            torch.manual_seed(step)
            backward(model)
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    assert all(map(torch.equal, run(None), run(5)))


def test_it_draws_no_random_number_and_keeps_a_spike_out_of_the_moments() -> None:
    """Without it one spike of the gradient fills the second moment, and the weights stand still for hundreds of steps."""
    grown = {}
    for guarded in (False, True):
        model, optimizer = trained(20)
        spam = Spam(optimizer, theta=50.0)
        if guarded:
            spam.attach()
        before = optimizer.state[model.weight]["exp_avg_sq"].clone()
        torch.manual_seed(1)
        backward(model, 1e5)
        state = torch.get_rng_state()
        optimizer.step()
        assert torch.equal(state, torch.get_rng_state())
        grown[guarded] = float((optimizer.state[model.weight]["exp_avg_sq"] / before).max())
    assert spam.clipped is not None and int(spam.clipped) > 0
    assert grown[True] <= 0.999 + 0.001 * 50.0 + 1e-4 and grown[False] > 1e3


@pytest.mark.parametrize("wrong", [{"theta": 0.0}, {"reset_every": -1}, {"warmup": -1}], ids=str)
def test_values_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="Spam needs"):
        Spam(trained(0)[1], **wrong)
    with pytest.raises(UsageError, match="torch optimizer"):
        Spam(object())  # type: ignore[arg-type]


def test_nothing_of_it_is_imported_before_it_is_used() -> None:
    code = "import sys, trackbridge; assert 'torch' not in sys.modules; trackbridge.interventions.Spam; print('ok')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "ok", done.stderr
