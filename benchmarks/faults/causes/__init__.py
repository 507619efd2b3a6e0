"""What is injected. Each class is one way of one cause; `sizes` are for the first tasks, `second_sizes` for the second.

An injection does what the fault itself does (a bit is flipped, a state is not loaded, a file is read as text), never what the
fault looks like in the record.
"""

from __future__ import annotations

from benchmarks.faults.causes.base import Fault
from benchmarks.faults.causes.data import (
    ConstantLabel,
    LongShuffled,
    NanBatch,
    Noise,
    OtherData,
    RareTokens,
    Repeated,
    Shuffled,
    Stuck,
    UnseenNoise,
)
from benchmarks.faults.causes.hardware import ActivationTile, GradientWord, WeightBit, WeightWord
from benchmarks.faults.causes.more import MORE
from benchmarks.faults.causes.network import (
    EmbeddingJump,
    EmbeddingRows,
    HalfCast,
    HalfOverflow,
    HeadGrowth,
    LogitGrowth,
    LogitJump,
    OutlierUnit,
    ScaleGrowth,
    ScaleTooHigh,
)
from benchmarks.faults.causes.optimization import (
    Deepening,
    Dropout,
    Frozen,
    MomentsZeroed,
    RateBlip,
    RateJump,
    Smoothing,
    StaleMoment,
    StateLost,
    Unclipped,
)

__all__ = ["FAULTS", "Fault"]

FAULTS: tuple[type[Fault], ...] = (
    Noise, UnseenNoise, Stuck, NanBatch, RareTokens, Shuffled, LongShuffled, ConstantLabel, Repeated, OtherData,
    RateJump, RateBlip, StateLost, MomentsZeroed, StaleMoment, Frozen, Unclipped, Deepening,
    HalfOverflow, ScaleTooHigh, HalfCast, LogitGrowth, ScaleGrowth, LogitJump, EmbeddingRows, EmbeddingJump, HeadGrowth,
    OutlierUnit, WeightBit, WeightWord, ActivationTile, GradientWord, Dropout, Smoothing, *MORE,
)  # fmt: skip
