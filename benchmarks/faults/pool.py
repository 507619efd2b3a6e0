"""Many trials at once, where one that fails costs no other."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from benchmarks.faults.judge import WAYS, Outcome, Plan, run

_STARTS = 4  # pools: a process that is killed takes its pool along


def outcomes(todo: Sequence[Plan], jobs: int, keep: Path | None = None, seconds: float | None = None) -> Iterator[Outcome]:
    """The outcomes of `todo` as they come, at most for so many `seconds`. A trial that raises has an `error` in its outcome;
    one whose process is killed is tried again, with the others that were under way."""
    end = None if seconds is None else time.monotonic() + seconds
    if jobs <= 1:
        for plan in todo:
            if end is not None and time.monotonic() > end:
                return
            yield attempt(plan, keep)
        return
    left = list(todo)
    for _ in range(_STARTS):
        for outcome in _pooled(left, jobs, keep, end):
            left.remove(outcome.plan)
            yield outcome
        if not left or (end is not None and time.monotonic() > end):
            return
    for plan in left:
        yield failed(plan, "its process was killed")


def attempt(plan: Plan, keep: Path | None) -> Outcome:
    try:
        return run(plan, keep)
    except Exception as error:  # of the trial, its model or the recorder: the others go on
        return failed(plan, f"{type(error).__name__}: {error}"[:300])


def failed(plan: Plan, why: str) -> Outcome:
    return Outcome(plan, WAYS[plan.way].cause, error=why)


def _pooled(todo: Sequence[Plan], jobs: int, keep: Path | None, end: float | None) -> Iterator[Outcome]:
    """Until all is done, time is up, or the pool breaks."""
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        pending: set[Future[Outcome]] = {pool.submit(attempt, plan, keep) for plan in todo}
        while pending:
            timeout = None if end is None else max(end - time.monotonic(), 0.0)
            done, pending = wait(pending, timeout, FIRST_COMPLETED)
            if not done:
                return
            for future in done:
                yield future.result()
    except BrokenProcessPool:
        return
    finally:
        workers = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()  # what is under way when time is up
