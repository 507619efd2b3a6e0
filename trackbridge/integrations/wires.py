"""Methods of one object replaced for a while, and put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

Method = Callable[..., Any]


class Wires:
    """What was replaced, and how it was. `cut` puts everything back; safe to call twice."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Method], Method]) -> bool:
        """Let `owner.name` be ``make(what it was)``, on this object only; False if it has no such method.

        What it was keeps its name and signature to the eye, and is bound: torch's schedulers look for
        ``optimizer.step.__func__``.
        """
        original = getattr(owner, name, None)
        if original is None:
            return False
        now = [make(original)]

        @functools.wraps(original)
        def method(_: Any, *args: Any, **kwargs: Any) -> Any:
            return now[0](*args, **kwargs)

        mine = MethodType(method, owner)
        own = vars(owner).get(name)  # somebody else's wire, to be put back as it was
        setattr(owner, name, mine)

        def undo() -> None:
            now[0] = original  # should somebody have put another one around ours, as a schedule does, it leads there
            if vars(owner).get(name) is not mine:
                return
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        self._undo.append(undo)
        return True

    def cut(self) -> None:
        while self._undo:
            self._undo.pop()()
