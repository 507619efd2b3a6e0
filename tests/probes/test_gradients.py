"""The gradient that is reported is the one the optimizer used, under the training code people really write."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.probes.kit import Lab, sgd
from trackbridge.errors import UsageError
from trackbridge.probes import reduce


def linear(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def data(seed: int = 1, rows: int = 16) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def norms(model: nn.Module) -> dict[str, float]:
    return {name: p.grad.double().norm().item() for name, p in model.named_parameters() if p.grad is not None}


def layer(found: dict[str, float], statistic: str = "grad_norm") -> dict[str, float]:
    end = f"/{statistic}"
    return {name[len("layer/") : -len(end)]: v for name, v in found.items() if name.startswith("layer/") and name.endswith(end)}


def total(parts: dict[str, float]) -> float:
    return math.sqrt(sum(v * v for v in parts.values()))


def test_norm_max_count_of_every_parameter_and_the_whole() -> None:
    model = linear()
    lab = Lab(model, optimizer := sgd(model))
    model(data()).square().mean().backward()
    true = norms(model)
    peaks = {name: p.grad.abs().max().item() for name, p in model.named_parameters()}
    optimizer.step()
    optimizer.zero_grad()  # too late to lose anything
    found = lab.close()
    assert layer(found) == pytest.approx(true, rel=1e-6)
    assert layer(found, "grad_max") == peaks
    assert layer(found, "grad_nonfinite") == dict.fromkeys(true, 0.0)
    assert found["grad/norm"] == found["grad/norm_clipped"] == pytest.approx(total(true), rel=1e-6)
    assert found["grad/nonfinite"] == 0


def test_a_step_without_an_update_has_no_gradient() -> None:
    model = linear()
    lab = Lab(model, optimizer := sgd(model))
    model(data()).mean().backward()
    optimizer.step()
    lab.close()
    found = lab.close()
    assert not layer(found)
    assert not {"grad/norm", "grad/norm_clipped", "grad/nonfinite", "param/norm"} & found.keys()


def test_accumulation_is_one_record_of_the_accumulated_gradient() -> None:
    model = linear()
    lab = Lab(model, optimizer := sgd(model))
    for part in data(rows=16).split(4):
        loss = model(part).square().mean()
        (loss / 4).backward()
        lab.instruments.micro(loss.detach(), part.numel())
    true = norms(model)
    optimizer.step()
    found = lab.close()
    assert layer(found) == pytest.approx(true, rel=1e-6)
    assert found["optim/applied"] == 1


def test_clipping_returns_and_leaves_torchs_own_bits() -> None:
    ours, theirs = linear(), linear()
    lab = Lab(ours, optimizer := sgd(ours))
    for model in (ours, theirs):
        (100 * model(data()).square().mean()).backward()
    true = norms(ours)
    returned = lab.instruments.clip_grad_norm_(1.0)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    assert torch.equal(returned, expected)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    optimizer.step()
    found = lab.close()
    assert found["grad/norm"] == returned.item() == pytest.approx(total(true), rel=1e-6)
    assert found["grad/norm_clipped"] == pytest.approx(1.0, rel=1e-4)
    assert layer(found) == pytest.approx({name: v / total(true) for name, v in true.items()}, rel=1e-4)


@pytest.mark.parametrize(
    "options", [{"norm_type": float("inf")}, {"norm_type": "inf"}, {"norm_type": "2"}, {"foreach": False}, {"norm_type": 1.0}]
)
def test_every_option_of_clipping(options: dict[str, Any]) -> None:
    ours, theirs = linear(), linear()
    lab = Lab(ours, optimizer := sgd(ours))
    for model in (ours, theirs):
        model(data()).square().mean().backward()
    before = total(norms(ours))
    assert torch.equal(
        lab.instruments.clip_grad_norm_(0.1, **options), torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1, **options)
    )
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    used = total(norms(ours))
    optimizer.step()
    found = lab.close()
    assert found["grad/norm_clipped"] == pytest.approx(used, rel=1e-6)
    if options == {"foreach": False}:
        assert found["grad/norm"] == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize("one", ["has no gradient", "is empty", "came after run.watch"])
def test_clipping_where_one_parameter(one: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has torch's bits; and measures on the way, but for what is not watched."""
    scaled: list[int] = []
    scale = reduce.scale
    monkeypatch.setattr(reduce, "scale", lambda tensors, *a, **k: scaled.append(len(tensors)) or scale(tensors, *a, **k))
    ours, theirs = linear(), linear()
    if one == "is empty":
        for model in (ours, theirs):
            model.register_parameter("empty", nn.Parameter(torch.ones(0)))
    lab = Lab(ours, optimizer := sgd(ours))
    for model in (ours, theirs):
        if one == "came after run.watch":
            model.register_parameter("late", nn.Parameter(torch.ones(3)))
        model(data()).square().mean().backward()
        for p in model.parameters():
            p.grad = torch.full_like(p, 2.0) if p.grad is None else p.grad
        if one == "has no gradient":
            model[0].bias.grad = None
    true = norms(ours)
    assert torch.equal(lab.instruments.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None) and (a.grad is None or torch.equal(a.grad, b.grad))
    assert scaled == {"has no gradient": [3], "is empty": [4], "came after run.watch": []}[one]
    used = norms(ours)
    optimizer.step()
    found = lab.close()
    assert found["grad/norm"] == pytest.approx(total(true), rel=1e-6)
    assert layer(found) == pytest.approx({name: used[name] for name in used if name not in ("empty", "late")}, rel=1e-6)


@pytest.mark.parametrize("limit", [torch.tensor(3.0), torch.tensor(0.3, dtype=torch.float64), "0.3", np.float64(0.3), 1])
def test_whatever_torch_takes_for_the_limit_gives_its_bits(limit: Any) -> None:
    """A tensor divided by a tensor rounds otherwise than a number divided by one."""
    ours, theirs = linear(), linear()
    lab = Lab(ours, sgd(ours))
    for scale in (10, 30, 100, 300, 1000):
        for model in (ours, theirs):
            model.zero_grad()
            (scale * model(data()).square().mean()).backward()
        lab.instruments.clip_grad_norm_(limit)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_gradients_changed_after_clipping_are_measured_again(max_norm: float) -> None:
    lab = Lab(model := linear(), optimizer := sgd(model))
    model(data()).square().mean().backward()
    lab.instruments.clip_grad_norm_(max_norm)
    with torch.no_grad():
        next(model.parameters()).grad.mul_(3.0)
    wanted = norms(model)
    optimizer.step()
    assert layer(lab.close(), "grad_norm") == pytest.approx(wanted, rel=1e-6)


def test_clipping_gradients_that_autograd_follows_is_torchs() -> None:
    """Theirs tells autograd that what it saved has changed."""
    lab = Lab(model := linear(), sgd(model))
    grads = torch.autograd.grad(model(data()).square().mean(), list(model.parameters()), create_graph=True)
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad
    penalty = sum(grad.square().sum() for grad in grads)
    lab.instruments.clip_grad_norm_(1e-3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_autograd_is_told_that_clipping_changed_what_it_saved() -> None:
    lab = Lab(model := nn.Linear(64, 64), sgd(model))  # too large to be joined with others
    model(torch.ones(4, 64)).square().mean().backward()
    weight = model.weight
    product = (weight * weight.grad).sum()
    lab.instruments.clip_grad_norm_(1e-3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_a_gradient_whose_memory_has_its_negative_is_not_left_as_it_is() -> None:
    """torch multiplies it, or raises; ours would have multiplied a copy."""
    lab = Lab(model := nn.Linear(64, 64, bias=False), sgd(model))
    model.weight.grad = torch._neg_view(torch.ones(64, 64))
    with contextlib.suppress(RuntimeError):
        lab.instruments.clip_grad_norm_(1.0)
        assert model.weight.grad.norm().item() == pytest.approx(1.0)


def test_gradients_made_in_inference_mode() -> None:
    """They have no version that would tell what was written to them since."""
    lab = Lab(model := linear(), optimizer := sgd(model))
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        before = total(norms(model))
        lab.instruments.clip_grad_norm_(0.1)
        optimizer.step()
    found = lab.close()
    assert found["grad/norm"] == pytest.approx(before) and found["grad/norm_clipped"] == pytest.approx(0.1, rel=1e-4)


def test_nonfinite_gradients_raise_where_the_user_asked_for_it_and_are_located() -> None:
    model = linear()
    lab = Lab(model, sgd(model))
    model(data()).square().mean().backward()
    model[0].bias.grad[2] = float("nan")
    with pytest.raises(RuntimeError, match="non-finite"):
        lab.instruments.clip_grad_norm_(1.0, error_if_nonfinite=True)
    found = lab.close()
    assert layer(found, "grad_nonfinite")["0.bias"] == 1
    assert found["grad/nonfinite"] == 1


def test_one_nan_is_counted_before_clipping_spreads_it() -> None:
    model = linear()
    lab = Lab(model, optimizer := sgd(model))
    model(data()).square().mean().backward()
    model[2].weight.grad[0, 3] = float("nan")
    lab.instruments.clip_grad_norm_(1.0)
    assert all(p.grad.isnan().all() for p in model.parameters())
    optimizer.step()
    found = lab.close()
    assert layer(found, "grad_nonfinite") == {"0.weight": 0, "0.bias": 0, "2.weight": 1, "2.bias": 0}
    assert math.isnan(found["grad/norm"]) and math.isnan(found["grad/norm_clipped"])


def test_a_nan_that_came_after_clipping_is_counted() -> None:
    """Clipping found nothing that it could have spread."""
    model = linear()
    lab = Lab(model, optimizer := sgd(model))
    model(data()).square().mean().backward()
    lab.instruments.clip_grad_norm_(1.0)
    model[2].weight.grad[0, 3] = float("nan")
    optimizer.step()
    found = lab.close()
    assert layer(found, "grad_nonfinite") == {"0.weight": 0, "0.bias": 0, "2.weight": 1, "2.bias": 0}
    assert found["grad/nonfinite"] == 1 and math.isnan(found["grad/norm_clipped"])


def test_nan_and_inf_without_clipping() -> None:
    model = linear()
    lab = Lab(model, optimizer := sgd(model))
    model(data()).square().mean().backward()
    model[2].bias.grad[0] = float("inf")
    model[0].weight.grad[1, :3] = float("nan")
    optimizer.step()
    found = lab.close()
    assert layer(found, "grad_nonfinite") == {"0.weight": 3, "0.bias": 0, "2.weight": 0, "2.bias": 1}
    assert math.isinf(layer(found)["2.bias"]) and math.isnan(layer(found)["0.weight"])
    assert math.isfinite(layer(found)["0.bias"])


def test_clipping_needs_a_watched_model() -> None:
    lab = Lab(linear())
    lab.instruments.detach()
    with pytest.raises(UsageError, match=r"run\.watch"):
        lab.instruments.clip_grad_norm_(1.0)
    lab = Lab({"g": linear(), "d": linear(1)})
    with pytest.raises(UsageError, match="g, d"):
        lab.instruments.clip_grad_norm_(1.0, model="x")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def test_tied_weights_count_once() -> None:
    torch.manual_seed(0)
    model = Tied()
    lab = Lab(model, optimizer := sgd(model))
    model(torch.arange(5)).square().mean().backward()
    true = model.embed.weight.grad.norm().item()
    optimizer.step()
    found = lab.close()
    assert layer(found) == {"embed.weight": pytest.approx(true)}
    assert found["grad/norm"] == pytest.approx(true)
    assert found["param/norm"] == pytest.approx(model.embed.weight.norm().item(), rel=1e-6)


def test_frozen_is_absent_and_unfrozen_is_picked_up() -> None:
    model = linear()
    for p in model[0].parameters():
        p.requires_grad = False
    lab = Lab(model, optimizer := sgd(model))
    for step in range(5):
        if step == 3:
            for p in model[0].parameters():
                p.requires_grad = True
        model(data()).square().mean().backward()
        optimizer.step()
        found = lab.close()
        expected = {"2.weight", "2.bias"} | ({"0.weight", "0.bias"} if step >= 3 else set())
        assert layer(found).keys() == layer(found, "weight_norm").keys() == expected
        assert found["param/norm"] == pytest.approx(total(layer(found, "weight_norm")))
        optimizer.zero_grad()


def test_a_parameter_without_gradient_is_absent_not_zero() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 1), "unused": nn.Linear(4, 1)})
    lab = Lab(model, optimizer := sgd(model))
    model["used"](data()).mean().backward()
    optimizer.step()
    assert layer(lab.close()).keys() == {"used.weight", "used.bias"}


def test_sparse_embedding_gradient_with_repeated_rows() -> None:
    model = nn.Embedding(10, 3, sparse=True)
    lab = Lab(model, optimizer := sgd(model))
    model(torch.tensor([1, 1, 1, 2])).sum().backward()
    optimizer.step()
    found = lab.close()
    assert layer(found)["weight"] == pytest.approx(math.sqrt(30))  # not sqrt(12), of the rows before they are summed
    assert layer(found, "grad_max")["weight"] == 3
    assert not model.weight.grad.is_coalesced()


def test_optimizer_in_backward() -> None:
    model = linear()
    true: dict[str, float] = {}
    optimizers = {name: torch.optim.SGD([p], lr=0.1) for name, p in model.named_parameters()}

    def step_now(name: str) -> Any:
        def hook(p: Tensor) -> None:
            true[name] = p.grad.norm().item()
            optimizers[name].step()
            optimizers[name].zero_grad()

        return hook

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(step_now(name))
    lab = Lab(model, optimizers)
    model(data()).square().mean().backward()
    assert all(p.grad is None for p in model.parameters())
    found = lab.close()
    assert layer(found) == pytest.approx(true, rel=1e-6)
    assert found["grad/norm"] == pytest.approx(total(true), rel=1e-6)
    assert found["optim/applied"] == 4


def test_a_critic_that_steps_five_times() -> None:
    generator, critic = linear(0), linear(1)
    optimizers = {"g": sgd(generator), "d": sgd(critic)}
    lab = Lab({"g": generator, "d": critic}, optimizers)
    for _ in range(5):
        optimizers["d"].zero_grad()
        critic(data()).square().mean().backward()
        last = norms(critic)
        optimizers["d"].step()
    first = lab.close()
    assert first["optim/applied"] == 5
    assert layer(first) == pytest.approx({f"d.{name}": v for name, v in last.items()}, rel=1e-6)  # its last update
    assert not {"param/norm", "grad/norm", "grad/norm_clipped"} & set(first)  # of half the parameters
    assert first["grad/nonfinite"] == first["grad/missing"] == 0  # a count is of those that stepped
    generator(data()).square().mean().backward()
    optimizers["g"].step()
    optimizers["d"].step()
    second = lab.close()
    assert second["optim/applied"] == 7
    assert {name.split(".")[0] for name in layer(second)} == {"g", "d"}
    assert {"param/norm", "grad/norm", "grad/norm_clipped"} <= set(second)


@pytest.mark.parametrize("clipped", ["all", "d", "none"])
def test_the_norm_of_one_of_two_optimizers_is_no_total_unless_clipping_gave_one_or_it_is_not_finite(clipped: str) -> None:
    models = {"g": linear(0), "d": linear(1)}
    optimizers = {key: sgd(model) for key, model in models.items()}
    lab = Lab(models, optimizers)
    for model in models.values():
        model(data()).square().mean().backward()
    whole = math.hypot(*(total(norms(model)) for model in models.values()))
    if clipped != "none":
        lab.instruments.clip_grad_norm_(1e6, model=None if clipped == "all" else clipped)
    optimizers["d"].step()
    found = lab.close()
    assert found.get("grad/norm") == (pytest.approx(whole, rel=1e-6) if clipped == "all" else None)
    assert "grad/norm_clipped" not in found
    models["d"][0].weight.grad[0, 0] = math.nan
    optimizers["d"].step()
    found = lab.close()
    assert math.isnan(found["grad/norm"]) and math.isnan(found["grad/norm_clipped"])
    assert found["grad/nonfinite"] == 1
    for parameter in models["g"].parameters():  # nothing of it is taught
        parameter.requires_grad_(False)
    models["d"][0].weight.grad[0, 0] = 1.0
    true = total(norms(models["d"]))
    optimizers["d"].step()
    assert lab.close()["grad/norm"] == pytest.approx(true, rel=1e-6)


def test_clipping_one_of_two_models() -> None:
    generator, critic = linear(0), linear(1)
    optimizers = {"g": sgd(generator), "d": sgd(critic)}
    lab = Lab({"g": generator, "d": critic}, optimizers)
    for model in (generator, critic):
        (10 * model(data()).square().mean()).backward()
    before, other = norms(generator), norms(critic)
    lab.instruments.clip_grad_norm_(0.01, model="g")
    assert norms(critic) == other
    for optimizer in optimizers.values():
        optimizer.step()
    found = lab.close()
    assert found["grad/norm"] == pytest.approx(math.hypot(total(before), total(other)), rel=1e-6)
    assert found["grad/norm_clipped"] == pytest.approx(math.hypot(0.01, total(other)), rel=1e-3)


@pytest.mark.parametrize("changed", [False, True], ids=["as they were clipped", "one changed since"])
def test_one_clipping_for_two_optimizers_measures_each_gradient_once(changed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"g": linear(0), "d": linear(1)}
    optimizers = {key: sgd(model) for key, model in models.items()}
    lab = Lab(models, optimizers, weights_every=0)
    for model in models.values():
        (10 * model(data()).square().mean()).backward()
    lab.instruments.clip_grad_norm_(0.1)
    if changed:
        with torch.no_grad():
            next(models["d"].parameters()).grad.mul_(3.0)
    wanted = {f"{key}.{name}": norm for key, model in models.items() for name, norm in norms(model).items()}
    measured: list[int] = []
    summary = reduce.summary
    monkeypatch.setattr(reduce, "summary", lambda tensors, **how: measured.append(len(tensors)) or summary(tensors, **how))
    for optimizer in optimizers.values():
        optimizer.step()
    assert layer(lab.close()) == pytest.approx(wanted, rel=1e-6)
    assert measured == ([1] if changed else [])
    for optimizer in optimizers.values():  # nothing is known of the next step's
        optimizer.step()
    assert sum(measured) == len(wanted) + changed


def test_what_an_optimizer_holds_may_change() -> None:
    lab = Lab(model := linear(), optimizer := sgd(model))
    held = optimizer.param_groups[0]["params"]
    names = [name for name, _ in model.named_parameters()]

    def measured() -> set[str]:
        model(data()).square().mean().backward()
        optimizer.step()
        return set(layer(lab.close()))

    assert measured() == set(names)
    taken = held.pop()
    assert measured() == set(names[:-1])
    held[0] = taken  # as many as before
    assert measured() == set(names[1:])


def test_a_closure_computes_its_gradient_inside_the_step() -> None:
    model = linear()
    lab = Lab(model, optimizer := sgd(model))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(data()).square().mean()
        loss.backward()
        return loss

    twin = copy.deepcopy(model)
    twin(data()).square().mean().backward()
    optimizer.step(closure)
    assert layer(lab.close()) == pytest.approx(norms(twin), rel=1e-6)
    optimizer.step(closure=closure)
    assert layer(lab.close()).keys() == norms(twin).keys()


def test_cadence() -> None:
    model = linear()
    lab = Lab(model, optimizer := torch.optim.Adam(model.parameters()), gradients_every=2, weights_every=3, moments_every=0)
    seen = []
    for _ in range(7):
        model(data()).square().mean().backward()
        optimizer.step()
        found = lab.close()
        seen.append(("grad/norm" in found, "param/norm" in found, "optim/exp_avg_norm" in found))
    assert [g for g, _, _ in seen] == [True, False, True, False, True, False, True]
    assert [w for _, w, _ in seen] == [True, False, False, True, False, False, True]
    assert not any(m for _, _, m in seen)


def test_float64_bfloat16_and_mixed_parameters() -> None:
    model = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2).double(), nn.Linear(4, 2).bfloat16()])
    lab = Lab(model, optimizer := sgd(model))
    for part, dtype in zip(model, (torch.float32, torch.float64, torch.bfloat16), strict=True):
        part(data().to(dtype)).sum().backward()
    true = norms(model)
    optimizer.step()
    assert layer(lab.close()) == pytest.approx(true, rel=1e-6)


def test_complex_and_empty_parameters_are_left_out() -> None:
    model = nn.ParameterDict(
        {
            "c": nn.Parameter(torch.randn(3, dtype=torch.complex64)),
            "e": nn.Parameter(torch.empty(0)),
            "r": nn.Parameter(torch.ones(2)),
        }
    )
    lab = Lab(model, optimizer := sgd(model))
    (model["c"].abs().sum() + model["r"].sum() + model["e"].sum()).backward()
    optimizer.step()
    assert layer(lab.close()).keys() == {"r"}


def test_names_that_differ_only_in_a_wrappers_part_stay_apart() -> None:
    inner = nn.ParameterDict({"w": nn.Parameter(torch.ones(2))})
    model = nn.Module()
    model.w = nn.Parameter(torch.full((2,), 2.0))
    model.module = inner
    lab = Lab(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.0))
    (model.w.sum() + 3 * inner["w"].sum()).backward()
    optimizer.step()
    assert layer(lab.close()) == pytest.approx({"w": math.sqrt(2), "w_": 3 * math.sqrt(2)})


def test_five_hundred_optimizers_in_backward_are_five_hundred_updates() -> None:
    model = nn.ParameterList(torch.ones(3) for _ in range(500))
    optimizers = {str(n): torch.optim.SGD([p], lr=0.1) for n, p in enumerate(model)}
    lab = Lab(model, optimizers, weights_every=0)
    torch.stack(list(model)).sum().backward()
    for optimizer in optimizers.values():
        optimizer.step()
    found = lab.close()
    assert len(layer(found)) == 500 and found["optim/applied"] == 500
