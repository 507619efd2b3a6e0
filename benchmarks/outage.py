"""What a tracker costs training when it is well, dead, stalled or refusing: the whole step against ``backend=None``.

    python benchmarks/outage.py                       # every tracker in every state, a table
    python benchmarks/outage.py --trackers mlflow --states dead stalled --json
    python benchmarks/outage.py --memory 100000       # resident memory over an outage of so many steps

Blocks of both kinds alternate in one process, which is pinned to one core while the shipper gets another (where there is one).
A dead server refuses connections, a stalled one takes them and says nothing, a refusing one answers 503. Also measured: that
no random generator moved, and what ``finish(timeout=10)`` takes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import trackbridge
from benchmarks.training_thread import Bench, percentile
from tests.faults.proxy import Mode, Proxy
from tests.faults.trackers import Mlflow
from tests.wandb_server import KEY, WandbServer

STATES: dict[str, Mode] = {"healthy": "pass", "dead": "refuse", "stalled": "stall", "refusing": "503"}


class Trackers:
    """Servers on loopback, each behind a network that can break."""

    def __init__(self, folder: Path, wanted: list[str]) -> None:
        self._folder = folder
        self._mlflow = Mlflow(folder) if "mlflow" in wanted else None
        self._wandb = WandbServer() if "wandb" in wanted else None
        self._proxies: dict[str, Proxy] = {}
        if self._mlflow is not None:
            self._proxies["mlflow"] = self._mlflow.proxy
        if self._wandb is not None:
            self._proxies["wandb"] = Proxy(self._wandb.port)
            os.environ["WANDB_API_KEY"] = KEY

    def backend(self, name: str, state: str) -> dict[str, Any]:
        if name == "tensorboard":
            return {"kind": "tensorboard", "logdir": str(self._folder / "tb")}
        proxy = self._proxies[name]
        proxy.set(STATES[state])
        if name == "mlflow":
            return {"kind": "mlflow", "tracking_uri": proxy.url}
        return {"kind": "wandb", "base_url": proxy.url, "entity": "team", "mode": "online"}

    def close(self) -> None:
        for proxy in self._proxies.values():
            proxy.set("pass")
        if self._mlflow is not None:
            self._mlflow.close()
        if self._wandb is not None:
            self._wandb.stop()


def generators() -> list[bytes]:
    return [repr(random.getstate()).encode(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()]


def measure(folder: Path, backend: dict[str, Any], *, blocks: int, steps: int) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    other = cores[1] if len(cores) > 1 else None
    os.sched_setaffinity(0, {cores[0]})
    quiet, busy = Bench(folder / "none", None, None), Bench(folder / "with", backend, other)
    for bench in (quiet, busy):
        bench.block(steps)
    before = generators()
    none: list[float] = []
    every: list[float] = []
    ratios = []
    for index in range(blocks):
        pair: dict[Bench, list[float]] = {}
        for bench in (quiet, busy) if index % 2 == 0 else (busy, quiet):
            pair[bench] = bench.block(steps)
        none += pair[quiet]
        every += pair[busy]
        ratios.append(statistics.median(pair[busy]) / statistics.median(pair[quiet]))
    moved = before != generators()
    begun = time.perf_counter()
    report = busy.run.finish(timeout=10)
    finish = time.perf_counter() - begun
    quiet.run.finish()
    os.sched_setaffinity(0, set(cores))
    return {
        "own_core": other is not None,
        "none_median_ms": statistics.median(none),
        "with_median_ms": statistics.median(every),
        "median": statistics.median(ratios),
        "none_p99_ms": percentile(none, 0.99),
        "with_p99_ms": percentile(every, 0.99),
        "p99": percentile(every, 0.99) / percentile(none, 0.99),
        "rng_moved": moved,
        "finish_s": finish,
        "delivered": bool(report),
    }


def memory(folder: Path, backend: dict[str, Any], steps: int) -> list[tuple[int, float, float]]:
    """(step, MB of this process, MB of its children) over an outage."""
    run = trackbridge.init(dir=folder, backend=backend, recorder={"enabled": False})
    names = [f"own/{index}" for index in range(50)]
    found = []
    for step in range(steps):
        run.step(loss={"loss": 1.0, **{name: float(step) for name in names}})
        if step % (steps // 10) == steps // 10 - 1:
            children = psutil.Process().children(recursive=True)
            own = psutil.Process().memory_info().rss / 1e6
            found.append((step + 1, own, sum(child.memory_info().rss for child in children) / 1e6))
    run.finish(timeout=10)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trackers", nargs="+", default=["tensorboard", "mlflow", "wandb"])
    parser.add_argument("--states", nargs="+", default=list(STATES), choices=list(STATES))
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--steps", type=int, default=40, help="per block")
    parser.add_argument("--memory", type=int, metavar="STEPS", help="measure memory over an outage instead")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        trackers = Trackers(Path(place), options.trackers)
        for name in options.trackers:
            for state in options.states if name != "tensorboard" else ["healthy"]:
                folder = Path(place) / f"{name}-{state}"
                if options.memory:
                    found = memory(folder, trackers.backend(name, state), options.memory)
                    results.append({"tracker": name, "state": state, "memory_mb": found})
                    line = ", ".join(f"{step}: {own:.0f}+{children:.0f}" for step, own, children in found)
                else:
                    one = measure(folder, trackers.backend(name, state), blocks=options.blocks, steps=options.steps)
                    results.append({"tracker": name, "state": state, **one})
                    line = (
                        f"median {one['none_median_ms']:.2f} -> {one['with_median_ms']:.2f} ms ({one['median'] - 1:+.1%}), "
                        f"p99 {one['none_p99_ms']:.2f} -> {one['with_p99_ms']:.2f} ms ({one['p99'] - 1:+.1%}), "
                        f"generators {'MOVED' if one['rng_moved'] else 'equal'}, finish(10) {one['finish_s']:.1f} s"
                    )
                if not options.json:
                    print(f"{name}, {state}: {line}", flush=True)
        trackers.close()
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
