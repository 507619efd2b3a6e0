"""Kurtosis over channels, hottest rows, routers and attention logits on a GPU. Skipped where there is none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.probes import test_attention as attention
from tests.probes import test_routers as routers
from tests.probes.kit import Lab, no_sync
from tests.probes.test_activations import Stack, acts, batch, outputs
from tests.probes.test_attention import logits
from tests.probes.test_channels import columns, truth
from tests.probes.test_cuda import GPU, train
from tests.probes.test_embeddings import rows
from tests.probes.test_moments import CASES, randn
from trackbridge.probes import channel_kernels, graph_kernels, observe_kernels, router_kernels
from trackbridge.probes.embeddings import hottest
from trackbridge.probes.moments import finish

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler's


def eager(x: Tensor, cells: Any, slab: Tensor) -> None:
    cells.add(x, slab, 1, 2)


@torch._dynamo.config.patch(recompile_limit=200)
@torch.compile(fullgraph=True, dynamic=False)
def traced(x: Tensor, cells: Any, slab: Tensor) -> None:
    cells.trace(x, slab, 1, 2)


Ways = pytest.mark.parametrize("way", [eager, traced], ids=["eager", "traced"])


def kurtosis(*parts: Tensor, way: Any = eager, gate: float = 1.0) -> float:
    slab = torch.tensor([0.0, 0.0, gate], dtype=torch.float64, device=GPU)
    cells = channel_kernels.Cells(2, GPU)
    for part in parts:
        way(part, cells, slab)
    cells.collect(slab, 0)
    assert slab[0] == 0 and not cells.cells.any() and not cells.widths.any()
    return float(slab[1])


@Ways
@pytest.mark.parametrize("parts", CASES.values(), ids=CASES.keys())
def test_channels(way: Any, parts: list[Tensor]) -> None:
    x = [columns(part) for part in parts]
    assert kurtosis(*(part.to(GPU) for part in x), way=way) == pytest.approx(truth(*x), rel=1e-5)


@Ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 2), (1, 768), (33, 77), (16_384, 768), (300, 5000), (7, 16_384)])
def test_channels_of_many_shapes(way: Any, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = randn(*shape)
    x[:, 1] *= 30
    x = x.to(dtype)
    assert kurtosis(x.to(GPU), x.to(GPU), way=way) == pytest.approx(truth(x), rel=1e-5)


@Ways
def test_channels_of_nothing(way: Any) -> None:
    x = torch.randn(40, 64, device=GPU)
    assert kurtosis(x, way=way, gate=0.0) == 0
    assert kurtosis(x * 0, way=way) == 0
    x[3, 4] = math.inf
    assert kurtosis(x, way=way) == 0


def test_channels_have_the_same_bits_every_time() -> None:
    x = torch.randn(5000, 768, device=GPU)
    for way in (eager, traced):
        assert len({kurtosis(x, x[:77], way=way) for _ in range(20)}) == 1


@torch._dynamo.config.patch(recompile_limit=200)
@torch.compile(fullgraph=True, dynamic=False)
def joined(x: Tensor, cells: Tensor, channels: Any, slab: Tensor) -> None:
    graph_kernels.observe_with_channels_graph(x, cells, channels.cells, channels.widths, slab, 1, 2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 64), (1, 768), (1300, 300), (16_384, 768), (9, 16_384)])
@pytest.mark.parametrize("gates", [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0)])
def test_moments_and_channels_in_one_launch(dtype: torch.dtype, shape: tuple[int, int], gates: tuple[float, float]) -> None:
    x = (randn(*shape) + 0.5).to(dtype).to(GPU)
    found = []
    for way in ("joined", "apart"):
        slab = torch.zeros(4 + 2 * observe_kernels.FIELDS, dtype=torch.float64, device=GPU)
        slab[2], slab[3] = gates
        cells, channels = observe_kernels.cells_for(2, GPU), channel_kernels.Cells(2, GPU)
        for _ in range(2):
            if way == "joined":
                joined(x, cells, channels, slab)
            else:
                observe_kernels.observe(x, cells, slab, 1, 2)
                channels.add(x, slab, 1, 3)
        observe_kernels.collect(cells, slab, 4)
        channels.collect(slab, 0)
        assert not cells.any() and not channels.cells.any() and slab[0] == 0
        numbers = slab.cpu().numpy()
        values, present = finish(numbers[4:].reshape(2, -1))
        assert not present[:, 0].any() and present[:, 1].all() == bool(gates[0]) and bool(numbers[1]) == bool(gates[1])
        found.append([numbers[1], *values[present]])
    assert found[0] == pytest.approx(found[1], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 4), (2, 300), (50_304, 64), (200_003, 32)])
@pytest.mark.parametrize("count", [1, 3, 16])
def test_hottest_rows(dtype: torch.dtype, shape: tuple[int, int], count: int) -> None:
    x = (randn(*shape) * (1 + randn(shape[0], 1, seed=1).abs())).to(dtype)
    out = torch.zeros(2 * count, dtype=torch.float64, device=GPU)
    hottest(x.to(GPU), out, count)
    norms = np.linalg.norm(x.double().numpy(), axis=1)
    found, named = out.cpu().numpy().reshape(2, count)
    most = min(count, shape[0])
    assert found[:most] == pytest.approx(np.sort(norms)[::-1][:most], rel=1e-6) and not found[most:].any()
    assert norms[named[:most].astype(int)] == pytest.approx(found[:most], rel=1e-6)
    assert len(set(named[:most])) == most


def test_hottest_rows_far_from_one_and_not_finite() -> None:
    out = torch.zeros(4, dtype=torch.float64, device=GPU)
    for size in (1e-30, 1e30):
        hottest(torch.arange(1.0, 9.0, device=GPU)[:, None].repeat(1, 8) * size, out, 2)
        assert out.tolist() == pytest.approx([8 * size * math.sqrt(8), 7 * size * math.sqrt(8), 7, 6], rel=1e-6)
    x = torch.ones(900, 8, device=GPU)
    x[40, 3], x[700, 0] = math.nan, -math.inf
    hottest(x, out, 2)
    assert not torch.isfinite(out[:2]).any() and out[2:].tolist() == [40, 700]


@pytest.mark.parametrize("experts, tokens", [(2, 1), (8, 16_384), (60, 5000), (256, 30_000)])
def test_counts_of_experts(experts: int, tokens: int) -> None:
    numbers = torch.randint(-1, experts + 1, (tokens, 4), generator=torch.Generator().manual_seed(0))
    slab = torch.zeros(experts + 2, dtype=torch.float64, device=GPU)
    slab[-1] = 1
    for _ in range(2):
        router_kernels.count(numbers.to(GPU), slab, 1, experts, experts + 1)
    flat = numbers.numpy().ravel()
    true = np.bincount(flat[(flat >= 0) & (flat < experts)], minlength=experts)
    assert slab.tolist() == [0, *(2 * true).tolist(), 1]


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_routers(linear: bool, way: str) -> None:
    torch._dynamo.reset()
    model = routers.Model(linear).to(GPU)
    run: Any = torch.compile(model, fullgraph=True) if way == "compiled" else model
    lab = Lab(run, torch.optim.SGD(model.parameters(), lr=0.0))
    for step in range(3):
        x = routers.data(step).detach().to(GPU)
        counts = routers.plain_counts(model, x)
        run(x).square().mean().backward()
        found = lab.close()
    for router, each in counts.items():
        for expert, share in enumerate(each / each.sum()):
            assert found[f"expert/{router}.{expert}/load_share"] == pytest.approx(share, abs=0.06)  # a tie may go either way


@pytest.mark.parametrize("kind", attention.KINDS)
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_attention_logits(kind: str, way: str) -> None:
    torch._dynamo.reset()
    model = attention.Model(kind)
    true = attention.true(model, attention.data(), queries=4)
    model.to(GPU)
    run: Any = torch.compile(model) if way == "compiled" else model
    lab = Lab(run, torch.optim.SGD(model.parameters(), lr=0.0), attention_every=2, attention_queries=4)
    for step in range(4):
        run(attention.data().detach().to(GPU)).square().mean().backward()
        assert logits(lab.close()) == pytest.approx({} if step % 2 else true, rel=2e-3)


@pytest.mark.parametrize("tokens, stride", [(None, 7), (1, 1), (4, 5)])
def test_a_graph_looks_at_some_of_many_tokens(tokens: int | None, stride: int) -> None:
    torch._dynamo.reset()
    model = Stack().to(GPU)
    run: Any = torch.compile(model, fullgraph=True)
    lab = Lab(run, torch.optim.SGD(model.parameters(), lr=0.0), tokens=tokens)
    for step in range(2):
        words = torch.randint(0, 16, (16, 1024), generator=torch.Generator().manual_seed(step)).to(GPU)
        true = {name: y.reshape(-1, 8)[::stride] for name, y in outputs(model, words).items()}
        run(words).sum().backward()
        found = lab.close()
        for name, y in true.items():
            assert found[f"act/{name}/mean"] == pytest.approx(y.double().mean().item(), abs=1e-4)
            assert found[f"act/{name}/max"] == pytest.approx(y.abs().max().item(), rel=1e-3)
            assert found[f"act/{name}/channel_kurtosis"] == pytest.approx(truth(y.cpu()), rel=1e-3)


@pytest.mark.parametrize("tokens", [1, 3])
def test_the_gpu_agrees_with_the_cpu(tokens: int) -> None:
    for ours, theirs in zip(train(GPU, tokens=tokens), train(torch.device("cpu"), tokens=tokens), strict=True):
        wanted = {k: v for k, v in theirs.items() if k.startswith(("act/", "embedding/hottest_norm"))}
        assert {k: v for k, v in ours.items() if k in wanted} == pytest.approx(wanted, rel=2e-3, abs=2e-5)
        assert acts(ours, "channel_kurtosis") and rows(ours)[0] == pytest.approx(rows(theirs)[0], rel=1e-3)


@pytest.mark.parametrize("which", ["stack", "routers", "attention"])
def test_nothing_waits(which: str) -> None:
    model: Any = {
        "stack": Stack, "routers": routers.Model, "attention": attention.Model,
    }[which]().to(GPU)  # fmt: skip
    data = {"stack": batch, "routers": routers.data, "attention": attention.data}[which]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    lab = Lab(model, optimizer, channels_every=2, attention_every=1, tokens=3)
    given = [data(step).detach().to(GPU) for step in range(8)]
    slots = []

    def step(number: int) -> None:
        for micro in range(2):
            model(given[(number + micro) % 8]).square().mean().backward()
        lab.instruments.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        slots.append(lab.instruments.close(number))

    for number in range(4):
        step(number)
    with no_sync():
        for number in range(4, 12):
            step(number)
    for slot in slots:
        lab.instruments.finalize(slot)


@pytest.mark.parametrize("attention_every", [0, 1])
def test_cuda_graphs_are_kept(attention_every: int) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = attention.Model().to(GPU)
    run = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    lab = Lab(run, torch.optim.SGD(model.parameters(), lr=0.1), attention_every=attention_every)
    for step in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        run(attention.data(step).detach().to(GPU)).square().mean().backward()
        model.zero_grad()
        found = lab.close()
    assert acts(found, "channel_kurtosis") and bool(logits(found)) == bool(attention_every)
    assert not counters["inductor"]["cudagraph_skips"] and not counters["graph_break"]
