"""Monitors: each knows one fault by its name, and tells it whether or not the loss follows.

The band (`trackbridge.detectors.band`) sees that a series is where it should not be. A monitor knows what a series must not
do, whatever its level: a second moment cannot fall faster than its decay, a batch does not come twice in an epoch.
"""

from __future__ import annotations

from trackbridge.config import DetectionConfig
from trackbridge.detectors.monitors.base import Look, Monitor, Sign
from trackbridge.detectors.monitors.foreign import Foreign
from trackbridge.detectors.monitors.learning_rate import LearningRate
from trackbridge.detectors.monitors.level import Level
from trackbridge.detectors.monitors.loss_scale import LossScale
from trackbridge.detectors.monitors.memory import Memory
from trackbridge.detectors.monitors.optimizer_state import OptimizerState
from trackbridge.detectors.monitors.plateau import Plateau
from trackbridge.detectors.monitors.regime import Regime
from trackbridge.detectors.monitors.repeats import Repeats
from trackbridge.detectors.monitors.replicas import Replicas
from trackbridge.detectors.monitors.rule import RuleMonitor
from trackbridge.detectors.monitors.stall import Stall
from trackbridge.detectors.monitors.throughput import Throughput

__all__ = ["Foreign", "Level", "Look", "Monitor", "Regime", "Sign", "Stall", "monitors"]


def monitors(settings: DetectionConfig) -> list[Monitor]:
    """Those that are switched on, in the order in which they are asked."""
    every: list[tuple[bool, Monitor]] = [
        (True, Regime()),
        (True, Replicas()),
        (settings.learning_rate.enabled, LearningRate(settings.learning_rate)),
        (settings.repeats.enabled, Repeats(settings.repeats)),
        (settings.optimizer_state.enabled, OptimizerState(settings.optimizer_state)),
        (settings.loss_scale.enabled, LossScale(settings.loss_scale)),
        (settings.level.enabled, Level(settings.level)),
        (settings.throughput.enabled, Throughput(settings.throughput)),
        (settings.memory.enabled, Memory(settings.memory)),
        (settings.stall.enabled, Stall(settings.stall)),
        (settings.plateau.enabled, Plateau(settings.plateau)),
    ]
    own = [monitor for enabled, monitor in every if enabled] + [RuleMonitor(rule) for rule in settings.rules]
    return own + [Foreign(name, settings.quiet) for name in settings.detectors]
