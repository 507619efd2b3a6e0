"""Rows from what was measured: which series a row has, in which order. Equal names are one `Schema` object, so that the journal
and the detectors can key on it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trackbridge.names import LOCAL
from trackbridge.probes.session import Reading
from trackbridge.records import FloatArray, Row, Schema

IntArray: TypeAlias = npt.NDArray[np.int64]

MAX_LAYOUTS = 4096


@dataclass(frozen=True, slots=True)
class _Layout:
    """The names of a row, and where its values are found. `of` is kept alive: a key has its `id`."""

    schema: Schema
    places: IntArray
    of: Schema | None = None


class RowMaker:
    """The names are those of a reading's own session: the user may have watched other objects since. What the user gave wins
    over what a probe measured under the same name (a gradient norm, a loss)."""

    def __init__(self, attempt: int) -> None:
        self._attempt = attempt
        self._layouts: dict[tuple[Hashable, ...], _Layout] = {}

    def own(self, step: int, time: float, host: Mapping[str, float], reading: Reading) -> Row:
        """This rank's row; what is of its shards only carries the suffix ``_local``."""
        values, present = reading.values()
        key = (reading.session, present.tobytes(), *host)
        layout = self._layouts.get(key)
        if layout is None:
            local = reading.session.local_series
            names = [f"{name}{LOCAL}" if name in local else name for name in reading.session.series]
            found = {names[place]: len(host) + place for place in np.flatnonzero(present).tolist()}
            layout = self._lay_out(key, {**dict.fromkeys(host), **found} | {name: place for place, name in enumerate(host)})
        return self._row(step, time, layout, np.concatenate((_floats(host), values)))

    def whole(self, own: Row, named: Mapping[str, float], merged: Reading | None, *, without: Collection[str] = ()) -> Row:
        """The row of all ranks: `named` series, what `merged` statistics give, and those of `own` that could not be merged (all
        of them where there are no merged statistics, but those in `without`)."""
        values, present = merged.values() if merged is not None else (np.zeros(0), np.zeros(0, bool))
        key = (merged.session if merged else None, present.tobytes(), id(own.schema), *named)
        layout = self._layouts.get(key)
        if layout is None:
            found = dict.fromkeys(named, 0)
            if merged is not None:
                found |= {merged.session.series[place]: len(named) + place for place in np.flatnonzero(present).tolist()}
            found |= {name: place for place, name in enumerate(named)}
            for place, name in enumerate(own.schema.names):
                if (merged is None or name.endswith(LOCAL)) and name.removesuffix(LOCAL) not in found and name not in without:
                    found[name] = len(named) + len(values) + place
            layout = self._lay_out(key, found, own.schema)
        return self._row(own.step, own.time, layout, np.concatenate((_floats(named), values, own.values)))

    def logged(self, step: int, time: float, series: tuple[str, ...], values: Sequence[float]) -> Row:
        """A row of `run.log`."""
        layout = self._layouts.get(series) or self._lay_out(series, {name: place for place, name in enumerate(series)})
        return Row(-1, step, time, self._attempt, layout.schema, np.array(values, np.float64), "log")

    def _row(self, step: int, time: float, layout: _Layout, values: FloatArray) -> Row:
        return Row(-1, step, time, self._attempt, layout.schema, values[layout.places])

    def _lay_out(self, key: tuple[Hashable, ...], found: Mapping[str, int], of: Schema | None = None) -> _Layout:
        """Remember under `key` the names of `found` and where their values are."""
        if len(self._layouts) >= MAX_LAYOUTS:
            self._layouts.clear()  # those of sessions that are gone, most of all
        self._layouts[key] = _Layout(Schema(tuple(found)), np.fromiter(found.values(), np.int64, len(found)), of)
        return self._layouts[key]


def _floats(values: Mapping[str, float]) -> FloatArray:
    return np.fromiter(values.values(), np.float64, len(values))
