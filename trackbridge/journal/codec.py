"""A record as the payload of a journal entry, and back. No pickle: binary for numbers, strict JSON for the rest.

A row is its numbers (NaN payloads and infinities exact) and the digest of its schema, which is an entry of its own. Any
other record is JSON, followed by the raw bytes of the arrays the JSON describes (dtype, shape). The `seq` and the `step` of
a record are in the entry's header, not in the payload.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from trackbridge.histograms import BINS
from trackbridge.records import (
    Anomaly,
    Artifact,
    Histograms,
    Hypothesis,
    MicroBatch,
    Params,
    Record,
    Row,
    RunEnd,
    Schema,
    StepContext,
)
from trackbridge.rundir import dumps

SCHEMA = 1
ROW = 2
MALFORMED = (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError, struct.error, zlib.error)
"""What decoding raises on a payload whose checksum holds but that trackbridge did not write."""

KINDS: dict[type, int] = {Row: ROW, Anomaly: 3, Artifact: 4, Params: 5, RunEnd: 6, StepContext: 7, Histograms: 8}
TYPES: dict[int, type] = {number: kind for kind, number in KINDS.items()}

_ROW = struct.Struct("<dIBxxx8s")  # time, attempt, kind, schema digest; then the values as little-endian float64
_JSON_LENGTH = struct.Struct("<I")
_ROW_KINDS = ("step", "log")
_ARRAY_KINDS = "biufcSU"  # numpy dtype kinds that are plain bytes: no objects, no structures
_MAX_SCHEMA = 64 << 20  # bytes of JSON; bounds what a hostile file can make us allocate

_ARRAY_FIELDS = ("rng", "tensors", "opening_rng", "counts")


def step_of(record: Record) -> int:
    """The step a record belongs to, -1 for the kinds that have none."""
    return -1 if isinstance(record, (Params, RunEnd)) else int(record.step)


# -- schemas and rows


def encode_schema(schema: Schema) -> tuple[bytes, bytes]:
    """(digest of 8 bytes, payload). Equal names give equal digests."""
    text = json.dumps(schema.names, ensure_ascii=False).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return digest, digest + zlib.compress(text, 6)


def digest_of_schema(payload: bytes) -> bytes:
    """The digest by which rows name the schema in `payload`."""
    return payload[:8]


def decode_schema(payload: bytes) -> tuple[bytes, Schema]:
    inflate = zlib.decompressobj()
    text = inflate.decompress(payload[8:], _MAX_SCHEMA)
    return digest_of_schema(payload), Schema(tuple(str(name) for name in json.loads(text)))


def encode_row(row: Row, digest: bytes) -> bytes:
    """`digest` is the one of the row's schema."""
    values = np.asarray(row.values, dtype="<f8", order="C")
    if values.shape != (len(row.schema.names),):
        raise ValueError(f"a row of {len(row.schema.names)} names has values of shape {values.shape}")
    return _ROW.pack(row.time, row.attempt, _ROW_KINDS.index(row.kind), digest) + values.tobytes()


def digest_in_row(payload: bytes) -> bytes:
    """Which schema the row in `payload` needs."""
    return payload[_ROW.size - 8 : _ROW.size]


def decode_row(seq: int, step: int, payload: bytes, schema: Schema) -> Row:
    time, attempt, kind, _ = _ROW.unpack_from(payload)
    values = np.frombuffer(payload, dtype="<f8", offset=_ROW.size).astype(np.float64)
    if len(values) != len(schema.names):
        raise ValueError("a row does not fit its schema")
    return Row(seq, step, time, attempt, schema, values, "log" if _ROW_KINDS[kind] == "log" else "step")


# -- everything else


def encode(record: Record) -> tuple[int, bytes]:
    """(kind, payload) of any record but a row."""
    arrays: list[np.ndarray] = []
    body = _body(record, arrays)
    del body["seq"]
    body.pop("step", None)
    text = _text(body)
    return KINDS[type(record)], b"".join([_JSON_LENGTH.pack(len(text)), text, *(array.tobytes() for array in arrays)])


def decode(kind: int, seq: int, step: int, payload: bytes) -> Record:
    """The record in `payload`. Raises one of `MALFORMED` when it is not one."""
    (length,) = _JSON_LENGTH.unpack_from(payload)
    start = _JSON_LENGTH.size + length
    body = json.loads(payload[_JSON_LENGTH.size : start])
    known = {f.name for f in fields(TYPES[kind])}
    body = {key: value for key, value in body.items() if key in known}  # a newer minor version may have added some
    body["seq"] = seq
    if "step" in known:
        body["step"] = step
    return _BUILD[kind](body, _Blobs(payload, start))


def _text(body: dict[str, Any]) -> bytes:
    """`dumps`, which looks at every value, only where `json` finds something it may not write."""
    try:
        return json.dumps(body, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError):
        return dumps(body).encode()


def _body(record: Any, arrays: list[np.ndarray]) -> dict[str, Any]:
    """The fields of a dataclass as JSON; what `_ARRAY_FIELDS` hold goes to `arrays`, the JSON says dtype and shape."""
    body: dict[str, Any] = {}
    for f in fields(record):
        value = getattr(record, f.name)
        if isinstance(record, Histograms) and f.name in ("counts", "copies"):
            value = _sparse(record) if f.name == "counts" else None
        if f.name in _ARRAY_FIELDS and value is not None:
            value = {name: _describe(array, arrays) for name, array in value.items()}
        elif isinstance(value, tuple):
            value = [_body(item, arrays) if isinstance(item, (Hypothesis, MicroBatch)) else item for item in value]
        body[f.name] = value
    return body


def _describe(array: np.ndarray, arrays: list[np.ndarray]) -> list[Any]:
    if array.dtype.kind not in _ARRAY_KINDS:
        raise TypeError(f"an array of dtype {array.dtype} cannot be journalled")
    arrays.append(array)
    return [array.dtype.str, list(array.shape)]


class _Blobs:
    """The raw bytes behind the JSON, taken in the order in which they were written."""

    def __init__(self, payload: bytes, start: int) -> None:
        self._payload = payload
        self._at = start

    def take(self, described: dict[str, Any] | None) -> dict[str, np.ndarray] | None:
        if described is None:
            return None
        return {name: self._one(np.dtype(dtype), shape) for name, (dtype, shape) in described.items()}

    def _one(self, dtype: np.dtype[Any], shape: list[int]) -> np.ndarray:
        if dtype.kind not in _ARRAY_KINDS:
            raise ValueError(f"dtype {dtype} in a journal")
        count = int(np.prod(shape, dtype=np.int64))
        if count == 0 or dtype.itemsize == 0:
            return np.zeros(shape, dtype)
        array: np.ndarray = np.frombuffer(self._payload, dtype, count, self._at).reshape(shape).copy()
        self._at += array.nbytes
        return array


def _anomaly(body: dict[str, Any], blobs: _Blobs) -> Anomaly:
    for name in ("severity", "value", "expected", "score", "time"):
        body[name] = float(body[name])  # NaN and infinities are strings in JSON
    mover = body["first_mover"]
    body["first_mover"] = None if mover is None else (mover[0], mover[1])
    body["cascade"] = tuple((series, step) for series, step in body["cascade"])
    body["hypotheses"] = tuple(_hypothesis(item) for item in body["hypotheses"])
    body["ranks"] = tuple(body["ranks"])
    body["notes"] = tuple(body["notes"])
    return Anomaly(**body)


def _hypothesis(body: dict[str, Any]) -> Hypothesis:
    for name in ("evidence_for", "evidence_against", "of_batch"):
        body[name] = tuple(body.get(name, ()))
    known = {f.name for f in fields(Hypothesis)}
    return Hypothesis(**{key: value for key, value in body.items() if key in known})


def _timed(kind: type[Artifact | Params | RunEnd]) -> Callable[[dict[str, Any], _Blobs], Record]:
    def build(body: dict[str, Any], blobs: _Blobs) -> Record:
        body["time"] = float(body["time"])
        return kind(**body)

    return build


def _context(body: dict[str, Any], blobs: _Blobs) -> StepContext:
    body["rng"] = blobs.take(body["rng"])
    body["micro"] = tuple(_micro(item, blobs) for item in body["micro"])
    body["notes"] = tuple(body["notes"])
    return StepContext(**body)


def _histograms(body: dict[str, Any], blobs: _Blobs) -> Histograms:
    """Counts are stored as (column, count) of the columns that are not empty, few of the many."""
    body["time"], body["names"] = float(body["time"]), tuple(body["names"])
    sparse = blobs.take(body["counts"]) or {}
    counts = np.zeros((len(body["names"]), BINS), np.int64)
    counts[sparse["row"], sparse["column"]] = sparse["count"]
    return Histograms(**{**body, "counts": counts, "copies": sparse["copies"]})


def _sparse(record: Histograms) -> dict[str, np.ndarray]:
    rows, columns = np.nonzero(record.counts)
    return {
        "row": rows.astype(np.uint32),
        "column": columns.astype(np.uint16),
        "count": record.counts[rows, columns].astype(np.uint64),
        "copies": np.asarray(record.copies, np.float64),
    }


def _micro(body: dict[str, Any], blobs: _Blobs) -> MicroBatch:
    body["rng"] = blobs.take(body["rng"])
    body["tensors"] = blobs.take(body["tensors"])
    body["opening_rng"] = blobs.take(body.get("opening_rng"))
    body["sample_ids"] = None if body["sample_ids"] is None else tuple(body["sample_ids"])
    return MicroBatch(**body)


_BUILD: dict[int, Callable[[dict[str, Any], _Blobs], Record]] = {
    KINDS[Anomaly]: _anomaly,
    KINDS[Artifact]: _timed(Artifact),
    KINDS[Params]: _timed(Params),
    KINDS[RunEnd]: _timed(RunEnd),
    KINDS[StepContext]: _context,
    KINDS[Histograms]: _histograms,
}
