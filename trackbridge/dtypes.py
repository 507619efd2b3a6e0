"""How an array of any numeric dtype is stored as one that safetensors and numpy share, and read again without torch.

| dtype | stored as |
|---|---|
| bool, integers, float16/32/64 | itself, little-endian |
| bfloat16; float8 | its bits in uint16; uint8 |
| complex | float32 or float64 with one more axis: (..., 2) |
| numpy text, bytes, dates, long double | uint8 with one more axis: (..., itemsize) |

A dtype is named as torch names it (``bfloat16``) or as numpy writes it (``<f4``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Array: TypeAlias = npt.NDArray[Any]

# torch dtypes that numpy has no name for, by the unsigned integers that hold their bits
BITS: dict[str, type[np.unsignedinteger[Any]]] = {
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
    "float8_e4m3fnuz": np.uint8,
    "float8_e5m2": np.uint8,
    "float8_e5m2fnuz": np.uint8,
    "float8_e8m0fnu": np.uint8,
}
PLAIN = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64")
SAFETENSORS = dict(zip(PLAIN, ["BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "F32", "F64"], strict=True))
COMPLEX: dict[str, type[np.floating[Any]]] = {"complex64": np.float32, "complex128": np.float64}

_NUMPY = re.compile(r"[<|][biufcSUmM][0-9]{1,9}(\[[0-9]{0,9}[a-zA-Z]{1,2}\])?")


def storable(dtype: np.dtype[Any]) -> bool:
    """True unless the dtype holds objects, has fields, or is empty."""
    return dtype.kind in "biufcSUmM" and dtype.itemsize > 0


@cache
def of_torch(dtype: torch.dtype) -> str | None:
    """The dtype's name, None if it cannot be stored (quantized, sub-byte)."""
    name = str(dtype).removeprefix("torch.")
    return name if name in PLAIN or name in BITS or name in COMPLEX else None


def store_array(array: Array) -> Array:
    """Stored form, contiguous. Shares memory when it can."""
    array = np.asarray(array, order="C")
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype.name in PLAIN:
        return array
    stored: Array = array.reshape(*array.shape, 1).view(COMPLEX.get(array.dtype.name, np.uint8))
    return stored


def store_tensor(tensor: torch.Tensor) -> Array:
    """Stored form on the host, contiguous. Shares memory when it can; waits for the tensor's device."""
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    if name in BITS:
        tensor = tensor.view(getattr(torch, np.dtype(BITS[name]).name))
    elif name in COMPLEX:
        tensor = torch.view_as_real(tensor)
    array: Array = tensor.numpy()
    return array


def value(array: Array, dtype: str) -> Array:
    """The values of a stored array; bfloat16 and float8 come as float32, exactly. Raises `ValueError` if `array` is not a
    stored `dtype`."""
    _check(array, dtype)
    if dtype == "bfloat16":
        bits: Array = array.astype(np.uint32) << 16
        return bits.view(np.float32)
    if dtype in BITS:
        table = _FLOAT8[dtype]()
        return table[array]
    wanted = np.dtype(dtype)
    if array.dtype == wanted:
        return array
    return np.ascontiguousarray(array).view(wanted).reshape(array.shape[:-1])


def tensor(array: Array, dtype: str) -> torch.Tensor:
    """The CPU tensor of a stored array, sharing its memory when that is writeable. Raises `ValueError` as `value` does, and
    when this torch does not know `dtype`."""
    import torch

    _check(array, dtype)
    if not hasattr(torch, dtype):
        raise ValueError(f"torch {torch.__version__} has no dtype {dtype!r}")
    if dtype in COMPLEX:
        array = value(array, dtype)
    flat = torch.from_numpy(array if array.flags.writeable and array.flags.c_contiguous else array.copy())
    return flat.view(getattr(torch, dtype)) if dtype in BITS else flat


def _check(array: Array, dtype: str) -> None:
    if dtype in BITS:
        right = array.dtype == BITS[dtype]
    elif dtype in PLAIN:
        right = array.dtype == np.dtype(dtype)
    elif dtype in COMPLEX or _NUMPY.fullmatch(dtype):
        wanted = np.dtype(dtype)
        unit = np.dtype(COMPLEX.get(wanted.name, np.uint8))
        packed = array.dtype == unit and array.ndim > 0 and array.shape[-1] * unit.itemsize == wanted.itemsize > 0
        right = array.dtype == wanted if wanted.name in PLAIN else packed
    else:
        raise ValueError(f"unknown dtype {dtype[:40]!r}")
    if not right:
        raise ValueError(f"an array of {array.dtype}, shape {array.shape}, is no stored {dtype}")


def _float8(exponent: int, mantissa: int, bias: int, kind: str) -> Array:
    """All 256 values of an 8-bit float as float32 (OCP 8-bit floating point specification, 2023). `kind`: "ieee" has
    infinities, "fn" only NaN at the largest code, "fnuz" no negative zero and NaN in its place."""
    code = np.arange(256)
    sign = np.where(code & 0x80, -1.0, 1.0)
    power = (code >> mantissa) & (2**exponent - 1)
    fraction = (code & (2**mantissa - 1)) / 2**mantissa
    table = sign * np.where(power == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (power - bias))
    if kind == "fnuz":
        table[0x80] = np.nan
    elif kind == "fn":
        table[[0x7F, 0xFF]] = np.nan
    else:
        top = power == 2**exponent - 1
        table[top] = np.where(fraction[top] == 0, sign[top] * np.inf, np.nan)
    values: Array = table.astype(np.float32)
    return values


def _e8m0() -> Array:
    """Powers of two, 2^(code - 127); 255 is NaN (OCP microscaling formats, 2023)."""
    return np.append(2.0 ** (np.arange(255) - 127.0), np.nan).astype(np.float32)


_FLOAT8: dict[str, Callable[[], Array]] = {
    "float8_e4m3fn": lambda: _float8(4, 3, 7, "fn"),
    "float8_e4m3fnuz": lambda: _float8(4, 3, 8, "fnuz"),
    "float8_e5m2": lambda: _float8(5, 2, 15, "ieee"),
    "float8_e5m2fnuz": lambda: _float8(5, 2, 16, "fnuz"),
    "float8_e8m0fnu": _e8m0,
}
