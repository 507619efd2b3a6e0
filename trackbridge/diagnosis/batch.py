"""Statistics of what the steps consumed, tensor by tensor: the recorded ones, and more where the batches were kept."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbridge import tree
from trackbridge.errors import TrackbridgeError
from trackbridge.records import MicroBatch, StepContext
from trackbridge.tokens import tokens_of

FloatArray = npt.NDArray[np.float64]

ODD = 6.0
"""Robust sigmas from which a statistic of a batch is called unusual."""
LEAST = 8
"""Batches before the onset without which nothing is called unusual."""
NEAR = 2
"""Steps before the onset whose batch may have caused it: its update acts a step later."""
_ELEMENTS = 1 << 16
_PAIRS = 1 << 13
_FEATURES = 4096
_TARGET = re.compile(r"(^|[._/\[\]'])(y|labels?|targets?|tgt|answers?|class(es)?)([._/\[\]']|$)", re.IGNORECASE)
_FLOATS = {"mean": 0.05, "std": 0.03, "largest": 0.15}  # of the usual standard deviation: smaller changes are no news

_LEASTS = {"entropy": 0.02, "share": 0.02, "new": 0.003, "kinds": 0.01, "pairs": 0.01, "mixture": 0.01}
_LEARNED = ("new", "kinds", "pairs", "mixture", "variety", "profile")
_SHAPE = ("entropy", "unique", "mean", "std", "share", "pairs", "mixture", "profile")
_BINS = 4096  # of token values
_DRAWS = 8
_KNOWN = 0.05  # the least share of known tokens of which a mixture is worked out

Table = dict[tuple[str, str], dict[int, list[float]]]


class Batches:
    """Micro-batches by step. A statistic is known by (tensor, key); tensors are named as `trackbridge.tree` names them."""

    def __init__(self, contexts: Sequence[StepContext], onset: int) -> None:
        self.contexts = contexts
        self.onset = onset

    @cached_property
    def table(self) -> Table:
        """{(tensor, key): {step: values of its micro-batches}}."""
        found: Table = {}
        past: dict[str, Past] = {}
        for context in self.contexts:
            for micro in context.micro:
                for tensor, statistics in _recorded(micro):
                    for key, value in statistics.items():
                        found.setdefault((tensor, key), {}).setdefault(context.step, []).append(value)
                for tensor, array in _kept(micro):
                    for key, value in past.setdefault(tensor, Past()).compare(array, learn=context.step < self.onset):
                        found.setdefault((tensor, key), {}).setdefault(context.step, []).append(value)
        return found

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(tensor for tensor, _ in self.table))

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """What the loss compares with: by name; of a plain tuple the last tensor."""
        named = tuple(name for name in self.tensors if _TARGET.search(name))
        if not named and len(self.tensors) > 1 and all(name.isdigit() for name in self.tensors):
            return self.tensors[-1:]
        return named

    def is_float(self, tensor: str) -> bool:
        return (tensor, "nonfinite") in self.table

    def step_values(self, tensor: str, key: str, first: int, last: int) -> FloatArray:
        """Values of the steps `first` to `last`, in order."""
        values = self.table.get((tensor, key), {})
        return np.array([v for step in sorted(values) if first <= step <= last for v in values[step]], np.float64)

    def odd(self, tensor: str, key: str, step: int) -> float | None:
        """Robust z of the most unusual micro-batch of `step` against those more than `NEAR` steps before the onset. None when
        unknown."""
        before = self.usual(tensor, key)
        now = self.step_values(tensor, key, step, step)
        if len(before) < (LEAST // 2 if key in _LEARNED else LEAST) or not len(now):
            return None
        middle, scale = float(np.median(before)), self._scale(tensor, key, before)
        return max(((float(value) - middle) / scale for value in now), key=abs)

    def usual(self, tensor: str, key: str) -> FloatArray:
        """Values more than `NEAR` steps before the onset; the later half of those that compare with all before: to the first
        batches everything is new."""
        before = self.step_values(tensor, key, 0, self.onset - NEAR - 1)
        return before[len(before) // 2 :] if key in _LEARNED else before

    def _scale(self, tensor: str, key: str, before: FloatArray) -> float:
        usual = float(np.median(np.abs(before)))
        if key in _FLOATS:
            spread = self.usual(tensor, "std")
            least = _FLOATS[key] * (float(np.median(spread)) if len(spread) else usual)
        else:
            least = _LEASTS.get(key, 0.03 * usual if key == "profile" else max(0.01 * usual, 1.0))
        return max(1.4826 * float(np.median(np.abs(before - np.median(before)))), least, 1e-12)

    @cached_property
    def oddities(self) -> list[tuple[int, str, str, float]]:
        """(step, tensor, key, z) of everything unusual at the onset or up to `NEAR` steps before, the worst first. `min` and
        `max` of tokens only say that some token is new; they are left to `new`."""
        found = []
        for tensor, key in self.table:
            if key in ("nonfinite", "min", "max", "kinds"):
                continue
            for step in range(self.onset - NEAR, self.onset + 1):
                z = self.odd(tensor, key, step)
                if z is not None and abs(z) > ODD:
                    found.append((step, tensor, key, z))
        return sorted(found, key=lambda one: -abs(one[3]))

    @cached_property
    def known(self) -> bool:
        """Statistics that tell a batch from others exist for the onset and enough batches before it."""
        return any(
            self.odd(tensor, key, self.onset) is not None
            for tensor, key in self.table
            if key in ("entropy", "std") and tensor not in self.targets
        )

    def compared(self, key: str) -> bool:
        """The statistic is known for an input near the onset, and for enough batches before it."""
        steps = range(self.onset - NEAR, self.onset + 1)
        inputs = [tensor for tensor in self.tensors if tensor not in self.targets]
        return any(self.odd(tensor, key, step) is not None for tensor in inputs for step in steps)

    def shifted(self, first: int, last: int) -> list[tuple[str, str, float]]:
        """(tensor, key, z) of statistics whose median over the steps `first` to `last` lies beyond 5 standard errors of the
        batches before the onset."""
        found = []
        for tensor, key in self.table:
            before, after = self.usual(tensor, key), self.step_values(tensor, key, first, last)
            if key not in _SHAPE or len(before) < LEAST or len(after) < 3:
                continue
            error = self._scale(tensor, key, before) * math.sqrt(1 / len(after) + 1 / len(before))
            z = (float(np.median(after)) - float(np.median(before))) / error
            if abs(z) > 5:
                found.append((tensor, key, z))
        return sorted(found, key=lambda one: -abs(one[2]))

    def still_there(self, tensor: str, key: str, first: int, later: int, last: int) -> bool:
        """The median over the steps `later` to `last` lies at least half as far from the usual, and on the same side, as that
        from `first` on. Told by its size: a few batches are too few to be sure of it by themselves."""
        usual = float(np.median(self.usual(tensor, key)))
        whole, end = (float(np.median(self.step_values(tensor, key, k, last))) - usual for k in (first, later))
        return whole * end > 0 and abs(end) >= abs(whole) / 2

    def nonfinite(self) -> tuple[int, int]:
        """(count of non-finite elements, step) of the first batch near the onset that has any. The recorded count is of the
        first million elements of a tensor; of a batch that was kept all are looked at."""
        near = [context for context in self.contexts if 0 <= self.onset - context.step <= NEAR]
        kept = {context.step: [array for micro in context.micro for _, array in _kept(micro)] for context in near}
        for step in range(self.onset - NEAR, self.onset + 1):
            count = sum(int(self.step_values(tensor, "nonfinite", step, step).sum()) for tensor in self.tensors)
            whole = sum(array.size - int(np.isfinite(array).sum()) for array in kept.get(step, ()) if array.dtype.kind == "f")
            count = max(count, whole)
            if count:
                return count, step
        return 0, self.onset

    def foreign(self) -> tuple[float, float, int] | None:
        """(share of new values, share of new kinds of values, step) of a batch near the onset most of which, of many kinds,
        came in no batch before: not rare tokens in a text, but another kind of text."""
        for tensor in self.tensors:
            for step in range(self.onset - NEAR, self.onset + 1):
                new, kinds = (self.step_values(tensor, key, step, step) for key in ("new", "kinds"))
                z = self.odd(tensor, "kinds", step)
                if z is not None and z > ODD and len(new) and new.max() > 0.5 and kinds.max() > 0.25:
                    return float(new.max()), float(kinds.max()), step
        return None

    def new_tokens(self) -> tuple[float, int]:
        """(largest share of tokens that came in no batch before, its step) near the onset; a share of 0 where it is usual."""
        best = (0.0, self.onset)
        for tensor in self.tensors:
            for step in range(self.onset - NEAR, self.onset + 1):
                z = self.odd(tensor, "new", step)
                if z is not None and z > ODD:
                    best = max(best, (float(self.step_values(tensor, "new", step, step).max()), step))
        return best


def _recorded(micro: MicroBatch) -> Iterator[tuple[str, dict[str, float]]]:
    """(tensor, numbers) of the recorded statistics; the share of the most frequent token is called ``share``."""
    for tensor, statistics in tokens_of(micro).items():
        if isinstance(statistics, Mapping):
            numbers = {
                key: float(value)
                for key, value in statistics.items()
                if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and key != "counted"
            }
            top = statistics.get("top")
            if isinstance(top, (list, tuple)) and len(top) == 2:
                numbers["share"] = float(top[1])
            yield tensor, numbers


def _kept(micro: MicroBatch) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """(tensor, its numbers) of a kept batch."""
    if micro.tensors is None or micro.skeleton is None:
        return
    try:
        arrays = tree.values(micro.skeleton, micro.tensors)
    except TrackbridgeError:
        return
    for name, array in arrays.items():
        if array.size and array.dtype.kind in "iuf":
            yield name, array


class Past:
    """What a tensor was in the batches so far, and how a new one differs. `learn` is off from the onset on, so that a change
    that stays goes on to be one."""

    def __init__(self) -> None:
        self.values: npt.NDArray[Any] | None = None
        self.pairs: npt.NDArray[Any] | None = None
        self.counts = np.zeros(_BINS)
        self.profile: FloatArray | None = None
        self.count = 0

    def compare(self, array: npt.NDArray[Any], *, learn: bool) -> Iterator[tuple[str, float]]:
        """Integers: the shares of values (``new``), of different values (``kinds``) and of neighbours along the last axis
        (``pairs``) that never came before; of those that did, the number of different ones (``variety``) and ``mixture``: how
        far their shares lie from the usual, as a Jensen-Shannon divergence in bits (IEEE Trans. Inf. Theory 37, 1991).
        Floats: ``mean``, ``std``, ``largest``, and ``profile``: how far the mean over the batch, feature by feature, lies from
        that of the batches before, as a root mean square."""
        if array.dtype.kind == "f":
            yield from self._floats(array, learn)
            return
        flat = array.reshape(-1)[:_ELEMENTS]
        values = np.unique(flat)
        if self.values is not None:
            seen = np.isin(flat, self.values)
            yield "new", float(1.0 - seen.mean())
            yield "kinds", float(1.0 - np.isin(values, self.values).mean())
            if seen.mean() > _KNOWN:
                yield "mixture", _beyond_chance(_binned(flat[seen]), self.counts)
                yield "variety", float(np.isin(values, self.values).sum())
        if learn:
            self.counts += _binned(flat)
            self.values = values if self.values is None else np.union1d(self.values, values)
        if array.ndim > 1 and array.shape[-1] > 1:
            wide = array.reshape(-1, array.shape[-1])[: max(1, _PAIRS // array.shape[-1])].astype(np.uint64)
            pairs = (wide[:, :-1] * np.uint64(0x9E3779B97F4A7C15) + wide[:, 1:]).reshape(-1)
            if self.pairs is not None:
                yield "pairs", float(1.0 - np.isin(pairs, self.pairs).mean())
            if learn:
                self.pairs = np.unique(pairs) if self.pairs is None else np.union1d(self.pairs, pairs)

    def _floats(self, array: npt.NDArray[Any], learn: bool) -> Iterator[tuple[str, float]]:
        flat = array.reshape(-1)[:_ELEMENTS]
        finite = flat[np.isfinite(flat)].astype(np.float64)
        if not finite.size:
            return
        yield "mean", float(finite.mean())
        yield "std", float(finite.std())
        yield "largest", float(np.abs(finite).max())
        if array.ndim < 2 or not array.shape[0]:
            return
        features = array.reshape(array.shape[0], -1)[:, :_FEATURES].astype(np.float64)
        profile = np.where(np.isfinite(features), features, 0.0).mean(axis=0)
        if self.profile is not None and self.profile.shape == profile.shape:
            yield "profile", float(np.sqrt(((profile - self.profile) ** 2).mean()) / max(float(finite.std()), 1e-12))
        if learn and (self.profile is None or self.profile.shape != profile.shape):
            self.profile, self.count = profile, 1
        elif learn and self.profile is not None:
            self.count += 1
            self.profile = self.profile + (profile - self.profile) / self.count


def _binned(values: npt.NDArray[Any]) -> FloatArray:
    return np.bincount((values.astype(np.int64) % _BINS), minlength=_BINS).astype(np.float64)


def _beyond_chance(counts: FloatArray, past: FloatArray) -> float:
    """How much farther a histogram lies from `past` than ones of as many values drawn from it do: of few values any histogram
    is a rough one, and a batch with many new tokens has few known ones. The draws are the same every time."""
    draws = np.random.default_rng(0).multinomial(int(counts.sum()), past / past.sum(), _DRAWS)
    return _divergence(counts, past) - float(np.mean([_divergence(draw.astype(np.float64), past) for draw in draws]))


def _divergence(p: FloatArray, q: FloatArray) -> float:
    """Of two histograms, in bits: 0 for equal shares, 1 for none in common."""
    p, q = p / p.sum(), q / q.sum()
    middle = (p + q) / 2
    parts = [one[one > 0] * np.log2(one[one > 0] / middle[one > 0]) for one in (p, q)]
    return float(sum(part.sum() for part in parts) / 2)
