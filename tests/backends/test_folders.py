"""Artifact folders: whole or not at all, the manifest last, replaced in one go."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from trackbridge.backends import folders, held


def fill(folder: Path, content: dict[str, bytes]) -> Path:
    for name, data in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def read(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


CONTENT = {"a.json": b"a" * 9, "manifest.json": b"{}", "z/manifest.json": b"inner", "z/y.md": b""}


def test_the_manifest_is_last(tmp_path: Path) -> None:
    names = [name for name, _ in folders.files(fill(tmp_path, CONTENT))]
    assert names == ["a.json", "z/manifest.json", "z/y.md", "manifest.json"]
    assert [name for name, _ in folders.files(tmp_path / "a.json")] == ["a.json"]
    with pytest.raises(FileNotFoundError):
        list(folders.files(tmp_path / "nothing"))


def test_a_newer_version_replaces_the_older_one(tmp_path: Path) -> None:
    later = time.monotonic() + 60
    target = tmp_path / "store" / "spike-1"
    folders.deliver(fill(tmp_path / "one", CONTENT), target, deadline=later)
    assert read(target) == CONTENT
    newer = {"manifest.json": b"[]", "a.json": b"b" * 9, "c.md": b"c"}
    folders.deliver(fill(tmp_path / "two", newer), target, deadline=later)
    assert read(target) == newer
    before = os.stat(target / "a.json").st_ino  # noqa: PTH116
    folders.deliver(tmp_path / "two", target, deadline=later)
    assert os.stat(target / "a.json").st_ino == before, "the same again is not copied"  # noqa: PTH116
    assert [path.name for path in target.parent.iterdir()] == ["spike-1"]


def test_what_an_interrupted_copy_left_is_checked_before_it_is_used(tmp_path: Path) -> None:
    target = tmp_path / "store" / "spike-1"
    fill(tmp_path / "store" / ".spike-1.part", {"a.json": b"X" * 9, "stale.bin": b"old", "z/.y.md.tmp": b"half"})
    folders.deliver(fill(tmp_path / "one", CONTENT), target, deadline=time.monotonic() + 60)
    assert read(target) == CONTENT


def test_links_are_not_followed_out_of_a_folder_that_is_pulled(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    source = fill(tmp_path / "one", CONTENT)
    (source / "link.md").symlink_to(tmp_path / "secret")
    held.bring(folders.plain(source), tmp_path / "copy", "x")
    assert read(tmp_path / "copy") == CONTENT
