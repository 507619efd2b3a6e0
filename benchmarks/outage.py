"""What a tracker costs training when it is well, dead, stalled or refusing: the whole step against ``backend=None``.

    python benchmarks/outage.py                       # every tracker in every state, a table
    python benchmarks/outage.py --trackers mlflow --states dead stalled --json
    python benchmarks/outage.py --memory 100000       # resident memory over an outage of so many steps

Short blocks alternate in one process: without a tracker, without one again (what the machine's own noise does to the same
figures), with one. The process is pinned to one core; the shipper, the servers and the network that breaks are other
processes, on another core (where there is one). Of each ratio the 95% interval is told, by resampling blocks. A dead server
refuses connections, a stalled one takes them and says nothing, a refusing one answers 503. Also measured: that no random
generator moved, and what ``finish(timeout=10)`` takes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import trackbridge
from benchmarks.training_thread import Bench
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


def serve(pipe: Connection, folder: Path, wanted: list[str], core: int | None) -> None:
    """The trackers, in a process of their own: (tracker, state) -> the backend's config, until None."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    trackers = Trackers(folder, wanted)
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        pipe.send(trackers.backend(*asked))
    trackers.close()


def generators() -> list[bytes]:
    return [repr(random.getstate()).encode(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()]


def compared(blocks: list[list[float]], base: list[list[float]], *, draws: int = 2000) -> dict[str, Any]:
    """Median and 99th percentile of whole steps against those of `base`: ratios of all steps together, with 95% intervals."""
    generator = np.random.default_rng(0)
    every, none = np.array(blocks), np.array(base)  # (blocks, steps) milliseconds

    def ratio(share: float) -> tuple[float, float, float]:
        found = np.empty(draws)
        for draw in range(draws):
            picked = generator.integers(len(every), size=len(every))
            found[draw] = np.quantile(every[picked], share) / np.quantile(none[picked], share)
        low, high = np.quantile(found, [0.025, 0.975])
        return float(np.quantile(every, share) / np.quantile(none, share)), float(low), float(high)

    return {"median": ratio(0.5), "p99": ratio(0.99)}


def measure(folder: Path, backend: dict[str, Any], *, blocks: int, steps: int) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    other = cores[1] if len(cores) > 1 else None
    os.sched_setaffinity(0, {cores[0]})
    benches = {
        "none": Bench(folder / "none", None, None),
        "again": Bench(folder / "again", None, None),
        "with": Bench(folder / "with", backend, other),
    }
    for bench in benches.values():
        bench.block(2 * steps)
    before = generators()
    times: dict[str, list[list[float]]] = {name: [] for name in benches}
    order = list(benches)
    for index in range(blocks):
        for name in order[index % 3 :] + order[: index % 3]:
            times[name].append(benches[name].block(steps))
    moved = before != generators()
    begun = time.perf_counter()
    report = benches["with"].run.finish(timeout=10)
    finish = time.perf_counter() - begun
    for name in ("none", "again"):
        benches[name].run.finish()
    os.sched_setaffinity(0, set(cores))
    return {
        "own_core": other is not None,
        "steps": blocks * steps,
        "none_median_ms": float(np.median(times["none"])),
        "none_p99_ms": float(np.quantile(times["none"], 0.99)),
        "again": compared(times["again"], times["none"]),
        "with": compared(times["with"], times["none"]),
        "rng_moved": moved,
        "finish_s": finish,
        "delivered": bool(report),
    }


def told(ratio: tuple[float, float, float]) -> str:
    middle, low, high = ((share - 1) * 100 for share in ratio)
    return f"{middle:+.1f}% [{low:+.1f}, {high:+.1f}]"


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
    parser.add_argument("--blocks", type=int, default=100)
    parser.add_argument("--steps", type=int, default=16, help="per block")
    parser.add_argument("--memory", type=int, metavar="STEPS", help="measure memory over an outage instead")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        pipe, theirs = multiprocessing.Pipe()
        core = sorted(os.sched_getaffinity(0))[1] if len(os.sched_getaffinity(0)) > 1 else None
        context = multiprocessing.get_context("spawn")
        servers = context.Process(target=serve, args=(theirs, Path(place), options.trackers, core))
        servers.start()
        pipe.recv()
        os.environ["WANDB_API_KEY"] = KEY
        for name in options.trackers:
            for state in options.states if name != "tensorboard" else ["healthy"]:
                folder = Path(place) / f"{name}-{state}"
                pipe.send((name, state))
                backend = pipe.recv()
                if options.memory:
                    found = memory(folder, backend, options.memory)
                    results.append({"tracker": name, "state": state, "memory_mb": found})
                    line = ", ".join(f"{step}: {own:.0f}+{children:.0f}" for step, own, children in found)
                else:
                    one = measure(folder, backend, blocks=options.blocks, steps=options.steps)
                    results.append({"tracker": name, "state": state, **one})
                    ours, again = one["with"], one["again"]
                    line = (
                        f"median {one['none_median_ms']:.2f} ms {told(ours['median'])} (again {told(again['median'])}), "
                        f"p99 {one['none_p99_ms']:.2f} ms {told(ours['p99'])} (again {told(again['p99'])}), "
                        f"generators {'MOVED' if one['rng_moved'] else 'equal'}, finish(10) {one['finish_s']:.1f} s"
                    )
                if not options.json:
                    print(f"{name}, {state}: {line}", flush=True)
        pipe.send(None)
        servers.join(30)
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
