"""Group E of the field's own failures: MFU, throughput, memory. Rows E1, E2 and E4 are in tests/flops, E7 in test_merging.py,
the parts of E9 and E10 that need a GPU in tests/probes/test_cuda.py; docs/public_reports.md has the table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import trackbridge
from trackbridge.clock import StepClock
from trackbridge.flops import count
from trackbridge.pace import Pace

N = 6  # tokens
X = torch.randn(N, 8)


class Experts(nn.Module):
    """Eight experts of which each token sees two."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = torch.tensor([t for t in range(len(x)) if number in (t % 8, (t + 1) % 8)], dtype=torch.long)
            y = y.index_add(0, mine, expert(x[mine]))
        return y


class Tied(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids))  # type: ignore[no-any-return]


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def test_e3_flops_are_of_what_runs_not_of_all_parameters() -> None:
    """prime-rl#778, torchtitan#3225, tt-metal#50114, litgpt#420."""
    inputs = X.clone().requires_grad_()
    ids = torch.arange(N)
    assert count(Experts(), inputs).model == 6 * 2 * N * 64  # two of eight experts a token: not 6 * 8 * N * 64
    assert count(Tied(tied=True), ids).model == count(Tied(tied=False), ids).model == 6 * N * 160  # the lookup is free
    assert count(Adapter(), inputs).model == 4 * N * 64 + 6 * N * 2 * 16  # a frozen matrix 4 N, the adapter 6 N
    first = nn.Sequential(nn.Linear(8, 8, bias=False).requires_grad_(False), nn.Linear(8, 8, bias=False))
    assert count(first, X).model == 2 * N * 64 + 4 * N * 64  # frozen, and nothing before it learns: 2 N


class Attention(nn.Module):
    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.qkv, self.causal = nn.Linear(8, 24, bias=False), causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(1, 1, N, 24).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)


class Again(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_e4_the_causal_choice_halves_attention_and_recomputation_is_apart() -> None:
    """torchtitan#280, Megatron-LM#831, ml-engineering#47."""
    inputs = X.clone().requires_grad_()
    causal, full = count(Attention(causal=True), inputs), count(Attention(causal=False), inputs)
    asked = count(Attention(causal=True), inputs, full_attention=True)
    pairs = 2 * 2 * 8  # two products of width 8 for each (query, key) pair
    assert full.attention == asked.attention == pairs * N * N and causal.attention == pairs * N * (N + 1) / 2
    assert full.model - causal.model == 3 * (full.attention - causal.attention)
    again = count(Again(Attention(causal=True)), inputs)
    assert again.model == causal.model and again.recomputed and not causal.recomputed


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("evaluation_s", [0.0, 60.0])
def test_e6_tokens_per_second_of_the_whole_step(micro: int, evaluation_s: float) -> None:
    """composer#271, nanochat#177, axolotl#3688, OpenNMT-tf#731: the same rate whatever the accumulation, no dip at evaluations,
    padding apart, none in the first step."""
    clock = Clock()
    pace = Pace(StepClock(clock))
    for step in range(4):
        for _ in range(micro):
            pace.consumed(120 / micro, 8 / micro, 160 / micro)
        clock.now += 2.0
        if step % 2:
            pace.pause()
            clock.now += evaluation_s
            pace.resume("perf/paused_s/eval")
        found = pace.close(None, None, step)
        rates = {name: found.get(f"perf/{name}_per_s") for name in ("tokens", "padded_tokens", "samples")}
        none = dict.fromkeys(rates)
        assert rates == (none if step == 0 else {"tokens": 60.0, "padded_tokens": 80.0, "samples": 4.0})
        assert found["data/padding_share"] == 0.25 and found["perf/step_s"] == 2.0


def test_e6_padding_in_a_run(tmp_path: Path) -> None:
    run = trackbridge.init(dir=tmp_path, recorder={"enabled": False})
    run.watch(nn.Linear(2, 1))
    run.micro(1.0, tokens=30, padded=64)
    run.micro(1.0, tokens=18, padded=64)
    run.step()
    run.step(loss=1.0, tokens=96, padded=128)
    run.step(loss=1.0, tokens=96)
    run.finish()
    record = trackbridge.load(run.dir)
    assert record.series("data/padding_share")[1].tolist() == [0.625, 0.25]
    assert record.series("train/tokens")[1].tolist() == [48, 144, 240]
    steps, rate = record.series("perf/padded_tokens_per_s")
    assert steps.tolist() == [1] and rate[0] == pytest.approx(record.series("perf/tokens_per_s")[1][0] * 128 / 96)


def test_e9_without_a_gpu_memory_is_absent_not_zero(tmp_path: Path) -> None:
    """pytorch#16266, Torch-FL#364."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: see test_cuda.py")
    run = trackbridge.init(dir=tmp_path)
    run.watch(model := nn.Linear(2, 1))
    run.step(loss=model(torch.ones(1, 2)).sum().detach())
    run.finish()
    names = trackbridge.load(run.dir).names
    assert "host/rss_bytes" in names and not [name for name in names if name.startswith("mem/")]


def test_e9_nothing_of_ours_resets_a_peak_or_empties_a_cache() -> None:
    sources = Path(trackbridge.__file__).parent.rglob("*.py")
    forbidden = ("reset_peak_memory_stats", "reset_max_memory", "reset_accumulated_memory_stats", "empty_cache(")
    assert not [(path.name, word) for path in sources for word in forbidden if word in path.read_text()]


def test_e10_no_other_tool_is_asked_about_the_device(tmp_path: Path) -> None:
    """Megatron-Bridge#3487, pytorch#153571, dask-cuda#671, serve#3090: memory comes from torch and the driver, by this process'
    own device, so neither a broken NVML nor CUDA_VISIBLE_DEVICES matters; snapshots are off unless asked for."""
    code = """
import sys
sys.modules["pynvml"] = sys.modules["nvidia_ml_py"] = None  # an import fails
import torch, trackbridge
run = trackbridge.init(dir=sys.argv[1], memory={"snapshots": 1, "at": [0]})
run.watch(model := torch.nn.Linear(2, 1))
for _ in range(3):
    run.step(loss=model(torch.ones(1, 2)).sum().detach())
sys.stdout.write(f"{len(run.finish().unshipped)} {run.memory_snapshot()}")
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 False"
    if not torch.cuda.is_available():
        assert not done.stderr.strip()
    assert trackbridge.TrackbridgeConfig().memory.snapshots == 0
