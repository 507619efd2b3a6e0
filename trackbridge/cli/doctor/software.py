"""What is installed, which extras it serves, and whether the settings in the environment can be read."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from trackbridge._version import __version__
from trackbridge.cli.doctor.finding import Finding
from trackbridge.config import TrackbridgeConfig
from trackbridge.errors import ConfigError

EXTRAS = {
    "wandb": "wandb",
    "mlflow": "mlflow",
    "tensorboard": "tensorboard",
    "prometheus-client": "prometheus",
    "wandb-workspaces": "reports",
    "apprise": "alerts",
    "transformers": "hf",
    "lightning": "lightning",
    "accelerate": "accelerate",
}
"""Distributions and the extra that brings each."""


def look() -> Iterator[Finding]:
    yield Finding("trackbridge", "ok", f"{__version__} with Python {platform.python_version()}, {sys.executable}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    advice = "" if cores > 1 else "trackers are served by one child process: with one core it shares the trainer's"
    yield Finding("cores", "ok" if cores > 1 else "note", str(cores), advice)
    wanted = _wanted()
    for package, extra in EXTRAS.items():
        found = installed(package)
        install = f"pip install 'trackbridge[{extra}]'"
        if found is None and package in wanted:
            yield Finding(package, "problem", f"not installed, but {wanted[package]} asks for it", install)
        else:
            yield Finding(
                package, "ok" if found else "note", found or "not installed", "" if found else f"to use it: {install}"
            )
    if "lightning" not in wanted and installed("lightning") is None and (older := installed("pytorch-lightning")):
        yield Finding("pytorch-lightning", "ok", f"{older}: serves as well as lightning")


def settings() -> tuple[TrackbridgeConfig, Finding]:
    """The settings as the environment has them, and whether they can be read; else the defaults."""
    from trackbridge.config import PREFIX

    given = sorted(name for name in os.environ if name.upper().startswith(PREFIX))
    try:
        read = TrackbridgeConfig.load()
    except ConfigError as error:
        return TrackbridgeConfig.model_construct(), Finding("settings", "problem", str(error), "correct or unset the variable")
    return read, Finding("settings", "ok", f"from the environment: {', '.join(given)}" if given else "the defaults")


def installed(package: str) -> str | None:
    """The version of a distribution, None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _wanted() -> dict[str, str]:
    """Distributions that a setting of the environment needs, with the variable that says so."""
    found = {}
    if os.environ.get("TRACKBRIDGE_ALERTS__URLS"):
        found["apprise"] = "TRACKBRIDGE_ALERTS__URLS"
    named = os.environ.get("TRACKBRIDGE_BACKEND", "")
    for kind, package in (("wandb", "wandb"), ("mlflow", "mlflow"), ("tensorboard", "tensorboard")):
        if kind in named:
            found[package] = "TRACKBRIDGE_BACKEND"
    return found
