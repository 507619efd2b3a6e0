"""What trackbridge costs the training thread.

    python benchmarks/training_thread.py            # both measurements below, printed
    python benchmarks/training_thread.py --json

1. `run.step` alone, with 500 series in the row: microseconds, median and 99th percentile.
2. A whole step of a small CPU model with MLflow, TensorBoard and W&B (offline) shipping, against ``backend=None``: blocks of
   both in one process, in alternating order, this process pinned to one core and the shipper to another. The shipper is
   drained before each block of the other kind, so that its work is charged to the blocks that caused it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import trackbridge
from trackbridge import shipper

LONG_STEPS = {"checksums_every": 40, "histograms_every": 40}


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def step_cost(directory: Path, *, steps: int = 2000, layers: int = 31) -> dict[str, float]:
    """Time inside `run.step` only. Each of `layers` Linear layers has two parameters; 31 give about 950 series."""
    run = trackbridge.init(dir=directory, recorder={"snapshot_every": 0}, parameters={"weights_every": 1, "moments_every": 0})
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.watch(model, optimizer)
    x = torch.randn(4, 8)
    costs = []
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        begin = time.perf_counter()
        run.step(loss=loss, tokens=4)
        costs.append((time.perf_counter() - begin) * 1e6)
    run.finish()
    series = len(trackbridge.load(run.dir).names)
    costs = costs[steps // 10 :]
    return {"series": series, "median_us": statistics.median(costs), "p99_us": percentile(costs, 0.99), "steps": steps}


class Net(nn.Module):
    """About 20 ms a step on one core: four blocks of width 256."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Bench:
    """One model under one run; `block` times some whole steps. It learns noise, slowly: its loss stays what it is, so that no
    anomaly is found, whose capsule would be sealed on the core that is measured. What comes with every 100th step comes with
    every 40th: of a hundred steps the longest alone would be the edge that a 99th percentile falls on, this side or that."""

    def __init__(self, directory: Path, backend: Any, core: int | None, *, width: int = 256) -> None:
        self.run = trackbridge.init(dir=directory, backend=backend, recorder={"snapshot_every": 0}, parameters=LONG_STEPS)
        for child in psutil.Process().children(recursive=True) if core is not None else ():
            child.cpu_affinity([core])
        torch.manual_seed(0)
        self.model = Net(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.run.watch(self.model, self.optimizer)
        self.batches = [(torch.randn(96, width), torch.randn(96, width)) for _ in range(64)]
        self.steps = 0

    def block(self, steps: int) -> list[float]:
        times = []
        for _ in range(steps):
            x, y = self.batches[self.steps % len(self.batches)]
            self.steps += 1
            begin = time.perf_counter()
            loss = (self.model(x) - y).square().mean()
            loss.backward()
            self.run.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.run.step(loss=loss, tokens=96)
            times.append((time.perf_counter() - begin) * 1e3)
        return times

    def drain(self) -> None:
        while any(status.lag > 0 for status in shipper.status(self.run.dir)):
            time.sleep(0.05)


def shipping_cost(directory: Path, *, blocks: int = 12, steps: int = 40) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    own = len(cores) > 1
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {cores[0]})
    quiet = Bench(directory / "none", None, None)
    trackers = [
        {"kind": "mlflow", "tracking_uri": f"sqlite:///{directory}/mlflow.db"},
        "tensorboard",
        {"kind": "wandb", "mode": "offline", "rows_per_minute": None, "values_per_minute": None},
    ]  # no budget: with one the newest rows wait for later ones, and `drain` would too
    busy = Bench(directory / "all", trackers, cores[1] if own else None)
    for bench in (quiet, busy):
        bench.block(steps)
    busy.drain()
    none: list[float] = []
    every: list[float] = []
    ratios = []
    for index in range(blocks):
        pair = {}
        for bench in (quiet, busy) if index % 2 == 0 else (busy, quiet):
            pair[bench] = bench.block(steps)
            busy.drain()
        none += pair[quiet]
        every += pair[busy]
        ratios.append(statistics.median(pair[busy]) / statistics.median(pair[quiet]))
    report = busy.run.finish(60)
    quiet.run.finish()
    return {
        "shipper_has_own_core": own,
        "none_median_ms": statistics.median(none),
        "none_p99_ms": percentile(none, 0.99),
        "all_median_ms": statistics.median(every),
        "all_p99_ms": percentile(every, 0.99),
        "median_of_block_ratios": statistics.median(ratios),
        "block_ratios": sorted(round(ratio, 4) for ratio in ratios),
        "delivered": bool(report),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = {"step": step_cost(Path(folder) / "step"), "shipping": shipping_cost(Path(folder))}
    if options.json:
        print(json.dumps(results))
        return
    step, shipping = results["step"], results["shipping"]
    print(f"run.step with {step['series']} series: median {step['median_us']:.0f} us, p99 {step['p99_us']:.0f} us")
    print(
        f"whole step, backend=None: {shipping['none_median_ms']:.2f} ms (p99 {shipping['none_p99_ms']:.2f}); "
        f"three trackers: {shipping['all_median_ms']:.2f} ms (p99 {shipping['all_p99_ms']:.2f})"
    )
    print(
        f"median of block ratios {shipping['median_of_block_ratios']:.4f}, "
        f"blocks {shipping['block_ratios'][0]} to {shipping['block_ratios'][-1]}, "
        f"shipper on its own core: {shipping['shipper_has_own_core']}, everything delivered: {shipping['delivered']}"
    )


if __name__ == "__main__":
    main()
