"""Calls that cannot be right: an error at the first call of a method, afterwards one warning and training goes on."""

from __future__ import annotations

import logging
from types import TracebackType

from trackbridge.errors import UsageError

logger = logging.getLogger("trackbridge")


class Misuse:
    """What the methods of one run have in common: that something was left out is said once."""

    def __init__(self) -> None:
        self.told = False

    def of(self) -> Use:
        """The guard of one more method."""
        return Use(self)


class Use:
    """``with use: ...`` raises a `UsageError` on until `accepted` is set; later it is said once, what was in the block is left
    out and training goes on."""

    __slots__ = ("_misuse", "accepted")

    def __init__(self, misuse: Misuse) -> None:
        self.accepted = False
        self._misuse = misuse

    def __enter__(self) -> Use:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, UsageError) or not self.accepted:
            return False
        if not self._misuse.told:
            self._misuse.told = True
            logger.warning("trackbridge: %s; such values are left out from now on", error)
        return True
