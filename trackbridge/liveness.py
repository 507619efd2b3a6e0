"""Is the process that records a run still alive?"""

from __future__ import annotations

import socket

from trackbridge.rundir import Attempt

STALE_SECONDS = 6 * 3600.0
"""A run on another host counts as dead when its newest record is older than this: no process there can be asked, and an
evaluation or a debugger may hold training up for hours."""

_SLACK = 600.0
"""Seconds by which the clock may have been set since. Wrong one way, a dead run looks alive for a while; the other way, we
would write into a live one's journal."""


def alive(pid: int, since: float) -> bool:
    """True if process `pid` of this host runs and was started before `since` (epoch seconds): no later owner of its number."""
    import psutil

    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= since + _SLACK
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def trainer_alive(attempt: Attempt) -> bool | None:
    """Whether the trainer of `attempt` runs; None when it ran on another host, which cannot be asked."""
    if attempt.host != socket.gethostname():
        return None
    return alive(attempt.pid, attempt.time)


def presumed_dead(attempt: Attempt, newest_record: float, now: float) -> bool:
    """True when nobody will go on writing: the trainer is gone, or it was elsewhere and silent for `STALE_SECONDS`.

    `newest_record` and `now` are epoch seconds.
    """
    known = trainer_alive(attempt)
    return now - max(newest_record, attempt.time) > STALE_SECONDS if known is None else not known
