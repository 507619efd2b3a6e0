"""Which process this is, without asking the kernel at every hook: under some sandboxes a system call takes microseconds."""

from __future__ import annotations

import os

_pid = os.getpid()


def pid() -> int:
    """`os.getpid()`, also in a forked child."""
    return _pid


def _forked() -> None:
    global _pid
    _pid = os.getpid()


if hasattr(os, "register_at_fork"):  # where processes fork
    os.register_at_fork(after_in_child=_forked)
