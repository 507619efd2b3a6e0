"""Accelerate: ``loader = trackbridge.accelerate.watch(run, accelerator, model, optimizer, loader)``, a tracker for
``Accelerator(log_with=...)``, and a loop's objects rebuilt for a replay."""

from trackbridge.integrations.accelerate.replaying import rebuild
from trackbridge.integrations.accelerate.tracker import Tracker
from trackbridge.integrations.accelerate.watching import watch

__all__ = ["Tracker", "rebuild", "watch"]
