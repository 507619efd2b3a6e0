"""What a batch was, in a few bytes: a fingerprint of its values. Numpy only.

Computed on the scribe's thread from host copies, never on the training thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

SAMPLE = 4096
_SAMPLED = "sample-"
_CHUNK = 1 << 18


def fingerprint(arrays: Mapping[str, Array]) -> str:
    """32 hexadecimal digits over the values of `arrays` in their order: equal for equal values, whatever device or dtype
    held them.

    BLAKE2b (RFC 7693), 128 bits, over each array's class, shape and values in C order: booleans and integers as int64
    (uint64 values above 2^63 - 1 wrap), floats as float64 with every NaN made the same one, complex numbers as pairs,
    text and dates as their bytes. Names are not part of it; -0.0 differs from 0.0, and the integer 1 from the float 1.0.
    """
    return _digest((array, array.shape) for array in arrays.values())


def sample_fingerprint(samples: Mapping[str, Array], shapes: Mapping[str, Sequence[int]]) -> str:
    """The same over `SAMPLE` evenly spaced elements of each array, for a batch too large to copy: it starts with
    ``sample-``. `samples` are the elements ``array.reshape(-1)[::stride(size)]``, `shapes` the shapes of the arrays."""
    return _SAMPLED + _digest((array, tuple(shapes[name])) for name, array in samples.items())


def stride(size: int) -> int:
    """The distance between the elements of a sample of `size`."""
    return max(1, -(-size // SAMPLE))


def matches(recorded: str, arrays: Mapping[str, Array]) -> bool:
    """Whether `arrays` have the `recorded` fingerprint, of either kind."""
    if not recorded.startswith(_SAMPLED):
        return fingerprint(arrays) == recorded
    samples = {name: array.reshape(-1)[:: stride(array.size)] for name, array in arrays.items()}
    return sample_fingerprint(samples, {name: array.shape for name, array in arrays.items()}) == recorded


def _digest(arrays: Iterable[tuple[Array, tuple[int, ...]]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for array, shape in arrays:
        kind = array.dtype.kind
        digest.update(f"{'i' if kind in 'biu' else kind}{shape}".encode())
        flat = array.reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            digest.update(_canonical(flat[start : start + _CHUNK]).data)
    return digest.hexdigest()


def _canonical(flat: Array) -> Array:
    kind = flat.dtype.kind
    if kind in "biu":
        return flat.astype("<i8")
    if kind in "fc":
        floats: Array = flat.astype("<c16" if kind == "c" else "<f8").view("<f8")
        floats[np.isnan(floats)] = np.nan
        return floats
    return np.frombuffer(np.ascontiguousarray(flat).tobytes(), np.uint8)
