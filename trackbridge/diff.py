"""Two runs side by side: where they come from, what they were given, and the first step and layer in which they part.

Two runs of one program agree to the bit until something differs. So the first difference of any recorded number matters more
than how far the curves are apart in the end: it says in which step, and in which layer of that step, to look.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trackbridge import provenance
from trackbridge.detectors.episodes import stage
from trackbridge.history import RunRecord, load
from trackbridge.journal import JournalReader
from trackbridge.names import is_wide
from trackbridge.records import StepContext
from trackbridge.rundir import RunDirectory

Fact = tuple[str, Any, Any]
_MACHINE = ("perf/", "mem/", "host/", "trackbridge/", "anomaly/", "guard/", "flops/")  # differs between any two runs
_STAGES = ("forward", "loss", "backward", "gradient", "update")
_IDENTITY = ("name", "id", "dir", "resume", "tags", "group", "project", "backend")
_AHEAD = 256  # of the series are read before the next ones


@dataclass(frozen=True, slots=True)
class Split:
    """The first step at which two runs differ in a recorded number. `series` is the first of that step to be computed, `a` and
    `b` its values; `layer` the first layer or module of a series that differs, be it a later one than `series` (None: only
    global series differ); `others` how many more differ there."""

    step: int
    series: str
    a: float
    b: float
    layer: str | None
    stage: str
    others: int


@dataclass(frozen=True, slots=True)
class Data:
    """What the runs were fed. `compared` counts the steps of which both records know the batches; `first` is the first of them
    with different ones (None: all equal), `how` what was compared. `same_elsewhere` counts batches of `b` that `a` had at
    another step: the order differs, not the data. `rng`: the first step whose random state differs."""

    compared: int
    first: int | None
    how: str
    same_elsewhere: int
    rng: int | None


@dataclass(frozen=True, slots=True)
class Diff:
    """`provenance`, `config` and `settings` list (name, a, b). `series` and `steps` count what was compared, `only` names the
    series of one run alone. `split` is the first difference, `apart` the loss's first beyond `tolerance` (relative)."""

    a: str
    b: str
    provenance: list[Fact]
    config: list[Fact]
    settings: list[Fact]
    data: Data
    series: int
    steps: int
    split: Split | None
    apart: Split | None
    tolerance: float
    only: dict[str, list[str]] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """Nothing that could matter differs: code, config, data and every recorded number."""
        return not (self.provenance or self.config or self.settings) and self.data.first is None and self.split is None


def diff(a: str | Path, b: str | Path, *, tolerance: float = 0.02) -> Diff:
    """Compare two run directories. `tolerance` is the relative difference of the loss that counts as visible.

    Raises `ReferenceNotFoundError` for what is no run.
    """
    first, second = load(a), load(b)
    mine, theirs = _comparable(first), _comparable(second)
    common = [name for name in mine if name in set(theirs)]
    split, steps = _split(first, second, common)
    apart = _apart(first, second, tolerance)
    return Diff(
        a=first.info.run_id,
        b=second.info.run_id,
        provenance=provenance.differences(first.provenance, second.provenance),
        config=list(facts(first.config, second.config)),
        settings=list(facts(_tidied(first.settings), _tidied(second.settings))),
        data=_data(first, second),
        series=len(common),
        steps=steps,
        split=split,
        apart=apart,
        tolerance=tolerance,
        only={"a": [n for n in mine if n not in set(theirs)], "b": [n for n in theirs if n not in set(mine)]},
    )


def facts(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Fact]:
    """What differs between two trees, as (dotted name, a, b); None for what one of them lacks."""
    mine, theirs = dict(_flat(a)), dict(_flat(b))
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            yield name, mine.get(name), theirs.get(name)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _tidied(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Without what names a run instead of describing it."""
    return {key: value for key, value in settings.items() if key not in _IDENTITY}


def _comparable(record: RunRecord) -> list[str]:
    return [name for name in record.names if not name.startswith(_MACHINE)]


# -- numbers


def _split(a: RunRecord, b: RunRecord, names: list[str]) -> tuple[Split | None, int]:
    """The first difference, and how many steps both runs have."""
    found: list[tuple[int, str, float, float]] = []
    best: int | None = None
    steps = 0
    for start in range(0, len(names), _AHEAD):
        part = names[start : start + _AHEAD]
        theirs = dict(b.many(part))
        for name, (at, values) in a.many(part):
            both, mine, other = np.intersect1d(at, theirs[name][0], assume_unique=True, return_indices=True)
            steps = max(steps, len(both))
            x, y = values[mine], theirs[name][1][other]
            parts = np.flatnonzero(~((x == y) | (np.isnan(x) & np.isnan(y))))
            if len(parts) and (best is None or both[parts[0]] <= best):
                place = int(parts[0])
                best = int(both[place])
                found.append((best, name, float(x[place]), float(y[place])))
    if best is None:
        return None, steps
    order = {name: place for place, name in enumerate(names)}
    here = [entry for entry in found if entry[0] == best]

    def computed(entry: tuple[int, str, float, float]) -> tuple[int, int]:
        rank = stage(entry[1])
        return rank, -order[entry[1]] if rank == 2 else order[entry[1]]  # gradients are made in reverse order

    step, series, x0, y0 = min(here, key=computed)
    wide = sorted((entry for entry in here if is_wide(entry[1])), key=computed)
    layer = wide[0][1].split("/", 1)[1].rsplit("/", 1)[0] if wide else None
    return Split(step, series, x0, y0, layer, _STAGES[stage(series)], len(here) - 1), steps


def _apart(a: RunRecord, b: RunRecord, tolerance: float) -> Split | None:
    if "train/loss" not in a.names or "train/loss" not in b.names:
        return None
    (at, values), (there, others) = a.series("train/loss"), b.series("train/loss")
    both, mine, theirs = np.intersect1d(at, there, assume_unique=True, return_indices=True)
    x, y = values[mine], others[theirs]
    with np.errstate(invalid="ignore"):
        far = (np.isfinite(x) != np.isfinite(y)) | (np.abs(x - y) > tolerance * np.maximum(np.abs(x), np.abs(y)))
    if not far.any():
        return None
    place = int(np.flatnonzero(far)[0])
    return Split(int(both[place]), "train/loss", float(x[place]), float(y[place]), None, "loss", 0)


# -- data


def _data(a: RunRecord, b: RunRecord) -> Data:
    mine, theirs = dict(_contexts(a)), dict(_contexts(b))
    common = sorted(mine.keys() & theirs.keys())
    known = [step for step in common if mine[step][0] and theirs[step][0]]
    first = next((step for step in known if mine[step][0] != theirs[step][0]), None)
    elsewhere = {identity: step for step, (identity, _) in mine.items() if identity}
    moved = sum(1 for step in known if elsewhere.get(theirs[step][0], step) != step)
    rng = next((step for step in common if mine[step][1] and theirs[step][1] and mine[step][1] != theirs[step][1]), None)
    kinds = {mine[step][0][0] for step in known}
    how = "fingerprints" if kinds == {"f"} else "sample ids" if kinds == {"i"} else "fingerprints and sample ids"
    return Data(len(known), first, how, moved, rng)


def _contexts(record: RunRecord) -> Iterator[tuple[int, tuple[str, str]]]:
    """(step, (identity of its batches, digest of its random state)), each empty where it is not known."""
    directory = RunDirectory(record.path)
    ranks = directory.ranks()
    reader = JournalReader(directory.contexts(ranks[0] if ranks else 0), kinds={StepContext})
    while records := reader.read(limit=256):
        for context in records:
            if isinstance(context, StepContext):
                yield context.step, (_identity(context), _state(context))


def _identity(context: StepContext) -> str:
    if context.micro and all(micro.fingerprint for micro in context.micro):
        return "f" + " ".join(str(micro.fingerprint) for micro in context.micro)
    if context.micro and all(micro.sample_ids for micro in context.micro):
        return "i" + repr([micro.sample_ids for micro in context.micro])
    return ""


def _state(context: StepContext) -> str:
    """Torch's own generators: what python and numpy draw may serve other ends."""
    return repr([(name, np.asarray(context.rng[name]).tobytes()) for name in sorted(context.rng) if name.startswith("torch")])
