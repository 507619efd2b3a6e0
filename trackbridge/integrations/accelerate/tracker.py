"""`Tracker`: what a script sends with ``accelerator.log``, into a run."""

from __future__ import annotations

from typing import Any

from accelerate import tracking
from accelerate.tracking import GeneralTracker

from trackbridge import names
from trackbridge.errors import UsageError
from trackbridge.integrations.given import Given, log
from trackbridge.ranks import Ranks
from trackbridge.run import Run


class Tracker(GeneralTracker):  # type: ignore[misc]
    """A tracker for ``Accelerator(log_with=...)``: ``Tracker(run)`` with a run of yours, or ``Tracker(project, **settings)``
    with what `trackbridge.init` takes; then the run begins at ``accelerator.init_trackers`` and ends at ``end_training``.

    By its name, ``log_with="trackbridge"``, where accelerate lets a tracker register itself (import ``trackbridge.accelerate``
    first); ``init_kwargs={"trackbridge": {...}}`` are the settings.

    What is logged under the name of a series of trackbridge's own goes to ``accelerate/<name>``: `watch` records that series.
    """

    name = "trackbridge"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, run: Run | str, **settings: Any) -> None:
        super().__init__()
        own = isinstance(run, Run)
        self._given = Given(run if own else None, settings if own else {"project": run, **settings})
        self._config: dict[str, Any] = {}
        self._run = self._given.run

    @property
    def tracker(self) -> Run:
        """The run, which begins when it is first asked for. Raises `UsageError` with several processes: accelerate asks only
        the first one, and a run is made by all."""
        if self._run is None:
            if Ranks.current().world_size > 1:
                raise UsageError("with several processes make the run on all of them: log_with=Tracker(trackbridge.init(...))")
            self._run = self._given.begin(self._config)
        return self._run

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The run's config; of a run that is there, which has one, a section of its own."""
        if self._run is None:
            self._config = dict(values)
            _ = self.tracker
        else:
            self._run.intake.facts("accelerate", values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """`run.log` of the numbers in `values`; what is none is said and left out."""
        log(self.tracker, {_free(str(name)): value for name, value in values.items()}, step=step)

    def finish(self) -> None:
        self._given.end(self._run)


def _free(name: str) -> str:
    return name if names.describe(names.legal(name)) is None else f"accelerate/{name}"


if hasattr(tracking, "register_tracker_class") and Tracker.name not in tracking.LOGGER_TYPE_TO_CLASS:
    tracking.register_tracker_class(Tracker)
