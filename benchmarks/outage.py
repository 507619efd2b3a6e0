"""What a tracker costs training when it is well, dead, stalled or refusing: the whole step against ``backend=None``.

    python benchmarks/outage.py                       # every tracker in every state, a line each
    python benchmarks/outage.py --trackers mlflow --states dead stalled --seconds 300 --json
    python benchmarks/outage.py --width 128           # a step of a quarter of the length: more of them, a harder comparison
    python benchmarks/outage.py --memory 100000       # resident memory over an outage of so many steps

Each case (a tracker in a state) is a process on cores of its own, and as many run side by side as there are cores for. In it
short blocks alternate: without a tracker, without one again (what the machine's own noise does to the same figures), with
one. The trainer is pinned to a core, the shipper to a second, the servers and the network that breaks to a third (to the
second where there are two). The first steps of a block find the caches full of another model, and are not counted. Of each
ratio the 95% interval is told, by resampling blocks, the same ones on both sides. A dead server refuses connections, a stalled
one takes them and says nothing, a refusing one answers 503. Also measured: that no random generator moved, and what
``finish(timeout=10)`` takes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
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
WARM = 2
"""Steps at the beginning of a block that are not counted."""


def teams(cores: list[int]) -> list[list[int]]:
    """Cores for each case that can run at a time: the trainer's, the shipper's, the servers'. A trainer shares its
    physical core with nobody, as far as the system tells which are two threads of one."""
    physical: dict[str, list[int]] = {}
    for core in cores:
        told = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        physical.setdefault(told.read_text() if told.exists() else str(core), []).append(core)
    found: list[list[int]] = []
    free = list(physical.values())
    while len(free) > 1:
        own, *free = free
        others: list[int] = []
        while free and len(others) < 2:
            others += free.pop(0)
        if len(others) >= 2 or not found:
            found.append([own[0], *others[:2]])
    return found or [cores]


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


def measure(folder: Path, backend: dict[str, Any], cores: list[int], seconds: float, steps: int, width: int) -> dict[str, Any]:
    """Blocks of `steps` for `seconds`, on the first of `cores`, the shipper on the second."""
    other = cores[1] if len(cores) > 1 else None
    os.sched_setaffinity(0, {cores[0]})
    benches = {
        "none": Bench(folder / "none", None, None, width=width),
        "again": Bench(folder / "again", None, None, width=width),
        "with": Bench(folder / "with", backend, other, width=width),
    }
    for bench in benches.values():
        bench.block(2 * steps)
    before = generators()
    times: dict[str, list[list[float]]] = {name: [] for name in benches}
    order = list(benches)
    over = time.perf_counter() + seconds
    while time.perf_counter() < over:
        first = len(times["none"]) % 3
        for name in order[first:] + order[:first]:
            times[name].append(benches[name].block(WARM + steps)[WARM:])
    moved = before != generators()
    begun = time.perf_counter()
    report = benches["with"].run.finish(timeout=10)
    finish = time.perf_counter() - begun
    for name in ("none", "again"):
        benches[name].run.finish()
    return {
        "own_core": other is not None,
        "steps": steps * len(times["none"]),
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
    """(step, MB of this process, MB of its children) over an outage, at a thousand steps a second: a loop that does nothing
    else would leave the scribe behind, and what finds no slot of the ring is lost."""
    run = trackbridge.init(dir=folder, backend=backend, recorder={"enabled": False})
    names = [f"own/{index}" for index in range(50)]
    found = []
    begun = time.monotonic()
    for step in range(steps):
        time.sleep(max(0.0, begun + step / 1000 - time.monotonic()))
        run.step(loss={"loss": 1.0, **{name: float(step) for name in names}})
        if step % (steps // 10) == steps // 10 - 1:
            children = psutil.Process().children(recursive=True)
            own = psutil.Process().memory_info().rss / 1e6
            found.append((step + 1, own, sum(child.memory_info().rss for child in children) / 1e6))
    run.finish(timeout=10)
    rows = sum(1 for row in trackbridge.load(run.dir).rows() if row.kind == "step")
    print(f"{rows} of {steps} rows in the journal", file=sys.stderr)
    return found


def case(name: str, state: str, cores: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """One tracker in one state, in this process and on `cores`."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        pipe, theirs = multiprocessing.Pipe()
        core = cores[-1] if len(cores) > 1 else None
        servers = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, Path(place), [name], core))
        servers.start()
        pipe.recv()
        os.environ["WANDB_API_KEY"] = KEY
        pipe.send((name, state))
        backend = pipe.recv()
        if options.memory:
            found: dict[str, Any] = {"memory_mb": memory(Path(place) / "run", backend, options.memory)}
        else:
            found = measure(Path(place) / "run", backend, cores, options.seconds, options.steps, options.width)
        pipe.send(None)
        servers.join(30)
    return {"tracker": name, "state": state, **found}


def line(one: dict[str, Any]) -> str:
    if "memory_mb" in one:
        return ", ".join(f"{step}: {own:.0f}+{children:.0f}" for step, own, children in one["memory_mb"])
    ours, again = one["with"], one["again"]
    return (
        f"{one['steps']} steps, median {one['none_median_ms']:.2f} ms {told(ours['median'])} (again {told(again['median'])}), "
        f"p99 {one['none_p99_ms']:.2f} ms {told(ours['p99'])} (again {told(again['p99'])}), "
        f"generators {'MOVED' if one['rng_moved'] else 'equal'}, finish(10) {one['finish_s']:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trackers", nargs="+", default=["tensorboard", "mlflow", "wandb"])
    parser.add_argument("--states", nargs="+", default=list(STATES), choices=list(STATES))
    parser.add_argument("--seconds", type=float, default=120.0, help="of each case")
    parser.add_argument("--steps", type=int, default=16, help="per block")
    parser.add_argument("--width", type=int, default=256, help="of the model: 256 is some 20 ms a step")
    parser.add_argument("--jobs", type=int, help="cases at a time, at most")
    parser.add_argument("--memory", type=int, metavar="STEPS", help="measure memory over an outage instead")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs="+", metavar="TRACKER STATE CORE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, state, *cores = options.one
        print(json.dumps(case(name, state, [int(core) for core in cores], options)))
        return
    free: queue.Queue[list[int]] = queue.Queue()
    for team in teams(sorted(os.sched_getaffinity(0)))[: options.jobs]:
        free.put(team)

    def run(asked: tuple[str, str]) -> dict[str, Any]:
        cores = free.get()
        command = [sys.executable, __file__, *sys.argv[1:], "--one", *asked, *map(str, cores)]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        finally:
            free.put(cores)  # else the next case would wait for them for ever
        one: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if not options.json:
            print(f"{one['tracker']}, {one['state']}: {line(one)}", flush=True)
        return one

    asked = [(name, state) for name in options.trackers for state in options.states if name != "tensorboard"]
    asked += [("tensorboard", "healthy")] if "tensorboard" in options.trackers else []
    with ThreadPoolExecutor(free.qsize()) as pool:
        results = list(pool.map(run, asked))
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
