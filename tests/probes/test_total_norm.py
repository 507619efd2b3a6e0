"""Norms of gradients that come with torch's total norm: torch's bits, or none."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.probes.kit import Lab, sgd
from tests.probes.test_gradients import data, layer, linear, norms
from trackbridge.probes.total_norm import LARGEST, TotalNorm


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 70_000), st.integers(-18, 18)), min_size=1, max_size=6))
def test_the_total_has_torchs_bits_and_is_made_of_the_parts(sizes: list[tuple[int, int]]) -> None:
    gradients = [randn(size, seed=place) * 10.0**exponent for place, (size, exponent) in enumerate(sizes)]
    found = TotalNorm().of(gradients)
    total = torch.nn.utils.get_total_norm(gradients)
    if not torch.isfinite(total):
        assert found is None
        return
    assert found is not None and torch.equal(found.total, total)
    assert found.parts.tolist() == pytest.approx([g.double().norm().item() for g in gradients], rel=1e-5)


@pytest.mark.parametrize("largest", [LARGEST, LARGEST // 2 + 1])
def test_of_as_many_elements_as_it_takes_it_is_right(largest: int) -> None:
    x = randn(largest) + 3.0
    found = TotalNorm().of([x])
    assert found is not None and found.parts.item() == pytest.approx(x.double().norm().item(), rel=1e-5)
    assert TotalNorm().of([randn(LARGEST + 1)]) is None


@pytest.mark.parametrize(
    "gradients",
    [
        [], [torch.zeros(0)], [randn(3), torch.tensor([math.nan])], [randn(3), torch.tensor([math.inf])], [randn(3).double()],
        [randn(3), randn(3).bfloat16()], [nn.Parameter(randn(3))], [randn(3).requires_grad_()], [randn(3).to_sparse()],
    ],
)  # fmt: skip
def test_what_it_does_not_take(gradients: list[Tensor]) -> None:
    assert TotalNorm().of(gradients) is None


def test_where_torch_has_other_bits_it_stands_back_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = [randn(9)]
    with monkeypatch.context() as other:
        other.setattr(torch.nn.utils, "get_total_norm", lambda tensors: torch.tensor(1.0))
        total = TotalNorm()
        assert total.of(gradients) is None
    assert total.of(gradients) is None and TotalNorm().of(gradients) is not None


@pytest.mark.parametrize("max_norm", [1e-2, 1e9])
@pytest.mark.parametrize("every", [1, 0], ids=["with elements", "norms only"])
def test_norms_after_clipping_are_those_of_the_gradients(max_norm: float, every: int) -> None:
    mine, theirs = linear(), linear()
    lab = Lab(mine, optimizer := sgd(mine), elements_every=every)
    for model in (mine, theirs):
        model(data()).square().mean().backward()
        model[0].weight.grad[:] = 0  # a silent layer
        model[0].bias.grad.mul_(1e-24)  # whose square is no float32
    total = lab.instruments.clip_grad_norm_(max_norm)
    assert torch.equal(total, torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))
    used = norms(mine)
    optimizer.step()
    found = lab.close()
    assert layer(found) == pytest.approx(used, rel=1e-6, abs=0) and used["0.weight"] == 0 < used["0.bias"] < 1e-20
    assert found["grad/norm"] == pytest.approx(total.item()) and found["grad/zero"] == 1
    assert set(layer(found, "grad_nonfinite").values()) == {0.0}


@pytest.mark.parametrize("options", [{"norm_type": 1.0}, {"foreach": False}, {"error_if_nonfinite": True}, {}])
@pytest.mark.parametrize("bad", [False, True])
def test_whatever_is_asked_of_clipping_is_torchs(options: dict[str, Any], bad: bool) -> None:
    mine, theirs = linear(), linear()
    lab = Lab(mine, optimizer := sgd(mine), elements_every=0)
    for model in (mine, theirs):
        model(data()).square().mean().backward()
        if bad:
            model[2].weight.grad[0, 1] = math.nan
    if bad and "error_if_nonfinite" in options:
        with pytest.raises(RuntimeError, match="non-finite"):
            lab.instruments.clip_grad_norm_(0.1, **options)
    else:
        total = lab.instruments.clip_grad_norm_(0.1, **options)
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1, **options)
        assert torch.equal(total, expected) or (bad and total.isnan() and expected.isnan())
    optimizer.step()
    counts = layer(lab.close(), "grad_nonfinite")
    assert counts == {"0.weight": 0, "0.bias": 0, "2.weight": int(bad), "2.bias": 0}
