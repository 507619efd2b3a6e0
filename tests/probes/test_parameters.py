"""Means and zeros of gradients, sizes of weights, what is not finite, parameters without a gradient: right numbers or none."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.probes.kit import Lab, sgd
from tests.probes.test_gradients import Tied, data, layer, linear, norms
from tests.probes.test_updates import Scaled
from trackbridge.probes import cpu

NORM, PEAK, BAD, TOTAL, NONZERO = range(5)


def truth(x: Tensor) -> list[float]:
    a = x.double().numpy().ravel()
    with np.errstate(invalid="ignore", over="ignore"):
        bad = np.count_nonzero(~np.isfinite(a))
        total = a.sum() if bad else math.fsum(a)
        return [float(np.linalg.norm(a)), float(np.abs(a).max()), bad, total, np.count_nonzero(a)]


def agrees(found: np.ndarray, x: Tensor) -> None:
    true = truth(x)
    size = float(x.double().abs().sum())
    assert found[NORM] == pytest.approx(true[NORM], rel=1e-5, nan_ok=True)
    assert found[PEAK] == pytest.approx(true[PEAK], rel=0, nan_ok=True)
    assert found[[BAD, NONZERO]].tolist() == [true[BAD], true[NONZERO]]
    assert found[TOTAL] == pytest.approx(true[TOTAL], rel=0, abs=1e-5 * size if math.isfinite(size) else None, nan_ok=True)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


CASES = {
    "mean 1000, std 1": 1000 + randn(300_000),
    "fp16 near overflow": (55000 + 2000 * randn(70_000)).clamp(max=65504).half(),
    "fp16, an outlier of 3000": torch.cat((randn(40_000), torch.tensor([3000.0]))).half(),
    "bf16": randn(33_000).bfloat16() * 1e-3,
    "constant": torch.full((200_000,), 0.1),
    "constant and small": torch.full((7,), 0.1),
    "one element": torch.tensor(3.5),
    "zeros": torch.zeros(140_000),
    "half zeros": randn(200_000).relu(),
    "float64": randn(9000).double() * 1e200,
    "squares overflow": randn(9000) * 1e30,
    "sum overflows": torch.full((9000,), 3e38),
    "squares are lost": randn(9000) * 1e-30,
    "a transposed view": randn(500, 70).t(),
    "just joined": randn(cpu.SMALL),
    "just alone": randn(cpu.SMALL + 1),
    "NaN in part": torch.cat((randn(50_000), torch.full((3,), math.nan), randn(5))),
    "infinity in part": torch.cat((randn(50_000), torch.tensor([math.inf, math.inf]))),
    "both infinities": torch.cat((torch.tensor([-math.inf]), randn(50_000), torch.tensor([math.inf]))),
    "NaN, small": torch.tensor([1.0, math.nan, math.inf]),
}


@pytest.mark.parametrize("x", CASES.values(), ids=CASES.keys())
def test_right_number(x: Tensor) -> None:
    neighbours = [torch.ones(5, dtype=x.dtype), x, torch.zeros(3000, dtype=x.dtype)]
    found = cpu.summarise(neighbours, sums=True)
    agrees(found[:, 1], x)
    agrees(found[:, 0], neighbours[0])
    agrees(found[:, 2], neighbours[2])
    assert np.array_equal(found[:3], cpu.summarise(neighbours), equal_nan=True)
    assert np.array_equal(cpu.norms(neighbours), found[NORM], equal_nan=True)  # a replay has more of a step than was recorded
    assert np.array_equal(found, cpu.summarise([t.clone() for t in neighbours], sums=True), equal_nan=True)


SPECIAL = st.sampled_from([0.0, -0.0, 1.0, 65504.0, 6e-8, math.inf, -math.inf, math.nan])
HALVES = st.one_of(SPECIAL, st.integers(0, 65535).map(lambda bits: float(np.uint16(bits).view(np.float16))))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(HALVES, min_size=1, max_size=9), min_size=1, max_size=4),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.sampled_from([1, 999]),
)
def test_any_numbers_of_any_dtype(lists: list[list[float]], dtype: torch.dtype, copies: int) -> None:
    tensors = [torch.tensor(numbers * copies).to(dtype) for numbers in lists]
    for column, x in zip(cpu.summarise(tensors, sums=True).T, tensors, strict=True):
        agrees(column, x)


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("by", [0.37, 1e-30])
def test_what_is_multiplied_on_the_way_has_torchs_bits(sums: bool, by: float) -> None:
    tensors = [randn(size, seed=size) for size in (3, cpu.SMALL + 1, cpu.PIECE + 77)]
    tensors[1][:9] = -0.0
    factor = torch.tensor(by)
    wanted = [tensor * factor for tensor in tensors]
    found = cpu.summarise(tensors, sums=True, by=factor.item()) if sums else cpu.norms(tensors, by=factor.item())[None]
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(tensors, wanted, strict=True))
    assert np.array_equal(found, cpu.summarise(wanted, sums=True)[: len(found)])


def test_norms_have_the_same_bits_however_python_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 3.12 on `sum` makes up for rounding. Which other statistics a step has must not show in its norms."""
    tensors = [randn(7 * cpu.PIECE, seed=seed) for seed in range(9)]
    for place in range(7):  # an embedding with rare tokens: sums that float64 does not hold side by side
        for tensor in tensors:
            tensor[place * cpu.PIECE : (place + 1) * cpu.PIECE] *= 10.0 ** (place % 3 * -3)
    monkeypatch.setattr(cpu, "sum", math.fsum, raising=False)
    assert np.array_equal(cpu.norms(tensors), cpu.summarise(tensors)[NORM])


def test_the_number_of_threads_changes_no_bit() -> None:
    x, y = randn(2_000_000), randn(2_000_000, seed=1)
    once = cpu.summarise([x]), cpu.summarise([x], sums=True), cpu.distances(x, y, (1_500_000, 500_000))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        again = cpu.summarise([x]), cpu.summarise([x], sums=True), cpu.distances(x, y, (1_500_000, 500_000))
    finally:
        torch.set_num_threads(threads)
    assert all(map(np.array_equal, once, again))


def test_mean_and_zeros_of_the_accumulated_gradient() -> None:
    model = linear()
    lab = Lab(model, optimizer := sgd(model))
    for part in data(rows=16).split(4):
        (model(part).square().mean() / 4).backward()
    model[0].weight.grad[:3] = 0
    mean = {name: p.grad.double().mean().item() for name, p in model.named_parameters()}
    zeros = {name: (p.grad == 0).double().mean().item() for name, p in model.named_parameters()}
    optimizer.step()
    optimizer.zero_grad()
    found = lab.close()
    assert layer(found, "grad_mean") == pytest.approx(mean, rel=1e-6, abs=1e-9)
    assert layer(found, "grad_zeros") == pytest.approx(zeros) and zeros["0.weight"] == 0.375
    assert (found["grad/zero"], found["grad/vanishing"], found["grad/missing"]) == (0, 0, 0)
    assert not {"grad/zero", "grad/missing"} & lab.close().keys()  # no update


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("elements", [0, 1])
def test_of_several_updates_in_a_step_the_last_one_counts(clip: bool, elements: int) -> None:
    """Also where it has nothing that is not finite, after one that had."""
    lab = Lab(model := linear(), optimizer := sgd(model), elements_every=elements)
    good = copy.deepcopy(model.state_dict())
    for factor in (math.nan, 1.0):
        model.load_state_dict(good)
        optimizer.zero_grad()
        (factor * model(data()).square().mean()).backward()
        if clip:
            lab.instruments.clip_grad_norm_(0.1)
        optimizer.step()
    found = lab.close()
    assert set(layer(found, "grad_nonfinite").values()) == set(layer(found, "weight_nonfinite").values()) == {0}


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(("every", "due"), [(None, [0, 10]), (4, [0, 4, 8]), (1, list(range(12))), (0, [])])
def test_single_elements_have_a_cadence_of_their_own(clip: bool, every: int | None, due: list[int]) -> None:
    lab = Lab(model := linear(), optimizer := sgd(model), elements_every=every)
    steps: list[int] = []
    for step in range(12):
        optimizer.zero_grad()
        model(data(step)).square().mean().backward()
        if clip:
            lab.instruments.clip_grad_norm_(0.1)
        wanted = {name: float(p.grad.mean()) for name, p in model.named_parameters()}
        largest = {name: float(p.grad.abs().max()) for name, p in model.named_parameters()}
        sizes = norms(model)
        optimizer.step()
        found = lab.close()
        assert layer(found, "grad_norm") == pytest.approx(sizes, rel=1e-6) and found["grad/zero"] == 0
        assert layer(found, "grad_nonfinite") == dict.fromkeys(sizes, 0)
        if layer(found, "grad_mean"):
            assert layer(found, "grad_mean") == pytest.approx(wanted, rel=1e-4, abs=1e-7)
            assert layer(found, "grad_max") == largest and len(layer(found, "grad_zeros")) == 4
            steps.append(step)
        else:
            assert not layer(found, "grad_max") and not layer(found, "grad_zeros")
    assert steps == due


def test_which_parameters_get_nothing() -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("taught", "again", "silent", "faint", "unused", "frozen")})
    for p in model["frozen"].parameters():
        p.requires_grad = False
    lab = Lab(model, optimizer := sgd(model))
    x = data()
    loss = model["taught"](x).sum() + model["again"](x).sum() + 0 * model["silent"](x).sum() + 1e-9 * model["faint"](x).sum()
    loss.backward()
    optimizer.step()
    found = lab.close()
    assert (found["grad/zero"], found["grad/vanishing"], found["grad/missing"]) == (2, 2, 2)
    assert {name for name, share in layer(found, "grad_zeros").items() if share == 1} == {"silent.weight", "silent.bias"}
    assert "unused.weight" not in layer(found, "grad_zeros")


def test_no_gradient_at_all_is_told() -> None:
    model = linear()
    lab = Lab(model, optimizer := sgd(model))
    optimizer.step()
    found = lab.close()
    assert found["grad/missing"] == 4 and "grad/zero" not in found


def test_frozen_and_unfrozen() -> None:
    model = linear()
    model[0].requires_grad_(False)
    lab = Lab(model, optimizer := sgd(model))
    for step in range(3):
        model[0].requires_grad_(step > 0)
        model(data()).square().mean().backward()
        optimizer.step()
        found = lab.close()
        for statistic in ("grad_mean", "grad_zeros", "weight_rms", "weight_max", "weight_nonfinite"):
            assert ("0.weight" in layer(found, statistic)) == (step > 0)
        assert found["grad/missing"] == 0


def test_tied_weights_count_once() -> None:
    model = Tied()
    lab = Lab(model, optimizer := sgd(model))
    model(torch.arange(5)).square().mean().backward()
    mean = model.embed.weight.grad.mean().item()
    optimizer.step()
    found = lab.close()
    assert layer(found, "grad_mean") == {"embed.weight": pytest.approx(mean, rel=1e-5, abs=1e-9)}
    assert layer(found, "weight_rms") == {"embed.weight": pytest.approx(model.embed.weight.square().mean().sqrt().item())}


def test_what_a_sparse_gradient_leaves_out_is_zero() -> None:
    model = nn.Embedding(10, 3, sparse=True)
    lab = Lab(model, optimizer := sgd(model))
    model(torch.tensor([1, 1, 2])).sum().backward()
    optimizer.step()
    found = lab.close()
    assert layer(found, "grad_zeros") == {"weight": pytest.approx(0.8)}
    assert layer(found, "grad_mean") == {"weight": pytest.approx(9 / 30)}


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_means_are_of_the_unscaled_gradient(fused: bool) -> None:
    scaled = Scaled(fused)
    found = scaled.step()
    assert layer(found, "grad_mean") == {"weight": 1.0} and layer(found, "grad_zeros") == {"weight": 0.0}
    found = scaled.step(poison=True)
    assert not layer(found, "grad_mean") and "grad/zero" not in found


def test_weights() -> None:
    model = linear()
    lab = Lab(model, optimizer := sgd(model, lr=0.0))
    with torch.no_grad():
        model[0].weight[1, 2] = -7.0
        model[2].weight[0, :2] = math.nan
        model[2].bias[0] = math.inf
    model[0](data()).sum().backward()
    optimizer.step()
    found = lab.close()
    assert layer(found, "weight_max")["0.weight"] == 7.0
    assert layer(found, "weight_rms")["0.bias"] == pytest.approx(model[0].bias.double().square().mean().sqrt().item(), rel=1e-6)
    assert layer(found, "weight_nonfinite") == {"0.weight": 0, "0.bias": 0, "2.weight": 2, "2.bias": 1}
    assert found["param/nonfinite"] == 3
    assert math.isnan(layer(found, "weight_max")["2.weight"]) and math.isinf(layer(found, "weight_rms")["2.bias"])


def test_after_torchs_own_clipping_nobody_knows_where_a_nan_began() -> None:
    model = linear()
    twin = copy.deepcopy(model)
    lab, other = Lab(model, optimizer := sgd(model)), Lab(twin, theirs := sgd(twin))
    for net in (model, twin):
        net(data()).square().mean().backward()
        net[2].bias.grad[0] = math.nan
    lab.instruments.clip_grad_norm_(1.0)
    torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    optimizer.step()
    theirs.step()
    ours, found = lab.close(), other.close()
    assert ours["grad/unlocated"] == 0 and layer(ours, "grad_nonfinite")["0.weight"] == 0
    assert found["grad/unlocated"] == 1 and found["grad/nonfinite"] == sum(p.numel() for p in twin.parameters())


def test_a_nan_that_is_in_one_place_is_located_without_our_clipping() -> None:
    model = linear()
    lab = Lab(model, optimizer := sgd(model))
    model(data()).square().mean().backward()
    model[0].bias.grad[:] = math.nan
    optimizer.step()
    found = lab.close()
    assert found["grad/unlocated"] == 0 and layer(found, "grad_nonfinite")["0.bias"] == 8
    model.zero_grad()
    model(data()).square().mean().backward()
    for p in model.parameters():
        p.grad.nan_to_num_(0.0)
    optimizer.step()
    assert "grad/unlocated" not in lab.close()


def test_a_parameter_that_was_given_other_memory_is_as_large_as_that() -> None:
    """As a table of embeddings that gets more rows (``weight.data = larger``)."""
    lab = Lab(model := nn.Linear(8, 8), optimizer := sgd(model))
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    lab.close()
    optimizer.zero_grad()
    model.weight.data, model.bias.data = torch.randn(16, 8), torch.zeros(16)
    model(torch.ones(2, 8)).sum().backward()
    weight, gradient = model.weight.detach().double(), model.weight.grad.double()
    optimizer.step()
    weight -= 0.1 * gradient
    found = lab.close()
    assert found["layer/weight/weight_rms"] == pytest.approx(weight.square().mean().sqrt().item(), rel=1e-6)
    assert found["layer/weight/grad_mean"] == pytest.approx(gradient.mean().item())
    assert found["layer/weight/grad_zeros"] == 0
