"""A small healthy run as rows and contexts, for the diagnosis tests to damage; detection is the real one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.detectors.kit import loss_curve, rows, watch_all
from trackbridge.detectors import Watch
from trackbridge.diagnosis import diagnose
from trackbridge.records import Anomaly, Hypothesis, MicroBatch, StepContext

STEPS, AT = 260, 200
LAYERS = ("embed.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.weight", "blocks.1.attn.qkv.weight", "blocks.1.mlp.weight")
MODULES = ("embed", "blocks.0", "blocks.1")


class Story:
    """`series` holds arrays of shape (STEPS,); `tokens` one dict of token statistics per step; `prints` fingerprints."""

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        norm = lambda size, spread: size * np.exp(spread * random.standard_normal(STEPS))  # noqa: E731
        self.series: dict[str, np.ndarray] = {
            "train/lr": 1e-3 * np.linspace(1, 0.5, STEPS),
            "train/loss": loss_curve(STEPS, seed),
        }
        self.series["grad/norm"] = norm(1.0, 0.1)
        for name in ("optim/exp_avg_norm", "optim/exp_avg_sq_norm", "optim/update_ratio"):
            self.series[name] = norm(0.1, 0.02)
        for layer in LAYERS:
            self.series[f"layer/{layer}/grad_norm"] = norm(0.4, 0.1)
            self.series[f"layer/{layer}/exp_avg_sq_norm"] = norm(0.01, 0.02)
            self.series[f"layer/{layer}/update_ratio"] = norm(1e-3, 0.05)
            self.series[f"layer/{layer}/weight_norm"] = norm(10.0, 1e-4)
        for module in MODULES:
            self.series[f"act/{module}/rms"] = norm(1.0, 0.02)
            self.series[f"act/{module}/max"] = norm(5.0, 0.05)
            self.series[f"act/{module}/kurtosis"] = norm(4.0, 0.05) - 3
        self.tokens: list[dict[str, Any]] = [
            {"length": 512, "unique": int(140 + 3 * random.standard_normal()), "entropy": 6.4 + 0.05 * random.standard_normal(),
             "min": 0, "max": 199, "rarest": [[199, 1], [180, 1]]} for _ in range(STEPS)
        ]  # fmt: skip
        self.prints = [f"print-{i}" for i in range(STEPS)]
        self.notes: tuple[str, ...] = ()

    def spike(self, length: int = 2, height: float = 3.0) -> Story:
        self.series["train/loss"][AT : AT + length] += height
        return self

    def gradients(self, factor: float = 20.0, length: int = 2) -> Story:
        for name in ("grad/norm", *(f"layer/{layer}/grad_norm" for layer in LAYERS)):
            self.series[name][AT : AT + length] *= factor
        return self

    def contexts(self) -> list[StepContext]:
        return [
            StepContext(i, i, 0, {}, (MicroBatch(0, 0, i, None, self.prints[i], {"input": self.tokens[i]}),))
            for i in range(STEPS)
        ]

    def told(self) -> tuple[Anomaly, tuple[Hypothesis, ...]]:
        """The first anomaly and its hypotheses."""
        data = rows(self.series)
        anomaly = watch_all(Watch(), data)[0]
        anomaly = replace(anomaly, notes=(*anomaly.notes, *self.notes))
        return anomaly, diagnose(anomaly, data, self.contexts())

    def first(self) -> Hypothesis:
        return self.told()[1][0]


def outliers() -> Story:
    """Kurtosis and largest values of a block grow over 40 steps, then the loss jumps."""
    story = Story().spike(10).gradients(10, 10)
    grown = np.maximum(1, 1.1 ** (np.arange(STEPS) - (AT - 40)))
    story.series["act/blocks.0/kurtosis"] = (story.series["act/blocks.0/kurtosis"] + 3) * grown - 3
    story.series["act/blocks.0/max"] *= np.sqrt(grown)
    return story
