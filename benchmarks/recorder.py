"""What the flight recorder costs the training thread per step: ``python benchmarks/recorder.py [--device cuda]``.

Prints microseconds of this thread (fastest of many rounds; the device runs behind) for the recorder's calls alone, and what
a snapshot adds to the time of real steps. The target is 150 microseconds a step without batches and snapshots.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from trackbridge.batches import Feed
from trackbridge.config import RecorderConfig
from trackbridge.recorder import Recorder
from trackbridge.rundir import RunDirectory


def recorder(**config: Any) -> Recorder:
    return Recorder(RecorderConfig(**config), RunDirectory(tempfile.mkdtemp()), 0, attempt=0)


def microseconds(step: Callable[[], object], rounds: int = 30, calls: int = 100) -> float:
    """The fastest of `rounds` means of `calls` calls: what else runs on the machine only adds."""
    step()
    return min(timeit.repeat(step, number=calls, repeat=rounds)) / calls * 1e6


def endless(batch: Any) -> Any:
    while True:
        yield batch


def calls(device: torch.device) -> None:
    tokens = torch.randint(0, 50_000, (16, 1024), device=device)
    model = nn.Linear(1, 1).to(device)
    one = torch.ones(1, 1, device=device)
    generators = {"a": np.random.default_rng(1), "b": torch.Generator()}
    cases: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
        ("forward hook and close", None, {}, {}),
        ("run.batches, no batch to keep", 0, {}, {}),
        ("run.batches, 16x1024 tokens sampled", tokens, {"batch_bytes": 0}, {}),
        ("run.batches, 16x1024 tokens kept", tokens, {}, {}),
        ("  and a numpy and a torch generator", tokens, {}, generators),
    ]
    plain = microseconds(lambda: model(one))
    bare = iter(endless(tokens))
    fetch = microseconds(lambda: next(bare))
    for name, batch, config, registered in cases:
        fed = batch is not None
        record = recorder(snapshot_every=0, **config)
        record.attach({"": model}, {}, generators=registered)
        batches = iter(Feed(endless(batch), record)) if fed else None

        def step(record: Recorder = record, batches: Any = batches) -> Any:
            if batches is not None:
                next(batches)
            model(one)
            return record.close_step(0)

        took = microseconds(step) - plain - fed * fetch
        packing = microseconds(functools.partial(record.pack, step()), 5, 10)
        print(f"{name:40s} {took:8.1f} us a step, {packing:8.1f} us to pack on the scribe")
        record.detach()
    for name, batch in (("8 micro-batches, none to keep", 0), ("8 micro-batches kept", tokens)):
        record = recorder(snapshot_every=0)
        record.attach({"": model}, {})
        batches = iter(Feed(endless(batch), record))

        def micro(record: Recorder = record, batches: Any = batches) -> None:
            for _ in range(8):
                next(batches)
                model(one)
            record.close_step(0)

        print(f"{name:40s} {microseconds(micro, 10, 20) - 8 * (plain + fetch):8.1f} us a step")


def snapshots(device: torch.device, width: int, depth: int, rows: int) -> None:
    """Times of real steps, every 20th with a snapshot, against the steps without."""
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)]
    )
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")
    x = torch.randn(rows, width, device=device)
    record = recorder(snapshot_every=20, snapshot_bytes=16 << 30)
    record.attach({"": model}, {"": optimizer})
    marks = []
    for step in range(121):
        if device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        marks.append((time.perf_counter(), event if device.type == "cuda" else None))
        with torch.autocast(device.type, torch.bfloat16):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        record.pack(record.close_step(step))
        if step in (0, 60, 120):
            cost = record.snapshot_cost
            print(f"  snapshot {step}: {cost.bytes / 2**20:.0f} MiB, {cost.seconds * 1e3:.1f} ms of the training thread")
    if device.type == "cuda":
        torch.cuda.synchronize()
        spans = [a[1].elapsed_time(b[1]) for a, b in itertools.pairwise(marks)]
    else:
        spans = [(b[0] - a[0]) * 1e3 for a, b in itertools.pairwise(marks)]
    taken = [span for step, span in enumerate(spans) if step % 20 == 0 and step >= 60]
    plain = [span for step, span in enumerate(spans) if step % 20 > 2 and step >= 60]
    base = statistics.median(plain)
    extra = statistics.median(taken) - base
    print(
        f"  step {base:.2f} ms, one with a snapshot {extra:+.2f} ms: {extra / base / 100:.3%} of a step at snapshot_every=100"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64)
    arguments = parser.parse_args()
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device(arguments.device)
    calls(device)
    snapshots(device, arguments.width, arguments.depth, arguments.rows)


if __name__ == "__main__":
    main()
