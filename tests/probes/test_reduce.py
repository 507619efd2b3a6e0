"""Norms, peaks and counts agree with float64 numpy for every size, dtype and range."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trackbridge.probes import cpu, reduce


def true_norm(x: Tensor) -> float:
    return float(np.linalg.norm(x.double().numpy().ravel()))


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_norms_of_mixed_sizes(dtype: torch.dtype) -> None:
    tensors = [randn(3), randn(100, 7).t(), randn(cpu.PIECE + 5), randn(()), randn(3 * cpu.DOT + 1)]
    tensors = [tensor.to(dtype) for tensor in tensors]
    assert reduce.norms(tensors).tolist() == pytest.approx([true_norm(x) for x in tensors], rel=2e-6)


def test_large_tensors_keep_their_digits() -> None:
    """vector_norm alone is off by 4e-4 here."""
    x = randn(10_000_000)
    assert reduce.norms([x]).item() == pytest.approx(true_norm(x), rel=1e-6)


@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e-22, 0.0])
def test_squares_outside_float32(scale: float) -> None:
    x = randn(1000) * scale
    assert reduce.norms([x, x]).tolist() == pytest.approx([true_norm(x)] * 2, rel=1e-6)


def test_fp16_and_bf16_do_not_overflow() -> None:
    x = torch.full((100,), 6e4, dtype=torch.float16)
    assert reduce.norms([x]).item() == pytest.approx(true_norm(x), rel=1e-6)


def test_nonfinite_elements() -> None:
    x, y = randn(10), randn(10)
    y[2], y[5], y[7] = float("nan"), float("inf"), -float("inf")
    assert reduce.nonfinites([x, y]).tolist() == [0, 3]
    assert np.isnan(reduce.norms([x, y])[1]) and np.isnan(reduce.peaks([x, y])[1])
    z = torch.tensor([1.0, -float("inf")])
    assert reduce.norms([z]).item() == float("inf") == reduce.peaks([z]).item()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9), min_size=1, max_size=4
    )
)
def test_any_finite_float32(lists: list[list[float]]) -> None:
    tensors = [torch.tensor(numbers, dtype=torch.float32) for numbers in lists]
    assert reduce.norms(tensors).tolist() == pytest.approx([true_norm(x) for x in tensors], rel=1e-5, abs=1e-300)
    assert reduce.peaks(tensors).tolist() == [float(x.abs().max()) for x in tensors]
    assert reduce.nonfinites(tensors).tolist() == [0] * len(tensors)
