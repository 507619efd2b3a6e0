"""A disk that is full, as far as this process is concerned."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(room: int = 10) -> Iterator[None]:
    """The kernel refuses every byte of a file of this process beyond the first `room` (EFBIG), as a full disk would. (Python
    ignores the signal.)"""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
