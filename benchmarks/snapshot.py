"""What a snapshot adds to the step it is taken in, copied in order and beside training: ``python benchmarks/snapshot.py``.

Weights and moments of GPT-2 124M with AdamW, bf16 autocast, batch 16 x 1024, on a GPU; with `--device cpu` a small one, for
which both ways are the same. Every fourth step has a snapshot, copied in the two ways in turn. Times are of the device, from
the start of a step to its update and from there to the next step, over the same without a snapshot: a delay of the first part
says that what the step itself copies (the batch, for the recorder; a loss that the loop reads) does not get past the large
copy, one of the second that the update waits for what is left of it. "after" is the whole next step. Under 60 seconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.overhead import GPT2
from trackbridge.batches import Feed
from trackbridge.config import RecorderConfig
from trackbridge.recorder import Recorder
from trackbridge.rundir import RunDirectory

EVERY = 4
WAYS = ("in order", "beside")


class Clock:
    """Marks on the device's stream, or the host's time where there is no device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def spans(self) -> list[float]:
        """Milliseconds from each mark to the next."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if not self._cuda:
            return [(b - a) * 1e3 for a, b in pairs]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairs]


def endless(batch: Tensor) -> Iterator[Tensor]:
    while True:
        yield batch


def measure(device: torch.device, rounds: int, *, reads: bool) -> None:
    cuda = device.type == "cuda"
    torch.manual_seed(0)
    model = (GPT2() if cuda else GPT2(512, 64, 64, 2, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
    tokens = torch.randint(0, 512, (16, 1025) if cuda else (4, 65), device=device)
    config = RecorderConfig(snapshot_every=EVERY, snapshot_bytes=8 << 30)
    record = Recorder(config, RunDirectory(Path(tempfile.mkdtemp())), 0, attempt=0, strict=True)
    record.attach({"": model}, {"": optimizer})
    batches = iter(Feed(endless(tokens), record))
    clock, host = Clock(device), dict[str, list[float]]({way: [] for way in WAYS})
    warm = 4 * EVERY
    for step in range(warm + 2 * EVERY * rounds + 1):
        way = WAYS[step // EVERY % 2]
        record._fence._in_order = way == "in order"
        if step >= warm:
            clock.mark()
        batch = next(batches)
        if step >= warm and step % EVERY == 0:
            host[way].append(record.snapshot_cost.seconds * 1e3)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        if step >= warm:
            clock.mark()
        optimizer.step()
        optimizer.zero_grad()
        record.close_step(step)
        if reads:
            loss.item()
        if record._snapshots._making is not None:
            record._snapshots._making.join()
    spans = clock.spans()
    parts = spans[::2], spans[1::2]  # up to the update, from the update on
    parts = parts[0][: len(parts[1])], parts[1]
    plain = [statistics.median(span for place, span in enumerate(part) if place % EVERY >= 2) for part in parts]
    loop, gigabytes = "reads its loss" if reads else "runs ahead", record.snapshot_cost.bytes / 1e9
    print(f"\n{loop}: {gigabytes:.2f} GB, a step without: {sum(plain):.2f} ms")
    print(
        f"  {'':10s}{'to the update':>16s}{'from it on':>16s}{'together':>32s}{'after':>14s}{'at one in 100':>16s}{'host':>12s}"
    )
    for number, way in enumerate(WAYS):
        first = ((warm // EVERY + number) % 2) * EVERY
        early, late = ([span - usual for span in part[first :: 2 * EVERY]] for part, usual in zip(parts, plain, strict=True))
        added = [a + b for a, b in zip(early, late, strict=True)]
        after = statistics.median(a + b - sum(plain) for a, b in list(zip(*parts, strict=True))[first + 1 :: 2 * EVERY])
        low, middle, high = statistics.quantiles(added, n=4)
        print(
            f"  {way:10s}{statistics.median(early):+13.2f} ms{statistics.median(late):+13.2f} ms{middle:+10.2f} ms "
            f"[{low:+7.2f}, {high:+7.2f}]{after:+11.2f} ms{(middle + after) / sum(plain) / 100:16.3%}"
            f"{statistics.median(host[way]):9.2f} ms"
        )
    record.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=24, help="snapshots of each way")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device(arguments.device)
    for reads in (False, True):
        measure(device, arguments.rounds, reads=reads)


if __name__ == "__main__":
    main()
