"""The data files of a capsule, each with its writer and its reader side by side: series, histograms, RNG states, batches.

Readers assume nothing about who wrote the file; they go through `trackbridge.untrusted`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trackbridge import untrusted
from trackbridge.errors import CapsuleError
from trackbridge.histograms import BINS
from trackbridge.names import is_wide
from trackbridge.records import Histograms, MicroBatch, Row, StepContext
from trackbridge.rundir import dumps
from trackbridge.tokens import tokens_of

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

WINDOW = "window.parquet"
HISTORY = "history.parquet"
LAYERS = "layers.parquet"
HISTOGRAMS = "histograms.parquet"
RNG = "rng.safetensors"
BATCHES = "batches.parquet"
TENSORS = "batches.safetensors"

_ROW_COLUMNS = ("step", "time", "attempt")
_LAYER_COLUMNS = ("step", "family", "layer")
_BATCH_COLUMNS = (
    "step", "micro", "loader", "epoch", "index", "workers", "base_seed", "sample_ids", "fingerprint", "tokens", "kept",
    "why_not_kept",
)  # fmt: skip


# -- series


def write_rows(folder: Path, rows: Sequence[Row]) -> None:
    """``window.parquet``: a row per step, run-level series as float64. ``layers.parquet``: a row per step and layer.
    A series that a step does not have is null; NaN is NaN."""
    import pyarrow as pa

    _write_narrow(folder / WINDOW, rows)
    values = [dict(row.items()) for row in rows]
    keys: list[tuple[int, str, str]] = []
    cells: list[dict[str, float]] = []
    for row, value in zip(rows, values, strict=True):
        of_step: dict[tuple[str, str], dict[str, float]] = {}
        for name in value:
            if is_wide(name):
                family, _, rest = name.partition("/")
                layer, _, statistic = rest.rpartition("/")
                of_step.setdefault((family, layer), {})[statistic] = value[name]
        keys += [(row.step, family, layer) for family, layer in of_step]
        cells += of_step.values()
    statistics = list(dict.fromkeys(name for cell in cells for name in cell))
    wide = {"step": pa.array([key[0] for key in keys], pa.int64())}
    wide["family"] = pa.array([key[1] for key in keys], pa.string())
    wide["layer"] = pa.array([key[2] for key in keys], pa.string())
    for name in statistics:
        wide[name] = pa.array([cell.get(name) for cell in cells], pa.float64())
    _write(folder / LAYERS, wide)


def write_history(folder: Path, rows: Sequence[Row]) -> None:
    """``history.parquet``: run-level series of steps before the window, as in ``window.parquet``."""
    _write_narrow(folder / HISTORY, rows)


def _write_narrow(path: Path, rows: Sequence[Row]) -> None:
    import pyarrow as pa

    narrow = list(dict.fromkeys(name for row in rows for name in row.schema.names if not is_wide(name)))
    table = {"step": pa.array([row.step for row in rows], pa.int64())}
    table["time"] = pa.array([row.time for row in rows], pa.float64())
    table["attempt"] = pa.array([row.attempt for row in rows], pa.int64())
    values = [dict(row.items()) for row in rows]
    for name in narrow:
        if name not in _ROW_COLUMNS:
            table[name] = pa.array([value.get(name) for value in values], pa.float64())
    _write(path, table)


def read_frame(path: Path) -> pd.DataFrame:
    """A table as pandas shows it best: strings as objects (equal ones are one object), nulls of numbers as NaN."""
    frame: pd.DataFrame = untrusted.read_parquet(path).to_pandas(ignore_metadata=True)
    for name in frame.columns:
        if frame[name].dtype.name == "category":
            frame[name] = frame[name].astype(object)
    return frame


def read_narrow(path: Path) -> dict[int, dict[str, float]]:
    """{step: {series: value}} of the run-level series in a table; a null is absent, NaN is NaN."""
    table = untrusted.read_parquet(path)
    steps = _integers(table, "step", path)
    found: dict[int, dict[str, float]] = {step: {} for step in steps}
    for name in table.column_names:
        if name not in _ROW_COLUMNS:
            for step, value in zip(steps, _column(table, name, path), strict=True):
                if value is not None:
                    found[step][name] = _float(value, path)
    return found


def read_series(window: Path, layers: Path) -> dict[int, dict[str, float]]:
    """{step: {series: value}}, wide series included; a null is absent, NaN is NaN."""
    found = read_narrow(window)
    table = untrusted.read_parquet(layers)
    steps, families, owners = (_column(table, name, layers) for name in _LAYER_COLUMNS)
    for statistic in table.column_names:
        if statistic in _LAYER_COLUMNS:
            continue
        names: dict[tuple[str, str], str] = {}  # each name once, however many rows repeat it
        for step, family, owner, value in zip(steps, families, owners, _column(table, statistic, layers), strict=True):
            if value is not None and step in found:
                key = (family, owner)
                name = names.get(key) or names.setdefault(key, f"{family}/{owner}/{statistic}")
                found[step][name] = _float(value, layers)
    return found


# -- histograms


def write_histograms(folder: Path, records: Sequence[Histograms]) -> bool:
    """``histograms.parquet``: step, time, attempt, name, copies, and (column, count) of the columns that are not empty.
    Returns False, and writes nothing, when there is no record."""
    import pyarrow as pa

    if not records:
        return False
    places = [np.nonzero(record.counts) for record in records]
    sizes = [len(rows) for rows, _ in places]
    names = [[record.names[row] for row in rows.tolist()] for record, (rows, _) in zip(records, places, strict=True)]
    copies = [record.copies[rows] for record, (rows, _) in zip(records, places, strict=True)]
    counts = [record.counts[place] for record, place in zip(records, places, strict=True)]
    table = {
        "step": pa.array(np.repeat([record.step for record in records], sizes), pa.int64()),
        "time": pa.array(np.repeat([record.time for record in records], sizes), pa.float64()),
        "attempt": pa.array(np.repeat([record.attempt for record in records], sizes), pa.int64()),
        "name": pa.array([name for each in names for name in each], pa.string()),
        "copies": pa.array(np.concatenate(copies), pa.float64()),
        "column": pa.array(np.concatenate([columns for _, columns in places]), pa.int64()),
        "count": pa.array(np.concatenate(counts), pa.int64()),
    }
    _write(folder / HISTOGRAMS, table)
    return True


def read_histograms(path: Path) -> list[Histograms]:
    """The records that were written, by step; a tensor without any element is left out."""
    table = untrusted.read_parquet(path)
    steps, attempts, columns, counts = (_integers(table, name, path) for name in ("step", "attempt", "column", "count"))
    times, copies, names = (_column(table, name, path) for name in ("time", "copies", "name"))
    if any(not 0 <= column < BINS for column in columns) or any(count < 0 for count in counts):
        raise CapsuleError(f"{path.name} holds a column or a count that no histogram has")
    tensors: dict[tuple[int, int], dict[str, tuple[float, float, list[int], list[int]]]] = {}
    cells = 0
    for key, when, name, copy, column, count in zip(
        zip(steps, attempts, strict=True), times, names, copies, columns, counts, strict=True
    ):
        of_step = tensors.setdefault(key, {})
        if name not in of_step:
            cells += BINS
            if not isinstance(name, str) or cells > untrusted.PARQUET_CELLS:
                raise CapsuleError(f"{path.name} names too many tensors, or one by no name")
            of_step[name] = (_float(when, path), _float(copy, path), [], [])
        of_step[name][2].append(column)
        of_step[name][3].append(count)
    found = []
    for (step, attempt), of_step in sorted(tensors.items()):
        dense = np.zeros((len(of_step), BINS), np.int64)
        for row, (_, _, at, many) in enumerate(of_step.values()):
            dense[row, at] = many
        first = next(iter(of_step.values()))
        each = np.array([copy for _, copy, _, _ in of_step.values()], np.float64)
        found.append(Histograms(-1, step, first[0], attempt, tuple(of_step), dense, each))
    return found


# -- RNG states: "step/<step>/<generator>" before the step, "micro/<step>/<k>/<generator>" after the fetch of micro-batch k,
#    "opening/<step>/<k>/<generator>" before the loader's iterator was made, where micro-batch k is the first of an epoch;
#    the metadata maps a step to the digests (JSON) of torch's generators at its end


def write_rng(folder: Path, contexts: Sequence[StepContext]) -> None:
    from safetensors.numpy import save_file

    arrays: dict[str, np.ndarray] = {}
    for context in contexts:
        arrays |= {f"step/{context.step}/{name}": np.ascontiguousarray(a) for name, a in context.rng.items()}
        for k, micro in enumerate(context.micro):
            arrays |= {f"micro/{context.step}/{k}/{name}": np.ascontiguousarray(a) for name, a in (micro.rng or {}).items()}
            opening = (micro.opening_rng or {}).items()
            arrays |= {f"opening/{context.step}/{k}/{name}": np.ascontiguousarray(a) for name, a in opening}
    after = {str(context.step): json.dumps(dict(context.rng_after)) for context in contexts if context.rng_after is not None}
    save_file(arrays, folder / RNG, metadata=after or None)


class RngStates:
    """The states in one ``rng.safetensors``, read as they are asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names, self._after = untrusted.safetensors_header(path)
        self.steps = sorted({_number(name.split("/")[1], path) for name in self._names if name.startswith("step/")})

    def before(self, step: int) -> dict[str, np.ndarray]:
        """Generator name -> packed state before `step`; empty when it was not recorded."""
        return self._under(f"step/{step}/")

    def after_fetch(self, step: int, micro: int) -> dict[str, np.ndarray]:
        """The state after the fetch of micro-batch `micro` of `step`, when that fetch moved it; else empty."""
        return self._under(f"micro/{step}/{micro}/")

    def opening(self, step: int, micro: int) -> dict[str, np.ndarray]:
        """The state before the loader's iterator was made, when micro-batch `micro` of `step` opened an epoch; else empty."""
        return self._under(f"opening/{step}/{micro}/")

    def after(self, step: int) -> dict[str, str] | None:
        """Digests of torch's generators at the end of `step`, by generator; None where they are not known."""
        text = self._after.get(str(step))
        if text is None:
            return None
        digests = _json(text, self._path.name)
        if not isinstance(digests, dict):
            raise CapsuleError(f"{self._path.name} holds no digests of the generators after step {step}")
        return digests

    def _under(self, prefix: str) -> dict[str, np.ndarray]:
        return untrusted.read_safetensors(
            self._path, {name: name[len(prefix) :] for name in self._names if name.startswith(prefix)}
        )


# -- batches


def _without_runs(statistics: Any) -> Any:
    if not isinstance(statistics, Mapping):
        return statistics
    return {name: {"count": value["count"]} if name == "ngram" else _without_runs(value) for name, value in statistics.items()}


def _statistics(micro: MicroBatch, *, runs: bool) -> str:
    statistics = tokens_of(micro)
    return dumps(statistics if runs else _without_runs(statistics))


def write_batches(folder: Path, contexts: Sequence[StepContext], *, runs: bool) -> None:
    """``batches.parquet``: identity of every micro-batch. The batches themselves are `write_tensors`.

    `runs`: with the tokens of the most repeated run, which are a piece of the batch; else with its count only.
    """
    import pyarrow as pa

    micros = [(context.step, k, micro) for context in contexts for k, micro in enumerate(context.micro)]
    table = {
        "step": pa.array([step for step, _, _ in micros], pa.int64()),
        "micro": pa.array([k for _, k, _ in micros], pa.int64()),
        "loader": pa.array([m.loader for _, _, m in micros], pa.int64()),
        "epoch": pa.array([m.epoch for _, _, m in micros], pa.int64()),
        "index": pa.array([m.index for _, _, m in micros], pa.int64()),
        "workers": pa.array([m.workers for _, _, m in micros], pa.int64()),
        "base_seed": pa.array([m.base_seed for _, _, m in micros], pa.int64()),
        "sample_ids": pa.array([_ids(m) for _, _, m in micros], pa.string()),
        "fingerprint": pa.array([m.fingerprint for _, _, m in micros], pa.string()),
        "tokens": pa.array([_statistics(m, runs=runs) for _, _, m in micros], pa.string()),
        "kept": pa.array([m.tensors is not None for _, _, m in micros], pa.bool_()),
        "why_not_kept": pa.array([m.why_no_tensors for _, _, m in micros], pa.string()),
    }
    _write(folder / BATCHES, table)


def write_tensors(folder: Path, contexts: Sequence[StepContext]) -> bool:
    """``batches.safetensors``: leaves as "<step>/<micro>/<leaf>", skeletons (`trackbridge.tree`) in the metadata, because a
    skeleton may hold the batch's strings. Returns False, and writes nothing, when no batch was kept."""
    from safetensors.numpy import save_file

    arrays: dict[str, np.ndarray] = {}
    skeletons: dict[str, str] = {}
    for context in contexts:
        for k, micro in enumerate(context.micro):
            if micro.tensors is not None:
                skeletons[f"{context.step}/{k}"] = json.dumps(micro.skeleton, allow_nan=False)
                arrays |= {f"{context.step}/{k}/{leaf}": np.ascontiguousarray(a) for leaf, a in micro.tensors.items()}
    if skeletons:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(arrays, folder / TENSORS, metadata=skeletons)
    return bool(skeletons)


class Batches(Mapping[int, tuple[MicroBatch, ...]]):
    """The micro-batches of each step of one rank. `batches[step]` reads that step's tensors, if they are here.

    `frame` is ``batches.parquet``: step, micro, loader, epoch, index, sample ids, fingerprint, token statistics.
    """

    def __init__(self, table: Path, tensors: Path | None, rng: RngStates) -> None:
        self.frame = read_frame(table)
        missing = [name for name in _BATCH_COLUMNS if name not in self.frame.columns]
        if missing:
            raise CapsuleError(f"{table.name} lacks the column {missing[0]!r}")
        if len(self.frame) and self.frame["step"].dtype.kind not in "iu":
            raise CapsuleError(f"{table.name}: the column 'step' does not hold whole numbers")
        self._tensors = tensors
        self._rng = rng
        self._leaves: dict[str, list[str]] = {}
        self._skeletons: dict[str, str] = {}
        if tensors is not None:
            names, self._skeletons = untrusted.safetensors_header(tensors)
            for name in names:
                step, _, rest = name.partition("/")
                k, _, leaf = rest.partition("/")
                self._leaves.setdefault(f"{step}/{k}", []).append(leaf)
        self._rows: dict[int, list[Mapping[str, Any]]] = {}
        for row in self.frame.to_dict("records"):
            self._rows.setdefault(int(row["step"]), []).append({str(key): value for key, value in row.items()})

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, step: object) -> bool:
        return step in self._rows  # without reading its tensors

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._rows))

    def __getitem__(self, step: int) -> tuple[MicroBatch, ...]:
        return tuple(self._micro(step, k, row) for k, row in enumerate(self._rows[step]))

    def _micro(self, step: int, k: int, row: Mapping[str, Any]) -> MicroBatch:
        key = f"{step}/{k}"
        skeleton, tensors = None, None
        if self._tensors is not None and key in self._skeletons:
            skeleton = _json(self._skeletons[key], self._tensors)
            tensors = untrusted.read_safetensors(self._tensors, {f"{key}/{leaf}": leaf for leaf in self._leaves.get(key, ())})
        ids = _text(row["sample_ids"])
        return MicroBatch(
            loader=_optional(row["loader"]),
            epoch=_optional(row["epoch"]),
            index=_optional(row["index"]),
            sample_ids=None if ids is None else _sample_ids(ids),
            fingerprint=_text(row["fingerprint"]),
            tokens=_tokens(_text(row["tokens"]) or "{}"),
            rng=self._rng.after_fetch(step, k) or None,
            skeleton=skeleton,
            tensors=tensors,
            why_no_tensors=_text(row["why_not_kept"]),
            workers=_optional(row["workers"]),
            base_seed=_optional(row["base_seed"]),
            opening_rng=self._rng.opening(step, k) or None,
        )


def _ids(micro: MicroBatch) -> str | None:
    return None if micro.sample_ids is None else json.dumps(list(micro.sample_ids))


def _sample_ids(text: str) -> tuple[int | str, ...]:
    ids = _json(text, BATCHES)
    if not isinstance(ids, list) or not all(isinstance(item, (int, str)) for item in ids):
        raise CapsuleError(f"{BATCHES} holds sample ids that are no list of numbers and words")
    return tuple(ids)


def _tokens(text: str) -> Any:
    statistics = _json(text, BATCHES)
    if not isinstance(statistics, dict):
        raise CapsuleError(f"{BATCHES} holds token statistics that are no object")
    return statistics


def _json(text: str, where: object) -> Any:
    try:
        return untrusted.parse_json(text)
    except ValueError as error:
        raise CapsuleError(f"{where} holds JSON that cannot be read: {error}") from None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _optional(value: Any) -> int | None:
    if value is None or value != value:
        return None
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise CapsuleError(f"{BATCHES} holds {value!r:.40} where a whole number belongs")
    return int(value)


def _float(value: Any, path: Path) -> float:
    if not isinstance(value, (int, float)):
        raise CapsuleError(f"{path.name}: a series holds {value!r:.40}, which is no number")
    return float(value)


def _number(text: str, path: Path) -> int:
    try:
        return int(text)
    except ValueError:
        raise CapsuleError(f"{path.name} names the step {text[:40]!r}, which is no number") from None


def _column(table: pa.Table, name: str, path: Path) -> list[Any]:
    import pyarrow as pa

    if name not in table.column_names:
        raise CapsuleError(f"{path.name} lacks the column {name!r}")
    column = table.column(name)
    if not pa.types.is_dictionary(column.type):
        values: list[Any] = column.to_pylist()
        return values
    same = column.unify_dictionaries().combine_chunks()
    words = same.dictionary.to_pylist()  # each once, however often it is used
    return [None if index is None else words[index] for index in same.indices.to_pylist()]


def _integers(table: pa.Table, name: str, path: Path) -> list[int]:
    values = _column(table, name, path)
    if not all(isinstance(value, int) for value in values):
        raise CapsuleError(f"{path.name}: the column {name!r} does not hold whole numbers")
    return values


def _write(path: Path, table: Mapping[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(dict(table)), path, compression="snappy")
