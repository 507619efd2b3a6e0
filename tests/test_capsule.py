"""Capsules: what is written comes back, and nothing that a stranger wrote can hurt."""

from __future__ import annotations

import json
import math
import os
import pickle
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.capsules import STEPS, adopt, an_anomaly, edit, make, some_contexts, some_rows
from trackbridge import capsule as capsules
from trackbridge import untrusted
from trackbridge.capsule import FileEntry, check_entries, load
from trackbridge.config import DetectionConfig, ParametersConfig
from trackbridge.errors import CapsuleError, ReferenceNotFoundError
from trackbridge.records import Row, Schema

# -- round trip


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    loaded = load(make(tmp_path / "spike-13"))
    assert loaded.anomaly == an_anomaly()
    assert (loaded.step, loaded.restart_step, loaded.span, loaded.tier) == (13, 10, (10, 15), "re-feed")
    assert list(loaded.steps) == list(STEPS)
    assert list(loaded.window.columns) == ["step", "time", "attempt", "train/loss", "grad/norm"]
    assert loaded.window["train/loss"].tolist() == [math.sqrt(step) for step in STEPS]
    assert loaded.layers.columns.tolist() == ["step", "family", "layer", "grad_norm", "rms"]
    assert len(loaded.layers) == 2 * (len(STEPS) - 1)
    for micro, wrote in zip(loaded.batches[12], some_contexts()[2].micro, strict=True):
        assert (micro.sample_ids, micro.epoch, micro.index, micro.fingerprint) == ((12, 13), 0, 12, "000c")
        assert micro.tokens == {"length": 8}
        assert micro.skeleton == wrote.skeleton
        assert micro.tensors is not None and np.array_equal(micro.tensors["x"], wrote.tensors["x"])  # type: ignore[index]
    assert loaded.batches[12][0].rng is None
    assert loaded.batches[12][1].rng is not None and loaded.batches[12][1].rng["torch.cpu"].tolist() == [12] * 16
    assert loaded.rng(11)["python"].tolist() == [11, 12, 13, 14, 15]
    assert loaded.rng(99) == {}
    assert loaded.verify() == len(loaded.files) == 6


def test_series_keep_bits_nan_and_absence(tmp_path: Path) -> None:
    series = load(make(tmp_path / "spike-13")).series()
    for row in some_rows():
        assert series[row.step].keys() == set(row.schema.names)
        for name, value in row.items():
            got = series[row.step][name]
            assert got.hex() == value.hex()


@given(st.lists(st.lists(st.one_of(st.none(), st.floats()), min_size=4, max_size=4), min_size=1, max_size=6))
@settings(max_examples=20, deadline=None)
def test_any_value_comes_back(tmp_path_factory: pytest.TempPathFactory, table: list[list[float | None]]) -> None:
    names = ("train/loss", "a", "layer/x.y/grad_norm", "act/m/rms")
    rows = []
    for step, values in enumerate(table):
        there = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        rows.append(Row(step, step, 0.0, 0, Schema(tuple(there)), np.array(list(there.values()), np.float64)))
    series = load(make(tmp_path_factory.mktemp("c") / "spike-1", rows=rows)).series()
    for row in rows:
        assert {name: value.hex() for name, value in series[row.step].items()} == {n: v.hex() for n, v in row.items()}


def test_a_nonfinite_anomaly_is_strict_json(tmp_path: Path) -> None:
    path = make(tmp_path / "spike-13", anomaly=an_anomaly(kind="nonfinite", value=math.nan, score=math.inf, expected=-math.inf))

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} in the manifest")

    json.loads((path / "manifest.json").read_text(), parse_constant=refuse)
    anomaly = load(path).anomaly
    assert math.isnan(anomaly.value) and anomaly.score == math.inf and anomaly.expected == -math.inf


def test_raw_batches_stay_here(tmp_path: Path) -> None:
    """The folder that travels holds neither tensors nor the strings of a batch; beside its local part it is whole."""
    path = make(tmp_path / "spike-13", local=True)
    assert not any(b"secret sentence" in file.read_bytes() for file in path.rglob("*") if file.is_file())
    here = load(path)
    assert here.missing == [] and here.batches[12][0].tensors is not None
    assert here.verify() == len(here.files) + 1
    travelled = path.rename(tmp_path / "elsewhere")
    there = load(travelled)
    assert there.missing == ["raw batches: elsewhere"]
    assert there.batches[12][0].tensors is None and there.batches[12][0].sample_ids == (12, 13)


def test_a_damaged_local_part_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "spike-13", local=True)
    flip(tmp_path / "spike-13.local" / "rank-0000" / "batches.safetensors", 200)
    with pytest.raises(CapsuleError, match=r"batches.safetensors does not match its digest"):
        load(path)


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "window.parquet").write_bytes(b"half")
        raise KeyboardInterrupt

    manifest = load(make(tmp_path / "other")).model_copy(update={"files": {}})
    with pytest.raises(KeyboardInterrupt):
        capsules.write(tmp_path / "spike-13", manifest, fill)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_who_may_read_the_manifest_may_read_the_rest(tmp_path: Path) -> None:
    path = make(tmp_path / "spike-13", local=True)
    modes = {file.stat().st_mode for folder in tmp_path.iterdir() for file in folder.rglob("*.*")}
    assert modes == {(path / "manifest.json").stat().st_mode}


def test_a_capsule_is_never_overwritten(tmp_path: Path) -> None:
    make(tmp_path / "spike-13")
    with pytest.raises(CapsuleError, match="exists already"):
        make(tmp_path / "spike-13")


def test_no_capsule(tmp_path: Path) -> None:
    with pytest.raises(ReferenceNotFoundError, match=r"is not a capsule: it has no manifest.json"):
        load(tmp_path)


def test_file_managers_may_leave_their_files(tmp_path: Path) -> None:
    path = make(tmp_path / "spike-13")
    (path / ".DS_Store").write_bytes(b"x")
    load(path)


# -- hostile capsules


CRATER = Path(tempfile.gettempdir()) / f"trackbridge-exploded-{os.getpid()}"


class Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(CRATER),))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1
    path.write_bytes(data)


def safetensors_file(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def parquet(**columns: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return bytes(sink.getvalue())


def batches(**columns: Any) -> bytes:
    """A table of one micro-batch with these columns spoilt."""
    good = {
        "step": [12], "micro": [0], "loader": [0], "epoch": [0], "index": [0], "workers": [0], "base_seed": [0],
        "sample_ids": ["[1]"], "fingerprint": ["f"], "tokens": ["{}"], "kept": [False], "why_not_kept": ["no"],
    }  # fmt: skip
    return parquet(**{**good, **columns})


def manifest(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    return lambda path: edit(path, change)


def claim(name: str, size: int = 0) -> Callable[[Path], None]:
    """The manifest lists `name`."""
    return manifest(lambda m: m["files"].update({name: {"sha256": "0" * 64, "bytes": size}}))


def text(content: str) -> Callable[[Path], None]:
    return lambda path: (path / "manifest.json").write_text(content) and None


def link(name: str, target: str) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(target)

    return spoil


def sparse(path: Path) -> None:
    """A file that really has the ten gigabytes it claims, without a block of disk behind them."""
    with (path / "rank-0000" / "batches.safetensors").open("r+b") as handle:
        handle.truncate(10 << 30)
    edit(path, lambda m: m["files"]["rank-0000/batches.safetensors"].update(bytes=10 << 30))
    edit(path, lambda m: m["files"].update({"b.safetensors": {"sha256": "0" * 64, "bytes": 10 << 30}}))


AT_LOAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "zip slip": (claim("../../evil.json"), "unsafe path"),
    "zip slip inside": (claim("rank-0000/../../evil.json"), "unsafe path"),
    "absolute path": (claim("/etc/evil.json"), "unsafe path"),
    "windows path": (claim("C:\\evil.json"), "unsafe path"),
    "backslashes": (claim("..\\evil.json"), "unsafe path"),
    "NUL": (claim("evil\0.json"), "unsafe path"),
    "newline": (claim("evil\n.json"), "unsafe path"),
    "hidden file": (claim(".evil.json"), "unsafe path"),
    "empty name": (claim(""), "unsafe path"),
    "endless path": (claim("a/" * 300 + "b.json"), "unsafe path"),
    "listed pickle": (lambda path: adopt(path, "state.pkl", pickle.dumps(Bomb())), "does not belong in a capsule"),
    "listed torch file": (lambda path: adopt(path, "state.pt", b"x"), "does not belong in a capsule"),
    "unlisted pickle": (lambda path: (path / "x.pkl").write_bytes(pickle.dumps(Bomb())) and None, "not in its manifest"),
    "unlisted file": (lambda path: (path / "x.json").write_text("{}") and None, "not in its manifest"),
    "symlink to a file": (link("report.html", "/etc/passwd"), "symbolic link"),
    "symlink for a listed file": (link("window.parquet", "/etc/passwd"), "symbolic link"),
    "symlink to a folder": (link("rank-0001", "/etc"), "symbolic link"),
    "hidden symlink": (link(".hidden", "/etc"), "symbolic link"),
    "symlink as manifest": (link("manifest.json", "/etc/passwd"), "not a regular file"),
    "dangling symlink as manifest": (link("manifest.json", "nowhere"), "not a regular file"),
    "a pipe": (lambda path: os.mkfifo(path / "pipe.json"), "not a regular file"),
    "truncated": (lambda path: os.truncate(path / "window.parquet", 100), "truncated or altered"),
    "emptied": (lambda path: os.truncate(path / "window.parquet", 0), "truncated or altered"),
    "gone": (lambda path: (path / "window.parquet").unlink(), "in the manifest but not in"),
    "10 GB claim": (claim("a.safetensors", 10 << 30), "in the manifest but not in"),
    "10 TB claim": (claim("a.safetensors", 10 << 40), "more than the limit"),
    "real 20 GB": (sparse, "more than the limit"),
    "negative size": (claim("a.json", -1), "not valid"),
    "digest of another kind": (manifest(lambda m: m["files"]["window.parquet"].update(sha256="md5")), "not valid"),
    "wrong digest": (manifest(lambda m: m["files"]["window.parquet"].update(sha256="0" * 64)), "does not match its digest"),
    "NaN in the manifest": (text('{"format_version": 1, "step": NaN}'), "NaN is not JSON"),
    "Infinity in the manifest": (text('{"format_version": 1, "step": Infinity}'), "Infinity is not JSON"),
    "a number that overflows": (text('{"format_version": 1, "step": 1e999}'), "overflows"),
    "a million digits": (text('{"format_version": 1, "step": ' + "9" * 1_000_000 + "}"), "not valid JSON"),
    "deep JSON": (text('{"format_version": 1, "x": ' + "[" * 100_000 + "]" * 100_000 + "}"), "deep"),
    "deep JSON that never closes": (text("[" * 1_000_000), "deep"),
    "huge JSON": (text('"' + "x" * (17 << 20) + '"'), "more than the"),
    "not JSON": (text("\x80\x04K\x01."), "not valid JSON"),
    "not UTF-8": (lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe{}") and None, "not valid JSON"),
    "not an object": (text("[]"), "not an object"),
    "no version": (text("{}"), "no format version"),
    "version 2": (manifest(lambda m: m.update(format_version=2)), "format version 2"),
    "version 2.0": (manifest(lambda m: m.update(format_version="2.0")), r"format version 2\.0"),
    "version true": (manifest(lambda m: m.update(format_version=True)), "no format version"),
    "endless version": (manifest(lambda m: m.update(format_version="9" * 5000)), "format version 9"),
    "no ranks": (manifest(lambda m: m.update(ranks=[])), "'ranks'"),
    "rank -1": (manifest(lambda m: m.update(ranks=[-1])), "ranks.0"),
    "no anomaly": (manifest(lambda m: m.pop("anomaly")), "'anomaly'"),
    "anomaly of wrong shape": (manifest(lambda m: m["anomaly"].update(step="x")), "anomaly.step"),
    "unknown tier": (manifest(lambda m: m.update(tier="magic")), "'tier'"),
    "window backwards": (manifest(lambda m: m.update(window=[9, 3])), "window"),
    "half a million files": (
        manifest(lambda m: m["files"].update({f"f{i}.json": {"sha256": "0" * 64, "bytes": 0} for i in range(130_000)})),
        "files, more than",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_LOAD)
def test_hostile_at_load(name: str, tmp_path: Path) -> None:
    spoil, words = AT_LOAD[name]
    path = make(tmp_path / "box" / "spike-13")
    spoil(path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CapsuleError, match=words) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    assert sorted(tmp_path.rglob("*")) == before and not CRATER.exists()


READS: dict[str, Callable[[Any], Any]] = {
    "window.parquet": lambda c: c.window,
    "layers.parquet": lambda c: (c.series(), c.layers),
    "rank-0000/rng.safetensors": lambda c: (c.rng(12), c.rng_states().after(12)),
    "rank-0000/batches.parquet": lambda c: c.batches[12],
    "rank-0000/batches.safetensors": lambda c: c.batches[12],
}

WELL_SIGNED: dict[str, tuple[str, bytes, str]] = {
    "pickle as rng": ("rank-0000/rng.safetensors", pickle.dumps(Bomb()), "not a readable safetensors"),
    "pickle as batches": ("rank-0000/batches.safetensors", pickle.dumps(Bomb()), "not a readable safetensors"),
    "pickle as parquet": ("window.parquet", pickle.dumps(Bomb()), "not a readable Parquet"),
    "empty safetensors": ("rank-0000/rng.safetensors", b"", "not a readable safetensors"),
    "safetensors header of 10 GB": (
        "rank-0000/rng.safetensors",
        (10 << 30).to_bytes(8, "little") + b"{}",
        "not a readable safetensors",
    ),
    "safetensors past its end": (
        "rank-0000/rng.safetensors",
        safetensors_file(b'{"step/12/python":{"dtype":"U8","shape":[9999999999],"data_offsets":[0,9999999999]}}'),
        "not a readable safetensors",
    ),
    "step that is no number": (
        "rank-0000/rng.safetensors",
        safetensors_file(b'{"step/evil/python":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
        "which is no number",
    ),
    "a column of structures": ("window.parquet", parquet(step=[1], x=[{"a": 1}]), "which is not read"),
    "a column of bytes": ("window.parquet", parquet(step=[1], x=[b"x"]), "which is not read"),
    "no step column": ("layers.parquet", parquet(layer=["a"], family=["layer"]), "lacks the column 'step'"),
    "words for numbers": ("layers.parquet", parquet(step=[12], family=["layer"], layer=["a"], grad_norm=["much"]), "no number"),
    "no sample ids": ("rank-0000/batches.parquet", parquet(step=[12], micro=[0]), "lacks the column"),
    "words for steps": ("rank-0000/batches.parquet", batches(step=["12"]), "does not hold whole numbers"),
    "ids that are no list": ("rank-0000/batches.parquet", batches(sample_ids=["5"]), "no list of numbers and words"),
    "ids of ids": ("rank-0000/batches.parquet", batches(sample_ids=["[[1]]"]), "no list of numbers and words"),
    "an endless index": ("rank-0000/batches.parquet", batches(index=[float("inf")]), "where a whole number belongs"),
    "tokens that are no object": ("rank-0000/batches.parquet", batches(tokens=["[1]"]), "no object"),
    "tokens that are null": ("rank-0000/batches.parquet", batches(tokens=["null"]), "no object"),
    "digests that are none": (
        "rank-0000/rng.safetensors",
        safetensors_file(b'{"__metadata__":{"12":"[1]"},"step/12/python":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
        "no digests of the generators after step 12",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WELL_SIGNED)
def test_hostile_content_with_digests_that_fit(name: str, tmp_path: Path) -> None:
    file, content, words = WELL_SIGNED[name]
    path = make(tmp_path / "spike-13")
    adopt(path, file, content)
    capsule = load(path)
    with pytest.raises(CapsuleError, match=words) as caught:
        READS[file](capsule)
    assert "\n" not in str(caught.value)
    assert not CRATER.exists()


def test_the_post_mortem_is_for_people_to_write_in(tmp_path: Path) -> None:
    folder = tmp_path / "spike-13"

    def fill(inside: Path) -> None:
        (inside / capsules.POST_MORTEM).write_text("Root cause: not known yet", encoding="utf-8")

    capsules.write(folder, load(make(tmp_path / "other")), fill)
    (folder / capsules.POST_MORTEM).write_text("Root cause: the batch of step 13 was corrupt", encoding="utf-8")
    load(folder).verify()
    (folder / capsules.POST_MORTEM).write_bytes(b"x" * (capsules.POST_MORTEM_BYTES + 1))
    with pytest.raises(CapsuleError, match="more than a person writes"):
        load(folder)
    (folder / capsules.POST_MORTEM).unlink()
    with pytest.raises(CapsuleError, match="in the manifest but not in"):
        load(folder)


def test_a_string_that_never_ends_costs_no_more_than_reading_it(tmp_path: Path) -> None:
    """Eight million escaped quotes: a pattern that tries again at each of them would take years."""
    path = make(tmp_path / "spike-13")
    (path / "manifest.json").write_text('{"format_version": 1, "x": "' + '\\"' * (8 << 20 - 1))
    code = f"from trackbridge.capsule import load; load({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "manifest.json is not valid JSON" in done.stderr.splitlines()[-1]


@given(st.text(alphabet='"\\[]{} a', max_size=40))
def test_depth_is_that_of_the_brackets_outside_strings(inside: str) -> None:
    text = json.dumps({"x": [inside, {"y": [inside]}]})
    assert untrusted.parse_json(text) == json.loads(text)
    deep = "[" * 60 + json.dumps(inside) + "]" * 60
    with pytest.raises(ValueError, match="nested 60 deep"):
        untrusted.parse_json(deep)


def test_a_name_that_is_none_is_not_looked_for(tmp_path: Path) -> None:
    path = make(tmp_path / "spike-13")
    for name in ("x" * 5000, "..", "a\0b", "/"):
        edit(path, lambda m, name=name: m["anomaly"].update(capsule=name))
        assert not load(path).joined


def test_a_second_writer_leaves_the_first_ones_batches_alone(tmp_path: Path) -> None:
    """A trainer that was killed leaves its sealing behind, and the shipper seals too: whoever comes second changes nothing."""
    path = tmp_path / "spike-13"
    theirs = make(tmp_path / "model" / "spike-13", local=True)
    manifest = load(theirs)

    def fill(folder: Path) -> None:
        for name in ("spike-13.local", "spike-13"):  # the other one is done just now
            theirs.with_name(name).rename(path.with_name(name))
        (folder / "post-mortem.md").write_text("later")

    with pytest.raises(CapsuleError, match="by another process"):
        capsules.write(path, manifest, fill, lambda folder: (folder / "post-mortem.md").write_text("other batches") and None)
    assert load(path).joined and load(path).verify()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "spike-13", "spike-13.local"]


def test_settings_of_a_newer_version_and_of_none(tmp_path: Path) -> None:
    path = make(tmp_path / "spike-13")
    newer = {"parameters": {"weights_every": 3, "invented": 1}, "detection": {"layers": {"after": 5, "invented": 1}}}
    edit(path, lambda m: m.update(settings=newer))
    assert load(path).section("parameters", ParametersConfig).weights_every == 3
    assert load(path).section("detection", DetectionConfig).layers.after == 5
    edit(path, lambda m: m.update(settings={"parameters": 5}))
    with pytest.raises(CapsuleError, match=r"settings.parameters in manifest.json is not valid"):
        load(path).section("parameters", ParametersConfig)


def test_every_flipped_bit_is_seen(tmp_path: Path) -> None:
    path = make(tmp_path / "spike-13")
    generator = np.random.default_rng(5)
    for file in sorted(path.rglob("*.*")):
        if file.name in (capsules.MANIFEST, capsules.POST_MORTEM):
            continue
        good = file.read_bytes()
        for at in generator.integers(0, len(good), 12).tolist():
            flip(file, at)
            with pytest.raises(CapsuleError, match="does not match its digest"):
                load(path)
            file.write_bytes(good)
    load(path)


@given(st.binary(max_size=300), st.integers(0, 2**20))
@settings(max_examples=60, deadline=None)
def test_any_manifest_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int) -> None:
    path = make(tmp_path_factory.mktemp("c") / "spike-13")
    good = (path / "manifest.json").read_bytes()
    at %= len(good)
    (path / "manifest.json").write_bytes(good[:at] + noise + good[at + len(noise) :])
    try:
        load(path)
    except CapsuleError as error:
        assert "\n" not in str(error)


def repetitive(rows: int) -> bytes:
    """A table whose file is small and whose strings are not."""
    sink = pa.BufferOutputStream()
    same = pa.array(["x" * 100_000]).dictionary_encode()
    layer = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), same.dictionary)
    steps = pa.array(np.full(rows, 12))
    table = pa.table({"step": steps, "family": layer, "layer": layer, "rms": pa.array(np.ones(rows))})
    pq.write_table(table, sink, compression="snappy")
    return bytes(sink.getvalue())


def test_a_parquet_bomb_is_refused_unread(tmp_path: Path) -> None:
    path = make(tmp_path / "spike-13")
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"step": pa.array(np.zeros(1_000_000, np.int64))}), sink, compression="zstd")
    adopt(path, "window.parquet", bytes(sink.getvalue()))
    with pytest.raises(CapsuleError, match="only Snappy"):
        _ = load(path).window
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"step": pa.array(np.zeros(60_000_000, np.int8))}), sink, compression="snappy")
    adopt(path, "window.parquet", bytes(sink.getvalue()))
    with pytest.raises(CapsuleError, match="too many"):
        _ = load(path).window


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """A table of 22 kB that would unpack to 200 GB of strings."""
    path = make(tmp_path / "spike-13")
    adopt(path, "layers.parquet", repetitive(2_000_000))
    code = (
        "import resource, pandas, pyarrow.parquet\n"
        "from pathlib import Path\n"
        "from trackbridge.capsule_parts import read_frame, read_series\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\n"
        f"folder = Path({str(path)!r})\n"
        "before = peak()\n"
        "assert len(read_frame(folder / 'layers.parquet')) == 2_000_000\n"
        "read_series(folder / 'window.parquet', folder / 'layers.parquet')\n"
        "print(peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 800, "megabytes"


def test_a_limit_of_the_callers_own(tmp_path: Path) -> None:
    path = make(tmp_path / "spike-13")
    with pytest.raises(CapsuleError, match="more than the limit of 1000"):
        load(path, max_bytes=1000)


@given(st.text(max_size=40))
@settings(max_examples=300, deadline=None)
def test_a_path_that_passes_stays_inside(name: str) -> None:
    try:
        check_entries({name: FileEntry(sha256="0" * 64, bytes=0)})
    except CapsuleError:
        return
    root = Path("/a/b")
    assert (root / name).resolve().is_relative_to(root) and (root / name).suffix in untrusted.SUFFIXES


def test_loading_imports_no_torch_and_no_pickle_use(tmp_path: Path) -> None:
    path = make(tmp_path / "spike-13")
    code = (
        "import sys, pickle\n"
        "def no(*a, **k): raise AssertionError('pickle used')\n"
        "pickle.load = pickle.loads = no; pickle.Unpickler = None\n"
        "from trackbridge.capsule import load\n"
        f"c = load({str(path)!r}); c.window, c.layers, c.series(), c.batches[12], c.rng(12)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "False", done.stderr


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_open_files_do_not_grow(tmp_path: Path) -> None:
    path = make(tmp_path / "spike-13")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_files()
    for _ in range(5):
        capsule = load(path)
        _ = capsule.window, capsule.batches[12], capsule.rng(11)
    assert open_files() - before < 5 < soft
