"""The hottest rows of the embedding: by the gradient that the optimizer used, in every kind of training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.probes.kit import Lab, sgd
from tests.probes.test_activations import Stack, batch
from trackbridge.probes.embeddings import hottest
from trackbridge.probes.merge import merge_ranks
from trackbridge.slab import Field, Slab


def rows(found: dict[str, float], table: str = "embed") -> list[tuple[int, float]]:
    """(token id, norm) of the hottest rows, the hottest first."""
    suffixes = ["", *(f"/{place}" for place in range(2, 17))]
    norm, row = f"embedding/hottest_norm/{table}", f"embedding/hottest_row/{table}"
    return [(int(found[row + s]), found[norm + s]) for s in suffixes if row + s in found and norm + s in found]


def true(gradient: Tensor, count: int = 3) -> list[tuple[int, float]]:
    norms = np.linalg.norm(gradient.to_dense().double().numpy(), axis=1)
    order = np.argsort(-norms, kind="stable")[:count]
    return [(int(row), pytest.approx(norms[row], rel=1e-5)) for row in order if norms[row]]


def measured(gradient: Tensor, count: int = 3) -> list[tuple[int, float]]:
    out = torch.full((2 * count,), 7.0, dtype=torch.float64)
    hottest(gradient, out, count)
    return [(int(row), norm) for norm, row in zip(out[:count].tolist(), out[count:].tolist(), strict=True) if norm]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_right_rows(dtype: torch.dtype, size: float) -> None:
    gradient = (torch.randn(50, 16, generator=torch.Generator().manual_seed(0)) * torch.arange(50)[:, None] / 50 * size).to(
        dtype
    )
    assert measured(gradient) == true(gradient)


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
def test_sizes_whose_squares_float32_cannot_hold(size: float) -> None:
    gradient = torch.arange(1.0, 7.0)[:, None].repeat(1, 8) * size
    assert measured(gradient) == true(gradient)


def test_fewer_rows_than_asked_for_and_rows_of_zero() -> None:
    assert measured(torch.tensor([[0.0, 0.0], [3.0, 4.0]])) == [(1, 5.0)]
    assert measured(torch.zeros(9, 4)) == []


def test_what_is_not_finite_comes_first() -> None:
    gradient = torch.ones(9, 4)
    gradient[6, 1] = float("nan")
    assert measured(gradient, 2)[0][0] == 6


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=2), min_size=1, max_size=30), st.integers(1, 5))
def test_against_numpy(table: list[list[float]], count: int) -> None:
    gradient = torch.tensor(table, dtype=torch.float64)
    found = [norm for _, norm in measured(gradient, count)]
    norms = np.sort(np.linalg.norm(gradient.numpy(), axis=1))[::-1][:count]
    assert found == pytest.approx(norms[norms > 0])


@pytest.mark.parametrize("way", ["eager", "compiled", "checkpointed"])
def test_of_the_accumulated_gradient(way: str) -> None:
    torch._dynamo.reset()
    model = Stack("non-reentrant" if way == "checkpointed" else "plain")
    run: Any = torch.compile(model, backend="aot_eager") if way == "compiled" else model
    lab = Lab(run, optimizer := sgd(model))
    for step in range(3):
        for micro in range(2):
            run(batch(2 * step + micro)).square().sum().backward()
        wanted = true(model.embed.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        assert rows(lab.close()) == wanted and len(wanted) == 3


def test_a_token_that_stands_out_is_named() -> None:
    model = nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 1))
    lab = Lab(model, optimizer := sgd(model))
    tokens = torch.tensor([[3, 4, 5, 777]])
    weight = torch.tensor([1.0, 1.0, 1.0, 300.0])[None, :, None]
    (model(tokens) * weight).sum().backward()
    optimizer.step()
    found = lab.close()
    assert found["embedding/hottest_row/0"] == 777
    assert found["embedding/hottest_norm/0"] == pytest.approx(300 * found["embedding/hottest_norm/0/2"])


def test_sparse_gradients_are_those_of_tokens() -> None:
    model = nn.Sequential(nn.Embedding(100, 3, sparse=True), nn.Linear(3, 1))
    lab = Lab(model, optimizer := sgd(model))
    model(torch.tensor([[40, 90, 90, 90, 7]])).sum().backward()
    wanted = true(model[0].weight.grad)
    optimizer.step()
    assert rows(lab.close(), "0") == wanted and wanted[0][0] == 90


def test_absent_without_a_gradient_a_table_or_the_wish() -> None:
    model = Stack()
    model.embed.weight.requires_grad = False
    lab = Lab(model, optimizer := sgd(model))
    model(batch()).sum().backward()
    optimizer.step()
    assert not rows(lab.close())
    model.embed.weight.requires_grad = True  # unfrozen later
    model(batch()).sum().backward()
    optimizer.step()
    assert rows(lab.close())
    for net, config in ((nn.Sequential(nn.Linear(2, 2), nn.Tanh()), {}), (Stack(), {"embedding_rows": 0})):
        assert not any(name.startswith("embedding/") for name in Lab(net, sgd(net), **config).instruments.series)


def test_cadence_and_a_table_that_another_optimizer_has() -> None:
    model = Stack()
    table = torch.optim.SGD([model.embed.weight], lr=0.1)
    rest = torch.optim.SGD([p for p in model.parameters() if p is not model.embed.weight], lr=0.1)
    lab = Lab(model, {"table": table, "rest": rest}, embedding_every=2)
    seen = []
    for step in range(6):
        model(batch(step)).sum().backward()
        rest.step()
        if step != 2:
            table.step()
        seen.append(bool(rows(lab.close())))
    assert seen == [True, False, False, False, True, False]


def test_rows_that_overflow_are_named_unless_all_may_have() -> None:
    model = Stack()
    lab = Lab(model, optimizer := sgd(model, lr=0.0))
    model(batch()).sum().backward()
    model.embed.weight.grad[5, 2] = float("inf")
    optimizer.step()
    found = lab.close()
    assert found["embedding/hottest_row/embed"] == 5 and not np.isfinite(found["embedding/hottest_norm/embed"])
    model.embed.weight.grad.fill_(float("nan"))
    optimizer.step()
    found = lab.close()
    assert "embedding/hottest_row/embed" not in found and np.isnan(found["embedding/hottest_norm/embed"])


def test_an_update_that_is_dropped_has_no_norm() -> None:
    model = Stack()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    lab = Lab(model, optimizer, scaler)
    found = []
    for step in range(3):
        scaler.scale(model(batch(step)).sum()).backward()
        if step == 1:
            model.embed.weight.grad[5, 2] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(lab.close())
    assert rows(found[0]) and rows(found[2])
    assert not any(name.startswith("embedding/hottest_norm") for name in found[1])


def test_a_tied_head_is_in_it_and_the_table_is_one() -> None:
    model = Stack()
    model.tied = nn.Embedding(16, 8)
    model.tied.weight = model.embed.weight
    lab = Lab(model, sgd(model))
    assert sum(name.startswith("embedding/hottest_row") for name in lab.instruments.series) == 3


def test_a_fused_optimizer_that_unscales_itself() -> None:
    model = Stack()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    lab = Lab(model, optimizer, scaler)
    scaler.scale(model(batch()).sum()).backward()
    wanted = true(model.embed.weight.grad / 1024)
    scaler.step(optimizer)
    scaler.update()
    assert rows(lab.close()) == wanted


def test_ranks_that_hold_parts_and_ranks_that_hold_the_same() -> None:
    found = merged([[9.0, 4.0, 3.0, 11, 7, 2], [5.0, 4.0, 0.0, 90, 91, 80]])
    assert found == [9.0, 5.0, 4.0, 11, 90, 7]
    assert merged([[9.0, 4.0, 11, 7]] * 3) == [9.0, 4.0, 11, 7]
    infinite = merged([[9.0, 4.0, 11, 7], [float("nan"), 1.0, 60, 61]])
    assert np.isnan(infinite[0]) and infinite[1:] == [9.0, 60, 11]
    assert merged([[9.0, 4.0, 11, 7], [3.0, 1.0, 60, 61]], seen=[1, 0])[-1] == 0  # one did not look


def merged(ranks: list[list[float]], seen: list[int] | None = None) -> list[float]:
    """What `merge_ranks` makes of the rows of several ranks; with `seen`, whether each had looked is the last number."""
    size = len(ranks[0])
    slab = Slab([Field("hottest_0", size, over_ranks="top"), Field("looked", 1, over_ranks="every")], torch.device("cpu"))
    numbers = np.array([[*rank, looked] for rank, looked in zip(ranks, seen or [1] * len(ranks), strict=True)])
    found = merge_ranks(slab, np.ones(0), numbers).tolist()
    return found if seen else found[:size]
