"""Nested state without pickle: a tree of plain Python objects becomes a JSON skeleton and a flat dict of arrays.

``pack`` takes what state dicts and batches are made of; ``unpack`` gives it back. Nothing else passes, so reading a tree
that a stranger wrote can build data and never run code. Reading works without torch.

| in the tree | in the skeleton | comes back as |
|---|---|---|
| None, bool, finite float, str, int of 64 bits | itself | itself |
| other float, int, str | ``{"$float": bits}``, ``{"$int": hex}``, ``{"$str": hex}`` | the same bits |
| list; tuple | list; ``{"$tuple": [...]}`` | list; tuple (a namedtuple too) |
| mapping with str keys; with int, tuple, ... keys | object; ``{"$dict": [[key, value], ...]}`` | dict, order kept |
| bytes, bytearray | ``{"$bytes": leaf}`` | bytes |
| numpy array; scalar | ``{"$array": leaf, "dtype": "<f4"}``; ``{"$scalar": ...}`` | the same, native byte order |
| torch tensor (DTensor: the local shard) | ``{"$tensor": leaf, "dtype": "bfloat16"}`` | CPU tensor, or a numpy array |

`leaf` names an array: the path in the tree, keys joined by ``/`` (``~1`` for a slash in a key, ``~0`` for ``~``). Arrays are
stored as `trackbridge.dtypes` says. A tensor that occurs twice is one leaf, and one tensor when it comes back.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from trackbridge import dtypes
from trackbridge.dtypes import Array
from trackbridge.errors import CapsuleError, UsageError

if TYPE_CHECKING:
    import torch

Leaf: TypeAlias = "Array | torch.Tensor"
Json: TypeAlias = Any

FORMAT_VERSION = 1
MAX_DEPTH = 100
MAX_JSON_BYTES = 256 * 1024 * 1024
STATE_ARRAYS = "state.safetensors"
STATE_JSON = "state.json"


def pack(obj: Any, *, max_objects: int | None = None) -> tuple[Json, dict[str, Leaf]]:
    """The tree `obj` as (skeleton, leaves). Leaves are the arrays and tensors themselves, not copies: `to_numpy` moves
    them to the host in stored form. Raises `UsageError` naming the path and the type of what cannot be stored, or when
    the tree has more than `max_objects` nodes."""
    packer = _Packer(max_objects)
    return packer.node(obj, "", 0), packer.leaves


def to_numpy(leaves: Mapping[str, Leaf]) -> dict[str, Array]:
    """Leaves in stored form on the host (`trackbridge.dtypes`). Waits for the device of CUDA leaves."""
    return {
        name: dtypes.store_array(leaf) if isinstance(leaf, np.ndarray) else dtypes.store_tensor(leaf)
        for name, leaf in leaves.items()
    }


def unpack(skeleton: Json, arrays: Mapping[str, Array], *, torch_tensors: bool = True) -> Any:
    """The tree again. With ``torch_tensors=False`` tensors come back as numpy arrays of their values (float8 and bfloat16
    as float32, exactly). Raises `CapsuleError` if skeleton and arrays do not belong together."""
    cache: dict[tuple[str, str], Any] = {}

    def leaf(kind: str, name: str, dtype: str) -> Any:
        if (kind, name) not in cache:
            if kind == "$tensor" and torch_tensors:
                cache[kind, name] = dtypes.tensor(_array(arrays, name), dtype)
            else:
                value = dtypes.value(_array(arrays, name), dtype)
                cache[kind, name] = value.tobytes() if kind == "$bytes" else value[()] if kind == "$scalar" else value
        return cache[kind, name]

    return _walk(skeleton, leaf)


def values(skeleton: Json, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """The values of every array in the tree, in tree order, by leaf name; one that occurs again is there again, as
    ``name#2``, the same object. Errors as in `unpack`."""
    decoded: dict[str, Array] = {}
    found: dict[str, Array] = {}

    def leaf(_: str, name: str, dtype: str) -> None:
        if name not in decoded:
            decoded[name] = dtypes.value(_array(arrays, name), dtype)
        key, times = name, 1
        while key in found or (times > 1 and key in arrays):
            times += 1
            key = f"{name}#{times}"
        found[key] = decoded[name]

    _walk(skeleton, leaf)
    return found


def save(directory: Path, skeleton: Json, arrays: Mapping[str, Array], *, metadata: Mapping[str, Any] | None = None) -> None:
    """Write ``state.safetensors`` and ``state.json`` into `directory`, fsynced. `metadata` is JSON. Copies no array and
    holds the interpreter only between writes: it runs beside training, on gigabytes."""
    directory.mkdir(parents=True, exist_ok=True)
    document = {"format_version": FORMAT_VERSION, "metadata": dict(metadata or {}), "skeleton": skeleton}
    text = json.dumps(document, allow_nan=False).encode()
    _write(directory / STATE_ARRAYS, [_header(arrays), *(array.reshape(-1).view(np.uint8).data for array in arrays.values())])
    _write(directory / STATE_JSON, [text])


def load(directory: Path) -> tuple[Json, dict[str, Array], dict[str, Any]]:
    """(skeleton, arrays, metadata) as `save` wrote them. Raises `CapsuleError` when damaged or of a newer format."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = directory / STATE_JSON
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CapsuleError(f"{path} is larger than {MAX_JSON_BYTES} bytes")
        document = json.loads(path.read_text(encoding="utf-8"))
        version, skeleton, metadata = document["format_version"], document["skeleton"], document["metadata"]
        if version != FORMAT_VERSION:
            raise CapsuleError(f"{path} has format version {version!r}; this trackbridge reads {FORMAT_VERSION}: upgrade it")
        return skeleton, load_file(str(directory / STATE_ARRAYS)), metadata
    except (OSError, ValueError, LookupError, TypeError, RecursionError, SafetensorError) as error:
        raise CapsuleError(f"cannot read the state in {directory}: {type(error).__name__}: {error}") from None


# writing ---------------------------------------------------------------------------------------------------------------


class _Packer:
    def __init__(self, max_objects: int | None) -> None:
        self.leaves: dict[str, Leaf] = {}
        self._names: dict[Any, str] = {}
        self._left = sys.maxsize if max_objects is None else max_objects
        self._torch = sys.modules.get("torch")

    def node(self, obj: Any, path: str, depth: int) -> Json:
        self._left -= 1
        if self._left < 0:
            raise UsageError("too many Python objects to store; keep data in tensors or arrays")
        if depth > MAX_DEPTH:
            raise UsageError(f"{path[:80]!r} is nested deeper than {MAX_DEPTH} levels (a cycle?)")
        if obj is None or obj is True or obj is False:
            return obj
        if self._torch is not None and isinstance(obj, self._torch.Tensor):
            return self._tensor(obj, path)
        if isinstance(obj, (np.ndarray, np.generic)) and not isinstance(obj, (np.str_, np.bytes_)):
            return self._array(obj, path)
        if isinstance(obj, (str, int, float)):
            return _scalar(obj)
        if isinstance(obj, Mapping):
            return self._mapping(obj, path, depth)
        if isinstance(obj, (list, tuple)):
            items = [self.node(item, f"{path}/{index}", depth + 1) for index, item in enumerate(obj)]
            return items if isinstance(obj, list) else {"$tuple": items}
        if isinstance(obj, (bytes, bytearray)):
            return {"$bytes": self._add(np.frombuffer(bytes(obj), np.uint8), path, None)}
        raise UsageError(f"cannot store {_shown(path)}: a {_type(obj)} is not plain data (no pickle is used)")

    def _mapping(self, obj: Mapping[Any, Any], path: str, depth: int) -> Json:
        if all(isinstance(key, str) and not key.startswith("$") and _encodable(key) for key in obj):
            return {str.__str__(key): self.node(item, f"{path}/{_escape(key)}", depth + 1) for key, item in obj.items()}
        return {
            "$dict": [
                [self._key(key, path, depth), self.node(item, f"{path}/{_escape(str(key))}", depth + 1)]
                for key, item in obj.items()
            ]
        }

    def _key(self, key: Any, path: str, depth: int) -> Json:
        if isinstance(key, tuple):
            return {"$tuple": [self._key(item, path, depth) for item in key]}
        if key is None or key is True or key is False:
            return key
        if isinstance(key, (str, int, float)) and not isinstance(key, np.generic):
            return _scalar(key)
        raise UsageError(f"cannot store {_shown(path)}: a dict key of type {_type(key)}")

    def _array(self, obj: Array | np.generic, path: str) -> Json:
        dtype = obj.dtype
        if isinstance(obj, np.ma.MaskedArray) or not dtypes.storable(dtype):
            raise UsageError(f"cannot store {_shown(path)}: a {_type(obj)} of dtype {dtype} is not plain numbers")
        name = dtype.newbyteorder("<").str
        if isinstance(obj, np.ndarray):
            return {"$array": self._add(np.asarray(obj), path, id(obj)), "dtype": name}
        return {"$scalar": self._add(np.asarray(obj), path, None), "dtype": name}

    def _tensor(self, obj: torch.Tensor, path: str) -> Json:
        torch = self._torch
        assert torch is not None
        obj = obj.detach()
        if type(obj) is not torch.Tensor:
            obj = self._own(obj, path)
        dtype = dtypes.of_torch(obj.dtype)
        if dtype is None or obj.layout != torch.strided or obj.is_nested or obj.is_meta:
            raise UsageError(f"cannot store {_shown(path)}: a {obj.layout} tensor of {obj.dtype} on {obj.device}")
        if type(obj) is not torch.Tensor:
            if hasattr(obj, "__tensor_flatten__"):
                raise UsageError(f"cannot store {_shown(path)}: tensor subclass {_type(obj)}")
            obj = obj.as_subclass(torch.Tensor)
        # The same memory seen the same way is one leaf: tied weights, or labels that are the inputs.
        same = (obj.data_ptr(), obj.shape, obj.stride(), obj.dtype, obj.device) if obj.numel() else None
        return {"$tensor": self._add(obj, path, same), "dtype": dtype}

    def _own(self, obj: Any, path: str) -> torch.Tensor:
        """What this process has of a tensor that may be spread over several."""
        if hasattr(obj, "to_local"):  # DTensor
            obj = obj.to_local()
        if hasattr(obj, "local_shards"):  # ShardedTensor
            shards = obj.local_shards()
            if len(shards) != 1:
                raise UsageError(f"cannot store {_shown(path)}: a ShardedTensor with {len(shards)} local shards")
            obj = shards[0].tensor.detach()
        return obj  # type: ignore[no-any-return]

    def _add(self, leaf: Leaf, path: str, same: Any) -> str:
        known = self._names.get(same) if same is not None else None
        if known is not None:
            return known
        name = path[1:].encode("utf-8", "backslashreplace").decode() or "~"
        if name in self.leaves or name == "__metadata__":  # keys 1 and "1" in one dict; a word safetensors keeps for itself
            name = f"{name}~{len(self.leaves)}"
        self.leaves[name] = leaf
        if same is not None:
            self._names[same] = name
        return name


def _scalar(obj: str | int | float) -> Json:
    if isinstance(obj, str):
        text = str.__str__(obj)
        return text if _encodable(text) else {"$str": text.encode("utf-8", "surrogatepass").hex()}
    if isinstance(obj, int):
        whole = int(obj)
        return whole if -(2**63) <= whole < 2**64 else {"$int": hex(whole)}
    number = float(obj)
    return number if math.isfinite(number) else {"$float": struct.pack(">d", number).hex()}


def _header(arrays: Mapping[str, Array]) -> bytes:
    """The safetensors header: its length, then JSON with each array's place in what follows."""
    entries, offset = {}, 0
    for name, array in arrays.items():
        place = [offset, offset + array.nbytes]
        entries[name] = {"dtype": dtypes.SAFETENSORS[array.dtype.name], "shape": array.shape, "data_offsets": place}
        offset = place[1]
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write(path: Path, parts: list[bytes | memoryview]) -> None:
    with path.open("wb") as handle:
        for part in parts:
            handle.write(part)
        handle.flush()
        os.fsync(handle.fileno())


# reading ---------------------------------------------------------------------------------------------------------------


_LEAVES = ("$tensor", "$array", "$scalar", "$bytes")


def _walk(skeleton: Json, leaf: Callable[[str, str, str], Any]) -> Any:
    try:
        return _build(skeleton, leaf)
    except RecursionError:
        raise CapsuleError("the skeleton is nested too deeply") from None
    except (LookupError, ValueError, TypeError, struct.error) as error:
        raise CapsuleError(f"the skeleton is damaged: {error}") from None


def _build(node: Json, leaf: Callable[[str, str, str], Any]) -> Any:
    if isinstance(node, list):
        return [_build(item, leaf) for item in node]
    if not isinstance(node, dict):
        return node
    tag = next(iter(node), "")
    if not tag.startswith("$"):
        return {key: _build(item, leaf) for key, item in node.items()}
    body = node[tag]
    if tag in _LEAVES:
        return leaf(tag, body, node.get("dtype", "|u1"))
    if tag == "$tuple":
        return tuple([_build(item, leaf) for item in body])
    if tag == "$dict":
        return {_build(key, leaf): _build(item, leaf) for key, item in body}
    if tag == "$float":
        return float(struct.unpack(">d", bytes.fromhex(body))[0])
    if tag == "$int":
        return int(body, 16)
    if tag == "$str":
        return bytes.fromhex(body).decode("utf-8", "surrogatepass")
    raise ValueError(f"unknown kind {tag!r}")


def _array(arrays: Mapping[str, Array], name: str) -> Array:
    if name not in arrays:
        raise LookupError(f"array {name!r} is missing")
    return arrays[name]


def _encodable(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _shown(path: str) -> str:
    return repr(path[1:]) if path else "this object"


def _type(obj: Any) -> str:
    kind = type(obj)
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__module__ != "builtins" else kind.__qualname__
