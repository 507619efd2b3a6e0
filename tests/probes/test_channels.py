"""Kurtosis over channels, and measuring some tokens only, against float64 numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.probes.kit import Lab, sgd
from tests.probes.test_activations import Stack, acts, batch, outputs
from tests.probes.test_moments import CASES, randn
from trackbridge.probes.channels import Channels, by_channel, squares_on_device, widest
from trackbridge.probes.strides import odd_prime


def measure(*parts: Tensor, width: int = 4096) -> float:
    """Of one of two sites, the other one being empty; the gate is the last element of the slab."""
    slab = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    found = Channels(2, width, torch.device("cpu"))
    for part in parts:
        found.add(part, slab, 1, 2)
    found.collect(slab, 0)
    assert slab[0] == 0 and not found.sums.any()
    return float(slab[1])


def truth(*parts: Tensor) -> float:
    x = np.concatenate([part.double().numpy() for part in parts])
    s = np.sqrt(np.square(x).mean(0))
    return float((s**4).mean() / (s**2).mean() ** 2)


def columns(part: Tensor, count: int = 8) -> Tensor:
    flat = part.reshape(-1)
    return flat[: len(flat) // count * count].reshape(-1, count)


@pytest.mark.parametrize("parts", CASES.values(), ids=CASES.keys())
def test_right_number(parts: list[Tensor]) -> None:
    x = [columns(part) for part in parts]
    assert measure(*x) == pytest.approx(truth(*x), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_channel_that_outgrows_the_others(dtype: torch.dtype) -> None:
    x = randn(300, 256)
    quiet = measure(x.to(dtype))
    x[7, 5] = 3000.0
    assert 1.0 <= quiet < 1.05 and measure(x.to(dtype)) == pytest.approx(truth(x.to(dtype)), rel=1e-6)
    assert measure(x.to(dtype)) > 200


def test_its_bounds() -> None:
    assert measure(torch.full((50, 16), 0.1)) == pytest.approx(1.0)
    assert measure(torch.eye(16)[:1].repeat(9, 1)) == pytest.approx(16.0)
    assert measure(torch.tensor([[3.0, 3.0]])) == pytest.approx(1.0)


@pytest.mark.parametrize("size", [1e-14, 1e-12, 1e12, 1e25, 3e38])
def test_sizes_far_from_one(size: float) -> None:
    x = randn(100, 32).clamp(-1, 1) * size
    x[:, 3] *= 0.2
    assert measure(x) == pytest.approx(truth(x), rel=1e-6)


@pytest.mark.parametrize("size", [1e-14, 1.0, 1e12, 1e25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_on_any_device(size: float, dtype: torch.dtype) -> None:
    x = (randn(100, 32) * size).to(dtype)
    true = np.square(x.double().numpy()).sum(0)
    assert squares_on_device(x).tolist() == pytest.approx(true.tolist(), rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 0.0])
def test_nothing_is_made_up(bad: float) -> None:
    x = randn(40, 8) if bad else torch.zeros(40, 8)
    x[3, 2] = bad
    assert measure(x) == 0.0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3), min_size=1, max_size=9),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([0.0, 1e3]),
)
def test_any_split_gives_that_of_the_whole(parts: list[list[list[float]]], shift: float) -> None:
    tensors = [torch.tensor(part, dtype=torch.float32) + shift for part in parts]
    whole = torch.cat(tensors).double()
    if whole.square().sum() > 1e-20:
        assert measure(*tensors) == pytest.approx(truth(*tensors), rel=1e-5)


def test_where_the_channels_are() -> None:
    x = torch.randn(2, 5, 7)
    assert by_channel(x, nn.Linear(7, 7)).shape == (10, 7)
    assert torch.equal(by_channel(x, nn.Conv1d(5, 5, 1)), x.movedim(1, 2).reshape(14, 5))
    assert by_channel(torch.randn(2, 3, 4, 4), nn.Sequential()) is None
    assert by_channel(torch.randn(4), nn.Linear(7, 7)) is None
    assert by_channel(torch.randn(4, 1), nn.Linear(7, 1)) is None
    assert widest([nn.Sequential(nn.Embedding(9999, 8), nn.Linear(8, 24))]) == 24


def test_of_blocks_over_micro_batches_and_by_cadence() -> None:
    model = Stack()
    lab = Lab(model, sgd(model), channels_every=2)
    micro = [batch(seed) for seed in range(3)]
    true = [outputs(model, tokens) for tokens in micro]
    seen = []
    for _ in range(5):
        for tokens in micro:
            model(tokens).sum().backward()
        found = acts(lab.close(), "channel_kurtosis")
        seen.append(bool(found))
        if found:
            each = {name: [t[name].reshape(-1, 8) for t in true] for name in true[0]}
            assert found == pytest.approx({name: truth(*parts) for name, parts in each.items()}, rel=1e-5)
    assert seen == [True, False, True, False, True]


def test_never() -> None:
    model = Stack()
    lab = Lab(model, sgd(model), channels_every=0)
    model(batch()).sum().backward()
    assert not acts(lab.close(), "channel_kurtosis")


def test_a_pause_in_the_middle_loses_nothing() -> None:
    model = Stack()
    lab = Lab(model, sgd(model))
    model(batch()).sum().backward()
    lab.instruments.pause()
    model(batch(3))
    found = lab.close()
    assert acts(found, "channel_kurtosis")["embed"] == pytest.approx(truth(outputs(model, batch())["embed"].reshape(-1, 8)))


def test_a_site_that_overflows_has_none() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    lab = Lab(model, sgd(model), sites=["0", "1"])
    with torch.no_grad():
        model[0].bias[1] = float("inf")
    model(torch.ones(3, 4))
    assert acts(lab.close(), "channel_kurtosis").keys() == {"1"}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it while tracing
@pytest.mark.parametrize("mode", ["plain", "reentrant", "non-reentrant", "compiled", "blocks compiled"])
def test_some_tokens_only(mode: str) -> None:
    torch._dynamo.reset()
    model = Stack(mode if "compiled" not in mode else "plain")
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if mode == "compiled" else model
    if mode == "blocks compiled":
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    lab = Lab(run, sgd(model), tokens=2)
    for _ in range(2):
        true = {name: x.reshape(-1, 8)[::3] for name, x in outputs(model, batch()).items()}
        run(batch()).sum().backward()
        found = lab.close()
        for name, x in true.items():
            assert found[f"act/{name}/mean"] == pytest.approx(x.double().mean().item(), abs=1e-6)
            assert found[f"act/{name}/max"] == pytest.approx(x.abs().max().item(), rel=1e-6)
            assert found[f"act/{name}/channel_kurtosis"] == pytest.approx(truth(x), rel=1e-5)
        assert set(lab.last.values()) == {1}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it while tracing
@pytest.mark.parametrize("mode", ["plain", "compiled"])
@pytest.mark.parametrize(
    "tokens, count, stride", [(None, 14_337, 7), (None, 14_334, 5), (None, 6_143, 1), (1, 14_337, 1), (4, 64, 5)]
)
def test_of_a_large_output_some_tokens_unless_told_otherwise(mode: str, tokens: int | None, count: int, stride: int) -> None:
    torch._dynamo.reset()
    model = Stack("plain")
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if mode == "compiled" else model
    lab = Lab(run, sgd(model), tokens=tokens)
    words = torch.randint(0, 16, (1, count), generator=torch.Generator().manual_seed(0))
    true = {name: x.reshape(-1, 8)[::stride] for name, x in outputs(model, words).items()}
    run(words).sum().backward()
    found = lab.close()
    for name, x in true.items():
        assert found[f"act/{name}/mean"] == pytest.approx(x.double().mean().item(), abs=1e-6)
        assert found[f"act/{name}/rms"] == pytest.approx(x.double().square().mean().sqrt().item(), rel=1e-6)
        assert found[f"act/{name}/channel_kurtosis"] == pytest.approx(truth(x), rel=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it while tracing
@pytest.mark.parametrize("batch, lengths", [(1, (17_000, 100)), (4000, (6, 9))])
def test_a_length_that_a_graph_leaves_open_gets_no_guard(batch: int, lengths: tuple[int, int]) -> None:
    """A guard would compile again where an output becomes large, or refuse a range that the user has promised. Of a large batch
    of an open length all is looked at: it may be a multiple of any stride."""
    torch._dynamo.reset()
    model, graphs = Stack("plain"), []
    run = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)
    lab = Lab(run, sgd(model))
    for length in lengths:
        words = torch.randint(0, 16, (batch, length), generator=torch.Generator().manual_seed(0))
        torch._dynamo.mark_dynamic(words, 1, min=2, max=100_000)
        run(words).sum().backward()
        found = lab.close()
        for name, x in outputs(model, words).items():
            assert found[f"act/{name}/rms"] == pytest.approx(x.double().square().mean().sqrt().item(), rel=1e-6)
    assert len(graphs) == 1


def test_the_stated_error_of_some_tokens() -> None:
    """docs/statistics.md: the standard error of a mean over n of all elements is std / sqrt(n)."""
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(200):
        x = torch.randn(64, 32, generator=generator)
        some = x[:: odd_prime(4)]
        inside += abs(some.mean() - x.mean()).item() < 2 * x.std().item() / math.sqrt(some.numel())
    assert inside > 180


def test_strides() -> None:
    assert [odd_prime(n) for n in (1, 2, 3, 4, 8, 9, 16, 24, 25)] == [1, 3, 3, 5, 11, 11, 17, 29, 29]
