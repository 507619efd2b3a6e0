"""How a row gets into the SDK's queue: by `Run.log`, or by the request that `Run.log` makes.

`Run.log` takes several microseconds a value before it hands a message to W&B's service. The message is simple, so we make it
ourselves, in a third of the time: a private way, so the first row of a run always goes by `Run.log`, watched, and only if
what that hands over is what we would have handed over do the next rows go directly.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

_TIME = "_timestamp"  # the SDK's own key: when the row was logged


class Log:
    """`run`: the SDK's. `direct`: allow the direct way; only for a run that nobody else logs to."""

    def __init__(self, run: Any, *, direct: bool) -> None:
        self._run = run
        self._untried = direct
        self._publish: Callable[[Any], None] | None = None

    @property
    def direct(self) -> bool:
        """Rows go directly."""
        return self._publish is not None

    def row(self, keys: Sequence[str], values: Sequence[float]) -> None:
        if self._publish is not None:
            self._publish(_request(keys, values))
            self._run._local_step += 1
        elif self._untried:
            self._untried = False
            self._try(keys, values)
        else:
            self._run.log(dict(zip(keys, values, strict=True)))

    def _try(self, keys: Sequence[str], values: Sequence[float]) -> None:
        """Log a row by `Run.log` and see whether the direct way would have been the same."""
        interface, seen = getattr(self._run, "_interface", None), []
        publish = getattr(interface, "_publish_partial_history", None)
        before = getattr(self._run, "_local_step", None)

        def watch(request: Any) -> None:
            seen.append(request)
            publish(request)  # type: ignore[misc]

        if publish is not None:
            interface._publish_partial_history = watch  # type: ignore[union-attr]
        try:
            self._run.log(dict(zip(keys, values, strict=True)))
        finally:
            if publish is not None:
                del interface._publish_partial_history  # type: ignore[union-attr]
        stepped = isinstance(before, int) and self._run._local_step == before + 1
        if stepped and len(seen) == 1 and _shape(seen[0]) == _shape(_request(keys, values)):
            self._publish = publish


def _request(keys: Sequence[str], values: Sequence[float]) -> Any:
    from wandb.proto.wandb_internal_pb2 import PartialHistoryRequest

    request = PartialHistoryRequest()
    add = request.item.add
    for key, value in zip(keys, values, strict=True):
        add(key=key, value_json=repr(value) if math.isfinite(value) else _word(value))
    add(key=_TIME, value_json=repr(time.time()))
    return request


def _word(value: float) -> str:
    """A number that JSON has no literal for, as the SDK writes it."""
    return json.dumps(value)


def _shape(request: Any) -> Any:
    """What a request says, without when."""
    items = [
        (
            [(field.name, value) for field, value in item.ListFields() if field.name != "value_json"],
            repr(json.loads(item.value_json)),
        )
        for item in request.item
        if item.key != _TIME
    ]
    rest = [(field.name, str(value)) for field, value in request.ListFields() if field.name != "item"]
    return items, len(request.item), rest
