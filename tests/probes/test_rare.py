"""What is looked at on a cadence: rows that nothing teaches, and checksums that replicas compare."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.probes.kit import Lab, sgd
from tests.probes.test_gradients import data, layer, linear
from trackbridge.probes import dead_rows
from trackbridge.probes.checksums import MODULUS, _on_cpu, checksums, on_device
from trackbridge.probes.cpu import PIECE
from trackbridge.probes.dead_rows import AFTER
from trackbridge.probes.merge import merge_ranks


def step(lab: Lab, optimizer: torch.optim.Optimizer, loss: Tensor) -> dict[str, float]:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return lab.close()


class Units(nn.Module):
    """Eight units, of which `closed` never open: their ReLU gets a bias that nothing overcomes."""

    def __init__(self, closed: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 1)
        with torch.no_grad():
            self.up.bias[:closed] = -1e6
            self.up.bias[closed:] = 10.0

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def test_units_that_never_open_are_dead_after_ten_looks_and_alive_with_one_gradient() -> None:
    model = Units(closed=3)
    lab = Lab(model, optimizer := sgd(model, lr=1e-3), rows_every=2)
    for number in range(2 * AFTER - 1):
        found = step(lab, optimizer, model(data()).square().mean())
        told = number == 2 * (AFTER - 1)
        assert ("param/dead_rows" in found) == bool(layer(found, "dead_rows")) == told
    assert layer(found, "dead_rows") == {"up.weight": 3, "down.weight": 0} and found["param/dead_rows"] == 3
    with torch.no_grad():
        model.up.bias[0] = 10.0
    step(lab, optimizer, model(data()).square().mean())
    assert step(lab, optimizer, model(data()).square().mean())["param/dead_rows"] == 2


@pytest.mark.parametrize("sparse", [False, True])
def test_tokens_that_do_not_come(sparse: bool) -> None:
    model = nn.Embedding(12, 16, sparse=sparse)
    lab = Lab(model, optimizer := sgd(model), rows_every=1)
    for number in range(AFTER + 3):
        tokens = torch.tensor([0, 1, 1] + [5] * (number == 5) + [7] * (number == 1))
        found = step(lab, optimizer, model(tokens).sum())
    assert found["param/dead_rows"] == 9  # 0, 1 and 5 came within ten looks; 7 eleven looks ago
    assert layer(found, "dead_rows") == {"weight": 9}


def test_a_step_without_a_gradient_is_no_look() -> None:
    model = Units(closed=2)
    lab = Lab(model, optimizer := sgd(model, lr=1e-3), rows_every=1)
    for _ in range(AFTER):
        step(lab, optimizer, model(data()).square().mean())
    optimizer.zero_grad()
    optimizer.step()
    assert "param/dead_rows" not in lab.close()
    assert step(lab, optimizer, model(data()).square().mean())["param/dead_rows"] == 2


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 30), st.lists(st.tuples(st.integers(0, 11), st.integers(0, 29)), max_size=9))
def test_any_element_keeps_a_row_alive(rows: int, width: int, places: list[tuple[int, int]]) -> None:
    x = torch.zeros(rows, width, dtype=torch.float16)
    for row, column in places:
        x[row % rows, column % width] = 6e-8
    alive = dead_rows._alive(x)
    assert alive.tolist() == [bool(x[row].any()) for row in range(rows)]
    quiet = [torch.full((rows,), AFTER - 1, dtype=torch.int32)]
    assert dead_rows.dead_rows([x], quiet).tolist() == [rows - int(alive.sum())]
    assert quiet[0].tolist() == [0 if here else AFTER for here in alive.tolist()]


def plainly(x: Tensor) -> int:
    """The formula, in Python's integers."""
    words = x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().view(f"<u{min(x.element_size(), 4)}").tolist()
    return sum((2 * i + 1) * word for i, word in enumerate(words)) % MODULUS


DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=16), min_size=1, max_size=20), DTYPES, st.integers(0, 10**6))
def test_one_bit_changes_the_checksum(numbers: list[float], dtype: torch.dtype, where: int) -> None:
    x = torch.tensor(numbers).to(dtype)
    before = _on_cpu(x)
    assert before == plainly(x) == on_device(x).item() < MODULUS
    bits = x.view(torch.uint8)
    bits[where // 8 % len(bits)] ^= 1 << where % 8
    assert _on_cpu(x) == plainly(x) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_bit_of_a_large_tensor_counts(dtype: torch.dtype) -> None:
    x = torch.randn(2 * PIECE + 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = _on_cpu(x)
    assert before == plainly(x) == on_device(x).item()
    bits = x.view(torch.uint8)
    for place in (0, PIECE, len(bits) - 1):
        for bit in (0, 7):
            bits[place] ^= 1 << bit
            assert _on_cpu(x) != before
            bits[place] ^= 1 << bit
    assert _on_cpu(x) == before
    assert _on_cpu(x.flip(0)) != before  # places count


def test_logical_order_counts_and_not_how_it_lies_in_memory() -> None:
    x = torch.randn(30, 40, generator=torch.Generator().manual_seed(0))
    assert checksums([x.t(), x.t().contiguous(), x]).unique().numel() == 2


def test_checksums_have_a_cadence() -> None:
    model = linear()
    lab = Lab(model, optimizer := sgd(model), checksums_every=3)
    for number in range(7):
        found = step(lab, optimizer, model(data()).square().mean())
        sums = {name: float(_on_cpu(p)) for name, p in model.named_parameters()}
        assert layer(found, "checksum") == (sums if number % 3 == 0 else {})
    assert "param/replicas_differ" not in found  # there is nothing to compare with


def test_replicas_that_differ_are_counted_and_shards_are_not_compared() -> None:
    model = linear()
    lab = Lab(model, optimizer := sgd(model))
    model(data()).square().mean().backward()
    optimizer.step()
    slot = lab.instruments.close(0)
    assert slot is not None
    reading = lab.instruments.read(slot)
    slab, series = reading.session.slab, lab.instruments.series

    def merged(other: np.ndarray, copies: list[float]) -> dict[str, float]:
        numbers = merge_ranks(slab, np.array(copies), np.stack([reading.numbers, other]))
        values, present = reading.session.finalize(numbers)
        return {name: v for name, v, here in zip(series, values.tolist(), present, strict=True) if here}

    same, flipped = reading.numbers.copy(), reading.numbers.copy()
    slab.unpack(flipped)["checksum"][[0, 2]] += 1
    assert merged(same, [2, 2, 2, 2])["param/replicas_differ"] == 0
    assert merged(flipped, [2, 2, 2, 2])["param/replicas_differ"] == 2
    found = merged(flipped, [1, 2, 2, 2])
    assert found["param/replicas_differ"] == 1
    assert "0.weight" not in layer(found, "checksum") and "0.bias" in layer(found, "checksum")
    assert "param/replicas_differ" not in merged(flipped, [1, 1, 1, 1])
