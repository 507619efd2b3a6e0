"""The held-out part: other models and data, and other ways of doing the same fifteen things.

Written on 2026-11-28, before the rules were changed for what the first held-out part had shown (which is development now).
"""

from __future__ import annotations

from benchmarks.faults.causes.base import Fault
from benchmarks.faults.held.data import (
    Alternating,
    CutOff,
    GlitchRows,
    Guessed,
    Infinite,
    NotNormalised,
    OffByOne,
    OtherLanguage,
    OtherTokenizer,
)
from benchmarks.faults.held.healthy import HELD_CONTROLS
from benchmarks.faults.held.network import (
    BadRead,
    BadReduce,
    BiasOutlier,
    GreedyScaler,
    HeadJump,
    HotGain,
    KeyGrowth,
    LostTile,
    NormOutlier,
    Positions,
)
from benchmarks.faults.held.optimization import (
    Betas,
    ClipRaised,
    Dropped,
    LostShard,
    Reduction,
    ScheduleLost,
    ThroughTime,
    WrongUnits,
)
from benchmarks.faults.held.tasks import HELD_OUT

__all__ = ["HELD_CONTROLS", "HELD_FAULTS", "HELD_OUT"]

HELD_FAULTS: tuple[type[Fault], ...] = (
    CutOff, OtherTokenizer, NotNormalised, Infinite, GlitchRows, OffByOne, Guessed, Alternating, OtherLanguage,
    ScheduleLost, Dropped, WrongUnits, LostShard, ClipRaised, ThroughTime, Reduction, Betas,
    GreedyScaler, HotGain, KeyGrowth, Positions, HeadJump, NormOutlier, BiasOutlier, BadRead, BadReduce, LostTile,
)  # fmt: skip
