"""Whatever bytes a stranger's capsule holds, with digests that fit: it is read or refused in one line; nothing else happens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.capsules import adopt, make
from tests.test_histograms import a_record
from trackbridge import capsule_parts as parts
from trackbridge import tree
from trackbridge.capsule import SpikeCapsule, load
from trackbridge.errors import CapsuleError

STATE = "rank-0000/state/state.json"
ARRAYS = "rank-0000/state/state.safetensors"

READS: dict[str, Callable[[SpikeCapsule], Any]] = {
    "window.parquet": lambda c: (c.window, c.series()),
    "layers.parquet": lambda c: (c.layers, c.series()),
    "histograms.parquet": lambda c: c.histograms,
    "rank-0000/rng.safetensors": lambda c: ([c.rng(step) for step in c.steps], c.rng_states().after(12)),
    "rank-0000/batches.parquet": lambda c: [c.batches[step] for step in c.batches],
    "rank-0000/batches.safetensors": lambda c: [c.batches[step] for step in c.batches],
    STATE: lambda c: c.state(),
    ARRAYS: lambda c: c.state(),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capsule with a file of every kind."""
    folder = tmp_path_factory.mktemp("fuzz")
    path = make(folder / "spike-13")
    parts.write_histograms(folder, [a_record(10), a_record(12)])
    adopt(path, "histograms.parquet", (folder / "histograms.parquet").read_bytes())
    skeleton, leaves = tree.pack({"models": {"": {"w": np.arange(6.0), "n": float("nan")}}, "optimizers": {"": {0: (1, b"x")}}})
    tree.save(folder / "state", skeleton, tree.to_numpy(leaves), metadata={"step": 10})
    for name in ("state.json", "state.safetensors"):
        adopt(path, f"rank-0000/state/{name}", (folder / "state" / name).read_bytes())
    load(path)
    for read in READS.values():
        read(load(path))
    return path


def tried(path: Path, read: Callable[[SpikeCapsule], Any]) -> None:
    """Loaded and read, or refused in one line; and nothing new beside it."""
    before = sorted(path.parent.rglob("*"))
    try:
        read(load(path))
    except CapsuleError as error:
        assert "\n" not in str(error) and len(str(error)) < 600, str(error)
    assert sorted(path.parent.rglob("*")) == before


@st.composite
def damage(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """A few edits: bytes replaced, taken out, put in, doubled, or the end cut off."""
    edits = draw(
        st.lists(st.tuples(st.sampled_from("rtidc"), st.integers(0, 2**20), st.binary(max_size=24)), min_size=1, max_size=4)
    )

    def change(data: bytes) -> bytes:
        for kind, at, piece in edits:
            at %= len(data) + 1
            end = at + len(piece)
            data = {
                "r": data[:at] + piece + data[end:],
                "t": data[:at] + data[end:],
                "i": data[:at] + piece + data[at:],
                "d": data[:end] + data[at:end] * 3 + data[end:],
                "c": data[:at],
            }[kind]
        return data

    return change


@pytest.mark.parametrize("name", READS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(change=damage())
def test_any_bytes_of_a_data_file(name: str, good: Path, tmp_path_factory: pytest.TempPathFactory, change: Any) -> None:
    box = tmp_path_factory.mktemp("box")
    path = Path(shutil.copytree(good, box / good.name))
    adopt(path, name, change((path / name).read_bytes()))
    tried(path, READS[name])
    shutil.rmtree(box)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["NaN", "../x.json", "Infinity"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def places(node: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON document."""
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [at] * bool(at) + [place for key, value in inner for place in places(value, (*at, key))]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(where=st.integers(0, 10**6), value=json_values, drop=st.booleans())
def test_any_value_anywhere_in_the_manifest(good: Path, where: int, value: Any, drop: bool) -> None:
    file = good / "manifest.json"
    original = file.read_text(encoding="utf-8")
    document = json.loads(original)
    found = places(document)
    *path, last = found[where % len(found)]
    node = document
    for key in path:
        node = node[key]
    if drop and isinstance(node, dict):
        del node[last]
    else:
        node[last] = value
    try:
        file.write_text(json.dumps(document), encoding="utf-8")
        tried(good, lambda c: (c.window, c.series(), c.batches, c.histograms, c.rng(c.step), c.to_json(), str(c.anomaly)))
    finally:
        file.write_text(original, encoding="utf-8")
