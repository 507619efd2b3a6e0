"""What one rank tells of one step, as bytes, and how the run-level series of several ranks become one, by name.

Sufficient statistics are merged by `trackbridge.probes.merge`; here is what has no more than a name and a value. How a series
combines is in `RULES`; the ``ranks/`` series say how far the ranks are apart and which of them stands out.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trackbridge.records import FloatArray

BoolArray: TypeAlias = npt.NDArray[np.bool_]

_MAGIC = b"tbs1"
_HEAD = struct.Struct("<4s8sqdBIII")  # magic, layout, step, tokens, broken, bytes of names, values, numbers

RULES: tuple[tuple[str, str], ...] = (
    ("train/loss_scale", "first"),
    ("train/loss", "loss"),  # the mean weighted by tokens
    ("train/lr", "first"),
    ("train/sample_loss_max/", "own"),
    ("train/sample_loss_argmax/", "own"),
    ("train/sample_loss_max", "max"),
    ("optim/", "max"),
    ("mem/", "max"),
    ("host/", "max"),
    ("guard/", "max"),
    ("trackbridge/overhead_share", "max"),
    ("trackbridge/thinning", "max"),
    ("trackbridge/", "sum"),  # counts of what was lost
    ("", "mean"),
)
"""(prefix, rule): the first prefix that fits. "first" is of the lowest rank that has the series, which is where all agree;
"own" is left out: it says something of one rank only, whose own journal has it."""

LOSS = "train/loss"
_ARGMAX = "train/sample_loss_argmax"
_WAITING = ("perf/backward_s", "perf/optimizer_s")


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """`names` and `values` are the run-level series of the rank's own row; `numbers` is `Reading.share`, `layout` that of its
    session. `tokens` is the weight of its loss in the mean, 0 if not known. `broken`: its own loss or activations are not
    finite (gradients say nothing here: one rank's NaN is in those of all)."""

    step: int
    layout: bytes
    tokens: float
    broken: bool
    names: tuple[str, ...]
    values: FloatArray
    numbers: FloatArray

    def pack(self) -> bytes:
        """Zeros among `numbers` take a bit each: most statistics have their own cadence."""
        text = _text(self.names)
        here = self.numbers != 0
        head = _HEAD.pack(
            _MAGIC, self.layout, self.step, self.tokens, self.broken, len(text), len(self.values), len(self.numbers)
        )
        return b"".join((head, text, self.values.tobytes(), np.packbits(here).tobytes(), self.numbers[here].tobytes()))

    @classmethod
    def unpack(cls, data: bytes) -> Share:
        """Raises `ValueError` for what is no share."""
        if len(data) < _HEAD.size or data[:4] != _MAGIC:
            raise ValueError("another rank runs another version of trackbridge")
        _, layout, step, tokens, broken, size, count, total = _HEAD.unpack_from(data)
        at = _HEAD.size + size
        names = _names(data[_HEAD.size : at])
        values = np.frombuffer(data, np.float64, count, at)
        at += values.nbytes
        bits = np.frombuffer(data, np.uint8, (total + 7) // 8, at)
        numbers = np.zeros(total)
        numbers[np.unpackbits(bits, count=total).view(bool)] = np.frombuffer(data, np.float64, -1, at + bits.nbytes)
        return cls(step, layout, tokens, bool(broken), names, values, numbers)


@lru_cache(maxsize=256)
def _text(names: tuple[str, ...]) -> bytes:
    return "\n".join(names).encode()


@lru_cache(maxsize=256)
def _names(text: bytes) -> tuple[str, ...]:
    return tuple(text.decode().split("\n")) if text else ()


@lru_cache(maxsize=4096)
def rule(name: str) -> str:
    """How the series `name` of several ranks becomes one."""
    return next(rule for prefix, rule in RULES if name.startswith(prefix))


def by_name(shares: Sequence[Share]) -> dict[str, float]:
    """The run-level series of all ranks together, and the ``ranks/`` series; `shares[rank]` is of that rank."""
    table = _Table(shares)
    weights = np.array([share.tokens for share in shares])
    found = dict(zip(table.names, table.values[0].tolist(), strict=True))
    for name in [name for name in found if rule(name) == "own"]:
        del found[name]
    for name in table.unlike():
        found[name] = _combined(rule(name), *table.column(name), weights)
    if _ARGMAX in found:
        ranks, values = table.column("train/sample_loss_max")
        found[_ARGMAX] = float(table.values[ranks[np.argmax(values)], table.names[_ARGMAX]])  # the row, on that rank
    return found | _spread(table, shares)


class _Table:
    """The values of all ranks: `values` and `present`, both of shape (ranks, names)."""

    def __init__(self, shares: Sequence[Share]) -> None:
        sorts = {share.names: None for share in shares}
        names = dict.fromkeys(name for sort in sorts for name in sort)
        self.names = {name: place for place, name in enumerate(names)}
        if len(sorts) == 1:
            self.values = np.stack([share.values for share in shares])
            self.present: BoolArray = np.ones(self.values.shape, bool)
            return
        self.values = np.zeros((len(shares), len(names)))
        self.present = np.zeros(self.values.shape, bool)
        places = {sort: [self.names[name] for name in sort] for sort in sorts}
        for rank, share in enumerate(shares):
            self.values[rank, places[share.names]] = share.values
            self.present[rank, places[share.names]] = True

    def unlike(self) -> list[str]:
        """The series that are not the same on all ranks, and those that are added whatever they are."""
        alike = (self.values == self.values[0]).all(0) & self.present.all(0)
        named = [name for name, same in zip(self.names, alike.tolist(), strict=True) if not same or rule(name) == "sum"]
        return [name for name in named if rule(name) != "own"]

    def column(self, name: str) -> tuple[npt.NDArray[np.intp], FloatArray]:
        """The ranks that have the series, and their values."""
        place = self.names.get(name)
        if place is None:
            return np.zeros(0, np.intp), np.zeros(0)
        ranks = np.flatnonzero(self.present[:, place])
        return ranks, self.values[ranks, place]


def _combined(how: str, ranks: npt.NDArray[np.intp], values: FloatArray, weights: FloatArray) -> float:
    if how == "sum":
        return float(values.sum())
    if how == "first" or (values == values[0]).all():
        return float(values[0])
    if how == "max":
        return float(values.max())  # NaN if there is one
    weight = weights[ranks]
    if how == "loss" and (weight > 0).all():
        return float((values * weight).sum() / weight.sum())
    return float(values.mean())


def _spread(table: _Table, shares: Sequence[Share]) -> dict[str, float]:
    """How far the ranks are apart, and which one stands out."""
    broken = [rank for rank, share in enumerate(shares) if share.broken]
    found = {"ranks/merged": float(len(shares)), "ranks/nonfinite": float(len(broken))}
    if broken:
        found["ranks/nonfinite_rank"] = float(broken[0])
    ranks, losses = table.column(LOSS)
    if len(ranks) > 1:
        worst = int(np.argmax(losses))  # the first NaN, if there is one
        found["ranks/loss_min"] = float(np.fmin.reduce(losses))
        found["ranks/loss_max"], found["ranks/loss_max_rank"] = float(losses[worst]), float(ranks[worst])
    ranks, busy = table.column("perf/step_s")
    if len(ranks) > 1:
        waits = sum(table.values[:, table.names[name]] for name in _WAITING if name in table.names)  # 0 where absent
        busy = busy - waits[ranks] if isinstance(waits, np.ndarray) else busy
        slowest = int(np.argmax(busy))
        found["ranks/busy_s_max"], found["ranks/slowest"] = float(busy[slowest]), float(ranks[slowest])
    return found
