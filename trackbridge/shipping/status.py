"""Which trackers a run has, and how far each one is. Contacts nobody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trackbridge.backends.base import BackendConfig
from trackbridge.backends.resolve import resolve
from trackbridge.errors import ConfigError, TrackbridgeError
from trackbridge.history import find
from trackbridge.journal import last_seq
from trackbridge.rundir import RunDirectory
from trackbridge.shipping.cursor import Cursor, cursors


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """How far one tracker is. `lag` counts records of the journal that it does not have; `where` is how to look at it."""

    kind: str
    shipped_seq: int
    last_seq: int
    lag: int
    last_error: str | None
    dead_letters: int
    where: str | None


def status(run_dir: str | Path) -> list[BackendStatus]:
    """How far each tracker is: those of ``run.json``, and any other that was ever synced to."""
    directory = find(run_dir)
    configs: dict[str, BackendConfig | None] = {str(given["kind"]): _resolved(given) for given in directory.read().backends}
    for kind in cursors(directory):
        configs.setdefault(kind, _resolved(kind))
    return statuses(directory, configs)


def statuses(directory: RunDirectory, configs: Mapping[str, BackendConfig | None]) -> list[BackendStatus]:
    """How far the trackers `configs` are, by kind (None: one that this machine cannot say more about)."""
    last = last_seq(directory.rows())
    saved = cursors(directory)
    found = []
    for kind, config in configs.items():
        cursor = saved.get(kind) or Cursor(kind)
        where = config.where(directory.info()) if config is not None else None
        lag = max(last - cursor.seq, 0)
        found.append(BackendStatus(kind, cursor.seq, last, lag, cursor.error, cursor.dead_letters, where))
    return found


def configured(directory: RunDirectory, kinds: Sequence[str] | None = None) -> list[BackendConfig]:
    """The backends of ``run.json`` that a process of ours serves; or those of `kinds`, configured as there if they are there.

    Raises `ConfigError` for an unknown kind, or one of `kinds` that lacks something here, and `MissingExtraError` for a missing
    package.
    """
    given = {str(config["kind"]): config for config in directory.read().backends}
    if kinds is not None:
        named = resolve([given.get(kind, kind) for kind in kinds])
        for config in named:
            if (lack := config.lacking()) is not None:
                raise ConfigError(lack)
        return named
    return [config for config in resolve(list(given.values())) if not config.in_process and config.lacking() is None]


def _resolved(given: Any) -> BackendConfig | None:
    """The config, or None when its package is not installed here or it does not validate."""
    try:
        return resolve(given)[0]
    except TrackbridgeError:
        return None
