"""The size of an update: exact of small parameters, of large ones an estimate from a sample that meets all their places."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.probes.kit import Lab, sgd
from tests.probes.test_gradients import layer
from trackbridge.demo.model import ByteGPT
from trackbridge.probes.samples import FEW, RAREST, Samples, interval, sample

SMALL = 2 * FEW - 1


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


SHAPES = st.lists(st.integers(1, 5000), min_size=0, max_size=4).filter(lambda shape: math.prod(shape) < 10**10)


@given(SHAPES)
@example([96, 96])
@example([3 * 5 * 7 * 11, 8])  # the worst: 13 where 3 would do
def test_a_sample_is_large_enough_and_falls_in_step_with_no_dimension(shape: list[int]) -> None:
    size, every = math.prod(shape), interval(tuple(shape))
    count = -(-size // every)
    if size < 2 * FEW:
        assert every == 1
    else:
        assert all(length % every for length in shape) and every % 2
        assert count >= FEW / 6 and (count < 2 * FEW or count < 2 * size / RAREST)


@settings(max_examples=20, deadline=None)
@given(st.integers(90, 700), st.integers(90, 700))
def test_a_sample_of_a_matrix_meets_every_column_and_every_row_that_is_long_enough(height: int, width: int) -> None:
    every = interval((height, width))
    places = np.arange(0, height * width, every)
    if len(places) >= 2 * width:
        assert len(set(places % width)) == width
    if width > every:
        assert len(set(places // width)) == height


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [1, SMALL, 50_000])
def test_samples_are_copies_with_the_elements_in_the_order_of_memory(dtype: torch.dtype, size: int) -> None:
    whole = randn(size).to(dtype)
    tensors = [nn.Parameter(whole), whole[:1]]
    if dtype.itemsize > 1:
        tensors.append(torch._neg_view(whole[:1]))
    found = Samples.of(tensors)
    first, *others = found.flat.split(list(found.layout.counts))
    assert torch.equal(first.double(), whole[:: interval((size,))].double())
    assert [other.item() for other in others] == [whole[0].item(), -whole[0].item()][: len(others)]
    assert not found.flat.requires_grad and found.flat.data_ptr() != whole.data_ptr()


def test_what_is_not_in_order_in_memory() -> None:
    image = randn(64, 32, 5, 5).to(memory_format=torch.channels_last)
    assert torch.equal(sample(image), image.permute(0, 2, 3, 1).reshape(-1)[:: interval(image.shape)])
    every_other = randn(400, 100)[:, ::2]
    assert torch.equal(sample(every_other), every_other.reshape(-1)[:: interval(every_other.shape)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [3, SMALL])
@pytest.mark.parametrize("step", [1e-2, 1e-30, 0.0])
def test_of_small_tensors_differences_are_exact(dtype: torch.dtype, size: int, step: float) -> None:
    old = [(randn(n) * (step != 1e-30)).to(dtype) for n in (size, 5)]  # a step that float32 squares would lose, from 0
    new = [(t + step * randn(t.numel(), seed=1)).to(dtype) for t in old]
    found = Samples.of(old).distances(new)
    exact = [float(np.linalg.norm(a.double().numpy() - b.double().numpy())) for a, b in zip(new, old, strict=True)]
    assert found.tolist() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("shape", [(4 * FEW,), (300, 300), (50_257, 64), (64, 64, 3, 3)])
def test_of_large_tensors_differences_are_estimated(shape: tuple[int, ...]) -> None:
    old = randn(*shape)
    for seed in range(5):
        step = randn(*shape, seed=seed + 1)
        rows = randn(shape[0], *[1] * (len(shape) - 1), seed=seed + 9).exp()  # some rows move far more than others
        for moved, error in ((step, 0.05), (step * rows, 0.25)):
            found = Samples.of([old]).distances([old + moved])
            assert found.item() == pytest.approx(float(moved.norm()), rel=error)


def test_samples_fit_tensors_of_the_same_shapes_only() -> None:
    before = Samples.of([randn(300, 300), randn(5)])
    assert before.fit([randn(300, 300), randn(5)])
    for shapes in (((300, 300),), ((300, 300), (6,)), ((301, 300), (5,)), ((5,), (300, 300))):
        assert not before.fit([randn(*shape) for shape in shapes])


def test_a_weight_that_is_not_finite_shows() -> None:
    old, new = randn(9), randn(9)
    new[3] = math.nan
    assert math.isnan(Samples.of([old]).distances([new]).item())


def test_in_training_the_estimate_is_near_and_every_layer_has_one() -> None:
    torch.manual_seed(0)
    model = ByteGPT()
    lab = Lab(model, optimizer := torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1), weights_every=1)
    whole = {name: p.numel() < 2 * FEW for name, p in model.named_parameters()}
    assert 10 < sum(whole.values()) < len(whole) - 10
    for step in range(4):
        tokens = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        found = lab.close()
        ratios = {name: float((p.detach() - before[name]).norm() / p.detach().norm()) for name, p in model.named_parameters()}
        seen = layer(found, "update_ratio")
        assert seen.keys() == {name for name, ratio in ratios.items() if math.isfinite(ratio)}
        for name, ratio in seen.items():
            assert ratio == pytest.approx(ratios[name], rel=1e-5 if whole[name] else 0.05), name
        moved = math.sqrt(sum(float((p.detach() - before[n]).square().sum()) for n, p in model.named_parameters()))
        size = math.sqrt(sum(float(p.detach().square().sum()) for p in model.parameters()))
        assert found["optim/update_ratio"] == pytest.approx(moved / size, rel=0.02)


def test_weights_that_were_replaced_during_the_update_have_no_ratio() -> None:
    model = nn.Linear(4, 3, bias=False)
    optimizer = sgd(model)
    lab = Lab(model, optimizer)

    def grow() -> Tensor:
        optimizer.zero_grad()
        model.weight.data = torch.ones(5, 4)
        loss = model(torch.ones(1, 4)).sum()
        loss.backward()
        return loss

    optimizer.step(grow)
    found = lab.close()
    assert "layer/weight/weight_norm" in found and "layer/weight/update_ratio" not in found
