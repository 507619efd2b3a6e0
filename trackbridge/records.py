"""Everything that flows through trackbridge, as frozen dataclasses. No behaviour beyond reading, no dependency but numpy.

A *record* is what one rank's journal holds. `seq` numbers the records of one journal without gaps, over all attempts of a
run: rows, anomalies and artifacts share it, so one cursor per tracker says what has been delivered. `step` is the user's
optimizer step (by default the count of `run.step` calls, from 0).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]
RunStatus: TypeAlias = Literal["finished", "failed", "killed"]
MAX_STEP = 2**53
"""Trackers keep steps as float64."""


@dataclass(frozen=True, slots=True)
class Schema:
    """The ordered series names of a row. Equal names are one `Schema` object per writer, so `id()` can key a cache."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """The values of one step. `values` is float64, shape (len(schema.names),); NaN and Inf are values, never "absent":
    a series that has no value at this step is not in the schema. `kind` is "step" for `run.step`, "log" for `run.log`.
    `time` is seconds since the epoch, stamped once by the training thread."""

    seq: int
    step: int
    time: float
    attempt: int
    schema: Schema
    values: FloatArray
    kind: Literal["step", "log"] = "step"

    def items(self) -> Iterator[tuple[str, float]]:
        return zip(self.schema.names, self.values.tolist(), strict=True)

    def get(self, name: str) -> float | None:
        """The value of `name`, or None when the row does not have it."""
        try:
            return float(self.values[self.schema.names.index(name)])
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One possible cause, with its evidence. `name` is a stable identifier such as ``corrupt-batch``; `of_batch` are those of
    `evidence_for` that are facts about a batch."""

    name: str
    evidence_for: tuple[str, ...] = ()
    evidence_against: tuple[str, ...] = ()
    intervention: str | None = None
    of_batch: tuple[str, ...] = ()


FAULTS = (
    "lr-discontinuity", "repeated-batch", "optimizer-state-lost", "stale-second-moment", "fp16-overflow", "hardware-fault",
)  # fmt: skip
"""With one of these begins the note of a monitor that knows the cause (`trackbridge.detectors.monitors`)."""
UNDER_WAY = "under way: "
"""With this begins the note of a user's rule that broke during the effects of such a fault."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """Something an engineer would want to be told. Written when detected, again (same `id`) when it is over or sealed.

    `step` is where it was detected, `onset` where it began. `first_mover` is (series, step) of the series that left its
    band first; `cascade` the (series, step) pairs in order. `recovered_after` counts steps from the onset, None if it did
    not. `capsule` is the path of the spike capsule relative to the run directory.

    `value` is that of `value_step`, or of `step` where that is None: of an event that began with another series, and is told by
    this one, it is a later step's. `expected` and `score` go with it. `score` is in robust sigmas, unless `terms` says what
    was expected in the words of a fault that is no matter of noise ("30 times the 0.001 before"): then it is a ratio.
    """

    id: str
    kind: str
    step: int
    onset: int
    severity: float
    series: str
    value: float
    expected: float
    score: float
    first_mover: tuple[str, int] | None = None
    cascade: tuple[tuple[str, int], ...] = ()
    recovered_after: int | None = None
    ranks: tuple[int, ...] = (0,)
    hypotheses: tuple[Hypothesis, ...] = ()
    capsule: str | None = None
    attempt: int = 0
    time: float = 0.0
    notes: tuple[str, ...] = ()
    seq: int = -1
    terms: str = ""
    value_step: int | None = None

    def updated(self, **changes: Any) -> Anomaly:
        return replace(self, **changes)

    @property
    def fault(self) -> str:
        """The name of a fault that no series shows, such as ``repeated-batch``: its note is all that there is to say of it. ""
        of every other event, a user's rule among them."""
        end = f": {self.terms}"
        notes = self.notes if self.kind == "rule" and self.terms else ()
        return next((note.removesuffix(end) for note in notes if note.endswith(end)), "")

    @property
    def what(self) -> str:
        """What it is called: its fault's name, or its kind."""
        return self.fault or self.kind

    @property
    def title(self) -> str:
        """``spike in train/loss``, ``repeated-batch``."""
        return self.fault or f"{self.kind} in {self.series}"

    def __str__(self) -> str:
        if self.fault:
            return f"{self.fault} at step {self.step}: {self.terms}"
        at = "" if self.value_step is None else f" at step {self.value_step}"
        return f"{self.kind} in {self.series} at step {self.step}: {self.value:.6g}{at}, {self.against}"

    @property
    def against(self) -> str:
        """What the value is held against, in words: "expected 2.25 (31 sigma)"; where noise is no measure, `terms`."""
        if self.terms:
            return self.terms
        far = f" ({self.score:.3g} sigma)" if math.isfinite(self.score) else ""
        return f"expected {self.expected:.6g}{far}"


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file or folder for the tracker's artifact store. `path` is relative to the run directory; our copy stays until
    the tracker has it. `name` uses only ``[A-Za-z0-9._-]``. `metadata` is JSON."""

    seq: int
    step: int
    time: float
    name: str
    kind: str
    path: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Params:
    """The user's configuration, provenance, or other facts for the tracker's config panel. `values` is JSON."""

    seq: int
    time: float
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of an attempt. `error` is one line, set when `status` is "failed"."""

    seq: int
    time: float
    status: RunStatus
    attempt: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Identity of one micro-batch as it was consumed. Unknown is None, never guessed.

    `loader` numbers the loaders in order of first use; `index` is the batch number within `epoch`. `sample_ids` are the
    sampler's indices. `rng` is the packed RNG state after this fetch, present only when the fetch itself moved it.
    `skeleton` and the arrays under `tensors` are the batch (`trackbridge.tree`), when it fitted the budget.
    `tokens` holds token statistics where they were written down: ask `trackbridge.tokens.tokens_of`. `workers` and `base_seed`
    say how the loader's workers were seeded in this epoch (worker i: ``base_seed + i``). `opening_rng` comes with the first
    batch of an epoch: the packed RNG state just before the loader's iterator was made, from which a shuffled order can be drawn
    again.
    """

    loader: int | None = None
    epoch: int | None = None
    index: int | None = None
    sample_ids: tuple[int | str, ...] | None = None
    fingerprint: str | None = None
    tokens: Mapping[str, Any] = field(default_factory=dict)
    rng: Mapping[str, np.ndarray] | None = None
    skeleton: Any = None
    tensors: Mapping[str, np.ndarray] | None = None
    why_no_tensors: str | None = None
    workers: int | None = None
    base_seed: int | None = None
    opening_rng: Mapping[str, np.ndarray] | None = None


@dataclass(frozen=True, slots=True)
class StepContext:
    """What is needed to run one step again, taken before the step ran. Lives in the context journal, which is a ring.

    `rng` maps generator names to arrays (see `trackbridge.rng`): the state with which the first forward pass of the step
    started, that is after the first fetch where `run.batches` saw it, else at the end of the step before. `rng_after` maps
    torch's generators to the digests of their states at the end of the step; None where a batch had been fetched ahead.
    """

    seq: int
    step: int
    attempt: int
    rng: Mapping[str, np.ndarray]
    micro: tuple[MicroBatch, ...] = ()
    notes: tuple[str, ...] = ()
    rng_after: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Histograms:
    """Histograms of parameters (after the update) and gradients (as the optimizer used them) at one step.

    `names` are ``layer/<parameter>/weight`` and ``layer/<parameter>/grad``; `counts` is int64 of shape (len(names), BINS), its
    columns those of `trackbridge.histograms`, the same for every tensor, step and rank. A name of which this is only one rank's
    piece ends in ``_local``; `copies`, float64 of shape (len(names),), says how many ranks hold the same piece (0: not known).
    """

    seq: int
    step: int
    time: float
    attempt: int
    names: tuple[str, ...]
    counts: npt.NDArray[np.int64]
    copies: FloatArray

    def get(self, name: str) -> npt.NDArray[np.int64] | None:
        """The counts of one tensor, shape (BINS,), None if it is not here."""
        return self.counts[self.names.index(name)] if name in self.names else None


Record: TypeAlias = Row | Anomaly | Artifact | Params | RunEnd | StepContext | Histograms


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Who a run is, for a backend. `directory` is the absolute path of the run directory; `start_step` the first step of
    this attempt; `attempt` is 0 at first and grows by one with each resume."""

    project: str
    run_id: str
    name: str
    directory: str
    attempt: int = 0
    start_step: int = 0
    created: float = 0.0
    tags: tuple[str, ...] = ()
    group: str | None = None
    rank: int = 0
    world_size: int = 1
