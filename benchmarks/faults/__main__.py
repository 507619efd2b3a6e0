"""Run the zoo and print what was found; see `benchmarks.faults`.

Needs torch on the CPU and trackbridge, no network and no tracker. ``--json FILE --resume`` goes on where a run was ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.faults.judge import Outcome, Plan, plans
from benchmarks.faults.pool import outcomes
from benchmarks.faults.scores import report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one trial of each way on the first task it fits; about a minute")
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--part", choices=("development", "held-out", "both"), default="both")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each part")
    parser.add_argument("--unseen", type=int, default=0, metavar="N", help="add N to every seed: trials nobody has looked at")
    parser.add_argument("--way", action="append", help="only these injections, by class name")
    parser.add_argument("--task", action="append", help="only these tasks")
    parser.add_argument("--keep", type=Path, help="keep the records in this folder; those that are there are judged again")
    parser.add_argument("--json", type=Path, help="write every outcome to this file, a line each, as they come")
    parser.add_argument("--resume", action="store_true", help="what the file of --json holds is not run again")
    parser.add_argument("--minutes", type=float, default=None, help="report what was done after so many minutes")
    options = parser.parse_args(arguments)

    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")  # of the processes of the trials
    parts = ("held-out", "development") if options.part == "both" else (options.part,)
    todo = quick() if options.quick else [plan for part in parts for plan in plans(part, options.seeds)]
    todo = [replace(plan, seed=plan.seed + options.unseen) for plan in todo]
    todo = [p for p in todo if (not options.way or p.way in options.way) and (not options.task or p.task in options.task)]
    known = _known(options.json, todo) if options.resume and options.json is not None else []
    left = [plan for plan in todo if plan not in {outcome.plan for outcome in known}]
    random.Random(options.unseen).shuffle(left)  # what is done when time is up is a random part of everything
    if options.json is not None and not options.resume:
        options.json.write_text("", encoding="utf-8")
    seconds = None if options.minutes is None else 60 * options.minutes
    found = [*known, *_progress(outcomes(left, options.jobs, options.keep, seconds), len(left), options.json)]
    found.sort(key=lambda outcome: todo.index(outcome.plan))
    print(report(found))
    if len(found) < len(todo):
        print(f"\n{len(todo) - len(found)} of {len(todo)} trials were not run.")
    return 0


def quick() -> list[Plan]:
    """One trial of each way of a cause, on the fastest development task it fits."""
    seen: dict[str, Plan] = {}
    order = ("perceptron", "deep", "images", "transformer")
    known = [plan for plan in plans("development", 1) if plan.task in order]
    for plan in sorted(known, key=lambda plan: order.index(plan.task)):
        seen.setdefault(plan.way, plan)
    return list(seen.values())


def _known(file: Path, todo: Sequence[Plan]) -> list[Outcome]:
    if not file.exists():
        return []
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    kept = [Outcome.from_json(json.loads(line)) for line in lines]
    return [outcome for outcome in kept if outcome.plan in todo and not outcome.error]


def _progress(found: Iterable[Outcome], count: int, file: Path | None) -> Iterable[Outcome]:
    start = time.monotonic()
    for number, outcome in enumerate(found, 1):
        told = "false alarms" if outcome.false_alarms else outcome.first if outcome.cause != "healthy" else "quiet"
        took = f"{number}/{count} {time.monotonic() - start:.0f}s"
        line = f"{took} {outcome.plan.way} {outcome.plan.task}: {outcome.error or told}"
        print(
            f"\r{line:<100.100}" if sys.stderr.isatty() else line, end="\n" if not sys.stderr.isatty() else "", file=sys.stderr
        )
        if file is not None:
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(outcome.to_json()) + "\n")
        yield outcome
    print(file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
