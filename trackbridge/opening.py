"""From the settings to a run that may begin: its directory and identity, and the trackers it goes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trackbridge import attempts
from trackbridge.backends.base import BackendConfig
from trackbridge.backends.resolve import resolve
from trackbridge.config import TrackbridgeConfig
from trackbridge.errors import ConfigError
from trackbridge.ranks import Ranks
from trackbridge.records import RunInfo
from trackbridge.rundir import RunDirectory


def opened(settings: TrackbridgeConfig, config: Mapping[str, Any] | None) -> tuple[RunDirectory, RunInfo, list[BackendConfig]]:
    """The run directory, created or found again, who the run is, and the trackers that this rank serves: those of earlier
    attempts too, as far as their packages are here. Raises as `trackbridge.init` does."""
    backends = [*resolve(settings.backend), *_alerts(settings)]
    ranks = Ranks.current()
    if ranks.leader:
        backends = _met(backends, join=settings.join)
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"config must be a mapping of your hyperparameters, not {type(config).__name__}; try vars(config)")
    directory, info = attempts.begin(settings, ranks, backends, config or {})
    if not ranks.leader:
        return directory, info, []
    secretive = {backend.kind: backend for backend in _alerts(settings)}  # run.json does not know the addresses
    known = [secretive.get(one.kind, one) for one in resolve(directory.read().backends)]
    served = [one for one in known if one.lacking() is None]
    for backend in backends:
        backend.introduce(info)
    return directory, info, served


def _alerts(settings: TrackbridgeConfig) -> list[BackendConfig]:
    """The backend that sends alerts, if there is somebody to send them to. Raises `ConfigError` for what is no address."""
    alerts = settings.alerts
    if not alerts.urls:
        return []
    from trackbridge.backends.alerts import AlertsConfig

    given = {name: getattr(alerts, name) for name in ("severity", "cooldown", "per_hour")}
    config = AlertsConfig(**given)
    config.check()
    return [config.to([url.get_secret_value() for url in alerts.urls])]


def _met(backends: Sequence[BackendConfig], *, join: bool) -> list[BackendConfig]:
    """`backends` in view of runs that the user has open. Raises `ConfigError` when there is none to join."""
    met = [backend.met(join=join) for backend in backends]
    if join and met == list(backends):
        raise ConfigError("join=True, but no W&B or MLflow run is open in this process: start yours before trackbridge.init")
    return met
