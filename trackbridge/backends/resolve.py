"""From what a user writes in ``backend=`` to backend configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from trackbridge import plugins
from trackbridge.backends.base import BackendConfig
from trackbridge.errors import ConfigError, nearest


def resolve(backend: Any) -> list[BackendConfig]:
    """`backend` is None, a name, a comma-separated string of names, a config, a mapping with ``kind``, or a list of these.

    Raises `ConfigError` for an unknown name or setting and `MissingExtraError` when a package is missing.
    """
    configs = [_one(item) for item in _items(backend)]
    kinds = [config.kind for config in configs]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ConfigError(f"backend {kind!r} was given twice: a run has one cursor per kind")
    for config in configs:
        config.check()
    return configs


def _items(backend: Any) -> list[Any]:
    if backend is None:
        return []
    if isinstance(backend, str):
        return [name.strip() for name in backend.split(",") if name.strip()]
    return list(backend) if isinstance(backend, (list, tuple)) else [backend]


def _one(item: Any) -> BackendConfig:
    if isinstance(item, BackendConfig):
        return item
    given = {"kind": item} if isinstance(item, str) else item
    if not isinstance(given, Mapping) or "kind" not in given:
        raise ConfigError(f"backend must be a name, a config object or a mapping with 'kind', not {item!r}")
    model: type[BackendConfig] = plugins.load(plugins.BACKENDS, str(given["kind"]))
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            hint = nearest(path, model.model_fields)
            raise ConfigError(f"unknown setting {path!r} for backend {given['kind']!r}{hint}") from None
        raise ConfigError(f"backend {given['kind']!r}, setting {path!r}: {first['msg']}") from None
