"""Probes: what is measured, and where. `Instruments` is all of them for one run."""

from trackbridge.probes.instruments import Instruments

__all__ = ["Instruments"]
