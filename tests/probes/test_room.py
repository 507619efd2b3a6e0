"""Update sizes where there is no room for a copy of all weights: in parts, in turn, and never a wrong number."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.probes.kit import Lab
from tests.probes.test_gradients import layer
from tests.probes.test_ranks import present
from trackbridge.probes import room, weights
from trackbridge.probes.weights import PARTS, shares
from trackbridge.replay.compare import Observation, compare

SIZES = (3, 40, 7, 64, 12, 9, 30, 5, 22, 17, 8, 11, 50)
WHOLE = 4 * sum(SIZES)


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(size, generator=generator) for size in SIZES)

    def forward(self) -> Tensor:
        return torch.stack([(w.sin() * w).sum() for w in self.weights]).sum()


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each copy that was made."""
    found: list[int] = []
    real = weights._copied

    def counted(tensors: list[Tensor]) -> list[Tensor]:
        found.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        return real(tensors)

    monkeypatch.setattr(weights, "_copied", counted)
    return found


def train(steps: range, *, rarer: int = 1, **config: Any) -> Iterator[tuple[int, dict[str, float], dict[str, float]]]:
    """The step, what was found in it, and the update ratios in float64 of all parameters."""
    model = Many()
    lab = Lab(model, optimizer := torch.optim.AdamW(model.parameters(), lr=0.01), **config)
    lab.instruments.rarer(rarer)
    lab.step = steps.start
    for step in steps:
        optimizer.zero_grad()
        model().backward()
        before = [p.detach().double() for p in model.parameters()]
        optimizer.step()
        ratios = {
            name: float((p.detach().double() - old).norm() / p.detach().double().norm())
            for (name, p), old in zip(model.named_parameters(), before, strict=True)
        }
        yield step, lab.close(), ratios


def test_without_room_every_parameter_has_its_turn(monkeypatch: pytest.MonkeyPatch, copied: list[int]) -> None:
    most = max(4 * max(SIZES), math.ceil(WHOLE / PARTS) + 4 * max(SIZES) // 2)
    monkeypatch.setattr(room, "HOST_BYTES", most)
    seen: list[str] = []
    for _, found, ratios in train(range(PARTS)):
        now = layer(found, "update_ratio")
        assert now == pytest.approx({name: ratios[name] for name in now}, rel=1e-6)
        assert len(layer(found, "weight_norm")) == len(SIZES) and "param/norm" in found
        assert "optim/update_ratio" not in found  # not of the whole
        seen += now
    assert sorted(seen) == sorted(f"weights.{number}" for number in range(len(SIZES)))  # each once
    assert max(copied) <= most < WHOLE and sum(copied) == WHOLE


def test_of_ranks_that_could_not_copy_the_same_only_what_all_have_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    readings, names = [], []
    for bytes_ in (WHOLE, WHOLE - 1):  # shards of one model, each as large as the whole here
        monkeypatch.setattr(room, "HOST_BYTES", bytes_)
        lab = Lab(model := Many(), optimizer := torch.optim.SGD(model.parameters(), lr=0.01))
        model().backward()
        optimizer.step()
        slot = lab.instruments.close(0)
        assert slot is not None
        readings.append(lab.instruments.read(slot))
        names.append(set(layer(present(lab, readings[-1]), "update_ratio")))
    assert len(names[0]) == len(SIZES) > len(names[1]) > 0
    merged = present(lab, readings[1].merged([reading.numbers for reading in readings]))
    assert set(layer(merged, "update_ratio")) == names[1] and len(layer(merged, "weight_norm")) == len(SIZES)


def test_with_room_all_are_measured_at_once(copied: list[int]) -> None:
    for _, found, ratios in train(range(3)):
        assert layer(found, "update_ratio") == pytest.approx(ratios, rel=1e-6) and "optim/update_ratio" in found
    assert copied == [WHOLE] * 3


def test_what_has_no_room_by_itself_has_no_ratio(monkeypatch: pytest.MonkeyPatch, copied: list[int]) -> None:
    monkeypatch.setattr(room, "HOST_BYTES", 4 * 45)
    seen = {name for _, found, _ in train(range(PARTS)) for name in layer(found, "update_ratio")}
    assert {"weights.3", "weights.12"}.isdisjoint(seen) and "weights.0" in seen
    assert max(copied) <= 4 * 45


@pytest.mark.parametrize(("rarer", "every"), [(1, 2), (3, 2)])
def test_the_turn_is_a_function_of_the_step(monkeypatch: pytest.MonkeyPatch, rarer: int, every: int) -> None:
    monkeypatch.setattr(room, "HOST_BYTES", WHOLE - 1)

    def turns(steps: range) -> dict[int, set[str]]:
        found = {step: set(layer(found, "update_ratio")) for step, found, _ in train(steps, rarer=rarer, weights_every=every)}
        return {step: names for step, names in found.items() if names and step > steps.start}

    long = turns(range(every * rarer * (PARTS + 3)))
    assert set.union(*long.values()) == {f"weights.{number}" for number in range(len(SIZES))}
    late = turns(range(every * rarer * 4 + 1, every * rarer * (PARTS + 3)))
    assert late and late.items() <= long.items()


@given(st.lists(st.integers(0, 10**9), max_size=60), st.integers(1, 12))
def test_parts_are_of_about_the_same_size(sizes: list[int], count: int) -> None:
    found = shares(sizes, count)
    assert len(found) == len(sizes) and all(0 <= part < count for part in found)
    loads = np.bincount(found, weights=sizes, minlength=count) if sizes else np.zeros(count)
    assert loads.max() <= sum(sizes) / count + max(sizes, default=0)


@pytest.mark.parametrize(("name", "differences"), [("update_ratio", 0), ("weight_norm", 1)])
def test_a_replay_does_not_miss_what_it_had_no_room_for(name: str, differences: int) -> None:
    series = f"layer/a/{name}"
    other = {f"layer/b/{name}": 1.0}
    known = frozenset({series, *other, "train/loss"})
    _, missing = compare({series: 1.0, **other}, Observation(0.0, 0.0, other, known), first=False)
    _, more = compare(other, Observation(0.0, 0.0, {series: 1.0, **other}, known), first=False)
    assert len(missing) == len(more) == differences
