"""What an integration is given: a run of the user's, or the settings of runs to be made."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from trackbridge.config import TrackbridgeConfig
from trackbridge.errors import Part, UsageError
from trackbridge.records import Anomaly
from trackbridge.run import Run, init

logger = logging.getLogger("trackbridge")


class Given:
    """`run`, which the user ends, or None and `settings` as `trackbridge.init` takes them, for runs that we begin and end.

    Raises `ConfigError` or `UsageError` for wrong ones, here and not when a training begins.
    """

    def __init__(self, run: Any, settings: Mapping[str, Any]) -> None:
        if run is not None and not isinstance(run, Run):
            raise UsageError(f"run must be a run of trackbridge.init, not a {type(run).__name__}; settings go by name")
        if run is not None and settings:
            raise UsageError(f"{', '.join(settings)} cannot be set for a run that is there: give them to trackbridge.init")
        known = {name: value for name, value in settings.items() if name not in ("settings", "config")}
        TrackbridgeConfig.load(settings.get("settings"), **known)
        self.run: Run | None = run
        self._settings = dict(settings)

    def begin(self, config: Mapping[str, Any], *, trial: bool = False, **asked: Any) -> Run:
        """The user's run, or a new one with `config` and what else the training asks `init` for; the user's word goes first.
        In a `trial` of the script no tracker hears of it."""
        if self.run is not None:
            return self.run
        given = {**asked, **self._settings, "config": {**config, **(self._settings.get("config") or {})}}
        if trial:
            given["backend"] = []
        return init(**given)

    def end(self, run: Run | None, error: BaseException | None = None) -> None:
        """End a run that `begin` made, as failed or killed with an `error`."""
        if run is not None and self.run is None:
            with Part("the end of the run"):
                run.__exit__(type(error) if error is not None else None, error, None)
                if run.anomalies:
                    said = "trackbridge: what was found is in %s; look at it with: trackbridge view %s"
                    logger.warning(said, run.dir, run.dir)


def warn(anomalies: Iterable[Anomaly]) -> None:
    """Log what was found, where no loop of the user's gets it."""
    for anomaly in anomalies:
        logger.warning("trackbridge: %s of %s at step %d", anomaly.kind, anomaly.series, anomaly.step)


def log(run: Run, values: Mapping[str, Any], *, step: int | None = None) -> None:
    """`run.log` of what a trainer logs: what is no scalar, or has a name of ours, is said and left out, and raises nothing."""
    for name, value in values.items():
        try:
            run.log({name: value}, step=step)
        except UsageError as error:
            logger.warning("trackbridge: %s; it is left out of the log", error)
