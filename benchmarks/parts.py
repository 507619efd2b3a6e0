"""Where the time that watching adds to a step goes: forward, backward, clipping, update, `run.step`, bare and watched in turn.

    python benchmarks/parts.py                                  # the demo's model on this machine's CPU
    python benchmarks/parts.py --device cuda --mode compiled    # GPT-2 124M, bf16 autocast, batch 16 x 1024

On a GPU each step is waited for before the next, so that a part is what the training thread needs to launch it. Medians in
milliseconds of the wall clock, in brackets those of the thread's own clock where it is another: the difference is waiting, for
the device or for the interpreter. Steps with weights and moments ("10th") are told apart from the others; those with snapshots,
checksums and histograms are left out.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.overhead import QUIET, Case, make, wait

PARTS = ("forward", "backward", "clip", "update", "zero", "device", "run.step")
CASES: dict[str, dict[str, Any] | None] = {"bare": None, "bare again": None, "probes": dict(QUIET), "trackbridge": {}}
Spent = tuple[tuple[float, float], ...]
"""Seconds of each part: of the wall clock, and of the thread's."""


def step(case: Case) -> Spent:
    marks = [(time.perf_counter(), time.thread_time())]

    def mark() -> None:
        marks.append((time.perf_counter(), time.thread_time()))

    tokens = case.batch()
    case.steps += 1
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=case.autocast):
        loss = case.forward(tokens[:, :-1], tokens[:, 1:])
    mark()
    loss.backward()
    mark()
    if case.run is not None:
        case.run.clip_grad_norm_(1.0)
    else:
        torch.nn.utils.clip_grad_norm_(case.model.parameters(), 1.0)
    mark()
    case.optimizer.step()
    mark()
    case.optimizer.zero_grad()
    mark()
    wait(tokens)
    mark()
    if case.run is not None:
        case.run.step(loss=loss.detach(), tokens=tokens.numel())
    mark()
    return tuple((b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(marks))


def show(name: str, kind: str, steps: list[Spent]) -> None:
    wall = [1e3 * sum(part for part, _ in spent) for spent in steps]
    told = []
    for place, part in enumerate(PARTS):
        both = [1e3 * statistics.median(spent[place][clock] for spent in steps) for clock in (0, 1)]
        own = f" ({both[1]:.2f})" if abs(both[0] - both[1]) > 0.1 * both[0] else ""
        told.append(f"{part} {both[0]:.2f}{own}")
    whole = f"{statistics.median(wall):7.2f} mean {statistics.mean(wall):7.2f}"
    print(f"{name:12s} {kind:5s} {whole}  {'  '.join(told)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--mode", choices=["eager", "compiled"], default="eager")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=11, help="per round and case; the first is not counted")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    shape, vocabulary = ((16, 1025), 50257) if options.device == "cuda" else ((8, 129), 256)
    data = [torch.randint(0, vocabulary, shape, device=options.device) for _ in range(8)]
    folder = Path(tempfile.mkdtemp(prefix="parts-"))
    cases = {
        name: make(name, options.device, options.mode, data, settings, folder / name.replace(" ", "-"))
        for name, settings in CASES.items()
    }
    found: dict[tuple[str, str], list[Spent]] = {}
    for number in range(options.rounds):
        names = list(cases)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            for place in range(options.steps):
                at = cases[name].steps
                spent = step(cases[name])
                if number and place and at % 100:  # the first round compiles and warms up
                    found.setdefault((name, "" if at % 10 else "10th"), []).append(spent)
    print(f"{options.device} {options.mode}, torch {torch.__version__}, milliseconds")
    for kind in ("", "10th"):
        for name in cases:
            if (name, kind) in found:
                show(name, kind, found[name, kind])
    for case in cases.values():
        if case.run is not None:
            case.run.finish()


if __name__ == "__main__":
    main()
