"""trackbridge: a flight recorder for PyTorch training that lives inside the tracker you already use.

Public names are imported when first used, so ``import trackbridge`` costs milliseconds and has no side effect.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trackbridge._version import __version__

if TYPE_CHECKING:
    from trackbridge.capsule import SpikeCapsule as SpikeCapsule
    from trackbridge.checkpoints import rollback as rollback
    from trackbridge.config import TrackbridgeConfig as TrackbridgeConfig
    from trackbridge.detectors import detect as detect
    from trackbridge.errors import TrackbridgeError as TrackbridgeError
    from trackbridge.fetch import pull as pull
    from trackbridge.history import RunRecord as RunRecord
    from trackbridge.history import load as load
    from trackbridge.records import Anomaly as Anomaly
    from trackbridge.run import Run as Run
    from trackbridge.run import init as init
    from trackbridge.skip import SkipPlan as SkipPlan

_WHERE = {
    "Anomaly": "trackbridge.records",
    "Run": "trackbridge.run",
    "RunRecord": "trackbridge.history",
    "SkipPlan": "trackbridge.skip",
    "SpikeCapsule": "trackbridge.capsule",
    "TrackbridgeConfig": "trackbridge.config",
    "TrackbridgeError": "trackbridge.errors",
    "detect": "trackbridge.detectors",
    "init": "trackbridge.run",
    "load": "trackbridge.history",
    "pull": "trackbridge.fetch",
    "rollback": "trackbridge.checkpoints",
}
_MODULES = {
    "accelerate": "trackbridge.integrations.accelerate",
    "hf": "trackbridge.integrations.hf",
    "interventions": "trackbridge.interventions",
    "lightning": "trackbridge.integrations.lightning",
    "replay": "trackbridge.replay",
    "testing": "trackbridge.testing",
}
_NEEDS = {  # package and extra
    **dict.fromkeys(("Run", "init", "interventions", "replay"), ("torch", "torch")),
    "accelerate": ("accelerate", "accelerate"),
    "hf": ("transformers", "hf"),
    "lightning": ("lightning", "lightning"),
}

__all__ = ["__version__", *_WHERE, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _NEEDS:
        from trackbridge.plugins import require

        require(*_NEEDS[name])
    if name in _WHERE:
        value = getattr(import_module(_WHERE[name]), name)
    elif name in _MODULES:
        value = import_module(_MODULES[name])
    else:
        raise AttributeError(f"module 'trackbridge' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
