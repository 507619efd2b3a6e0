"""Moments agree with float64 numpy and scipy, or are absent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trackbridge.probes import moments
from trackbridge.probes.moments import STATISTICS, WIDTH, add_on_cpu, add_on_device, finish

Adders = pytest.mark.parametrize("add", [add_on_cpu, add_on_device], ids=["cpu", "any device"])


def measure(add: Any, *parts: Tensor) -> dict[str, float]:
    """What is present after `parts` were added to an empty row."""
    row = torch.zeros(WIDTH, dtype=torch.float64)
    for part in parts:
        add(part, row.numpy() if add is add_on_cpu else row)
    values, present = finish(row.numpy().reshape(1, WIDTH))
    return {name: v for name, v, here in zip(STATISTICS, values[:, 0].tolist(), present[:, 0], strict=True) if here}


def truth(*parts: Tensor) -> dict[str, float]:
    x = np.concatenate([part.double().numpy().ravel() for part in parts])
    return {
        "mean": x.mean(),
        "std": x.std(),
        "rms": float(np.sqrt(np.square(x).mean())),
        "max": float(np.abs(x).max()),
        "kurtosis": float(scipy.stats.kurtosis(x)) if x.std() > 1e-6 * abs(x.mean()) else float("nan"),
        "nonfinite": 0.0,
    }


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


CASES = {
    "normal": [randn(64, 33)],
    "mean 1000, std 1": [1000 + randn(100, 100)],
    "mean 1000, std 1, many elements": [1000 + randn(700, 1000)],
    "fp16 near overflow": [(55000 + 2000 * randn(5000)).half()],
    "fp16, an outlier of 3000": [torch.cat((randn(4095), torch.tensor([3000.0]))).half()],
    "bf16 near 1000": [(1000 + 3 * randn(4096)).bfloat16()],
    "float64": [randn(999, dtype=torch.float64) * 1e-3 + 7],
    "two micro-batches, far apart": [randn(1000) - 500, 2 * randn(300, seed=1) + 500],
    "seven micro-batches": [randn(100 + i, seed=i) * (i + 1) for i in range(7)],
    "large": [1e12 * randn(1000)],
    "tiny": [1e-12 * randn(1000)],
    "skewed": [randn(3000).exp()],
    "a transposed view": [randn(40, 50).t()],
    "an expanded view": [randn(40, 1).expand(40, 9)],
}


@Adders
@pytest.mark.parametrize("parts", CASES.values(), ids=CASES.keys())
def test_right_number(add: Any, parts: list[Tensor]) -> None:
    found, true = measure(add, *parts), truth(*parts)
    scale = true["rms"]
    assert found["mean"] == pytest.approx(true["mean"], abs=2e-6 * scale)
    assert found["std"] == pytest.approx(true["std"], rel=1e-4)
    assert found["rms"] == pytest.approx(true["rms"], rel=1e-5)
    assert found["max"] == true["max"]
    assert found["kurtosis"] == pytest.approx(true["kurtosis"], rel=1e-4, abs=2e-3)
    assert found["nonfinite"] == 0


def test_the_naive_formula_is_wrong_where_ours_is_right() -> None:
    """The cases above are hard: raw float32 sums fail them."""
    x = 1000 + randn(100, 100)
    m1, m2, m3, m4 = (x.pow(k).mean().item() for k in (1, 2, 3, 4))
    naive = (m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4) / (m2 - m1**2) ** 2 - 3
    assert abs(naive - truth(x)["kurtosis"]) > 1


@Adders
@pytest.mark.parametrize("x", [torch.ones(8), torch.full((300_000,), 0.1), torch.zeros(5), torch.full((7,), 1e4).half()])
def test_constant(add: Any, x: Tensor) -> None:
    found = measure(add, x, x)
    assert "kurtosis" not in found
    assert found["mean"] == pytest.approx(x.double().mean().item(), rel=1e-6)
    assert found["std"] == pytest.approx(0.0, abs=1e-6 * float(x.abs().max()))


@Adders
def test_one_element(add: Any) -> None:
    assert measure(add, torch.tensor([3.0])) == {"mean": 3.0, "std": 0.0, "rms": 3.0, "max": 3.0, "nonfinite": 0.0}


@Adders
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_elements_are_counted_and_nothing_is_made_up(add: Any, bad: float) -> None:
    x = randn(1000)
    x[3], x[700] = bad, bad
    assert measure(add, randn(50), x) == {"nonfinite": 2.0}


@Adders
def test_never_fired(add: Any) -> None:
    assert measure(add) == {}


@Adders
def test_what_float64_cannot_hold_is_absent(add: Any) -> None:
    assert measure(add, torch.tensor([1e200, -1e200, 3e200], dtype=torch.float64)) == {"nonfinite": 0.0}


finite = st.floats(-100, 100, width=32)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(finite, min_size=1, max_size=40), min_size=1, max_size=5),
    st.sampled_from([0.0, 1e3, -1e5]),
    st.sampled_from([1e-3, 1.0, 1e4]),
)
def test_any_split_gives_the_moments_of_the_whole(parts: list[list[float]], shift: float, scale: float) -> None:
    tensors = [torch.tensor(part, dtype=torch.float64) * scale + shift for part in parts]
    found, true = measure(add_on_cpu, *tensors), truth(*tensors)
    size = abs(true["mean"]) + true["std"] + 1e-12
    assert found["mean"] == pytest.approx(true["mean"], abs=1e-9 * size)
    assert found["std"] == pytest.approx(true["std"], abs=1e-9 * size)
    assert found["max"] == true["max"]
    if true["std"] > 1e-4 * size:
        assert found["kurtosis"] == pytest.approx(true["kurtosis"], rel=1e-4, abs=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.lists(finite, min_size=2, max_size=30), st.integers(1, 29))
def test_merging_is_symmetric(numbers: list[float], cut: int) -> None:
    cut = min(cut, len(numbers) - 1)
    a, b = (np.array(part) for part in (numbers[:cut], numbers[cut:]))

    def sums(x: np.ndarray) -> tuple[float, ...]:
        d = x - x.mean()
        return len(x), x.mean(), *(float((d**k).sum()) for k in (2, 3, 4))

    ab, ba = moments.merge(sums(a), sums(b)), moments.merge(sums(b), sums(a))
    whole = sums(np.array(numbers))
    size = 1 + np.abs(numbers).max()
    for k, (x, y, z) in enumerate(zip(ab, ba, whole, strict=True)):
        assert x == pytest.approx(y, abs=1e-9 * size ** max(1, k)) == pytest.approx(z, abs=1e-9 * size ** max(1, k))


def test_the_same_tensor_gives_the_same_bits() -> None:
    x = randn(64, 5000)
    assert measure(add_on_cpu, x) == measure(add_on_cpu, x.clone())
