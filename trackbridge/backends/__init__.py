"""One file per tracker, behind one protocol of three methods. See `trackbridge.backends.base`."""

from trackbridge.backends.base import Backend, BackendConfig

__all__ = ["Backend", "BackendConfig"]
