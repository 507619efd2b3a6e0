"""Methods of one object replaced for a while, and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Method = Callable[..., Any]


class Wires:
    """What was replaced, and how it was. `cut` puts everything back; safe to call twice."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Method], Method]) -> None:
        """Let `owner.name` be ``make(what it was)``, on this object only. What it was keeps name and signature to the eye."""
        original = getattr(owner, name)
        mine = functools.wraps(original)(make(original))
        own = vars(owner).get(name)  # somebody else's wire, to be put back as it was
        setattr(owner, name, mine)

        def undo() -> None:
            if vars(owner).get(name) is not mine:  # somebody put another one around ours: leave it
                return
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        self._undo.append(undo)

    def cut(self) -> None:
        while self._undo:
            self._undo.pop()()
