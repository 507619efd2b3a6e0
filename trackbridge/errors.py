"""Exceptions, and the one guard between a bug of ours and somebody's training.

Errors that a user can cause are raised on the user's thread, in one line, with the fix in the message. A bug of ours
inside a hook, a step or a background thread must not stop training: the code runs inside a `Part`, which logs one
traceback, says that the part is not alive and counts; its owner then leaves it alone. Under pytest and with
``strict=True`` the exception is raised instead.
"""

from __future__ import annotations

import difflib
import errno
import logging
import os
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Protocol

logger = logging.getLogger("trackbridge")

NO_PLACE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
"""Of an `OSError`: nothing can be written there until a person has done something. A full disk may have space in a minute."""


class TrackbridgeError(Exception):
    """Base of every error trackbridge raises on purpose; its text is one line that names the fix."""


class ConfigError(TrackbridgeError):
    """A setting is unknown, has the wrong type or contradicts another."""


class MissingExtraError(TrackbridgeError, ImportError):
    """A package that an optional feature needs is not installed; the text is the pip command."""


class UsageError(TrackbridgeError, ValueError):
    """The public interface was called in a way that cannot be right."""


class ReferenceNotFoundError(TrackbridgeError, LookupError):
    """A run or capsule reference names nothing that exists."""


class GuardError(TrackbridgeError):
    """`run.guard` stops the training, as its settings ask."""


class CapsuleError(TrackbridgeError):
    """A capsule is damaged, hostile, or of a format this version does not read."""


class RetryLater(Exception):  # noqa: N818 - a signal from a backend, not an error
    """A backend cannot take records now. `after` is the least number of seconds to wait."""

    def __init__(self, after: float, why: str = "") -> None:
        super().__init__(why or f"retry after {after:g} s")
        self.after = after


class Rejected(Exception):  # noqa: N818 - a signal from a backend, not an error
    """A backend refuses some records for good. `reasons` maps their `seq` to the tracker's words."""

    def __init__(self, reasons: dict[int, str]) -> None:
        super().__init__(f"{len(reasons)} records refused: {next(iter(reasons.values()), '')}")
        self.reasons = reasons


def nearest(word: str, known: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"`, or the empty string when nothing is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


class Timer(Protocol):
    """Told when our own code begins and ends on the training thread."""

    def enter(self) -> None: ...

    def leave(self) -> None: ...


class Part:
    """A part of trackbridge that may break without hurting training.

    ``with part: ...`` swallows exceptions: the first is logged with its traceback, and the part is disabled
    (`alive` turns False) and counted in `failures`. `strict` re-raises; so does running under pytest. What a part does on
    the training thread is charged to its `timer`.
    """

    __slots__ = ("alive", "failures", "name", "strict", "timer")

    def __init__(self, name: str, *, strict: bool = False, timer: Timer | None = None) -> None:
        self.name = name
        self.timer = timer
        self.strict = strict
        self.alive = True
        self.failures = 0

    def __enter__(self) -> Part:
        if self.timer is not None:
            self.timer.enter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if self.timer is not None:
            self.timer.leave()
        return isinstance(error, Exception) and self.caught(error)

    def run(self, what: Callable[..., object], *args: object, **kwargs: object) -> None:
        """``with self: what(...)`` while it is alive, inside of another part that is charged for the time."""
        if self.alive:
            try:
                what(*args, **kwargs)
            except Exception as error:
                if not self.caught(error):
                    raise

    def caught(self, error: Exception) -> bool:
        """The part has failed. False where that is to be raised."""
        self.failures += 1
        if self.strict or "PYTEST_CURRENT_TEST" in os.environ:
            return False
        if self.alive:
            self.alive = False
            logger.error(
                "trackbridge: %s failed and is switched off; training goes on. Please report this.",
                self.name,
                exc_info=(type(error), error, error.__traceback__),
            )
        return True
