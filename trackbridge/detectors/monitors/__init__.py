"""Monitors: each knows one fault by its name, and tells it whether or not the loss follows.

The band (`trackbridge.detectors.band`) sees that a series is where it should not be. A monitor knows what a series must not
do, whatever its level: a second moment cannot fall faster than its decay, a batch does not come twice in an epoch.
"""

from __future__ import annotations

from trackbridge.config import DetectionConfig
from trackbridge.detectors.monitors.base import Look, Monitor, Sign
from trackbridge.detectors.monitors.learning_rate import LearningRate
from trackbridge.detectors.monitors.loss_scale import LossScale
from trackbridge.detectors.monitors.optimizer_state import OptimizerState
from trackbridge.detectors.monitors.repeats import Repeats

__all__ = ["Look", "Monitor", "Sign", "monitors"]


def monitors(settings: DetectionConfig) -> list[Monitor]:
    """Those that are switched on, in the order in which they are asked."""
    every: list[tuple[bool, Monitor]] = [
        (settings.learning_rate.enabled, LearningRate(settings.learning_rate)),
        (settings.repeats.enabled, Repeats(settings.repeats)),
        (settings.optimizer_state.enabled, OptimizerState(settings.optimizer_state)),
        (settings.loss_scale.enabled, LossScale(settings.loss_scale)),
    ]
    return [monitor for enabled, monitor in every if enabled]
