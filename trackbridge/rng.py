"""The state of every random generator: captured cheaply, packed to plain arrays, restored and verified.

| name | generator | packed as |
|---|---|---|
| ``python`` | `random` | uint32 (630,): format, version, 625 words, has_gauss, float64 in two words |
| ``numpy`` | numpy's legacy global | uint32 (629,): format, 624 words, position, has_gauss, float64 in two words |
| ``torch`` | torch's CPU generator | uint8, torch's own bytes |
| ``cuda:0`` ... | each CUDA device in use | uint8, torch's own bytes |
| ``generator/<name>`` | what the user registered | as above by its type; numpy Generators: JSON in uint8 |

Nothing here draws a number. A state that numpy or torch would take unchecked is validated first: a wrong position in a
Mersenne state reads outside its array.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trackbridge.errors import CapsuleError, UsageError

Array: TypeAlias = npt.NDArray[Any]

FORMAT = 1
GENERATOR = "generator/"
_WORDS = 624  # of a Mersenne twister
_GLOBALS = ("python", "numpy", "torch")
_POSITIONS = {"pos": _WORDS, "buffer_pos": 4, "has_uint32": 1, "has_gauss": 1}  # numpy's own indices: largest legal value


@dataclass(frozen=True, slots=True, eq=False)
class RngState:
    """Raw states by name, as their libraries gave them. `pack` and `same` are for another thread."""

    raw: Mapping[str, Any]

    def pack(self) -> dict[str, Array]:
        """Plain arrays, the same on every version of numpy and torch."""
        return {name: _packed(state) for name, state in self.raw.items()}

    def digests(self) -> dict[str, str]:
        """BLAKE2b (RFC 7693), 128 bits in hexadecimal, of each packed state."""
        return {name: hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest() for name, array in self.pack().items()}


def check(generators: Mapping[str, Any]) -> None:
    """Raise `UsageError` if a registered generator's state cannot be captured."""
    for name, generator in generators.items():
        try:
            _packed(_getter(generator)())
        except (TypeError, NotImplementedError):
            raise UsageError(
                f"generators[{name!r}] is a {type(generator).__name__}, whose state cannot be captured; "
                "give a torch.Generator, numpy Generator, RandomState or random.Random"
            ) from None


def capture(generators: Mapping[str, Any], devices: Sequence[torch.device]) -> RngState:
    """The state of all generators now. `devices` are the devices in use, with their index; no other is touched."""
    raw: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.default_generator.get_state(),
    }
    for device in devices:
        if device.type == "cuda":
            raw[f"cuda:{device.index}"] = torch.cuda.default_generators[device.index].get_state()
    for name, generator in generators.items():
        raw[GENERATOR + name] = _getter(generator)()
    return RngState(raw)


def capture_torch(generators: Mapping[str, Any], devices: Sequence[torch.device]) -> RngState:
    """The same of torch's generators only, which takes a microsecond (numpy's takes forty)."""
    raw: dict[str, Any] = {"torch": torch.default_generator.get_state()}
    for device in devices:
        if device.type == "cuda":
            raw[f"cuda:{device.index}"] = torch.cuda.default_generators[device.index].get_state()
    for name, generator in generators.items():
        if isinstance(generator, torch.Generator):
            raw[GENERATOR + name] = generator.get_state()
    return RngState(raw)


def same(a: RngState, b: RngState) -> bool:
    """True if no generator moved between the two captures."""
    return a.raw.keys() == b.raw.keys() and all(_equal(state, b.raw[name]) for name, state in a.raw.items())


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What became of each generator. `missing`: here, but not in the record. `unused`: in the record, but not here.
    `failed`: name to reason; such a generator may be in any state."""

    restored: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Every generator of the record is here and verified, and no other is known here."""
        return not (self.missing or self.unused or self.failed)

    def __str__(self) -> str:
        devices = [name for name in self.unused if name.startswith("cuda:")]
        others = [name for name in self.unused if name not in devices]
        said = [f"restored {', '.join(self.restored) or 'nothing'}"]
        said += [f"{len(devices)} device state{'s' * (len(devices) > 1)} unused"] if devices else []
        said += [f"unused: {', '.join(others)}"] if others else []
        said += [f"not recorded: {', '.join(self.missing)}"] if self.missing else []
        said += [f"{name} failed: {why}" for name, why in self.failed.items()]
        return f"{'exact' if self.exact else 'inexact'}: {'; '.join(said)}"


def restore(packed: Mapping[str, Array], generators: Mapping[str, Any] | None = None, *, strict: bool = False) -> RestoreReport:
    """Put every generator into its packed state and read it back to be sure. States are host arrays and are only ever
    given to CPU tensors. With `strict`, anything less than exact raises `CapsuleError` naming the generators."""
    generators = generators or {}
    restored, unused, failed = [], [], {}
    for name, array in packed.items():
        generator = _find(name, generators)
        if generator is None:
            unused.append(name)
            continue
        try:
            _setter(generator)(array)
            if not np.array_equal(_packed(_getter(generator)()), array):
                raise ValueError("the generator did not take the state")
            restored.append(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    expected = [*_GLOBALS, *(GENERATOR + name for name in generators)]
    missing = [name for name in expected if name not in packed]
    report = RestoreReport(tuple(restored), tuple(missing), tuple(unused), failed)
    if strict and not report.exact:
        raise CapsuleError(f"the random state cannot be restored exactly: {report}")
    return report


# one generator ---------------------------------------------------------------------------------------------------------


def _find(name: str, generators: Mapping[str, Any]) -> Any:
    """The generator called `name` on this machine, None if there is none."""
    if name.startswith(GENERATOR):
        return generators.get(name[len(GENERATOR) :])
    if name.startswith("cuda:"):
        index = name[5:]
        if not (torch.cuda.is_available() and index.isdecimal() and int(index) < torch.cuda.device_count()):
            return None
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.cuda.default_generators[int(index)]
    return {"python": random, "numpy": np.random, "torch": torch.default_generator}.get(name)


def _getter(generator: Any) -> Callable[[], Any]:
    if isinstance(generator, torch.Generator):
        return generator.get_state
    if generator is random or isinstance(generator, random.Random):
        return generator.getstate
    if generator is np.random or isinstance(generator, np.random.RandomState):
        return lambda: generator.get_state(legacy=False)
    if isinstance(generator, np.random.Generator):
        generator = generator.bit_generator
    if isinstance(generator, np.random.BitGenerator):
        return lambda: generator.state
    raise TypeError(f"{type(generator).__name__} is not a random generator")


def _setter(generator: Any) -> Callable[[Array], None]:
    if isinstance(generator, torch.Generator):
        return lambda array: _set_torch(generator, array)
    if generator is random or isinstance(generator, random.Random):
        return lambda array: generator.setstate(_python_state(array))
    if generator is np.random or isinstance(generator, np.random.RandomState):
        return lambda array: generator.set_state(_numpy_state(array, generator.get_state(legacy=False)))
    if isinstance(generator, np.random.Generator):
        generator = generator.bit_generator

    def set_numpy(array: Array) -> None:
        generator.state = _json_state(array, generator.state)

    return set_numpy


def _set_torch(generator: torch.Generator, array: Array) -> None:
    if array.dtype != np.uint8 or array.ndim != 1:
        raise ValueError(f"expected bytes, got {array.dtype} of shape {array.shape}")
    generator.set_state(torch.from_numpy(array.copy()))


# packing ---------------------------------------------------------------------------------------------------------------


def _packed(state: Any) -> Array:
    if isinstance(state, torch.Tensor):
        return state.numpy()
    if isinstance(state, tuple):
        return np.array(_packed_python(state))
    if state["bit_generator"] == "MT19937" and "has_gauss" in state:
        inner, gauss = state["state"], _gauss(bool(state["has_gauss"]), state["gauss"])
        return np.concatenate([[FORMAT], inner["key"], [inner["pos"]], gauss]).astype(np.uint32)
    text = json.dumps({"format": FORMAT, "state": _plain(state)})
    return np.frombuffer(text.encode(), np.uint8)


@lru_cache(maxsize=4)
def _packed_python(state: tuple[int, tuple[int, ...], float | None]) -> Array:
    """Remembered: most trainings never draw from `random`, and 624 numbers take long to convert."""
    version, words, gauss = state
    return np.array([FORMAT, version, *words, *_gauss(gauss is not None, gauss or 0.0)], np.uint32)


def _python_state(array: Array) -> tuple[int, tuple[int, ...], float | None]:
    words = _words(array, _WORDS + 6)
    gauss = _ungauss(words[-3:])
    return words[1], tuple(words[2:-3]), gauss if words[-3] else None


def _numpy_state(array: Array, now: dict[str, Any]) -> dict[str, Any]:
    if array.dtype == np.uint8:
        return _json_state(array, now)
    words = _words(array, _WORDS + 5)
    inner = {"key": np.array(words[1 : _WORDS + 1], np.uint32), "pos": words[_WORDS + 1]}
    state = {"bit_generator": "MT19937", "state": inner, "has_gauss": words[-3], "gauss": _ungauss(words[-3:])}
    return _checked(state, now, "")  # type: ignore[no-any-return]


def _json_state(array: Array, now: dict[str, Any]) -> dict[str, Any]:
    document = json.loads(array.tobytes())
    if document["format"] != FORMAT:
        raise ValueError(f"format {document['format']!r} is not known")
    return _checked(document["state"], now, "")  # type: ignore[no-any-return]


def _words(array: Array, length: int) -> list[int]:
    if array.dtype != np.uint32 or array.shape != (length,):
        raise ValueError(f"expected uint32 of shape ({length},), got {array.dtype} of shape {array.shape}")
    if array[0] != FORMAT:
        raise ValueError(f"format {array[0]} is not known")
    return array.tolist()  # type: ignore[no-any-return]


def _gauss(has: bool, value: float) -> list[int]:
    return [int(has), *np.array([value], "<f8").view("<u4").tolist()]


def _ungauss(words: Sequence[int]) -> float:
    return float(np.array(words[1:], "<u4").view("<f8")[0])


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(item) for key, item in state.items()}
    return state.tolist() if isinstance(state, (np.ndarray, np.generic)) else state


def _checked(state: Any, now: Any, name: str) -> Any:
    """`state` in the very shape of `now`, the generator's present state; raises `ValueError` where they differ."""
    if isinstance(now, dict):
        if not isinstance(state, dict) or state.keys() != now.keys():
            raise ValueError(f"{name or 'state'} does not fit this kind of generator")
        return {key: _checked(state[key], item, key) for key, item in now.items()}
    if isinstance(now, np.ndarray):
        array = np.array(state, now.dtype)
        if array.shape != now.shape:
            raise ValueError(f"{name} has shape {array.shape}, not {now.shape}")
        return array
    if isinstance(now, str) and state != now:
        raise ValueError(f"the state is of a {state!r}, the generator a {now}")
    if isinstance(now, (int, np.integer)) and (not isinstance(state, int) or not 0 <= state <= _POSITIONS.get(name, 2**256)):
        raise ValueError(f"{name} is out of range")
    return state


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(item, b[key]) for key, item in a.items())
    return bool(a == b)
