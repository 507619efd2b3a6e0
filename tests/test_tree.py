"""A tree comes back to the bit, and nothing but plain data passes."""

from __future__ import annotations

import collections
import json
import math
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trackbridge import dtypes, tree
from trackbridge.errors import CapsuleError, UsageError

FLOAT8 = [name for name in dtypes.BITS if name.startswith("float8") and hasattr(torch, name)]


def round_trip(obj: Any, **options: Any) -> Any:
    skeleton, leaves = tree.pack(obj)
    text = json.dumps(skeleton, allow_nan=False)
    text.encode("utf-8")
    return tree.unpack(json.loads(text), tree.to_numpy(leaves), **options)


def identical(a: Any, b: Any) -> bool:
    """Same types, same bits, same order of keys."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)
    if isinstance(a, (np.ndarray, np.generic)):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        same = isinstance(b, dict) and len(a) == len(b)
        return same and all(identical(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, float):
        return isinstance(b, float) and struct.pack(">d", a) == struct.pack(">d", b)
    return type(a) is type(b) and a == b


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=3,
)
arrays = hnp.arrays(
    dtype=hnp.scalar_dtypes() | hnp.unicode_string_dtypes(max_len=4),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())  # surrogates included
    | st.binary(max_size=20)
    | hnp.from_dtype(np.dtype(np.float64))
    | hnp.from_dtype(np.dtype(np.int16))
)
trees = st.recursive(
    scalars | arrays,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def native(obj: Any) -> Any:
    """Arrays in native byte order: what a round trip promises."""
    if isinstance(obj, (np.ndarray, np.generic)):
        return obj.astype(obj.dtype.newbyteorder("<"))
    if isinstance(obj, dict):
        return {key: native(item) for key, item in obj.items()}
    return type(obj)(native(item) for item in obj) if isinstance(obj, (list, tuple)) else obj


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trees)
def test_any_plain_tree_comes_back_to_the_bit(obj: Any) -> None:
    assert identical(native(obj), round_trip(obj))


TORCH_DTYPES = [getattr(torch, name) for name in (*dtypes.PLAIN, *dtypes.BITS, *dtypes.COMPLEX) if hasattr(torch, name)]


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3)], ids=str)
def test_every_torch_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    assert identical(tensor, round_trip(tensor))
    assert identical({"a": [tensor]}, round_trip({"a": [tensor]}))


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_values_agree_with_torch(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    ours = round_trip(codes.view(getattr(torch, name)), torch_tensors=False)
    np.testing.assert_array_equal(ours, codes.view(getattr(torch, name)).to(torch.float32).numpy())


def test_bfloat16_values_agree_with_torch() -> None:
    codes = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    np.testing.assert_array_equal(round_trip(codes, torch_tensors=False), codes.to(torch.float32).numpy())


def test_views_are_stored_as_seen() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    z = torch.randn(3, dtype=torch.complex64)
    for view in (base.T, base[::2, 1::2], base.expand(2, 4, 6), base[1, 2], z.conj(), z.conj().imag, base.flip(0)):
        assert torch.equal(round_trip(view).resolve_conj(), view.resolve_conj().resolve_neg())
    array = np.arange(24).reshape(4, 6)
    for view in (array.T, array[::2, ::-1], np.broadcast_to(array, (2, 4, 6)), np.asfortranarray(array), array.astype(">i4")):
        np.testing.assert_array_equal(round_trip(view), view)


def test_tied_tensors_are_one_leaf_and_stay_tied() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 4))
    skeleton, leaves = tree.pack({"embed": weight, "head": weight.detach(), "transposed": weight.T})
    assert list(leaves) == ["embed", "transposed"]
    back = tree.unpack(skeleton, tree.to_numpy(leaves))
    assert back["embed"] is back["head"] and back["transposed"] is not back["embed"]


def test_values_name_every_occurrence() -> None:
    """So that a batch has the same values whether its labels are its inputs or a copy of them."""
    x = torch.arange(3)
    for labels in (x, x.clone()):
        skeleton, leaves = tree.pack({"x": x, "labels": labels, "x#2": torch.zeros(1)})
        values = tree.values(skeleton, tree.to_numpy(leaves))
        assert [array.tolist() for array in values.values()] == [[0, 1, 2], [0, 1, 2], [0.0]]


def test_leaves_that_would_share_a_name_do_not() -> None:
    obj = {
        "a/b": np.array(1),
        "a": {"b": np.array(2)},
        1: np.array(3),
        "1": np.array(4),
        "__metadata__": np.array(5),
        "": np.array(6),
        "\ud800": np.array(7),
    }
    assert identical(obj, round_trip(obj))


def test_state_dicts_of_real_training_objects() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    for _ in range(3):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    for obj in (model.state_dict(), optimizer.state_dict(), scheduler.state_dict()):
        assert identical(dict(obj), round_trip(obj))
    twin = torch.optim.AdamW(model.parameters())
    twin.load_state_dict(round_trip(optimizer.state_dict()))
    assert identical(twin.state_dict(), optimizer.state_dict())


def test_mappings_and_named_tuples_come_back_plain() -> None:
    Point = collections.namedtuple("Point", "x y")
    got = round_trip([collections.OrderedDict(b=1, a=2), collections.UserDict(k=3), Point(1, 2), np.str_("s"), torch.Size([2])])
    assert identical(got, [{"b": 1, "a": 2}, {"k": 3}, (1, 2), "s", (2,)])


class Unknown:
    pass


@pytest.mark.parametrize(
    ("obj", "words"),
    [
        ({"a": [1, Unknown()]}, r"'a/1': a .*Unknown"),
        ({"a": {3, 4}}, "'a': a set"),
        ({"f": len}, "builtin_function"),
        (Unknown(), "this object"),
        ({"k": {Unknown(): 1}}, "'k': a dict key"),
        ({"o": np.array([None])}, "'o': .*dtype object"),
        ({"r": np.zeros(2, dtype=[("x", "f4")])}, "'r'"),
        ({"m": np.ma.masked_array([1], [True])}, "'m': .*MaskedArray"),
        ({"s": torch.eye(2).to_sparse()}, "'s': a torch.sparse_coo"),
        ({"z": torch.empty(2, device="meta")}, "'z': .*meta"),
        ({"j": torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)}, "'j'"),
    ],
)
def test_what_is_not_plain_data_is_refused_with_its_place(obj: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tree.pack(obj)


def test_large_integers_do_not_meet_the_limits_of_json_readers() -> None:
    for number in (2**63, -(2**63) - 1, 2**64, 10**5000):
        assert round_trip(number) == number
    assert tree.pack(2**64 - 1)[0] == 2**64 - 1 and tree.pack(2**64)[0] == {"$int": "0x10000000000000000"}


def test_cycles_and_crowds_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="cycle"):
        tree.pack(loop)
    with pytest.raises(UsageError, match="too many"):
        tree.pack(list(range(100)), max_objects=100)
    tree.pack(list(range(99)), max_objects=100)


def test_save_and_load(tmp_path: Any) -> None:
    obj = {
        "w": torch.randn(2, 3).to(torch.bfloat16),
        "c": torch.randn(2, dtype=torch.complex64),
        "n": [math.nan, "x"],
        "u": np.array("é"),
    }
    skeleton, leaves = tree.pack(obj)
    tree.save(tmp_path / "s", skeleton, tree.to_numpy(leaves), metadata={"step": 3})
    skeleton, arrays, metadata = tree.load(tmp_path / "s")
    assert identical(obj, tree.unpack(skeleton, arrays))
    assert metadata == {"step": 3}
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["state.json", "state.safetensors"]


def test_reading_needs_no_torch(tmp_path: Any) -> None:
    skeleton, leaves = tree.pack({"w": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)})
    tree.save(tmp_path, skeleton, tree.to_numpy(leaves))
    code = f"""
import sys, pathlib
from trackbridge import tree
skeleton, arrays, _ = tree.load(pathlib.Path({str(tmp_path)!r}))
print(tree.unpack(skeleton, arrays, torch_tensors=False)["w"].tolist(), "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[1.5, -2.0] False"


LEAF = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    "skeleton",
    [
        {"$tensor": "gone", "dtype": "float32"},
        {"$tensor": "a", "dtype": "float64"},
        {"$tensor": "a", "dtype": "bfloat16"},
        {"$tensor": "a", "dtype": "complex128"},
        {"$tensor": "a", "dtype": "load"},
        {"$tensor": ["a"], "dtype": "float32"},
        {"$tensor": "a", "dtype": ["float32"]},
        {"$tensor": "a"},
        {"$array": "a", "dtype": "O"},
        {"$array": "a", "dtype": "f4,f4"},
        {"$array": "a", "dtype": "<U99999"},
        {"$array": "a", "dtype": "<f3"},
        {"$array": "a", "dtype": "<M8[zz]"},
        {"$python": "os.system"},
        {"$float": "zz"},
        {"$float": 3},
        {"$float": "00"},
        {"$int": "os"},
        {"$str": "ff"},
        {"$dict": [[[], 1]]},
        {"$dict": [1]},
        {"$dict": None},
        {"$tuple": 3},
    ],
    ids=str,
)
def test_a_damaged_skeleton_is_a_capsule_error(skeleton: Any) -> None:
    for read in (tree.unpack, tree.values, lambda s, a: tree.unpack(s, a, torch_tensors=False)):
        with pytest.raises(CapsuleError, match="skeleton"):
            read(skeleton, {"a": LEAF})


def test_a_deep_skeleton_is_a_capsule_error() -> None:
    deep: Any = 0
    for _ in range(100_000):
        deep = [deep]
    try:
        with pytest.raises(CapsuleError, match="deep"):
            tree.unpack(deep, {})
    finally:
        while deep:  # freeing it level by level keeps the interpreter's own recursion out of it
            deep = deep[0]


def test_damaged_files_are_capsule_errors(tmp_path: Any) -> None:
    tree.save(tmp_path, *_stored({"w": torch.ones(100)}))
    whole = {name: (tmp_path / name).read_bytes() for name in ("state.json", "state.safetensors")}
    for name, data in whole.items():
        for damage in (data[: len(data) // 2], b"", b"\xff" + data[1:], None):
            (tmp_path / name).unlink(missing_ok=True)
            if damage is not None:
                (tmp_path / name).write_bytes(damage)
            with pytest.raises(CapsuleError, match="cannot read the state"):
                tree.load(tmp_path)
        (tmp_path / name).write_bytes(data)
    document = json.loads(whole["state.json"])
    for changed in ({**document, "format_version": 2}, [], {"format_version": 1}):
        (tmp_path / "state.json").write_text(json.dumps(changed))
        with pytest.raises(CapsuleError):
            tree.load(tmp_path)
    (tmp_path / "state.json").write_text("[" * 100_000)
    with pytest.raises(CapsuleError):
        tree.load(tmp_path)


def _stored(obj: Any) -> tuple[Any, Any]:
    skeleton, leaves = tree.pack(obj)
    return skeleton, tree.to_numpy(leaves)
