"""Copies of outputs on the CPU that are measured together give the bits that each would have given by itself, at once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.probes.kit import Lab, sgd
from trackbridge.config import ActivationsConfig, ParametersConfig
from trackbridge.probes import Instruments, cpu, moments, output_copies, site_statistics
from trackbridge.probes.moments import WIDTH, add_all_on_cpu, add_on_cpu, finish
from trackbridge.probes.output_copies import Copies
from trackbridge.probes.session import Session

LENGTHS = st.sampled_from([1, 2, 7, 100, 4096, cpu.DOT, cpu.DOT + 1, 28224, 33333, 49999, cpu.PIECE])
KINDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "normal": lambda x: x,
    "mean 1000": lambda x: x + 1000,
    "mean as large as its spread": lambda x: x + 1,
    "positive": np.abs,
    "large": lambda x: 1e12 * x,
    "beyond float32's squares": lambda x: 1e25 * x,
    "tiny": lambda x: 1e-12 * x,
    "below float32's squares": lambda x: 1e-30 * x,
    "zeros": lambda x: 0 * x,
    "negative zeros": lambda x: -0.0 * np.abs(x),
    "constant": lambda x: 0 * x + 0.1,
    "an outlier": lambda x: np.where(np.arange(len(x)) == len(x) // 2, 3e4, x),
    "NaN": lambda x: np.where(np.arange(len(x)) == len(x) - 1, np.nan, x),
    "infinite": lambda x: np.where(np.arange(len(x)) == 0, -np.inf, x),
}


def one_by_one(xs: np.ndarray, count: int, sites: list[int]) -> np.ndarray:
    rows = np.zeros((count, WIDTH))
    for x, site in zip(xs, sites, strict=True):
        add_on_cpu(torch.from_numpy(x.copy()), rows[site])
    return rows


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_together_each_gives_the_bits_that_it_gives_alone(n: int, kinds: list[str], count: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    with np.errstate(over="ignore", invalid="ignore"):
        xs = np.stack([KINDS[kind](draw.standard_normal(n)).astype(np.float32) for kind in kinds])
    sites = draw.integers(0, count, len(kinds)).tolist()
    rows = np.zeros((count, WIDTH))
    add_all_on_cpu(xs, [rows[site] for site in sites])
    assert rows.tobytes() == one_by_one(xs, count, sites).tobytes()


@settings(max_examples=30, deadline=None)
@given(LENGTHS, st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_dots_of_many_have_the_bits_of_one(n: int, k: int, seed: int) -> None:
    a, b = np.random.default_rng(seed).standard_normal((2, k, n)).astype(np.float32)
    assert cpu.dots(a, b) == [cpu.dot(x, y) for x, y in zip(a, b, strict=True)]
    assert cpu.totals(a) == [cpu.total(x) for x in a]


@pytest.mark.parametrize("kind", ["normal", "mean 1000", "an outlier", "beyond float32's squares", "positive"])
def test_right_numbers(kind: str) -> None:
    x = KINDS[kind](np.random.default_rng(3).standard_normal(28224)).astype(np.float32)
    row = np.zeros(WIDTH)
    add_all_on_cpu(np.stack((x, x)), [row, np.zeros(WIDTH)])
    values, present = finish(row[None])
    true = x.astype(np.float64)
    d = true - true.mean()
    kurtosis = (d**4).mean() / (d**2).mean() ** 2 - 3
    expected = [true.mean(), true.std(), np.sqrt((true**2).mean()), np.abs(true).max(), kurtosis, 0]
    assert present.all()
    assert values[:, 0] == pytest.approx(expected, rel=1e-4, abs=2e-6 * float(np.abs(true).max()))


def held(*outputs: tuple[int, Tensor]) -> np.ndarray:
    rows = np.zeros((3, WIDTH))
    these = Copies(rows, lambda x, site: None)
    for site, y in outputs:
        these.add(y, site)
        if y.dtype is torch.float32:
            y.fill_(float("nan"))  # an activation in place behind the module
    these.measure()
    return rows


def outputs(draw: torch.Generator) -> list[tuple[int, Tensor]]:
    """Micro-batches of several lengths, another dtype, views, and one that is too long to be copied."""
    shapes = [(2, 30), (2, 30), (700,), (2, 30), (400, 400), (2, 30), (5, 9)]
    made = [(place % 3, torch.randn(shape, generator=draw)) for place, shape in enumerate(shapes)]
    half = (0, torch.randn(60, generator=draw).bfloat16())
    turned = (1, torch.randn(40, 50, generator=draw).t())
    return [*made, half, turned, (0, torch.randn(2, 30, generator=draw))]


@pytest.mark.parametrize("room", [output_copies.ROOM, 3000, 2000])
def test_how_they_are_grouped_changes_no_bit(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_copies, "ROOM", room)
    monkeypatch.setattr(output_copies, "LONGEST", 2000)
    expected = np.zeros((3, WIDTH))
    for site, y in outputs(torch.Generator().manual_seed(0)):
        add_on_cpu(y, expected[site])
    assert held(*outputs(torch.Generator().manual_seed(0))).tobytes() == expected.tobytes()


def test_another_thread_measures_at_once() -> None:
    rows = np.zeros((2, WIDTH))
    these = Copies(rows, lambda x, site: None)
    y = torch.randn(100)
    these.add(y, 0)
    thread = threading.Thread(target=these.add, args=(y, 1))
    thread.start()
    thread.join()
    assert rows[1, moments.FIRES] == 1 and rows[0, moments.FIRES] == 0
    these.measure()
    assert rows[0].tobytes() == rows[1].tobytes()


def test_threads_that_run_one_model_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one merges what it has, another has its turn: its own must not be lost."""
    rows = np.zeros((1, WIDTH))
    these = Copies(rows, lambda x, site: None)
    others = [threading.Thread(target=these.add, args=(torch.full((1000,), 2.0), 0)) for _ in range(2)]
    merge = moments.merge

    def interrupted(a: Any, b: Any) -> Any:
        if others:
            other = others.pop()
            other.start()
            other.join(0.05)  # it comes to the end now, or waits for this
            started.append(other)
        return merge(a, b)

    started: list[threading.Thread] = []
    monkeypatch.setattr(moments, "merge", interrupted)
    monkeypatch.setattr(output_copies, "LONGEST", 10)
    for _ in range(4):
        these.add(torch.full((1000,), 4.0), 0)
    for other in started:
        other.join()
    assert rows[0, moments.FIRES] == 6
    assert rows[0, moments.N] == 6000 and rows[0, moments.MEAN] == pytest.approx(20 / 6)


def bfloat(y: Tensor) -> Tensor:
    return y.bfloat16()


def turned(y: Tensor) -> Tensor:
    return y.transpose(1, 2)


class Then(nn.Linear):
    """A linear map, and what is made of its output; behind it the output is overwritten."""

    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__(64, 64)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(super().forward(x))


class Spoiled(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.part(x)
        self.seen = y.detach().clone()
        return y.mul_(0.0)


@pytest.mark.parametrize("after", [Tensor.contiguous, turned, bfloat], ids=["plain", "a view", "bfloat16"])
@pytest.mark.parametrize("shape", [(16, 149, 64), (8, 11, 64), (1, 2050, 64)], ids=["some tokens", "all tokens", "one text"])
def test_the_quick_way_finds_the_same_elements(after: Any, shape: tuple[int, ...]) -> None:
    """An output is seen as it was when the module returned it, and with statistics of channels or without in the same bits."""
    found = []
    for channels_every in (0, 1):
        torch.manual_seed(0)
        model = Spoiled(Then(after))
        lab = Lab(model, sgd(model), sites=["part"], channels_every=channels_every)
        model(torch.randn(shape)).sum().backward()
        values = lab.close()
        found.append({name: value for name, value in values.items() if name.startswith("act/") and "channel" not in name})
    assert found[0] and found[0] == found[1]
    y = model.seen.double()
    tokens = y.reshape(-1, y.shape[-1])
    tokens = tokens[::7] if len(tokens) >= 7 * 128 else tokens
    assert found[0]["act/part/mean"] == pytest.approx(tokens.mean().item(), rel=1e-4, abs=1e-6)
    assert found[0]["act/part/std"] == pytest.approx(tokens.std(correction=0).item(), rel=1e-4)


@pytest.mark.parametrize("scale", [1.0, 1e19], ids=["usual", "beyond float32's squares"])
@pytest.mark.parametrize("way", ["slow", "mixed", "crowded", "too long"])
def test_every_way_gives_the_same_bits(way: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments and channels of micro-batches: measured together; each in the hook; in turns; and with room for few or none."""

    def values() -> dict[str, float]:
        torch.manual_seed(0)
        model = nn.Sequential(Then(lambda y: y * scale), nn.Linear(64, 64))
        lab = Lab(model, sgd(model), sites=["0", "1"], channels_every=1)
        for shape in ((16, 149, 64), (8, 11, 64), (5, 64), (16, 149, 64), (16, 149, 64)):
            model(torch.randn(shape)).mean().backward()
        return {name: value for name, value in lab.close().items() if name.startswith("act/")}

    expected = values()
    assert {"act/0/channel_kurtosis", "act/1/channel_kurtosis", "act/0/kurtosis"} <= expected.keys()
    if way == "crowded":
        monkeypatch.setattr(output_copies, "ROOM", 50_000)
    elif way == "too long":
        monkeypatch.setattr(output_copies, "LONGEST", 10)
    else:
        answers = itertools.cycle([False] if way == "slow" else [True, False, False])
        monkeypatch.setattr(site_statistics, "plain", lambda output: next(answers))
        if way == "slow":
            monkeypatch.setattr(output_copies, "LONGEST", 10)
    assert values() == expected


def test_however_far_behind_the_scribe_is_each_step_has_its_own_outputs() -> None:
    """Read at once, or all in the end: then there are not rooms enough for all steps, and some were measured in the loop."""
    steps = 2 * output_copies.ROOMS

    def values(late: bool) -> list[dict[str, float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        lab = Lab(model, sgd(model), sites=["0", "1"], channels_every=0)
        slots, found = [], []
        for step in range(steps):
            for shape in ((16, 149, 64), (5, 64)):
                model(torch.randn(shape)).mean().backward()
            slots.append(lab.instruments.close(step))
            if not late:
                found.append(lab.instruments.finalize(slots.pop()))  # type: ignore[arg-type]
        found += [lab.instruments.finalize(slot) for slot in slots if slot is not None]
        named = [dict(zip(lab.instruments.series, values.tolist(), strict=True)) for values, _ in found]
        return [{name: value for name, value in each.items() if name.startswith("act/")} for each in named]

    at_once = values(late=False)
    assert len(at_once) == steps and at_once[0]["act/0/kurtosis"] != at_once[1]["act/0/kurtosis"]
    assert values(late=True) == at_once


def test_rooms_come_back_and_are_used_again() -> None:
    rows = np.zeros((1, WIDTH))
    these = Copies(rows, lambda x, site: None)
    away = []
    for _ in range(output_copies.ROOMS + 2):
        these.add(torch.randn(100), 0)
        away.append(these.take())
    assert [held is None for held in away] == [False] * (output_copies.ROOMS - 1) + [True] * 3
    assert rows[0, moments.FIRES] == 3  # what found no room to be taken along
    assert these.take() is None
    first = away[0]
    assert first is not None
    first.measure(rows)
    first.give_back()
    these.add(torch.randn(100), 0)
    again = these.take()
    assert again is not None and rows[0, moments.FIRES] == 4
    assert these._held.room is first.room


def watched() -> tuple[nn.Module, Instruments, Session, Copies]:
    """A model with one site that has no statistics of channels, and what looks at it."""
    model = nn.Sequential(nn.Linear(64, 64))
    instruments = Instruments(ParametersConfig(), ActivationsConfig(sites=["0"], channels_every=0))
    instruments.attach({"": model}, {"": sgd(model)})
    session = instruments._session
    assert session is not None
    copies = session.activations._sites.copies
    assert copies is not None
    return model, instruments, session, copies


@pytest.mark.parametrize("what", ["is read", "finds no slot", "is read, but its numbers are not made"])
def test_the_room_of_a_step_comes_back_when_it(what: str) -> None:
    model, instruments, session, copies = watched()
    if what == "finds no slot":
        session._ring.take = lambda step: None  # type: ignore[method-assign]
    if what == "is read, but its numbers are not made":  # its formulas have failed; other ranks still merge what it adds up
        session._readings["the activation probe"].alive = False
    for step in range(3 * output_copies.ROOMS):
        model(torch.randn(4, 64)).sum().backward()
        slot = instruments.close(step)
        assert (slot is None) == (what == "finds no slot")
        if slot is not None:
            stats = session.slab.unpack(instruments.read(slot).numbers)
            assert stats["activations"].reshape(-1, WIDTH)[:, moments.FIRES] == 1
    assert copies._unmade == output_copies.ROOMS - 2  # one in use, and one that goes to and fro


def test_where_measuring_fails_on_the_scribes_thread_hooks_copy_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("a bug of ours")

    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    model, instruments, _, copies = watched()
    model(torch.randn(4, 64)).sum().backward()
    slot = instruments.close(0)
    assert slot is not None
    with monkeypatch.context() as patch:
        patch.setattr(moments, "add_all_on_cpu", broken)
        present = instruments.finalize(slot)[1]
    assert not any(here for name, here in zip(instruments.series, present, strict=True) if name.startswith("act/"))
    model(torch.randn(4, 64)).sum().backward()
    assert not copies._held.copies
