"""A run of a million steps: memory, the journal's size against its budget, and `sync` of the whole to empty trackers.

    python benchmarks/million.py                            # 1,000,000 steps, TensorBoard and MLflow (SQLite)
    python benchmarks/million.py --steps 50000 --trackers tensorboard

No model: `run.step` with a loss and ten numbers, at most `--rate` times a second. The budget is a tenth of what the rows would
take, so most of the run is thinned. Times are stamped a second apart in the copy that is synced, as a run of twelve days would
have them: otherwise MLflow's budget a minute would leave most rows out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

import trackbridge
from trackbridge import shipper
from trackbridge.backends.resolve import resolve
from trackbridge.journal import JournalReader, JournalWriter
from trackbridge.records import Row
from trackbridge.rundir import RunDirectory

OWN = tuple(f"own/{index}" for index in range(10))


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in (directory / "rank-0000" / "rows").glob("*"))


def record(folder: Path, steps: int, budget: int, rate: float) -> dict[str, Any]:
    noise = np.random.default_rng(0).normal(1.0, 0.02, size=(1009, len(OWN) + 1)).tolist()
    run = trackbridge.init(
        dir=folder, id="million", recorder={"enabled": False},
        journal={"budget_bytes": budget, "full_resolution_steps": steps // 50, "segment_bytes": max(budget // 16, 4096)},
    )  # fmt: skip
    process = psutil.Process()
    memory, sizes = [], []
    begun = time.perf_counter()
    for step in range(steps):
        spike = 100.0 if step % (steps // 5) == steps // 10 else 0.0
        loss, *own = noise[step % 1009]
        run.step(loss={"loss": spike + loss, **dict(zip(OWN, own, strict=True))})
        ahead = step / rate - (time.perf_counter() - begun)
        if ahead > 0.01:
            time.sleep(ahead)
        if step % (steps // 10) == steps // 10 - 1:
            run.log({"eval/loss": 1.0})
            memory.append(process.memory_info().rss / 1e6)
            sizes.append(size(run.dir) / 1e6)
    seconds = time.perf_counter() - begun
    report = run.finish(120)
    return {"path": str(run.dir), "seconds": seconds, "memory_mb": memory, "journal_mb": sizes, "lost": report.lost,
            "final_mb": size(run.dir) / 1e6}  # fmt: skip


def spaced(path: Path, target: Path) -> Path:
    """The run again, its rows a second apart."""
    source, copy = RunDirectory(path), RunDirectory(target)
    file = source.read()
    file.attempts[0].time = file.created
    copy.write(file)
    writer = JournalWriter(copy.rows(), segment_bytes=64 << 20, fsync_seconds=60.0)
    reader = JournalReader(source.rows())
    while records := reader.read(limit=4096):
        for one in records:
            writer.append(replace(one, time=file.created + one.step) if isinstance(one, Row) else one)
    writer.close()
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--trackers", nargs="+", default=["tensorboard", "mlflow"])
    parser.add_argument("--rate", type=float, default=2000.0, help="steps a second, at most")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    budget = max(options.steps * (len(OWN) + 8) * 8 // 10, 1 << 18)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        done = record(Path(place), options.steps, budget, options.rate)
        results: dict[str, Any] = {"steps": options.steps, "budget_mb": budget / 1e6, "record": done}
        if not options.json:
            print(
                f"{options.steps} steps in {done['seconds']:.0f} s, lost {done['lost']}; at every tenth: memory "
                f"{[round(mb) for mb in done['memory_mb']]} MB, journal {[round(mb, 1) for mb in done['journal_mb']]} MB; "
                f"journal at the end {done['final_mb']:.1f} of {budget / 1e6:.1f} MB",
                flush=True,
            )
        for tracker in options.trackers:
            path = spaced(Path(done["path"]), Path(place) / f"copy-{tracker}" / "million")
            where = {"tracking_uri": f"sqlite:///{place}/mlflow.db"} if tracker == "mlflow" else {}
            backends = resolve({"kind": tracker, **where})
            begun = time.perf_counter()
            report = shipper.sync(path, backends)
            seconds = time.perf_counter() - begun
            cursor = json.loads((path / "shipper" / f"{tracker}.json").read_text())
            peak = psutil.Process().memory_info().rss / 1e6
            results[tracker] = {"seconds": seconds, "rows": cursor["rows"], "complete": report.complete, "memory_mb": peak}
            if not options.json:
                print(f"sync to {tracker}: {cursor['rows']} rows in {seconds:.0f} s, memory {peak:.0f} MB", flush=True)
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
