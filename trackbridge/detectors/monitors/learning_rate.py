"""A learning rate that jumps where its schedule does not.

A schedule moves smoothly, in steps down, or up again to a peak it has had. Told are: a rise above everything so far or out of
nowhere, a rise after a resume, a rise that is taken back within a few steps, and a fall to next to nothing. Not told: warm-up
(equal or slowly growing rises), decay in steps, a rise at the edge of an epoch, and a restart: from a trough back to a former
peak. A restart is a change of regime for the loss.
"""

from __future__ import annotations

import math
from typing import ClassVar

from trackbridge.config import LearningRateConfig
from trackbridge.detectors.monitors.base import Look, Monitor, Sign

FAULT = "lr-discontinuity"
_USUAL = 5.0  # a rise is unusual from this many times the largest recent change
_FORGET = 0.95  # how fast that largest change is forgotten, per step
_SETTLE = 10  # steps before the first judgement: a schedule's first values say little
_EQUAL = 0.3  # a rise of the size of an earlier one, within this share, is a stair of a warm-up
_TROUGH, _PEAK = 0.5, (0.5, 1.05)  # a restart goes from below this share of the peak to within these
_WARMING = 3.0
_LONG = 64  # groups that are followed: some runs give each parameter its own
_KEYS = ("last", "peak", "usual", "stair", "seen", "before", "jumped", "told")


class LearningRate(Monitor):
    """Follows ``train/lr`` and ``train/lr/<group>``. Groups that jump together are one sign."""

    NAME = "learning_rate"
    KEPT: ClassVar[tuple[str, ...]] = ("groups", "epoch", "ended")

    def __init__(self, config: LearningRateConfig) -> None:
        super().__init__()
        self.config = config
        self.groups: dict[str, dict[str, float]] = {}
        self.epoch = -1
        self.ended = -1
        self._regime: str | None = None

    def update(self, look: Look) -> Sign | None:
        self._regime = None
        edge = self._edge(look)
        found: Sign | None = None
        for name in self.columns(look)[0][:_LONG]:
            value = look.finite(name)
            if value is None:
                continue
            sign = self._judge(name, value, look, edge)
            if sign is not None and (found is None or sign.severity > found.severity):
                found = sign
        return found

    def follows(self, name: str) -> bool:
        return name == "train/lr" or name.startswith("train/lr/")

    def over(self) -> int | None:
        return self.ended if self.ended >= 0 else None

    def regime(self) -> str | None:
        return self._regime

    def _edge(self, look: Look) -> bool:
        """True at the first step of an epoch."""
        epochs = [micro.epoch for micro in look.context.micro if micro.epoch is not None] if look.context else []
        if not epochs:
            return False
        edge = self.epoch >= 0 and max(epochs) > self.epoch
        self.epoch = max(epochs)
        return edge

    def _judge(self, name: str, value: float, look: Look, edge: bool) -> Sign | None:
        g = self.groups.get(name)
        if g is None:
            first = (value, value, 0.0, 0.0, 1.0, 0.0, -1.0, 0.0)
            self.groups[name] = dict(zip(_KEYS, first, strict=True))
            return None
        last, usual = g["last"], g["usual"]
        change = value - last
        ratio = value / last if last > 0 else 1.0
        sign = None
        if change and last > 0 and value >= 0:
            taken_back = self._taken_back(g, value, look.step)
            if taken_back is not None:
                sign = self._end(name, g, taken_back, look)
            elif g["seen"] >= _SETTLE or look.resumed:
                sign = self._change(name, g, value, ratio, look, edge, abs(change) > _USUAL * usual)
        g["usual"] = max(abs(change), _FORGET * usual)
        g["last"], g["peak"], g["seen"] = value, max(g["peak"], value), g["seen"] + 1
        return sign

    def _change(
        self, name: str, g: dict[str, float], value: float, ratio: float, look: Look, edge: bool, unusual: bool
    ) -> Sign | None:
        cfg, last = self.config, g["last"]
        if ratio >= cfg.rise and unusual:
            stair = g["stair"] > 0 and abs(value - last - g["stair"]) < _EQUAL * g["stair"]
            g["stair"] = value - last
            restart = last <= _TROUGH * g["peak"] and _PEAK[0] * g["peak"] <= value <= _PEAK[1] * g["peak"]
            g["before"], g["jumped"], g["told"] = last, float(look.step), 0.0
            warming = value <= _PEAK[0] * g["peak"] and ratio < _WARMING  # the first step of another warm-up
            if (restart or edge or stair or warming) and not look.resumed:
                self._regime = "lr_restart"
                return None
            where = " just after a resume" if look.resumed else ""
            return self._told(name, g, value, look.step, f"{name} rose {ratio:.3g} times{where}, to {value:.3g}")
        if unusual and last >= 0.3 * g["peak"] and ratio <= 1 / cfg.fall:
            g["before"], g["jumped"] = last, float(look.step)
            return self._told(name, g, value, look.step, f"{name} fell from {last:.3g} to {value:.3g} in one step")
        return None

    def _taken_back(self, g: dict[str, float], value: float, step: int) -> int | None:
        """The step of the jump that this value takes back, or None."""
        back = g["jumped"] >= 0 and step - g["jumped"] <= self.config.back and 0.7 < value / max(g["before"], 1e-300) < 1.4
        return int(g["jumped"]) if back else None

    def _end(self, name: str, g: dict[str, float], since: int, look: Look) -> Sign | None:
        told, g["jumped"] = g["told"], -1.0
        if told:
            self.ended = look.step
            return None
        high = g["last"]
        words = f"{name} was {high / g['before']:.3g} times as large for {look.step - since} steps from step {since}"
        return self._told(name, g, high, since, words)

    def _told(self, name: str, g: dict[str, float], value: float, onset: int, words: str) -> Sign:
        g["told"], self.ended = 1.0, -1
        factor = max(value, 1e-3 * g["before"]) / g["before"]
        severity = min(0.9, 0.4 + 0.25 * abs(math.log10(factor)))
        how = f"{factor:.3g} times" if factor > 1 else f"{1 / factor:.3g} times less than" if value > 0 else "from"
        terms = f"{how} the {g['before']:.3g} before"
        return Sign(FAULT, "shift", name, onset, value, g["before"], factor, severity, words, terms=terms)
