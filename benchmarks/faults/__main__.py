"""Run the zoo and print what was found; see `benchmarks.faults`."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.faults.judge import Outcome, Plan, plans, run
from benchmarks.faults.scores import report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one trial of each way on the first task it fits; under a minute")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--part", choices=("development", "held-out", "both"), default="both")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each part")
    parser.add_argument("--way", action="append", help="only these injections, by class name")
    parser.add_argument("--task", action="append", help="only these tasks")
    parser.add_argument("--keep", type=Path, help="keep the records in this folder; those that are there are judged again")
    parser.add_argument("--json", type=Path, help="write every outcome to this file, a line each")
    options = parser.parse_args(arguments)

    parts = ("development", "held-out") if options.part == "both" else (options.part,)
    todo = quick() if options.quick else [plan for part in parts for plan in plans(part, options.seeds)]
    todo = [p for p in todo if (not options.way or p.way in options.way) and (not options.task or p.task in options.task)]
    outcomes = list(_progress(_outcomes(todo, options.jobs, options.keep), len(todo), options.json))
    outcomes.sort(key=lambda outcome: todo.index(outcome.plan))
    print(report(outcomes))
    return 0


def quick() -> list[Plan]:
    """One trial of each way of a cause, on the fastest development task it fits."""
    seen: dict[str, Plan] = {}
    order = ("perceptron", "deep", "images", "transformer")
    for plan in sorted(plans("development", 1), key=lambda plan: order.index(plan.task) if plan.task in order else len(order)):
        seen.setdefault(plan.way, plan)
    return list(seen.values())


def _outcomes(todo: Sequence[Plan], jobs: int, keep: Path | None) -> Iterable[Outcome]:
    if jobs <= 1:
        yield from map(partial(run, keep=keep), todo)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(partial(run, keep=keep), todo)


def _progress(outcomes: Iterable[Outcome], count: int, file: Path | None) -> Iterable[Outcome]:
    start = time.monotonic()
    if file is not None:
        file.write_text("", encoding="utf-8")
    for number, outcome in enumerate(outcomes, 1):
        found = "false alarms" if outcome.false_alarms else outcome.first if outcome.cause != "healthy" else "quiet"
        line = f"{number}/{count} {time.monotonic() - start:.0f}s {outcome.plan.way} {outcome.plan.task}: {found}"
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
