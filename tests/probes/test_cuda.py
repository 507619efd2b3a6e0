"""The kernels and the whole path on a GPU: right numbers, no synchronisation, one graph. Skipped where there is none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.probes.kit import Lab
from tests.probes.test_activations import Stack, acts, batch, fires
from tests.probes.test_gradients import layer
from tests.probes.test_moments import CASES, truth
from trackbridge.probes.moments import STATISTICS, WIDTH, finish

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from trackbridge.probes import kernels, reduce

GPU = torch.device("cuda")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler's


@contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def observed(*parts: Tensor) -> dict[str, float]:
    slab = torch.zeros(WIDTH + 3, dtype=torch.float64, device=GPU)
    slab[-1] = 1.0
    for part in parts:
        kernels.observe(part, slab, 2, WIDTH + 2)
    assert slab[:2].tolist() == [0, 0] and slab[-1] == 1
    values, present = finish(slab[2 : 2 + WIDTH].cpu().numpy().reshape(1, WIDTH))
    return {name: v for name, v, here in zip(STATISTICS, values[:, 0].tolist(), present[:, 0], strict=True) if here}


@pytest.mark.parametrize("parts", CASES.values(), ids=CASES.keys())
def test_moments(parts: list[Tensor]) -> None:
    parts = [part.float() if part.dtype == torch.float64 else part for part in parts]
    found, true = observed(*(part.to(GPU) for part in parts)), truth(*parts)
    assert found["mean"] == pytest.approx(true["mean"], abs=2e-6 * true["rms"])
    assert found["std"] == pytest.approx(true["std"], rel=1e-4)
    assert found["rms"] == pytest.approx(true["rms"], rel=1e-5)
    assert found["max"] == true["max"]
    assert found["kurtosis"] == pytest.approx(true["kurtosis"], rel=1e-4, abs=2e-3)
    assert found["nonfinite"] == 0


@pytest.mark.parametrize("seed", range(12))
def test_moments_of_random_shapes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(10 ** rng.uniform(0, 7.3))
    x = torch.randn(n, device=GPU) * 10 ** rng.uniform(-6, 6) + rng.choice([0.0, 1e3, -1e5])
    x = x.to([torch.float32, torch.bfloat16, torch.float16][seed % 3]).clamp(-6e4, 6e4)
    found, true = observed(x), truth(x.cpu())
    assert found["mean"] == pytest.approx(true["mean"], abs=1e-5 * true["rms"])
    assert found["std"] == pytest.approx(true["std"], rel=1e-3, abs=1e-6 * abs(true["mean"]))
    assert found["max"] == true["max"]
    if "kurtosis" in found:
        assert found["kurtosis"] == pytest.approx(true["kurtosis"], rel=1e-3, abs=1e-2)


@pytest.mark.parametrize("x", [torch.ones(8), torch.full((300_000,), 0.1), torch.zeros(5)])
def test_constant(x: Tensor) -> None:
    assert "kurtosis" not in observed(x.to(GPU))


def test_nonfinite_elements() -> None:
    x = torch.randn(100_000, device=GPU)
    x[5], x[77_777], x[99_999] = float("nan"), float("inf"), -float("inf")
    assert observed(torch.randn(10, device=GPU), x) == {"nonfinite": 3.0}


def test_the_gate_is_on_the_device() -> None:
    slab = torch.zeros(WIDTH + 1, dtype=torch.float64, device=GPU)
    kernels.observe(torch.randn(10, device=GPU), slab, 0, WIDTH)
    assert not slab.any()


def test_the_same_bits_every_time() -> None:
    x = torch.randn(3_000_001, device=GPU)
    slabs = []
    for _ in range(20):
        slab = torch.zeros(WIDTH + 1, dtype=torch.float64, device=GPU)
        slab[-1] = 1
        kernels.observe(x, slab, 0, WIDTH)
        slabs.append(slab)
    assert all(torch.equal(slab, slabs[0]) for slab in slabs)
    results = [kernels.summarise([x, x[:1000], x[1:70000]]) for _ in range(20)]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_peaks_and_counts(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    base = torch.randn(40_000_003, device=GPU).to(dtype)
    tensors = [base[:1], base[1:3000], base[3000:70_000].view(67, 1000).t(), base, base[:0x10000], base[5:0x20005] * 100]
    found = kernels.summarise(tensors)
    exact = [float(np.linalg.norm(t.double().cpu().numpy().ravel())) for t in tensors]
    assert found[0].tolist() == pytest.approx(exact, rel=2e-6)
    assert found[1].tolist() == [t.abs().max().item() for t in tensors]
    assert found[2].tolist() == [0] * len(tensors)
    base[2_000_000], base[30_000_000] = float("nan"), float("inf")
    norm, peak, bad = reduce.summary(tensors)
    assert bad is not None and bad.tolist() == [0, 0, 0, 2, 0, 0]
    assert math.isnan(norm[3]) and math.isnan(peak[3]) and torch.isfinite(norm[[0, 1, 2, 4, 5]]).all()


def test_ranges_outside_float32_squares() -> None:
    tensors = [torch.randn(5000, device=GPU) * scale for scale in (1e25, 1e-25, 0.0)]
    exact = [float(np.linalg.norm(t.double().cpu().numpy())) for t in tensors]
    assert kernels.summarise(tensors)[0].tolist() == pytest.approx(exact, rel=1e-5)


def test_differences() -> None:
    old = [torch.randn(n, device=GPU) for n in (3, 70_000, 200_001)]
    new = [t + 1e-3 * torch.randn_like(t) for t in old]
    norm, moved = reduce.norms_and_differences(new, old)
    assert norm.tolist() == pytest.approx([t.double().norm().item() for t in new], rel=1e-6)
    exact = [(a.double() - b.double()).norm().item() for a, b in zip(new, old, strict=True)]
    assert moved.tolist() == pytest.approx(exact, rel=1e-5)


def train(device: torch.device, *, clip: bool = True, steps: int = 4, **config: Any) -> list[dict[str, float]]:
    model = Stack().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    lab = Lab(model, optimizer, **config)
    rows = []
    for step in range(steps):
        model(batch(step).to(device)).square().mean().backward()
        if clip:
            lab.instruments.clip_grad_norm_(0.01)
        optimizer.step()
        optimizer.zero_grad()
        rows.append(lab.close())
    return rows


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("sites", ["blocks", "leaf"])
def test_the_gpu_agrees_with_the_cpu(clip: bool, sites: str) -> None:
    for ours, theirs in zip(
        train(GPU, clip=clip, sites=sites), train(torch.device("cpu"), clip=clip, sites=sites), strict=True
    ):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if not name.startswith("perf/"):
                assert ours[name] == pytest.approx(value, rel=2e-3, abs=2e-5), name


def test_one_nan_is_counted_before_clipping_spreads_it() -> None:
    model = Stack().to(GPU)
    lab = Lab(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    model(batch().to(GPU)).sum().backward()
    model.head.weight.grad[0, 3] = float("nan")
    lab.instruments.clip_grad_norm_(1.0)
    optimizer.step()
    found = lab.close()
    assert {name: v for name, v in layer(found, "grad_nonfinite").items() if v} == {"head.weight": 1}
    assert math.isnan(found["grad/norm"]) and math.isnan(found["grad/norm_clipped"])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_nothing_waits(fused: bool, clip: bool) -> None:
    torch.manual_seed(0)
    model = Stack("non-reentrant").to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused, capturable=not fused)
    lab = Lab(model, optimizer, sites="leaf", weights_every=2, moments_every=3)
    slots = []
    tokens = [batch(step).to(GPU) for step in range(8)]

    def step(number: int) -> None:
        for micro in range(2):
            loss = model(tokens[(number + micro) % 8]).square().mean()
            loss.backward()
            lab.instruments.micro(loss.detach(), 20, loss.detach().reshape(1))
        if clip:
            lab.instruments.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        lab.instruments.set("train/loss/x", loss.detach())
        if number % 3 == 1:
            lab.instruments.pause()
            lab.instruments.resume()
        slots.append(lab.instruments.close(number))

    for number in range(4):
        step(number)
    with no_sync():
        for number in range(4, 16):
            step(number)
    for slot in slots:
        values, present = lab.instruments.finalize(slot)
        found = dict(zip(np.array(lab.instruments.series)[present], values[present], strict=True))
        assert found["grad/norm"] > 0 and found["act/head/rms"] > 0 and found["perf/backward_s"] > 0


def test_fused_optimizer_under_gradscaler() -> None:
    model = nn.Linear(4, 1, bias=False).to(GPU)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    lab = Lab(model, optimizer, scaler)
    rows = []
    for step in range(5):
        loss = model(torch.ones(8, 4, device=GPU)).mean() * (float("inf") if step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        rows.append(lab.close())
    assert [row["optim/applied"] for row in rows] == [1, 2, 2, 3, 4]
    assert [row["optim/skipped"] for row in rows] == [0, 0, 1, 1, 1]
    assert rows[0]["grad/norm"] == pytest.approx(2.0) and "grad/norm" not in rows[2]


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("way", ["whole", "blocks before", "blocks after"])
def test_compiled_with_inductor(mode: str | None, way: str) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = Stack().to(GPU)
    run: Any = model
    if way == "whole":
        run = torch.compile(model, mode=mode, fullgraph=True)
    if way == "blocks before":
        for block in model.blocks:
            block.compile(mode=mode, fullgraph=True)
    lab = Lab(run, optimizer := torch.optim.AdamW(model.parameters(), fused=True))
    if way == "blocks after":
        for block in model.blocks:
            block.compile(mode=mode, fullgraph=True)
    for step in range(6):
        tokens = batch(step).to(GPU)
        with torch.no_grad():
            x = truth_x = model.embed(tokens)
            true = {"embed": truth_x.double().mean().item()}
            for number, block in enumerate(model.blocks):
                x = torch.tanh(block.linear(x)) + x
                true[f"blocks.{number}"] = x.double().mean().item()
        if mode:
            torch.compiler.cudagraph_mark_step_begin()
        run(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found = lab.close()
        assert acts(found, "mean") == pytest.approx(true, abs=1e-5), step
        assert fires(lab, "blocks.1") == 1
        if step == 1:
            graphs = counters["stats"]["unique_graphs"]
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == graphs


def test_cuda_graphs_are_kept() -> None:
    """The compiler gives up on CUDA graphs when a graph writes to its inputs, unless their address is known to stay."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = Stack().to(GPU)
    run = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    Lab(run, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        run(batch(step).to(GPU)).square().mean().backward()
    assert not counters["inductor"]["cudagraph_skips"]


@pytest.mark.parametrize("way", ["eager", "compiled after watch"])
def test_a_checkpoint_is_counted_once(way: str) -> None:
    torch._dynamo.reset()
    model = Stack("non-reentrant").to(GPU)
    lab = Lab(model, torch.optim.SGD(model.parameters(), lr=0.1), sites=["embed", "blocks.?", "blocks.?.linear"])
    if way != "eager":
        for block in model.blocks:
            block.compile()
    for step in range(4):
        model(batch(step).to(GPU)).sum().backward()
        lab.close()
        assert set(lab.last.values()) == {1}


def test_memory_is_sampled_without_touching_the_peak() -> None:
    from trackbridge.probes.host import HostSampler

    kept, gone = torch.empty(1 << 20, device=GPU), torch.empty(1 << 20, device=GPU)
    del gone
    peak = torch.cuda.max_memory_allocated()
    sampler = HostSampler()
    sampler.devices = {kept.device}
    found = sampler.sample(0)
    assert found["mem/reserved_bytes"] >= found["mem/allocated_bytes"] > 0 and 0 <= found["mem/fragmentation"] <= 1
    assert torch.cuda.max_memory_allocated() == peak
