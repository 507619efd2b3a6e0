"""The history of a run on a W&B server, whole: the API's full scan, not the sampled history that its charts use."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trackbridge.backends.wandb_process import ClientError, Process, ours
from trackbridge.errors import TrackbridgeError, UsageError

FORM = "wandb:ENTITY/PROJECT/RUN_ID"
_SECONDS = 900.0


class History:
    """`where` is ENTITY/PROJECT/RUN_ID. Raises `UsageError` for another form, `ReferenceNotFoundError` for a run that is not
    there, `TrackbridgeError` when the server does not answer or does not let us in."""

    def __init__(self, where: str) -> None:
        if len(where.split("/")) != 3 or not all(where.split("/")):
            raise UsageError(f"{where!r} is no W&B run; write {FORM}")
        self._where = where

    def columns(self) -> list[str]:
        """The names of the series, as the run's summary has them."""
        return [str(name) for name in self._asked("history_columns", self._where)]

    def read(self, keys: Sequence[str]) -> list[Mapping[str, Any]]:
        """The rows that have all of `keys`, in order."""
        return list(self._asked("history_rows", self._where, list(keys)))

    def _asked(self, method: str, *arguments: Any) -> Any:
        """In a process of its own: the SDK keeps state, and may not come back."""
        with tempfile.TemporaryDirectory(prefix="trackbridge-wandb-") as scratch:
            process = Process(Path(scratch))
            try:
                return process.call(method, *arguments, timeout=_SECONDS)
            except ClientError as error:
                raise ours(error) from None
            except TimeoutError as error:
                raise TrackbridgeError(str(error)) from None
            finally:
                process.kill()


# in the client's process


def columns(where: str) -> list[str]:
    summary = _run(where).summary
    return [name for name in dict(summary) if _numeric(summary[name])]


def rows(where: str, keys: Sequence[str]) -> list[dict[str, Any]]:
    wanted = list(dict.fromkeys([*keys, "_step"]))
    return [{key: row.get(key) for key in keys} for row in _run(where).scan_history(keys=wanted, page_size=10_000)]


def _run(where: str) -> Any:
    import wandb

    from trackbridge.backends.wandb_fetch import asked

    return asked(lambda: wandb.Api(timeout=30).run(where), f"run {where}")


def _numeric(value: Any) -> bool:
    return isinstance(value, (int, float)) or value in ("NaN", "Infinity", "-Infinity")
