"""The sufficient statistics of several ranks become those of the whole, in float64, field by field (`Field.over_ranks`).

- norm: of shards, sqrt(sum n^2 / copies), where `copies` ranks hold the same piece; what every rank holds is taken as it is
- count: sum / copies; clip: as norm, with the copies of the norm that clipping returned
- moments: pairwise, as micro-batches are merged
- shape: the mean over the ranks that have it (a positive number that does not depend on size, of other tokens on each rank)
- top: the largest numbers, then what they belong to; what several ranks have counts once
- largest: the maximum over the ranks that have the value
- every: the least, so that it is there only where every rank has it
- equal: numbers of replicas, which are compared; told: what that has found
- sum, max; mean over the ranks that have the value; worst: the pair with the largest first number

What no rule can make whole, a parameter of unknown layout, is taken out: neither it nor a total over it has a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trackbridge.probes import moments
from trackbridge.probes.base import BoolArray
from trackbridge.records import FloatArray
from trackbridge.slab import Slab

IntArray: TypeAlias = npt.NDArray[np.int64]

MEASURED = ("grad_seen", "grad_counted", "weight_seen", "update_seen", "exp_avg_seen", "exp_avg_sq_seen", "hottest_seen",
            "grad_missing")  # fmt: skip


def merge_ranks(slab: Slab, copies: FloatArray, ranks: FloatArray, exchanged: IntArray | None = None) -> FloatArray:
    """One vector from the vectors of all ranks, shape (ranks, numbers); `copies` is `layout.parameter_copies`. Only numbers at
    the places `exchanged` differ between ranks, if given."""
    merged: FloatArray = ranks[0].copy()
    result = slab.unpack(merged)
    parts = {name: columns.T for name, columns in slab.unpack(ranks.T).items()}  # each of shape (ranks, size)
    differ = np.ones(len(merged), bool) if exchanged is None else np.zeros(len(merged), bool)
    differ[exchanged if exchanged is not None else []] = True
    touched = slab.unpack(differ)
    known = copies > 0
    everywhere = copies == len(ranks)
    shares = np.where(known, copies, 1.0)
    for field in slab.fields:
        name = field.name
        if not touched[name].any():
            continue
        stack = parts[name]
        with np.errstate(over="ignore", invalid="ignore"):
            match field.over_ranks:
                case "norm":
                    value = np.where(everywhere, stack[0], np.sqrt((np.square(stack) / shares).sum(0)))
                case "count":
                    value = np.where(everywhere, stack[0], (stack / shares).sum(0))
                case "clip":
                    held = np.maximum(parts["clip_copies"], 1.0)
                    value = np.where(held[0] == len(ranks), stack[0], np.sqrt((np.square(stack) / held).sum(0)))
                case "moments":
                    value = _merge_moments(stack)
                case "sum":
                    value = stack.sum(0)
                case "mean":
                    seen = parts[f"{name}_seen"] > 0
                    value = np.where(seen, stack, 0.0).sum(0) / np.maximum(seen.sum(0), 1)
                case "shape":
                    value = stack.sum(0) / np.maximum((stack > 0).sum(0), 1)
                case "top":
                    value = _largest(stack)
                case "largest":
                    seen = parts[f"{name}_seen"] > 0
                    value = np.where(seen.any(0), np.where(seen, stack, -np.inf).max(0), 0.0)
                case "every":
                    value = stack.min(0)
                case "equal":
                    _compare(name, parts, everywhere, result)
                    continue
                case "told":
                    continue
                case "worst":
                    value = stack[np.argmax(stack[:, 0])]
                case _:
                    value = stack.max(0)
        result[name][:] = value
    if not known.all():
        for name in MEASURED:
            result[name][~known] = 0.0
        result["clip_seen"][:] = 0.0
    return merged


def _largest(stack: FloatArray) -> FloatArray:
    """The largest numbers of all ranks and what they belong to, shape (2 * count,), from (ranks, 2 * count)."""
    count = stack.shape[1] // 2
    numbers, owners = stack[:, :count].reshape(-1), stack[:, count:].reshape(-1)
    order = np.argsort(np.where(np.isnan(numbers), -np.inf, -numbers), kind="stable")
    _, first = np.unique(owners[order], return_index=True)
    chosen = order[np.sort(first)][:count]
    value = np.zeros(2 * count)
    value[: len(chosen)], value[count : count + len(chosen)] = numbers[chosen], owners[chosen]
    return value


def _compare(name: str, parts: Mapping[str, FloatArray], everywhere: BoolArray, result: Mapping[str, FloatArray]) -> None:
    """Tell of numbers which must be equal on all ranks that hold the whole whether they are. The first rank's stay."""
    stack, whole = parts[name], everywhere & (parts[f"{name}_seen"] > 0).all(0)
    result[f"{name}_differs"][:] = whole & (stack != stack[0]).any(0)
    result[f"{name}_compared"][:] = whole.any() and len(stack) > 1
    result[f"{name}_seen"][:] = whole


def _merge_moments(stack: FloatArray) -> FloatArray:
    """Rows of all ranks, shape (ranks, sites * WIDTH), to one row per site, flat."""
    rows = stack.reshape(len(stack), -1, moments.WIDTH)
    rest = (rows[:, :, moments.MAX].max(0), rows[:, :, moments.NONFINITE].sum(0), rows[:, :, moments.FIRES].sum(0))
    parts = np.moveaxis(rows[:, :, : moments.MAX], 2, 0)  # (5, ranks, sites)
    while (count := parts.shape[1]) > 1:
        pairs = count // 2
        together = np.stack(moments.merge(tuple(parts[:, :pairs]), tuple(parts[:, pairs : 2 * pairs])))
        parts = np.concatenate((together, parts[:, 2 * pairs :]), axis=1)
    return np.stack((*parts[:, 0], *rest), axis=1).reshape(-1)
