"""What is recorded about code, packages and hardware, and what a comparison says."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from trackbridge import provenance


def repository(path: Path) -> Path:
    def git(*words: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        subprocess.run(["git", *identity, "-C", str(path), *words], check=True, capture_output=True)

    git("init", "-q", "-b", "trunk")
    (path / "train.py").write_text("lr = 1\n")
    git("add", ".")
    git("commit", "-q", "-m", "start")
    git("remote", "add", "origin", "https://me:secretword@example.org/repo.git")
    return path


def test_git_commit_diff_and_remote(tmp_path: Path) -> None:
    repository(tmp_path)
    clean = provenance.git(tmp_path)
    assert len(clean["commit"]) == 40 and clean["branch"] == "trunk" and not clean["dirty"] and "diff" not in clean
    (tmp_path / "train.py").write_text("lr = 2\n")
    dirty = provenance.git(tmp_path)
    assert dirty["dirty"] and "+lr = 2" in dirty["diff"]
    assert "secretword" not in json.dumps(dirty)


def test_no_repository_is_absent_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.git(tmp_path) == {}
    assert "git" not in provenance.collect(tmp_path)


def test_everything_is_json_and_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr("sys.argv", ["train.py", "--api-key", "verysecretvalue"])
    words = json.dumps(provenance.collect(tmp_path), allow_nan=False)
    assert "0123456789abcdef" not in words and "verysecretvalue" not in words
    facts = json.loads(words)
    assert facts["environment"]["OMP_NUM_THREADS"] == "3"
    assert facts["packages"]["numpy"] and facts["hardware"]["cpu_count"]


def test_differences_name_what_changes_results_first() -> None:
    a = {"torch": {"version": "2.6", "num_threads": 2}, "packages": {"numpy": "1.26"}, "command": "a", "python": "3.11"}
    b = {"torch": {"version": "2.7", "num_threads": 2}, "packages": {"numpy": "2.0"}, "command": "b", "python": "3.11"}
    assert provenance.differences(a, b) == [("torch.version", "2.6", "2.7"), ("packages.numpy", "1.26", "2.0")]
    assert provenance.differences(a, a) == []
