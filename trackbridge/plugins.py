"""Entry points and optional packages: how a name becomes a class, and what to say when a package is missing."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from trackbridge.errors import ConfigError, MissingExtraError, nearest

BACKENDS = "trackbridge.backends"


@cache
def available(group: str) -> dict[str, EntryPoint]:
    """Entry points of `group` by name; built-ins and third parties come through the same door."""
    return {point.name: point for point in entry_points(group=group)}


def load(group: str, name: str) -> Any:
    """The object registered as `name` in `group`. Raises `ConfigError` with the nearest valid name."""
    found = available(group)
    if name not in found:
        kind = group.rsplit(".", 1)[-1].rstrip("s")
        raise ConfigError(f"unknown {kind} {name!r}{nearest(name, found)}; installed: {', '.join(sorted(found))}")
    return found[name].load()


def require(module: str, extra: str) -> ModuleType:
    """Import `module`, or raise `MissingExtraError` naming the pip command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(error.name + ".")):
            raise
        raise MissingExtraError(
            f"{module!r} is not installed; run: pip install 'trackbridge[{extra}]'", name=error.name
        ) from None


def installed(module: str) -> bool:
    """True if `module` could be imported; imports nothing."""
    return importlib.util.find_spec(module) is not None
