"""`BackendContract` accepts an honest backend, and each kind of dishonest one fails the test that is meant for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonl_backend import Break, JsonlConfig, read_jsonl

from trackbridge.records import RunInfo
from trackbridge.testing import BackendContract, ReadBack, newest, run_info


class Jsonl(BackendContract):
    signed_zero = True
    breakage: Any = None

    def config(self, tmp_path: Path) -> JsonlConfig:
        given = {} if self.breakage is None else {"breakage": self.breakage}
        return JsonlConfig(path=tmp_path / "jsonl", **given)

    def read_back(self, config: Any, run: RunInfo) -> ReadBack:
        return read_jsonl(config)


class TestHonestBackend(Jsonl):
    pass


def values(change: Any) -> Break:
    """A breakage that maps the values of every row."""
    return lambda line: [{**line, "values": change(line["values"])}] if "values" in line else [line]


def drops_a_row(line: dict[str, Any]) -> list[dict[str, Any]]:
    return [] if line.get("step") == 1 else [line]


def doubles_a_row(line: dict[str, Any]) -> list[dict[str, Any]]:
    return [line, line] if line.get("step") == 1 else [line]


def loses_old_attempts(line: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**line, "attempt": 0}] if "values" in line else [line]


def always_finished(line: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**line, "status": "finished"}] if "status" in line else [line]


def shortens_params(line: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**line, "params": {k.rsplit(".")[-1]: v for k, v in line["params"].items()}}] if "params" in line else [line]


def mumbles(line: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**line, "text": "something happened"}] if "text" in line else [line]


BROKEN: list[tuple[Any, str, tuple[Any, ...]]] = [
    (drops_a_row, "test_every_row_arrives_once_and_equal", ()),
    (doubles_a_row, "test_every_row_arrives_once_and_equal", ()),
    (values(lambda row: {k: round(v, 6) for k, v in row.items()}), "test_every_row_arrives_once_and_equal", ()),
    (values(lambda row: dict(list(row.items())[:1000])), "test_a_wide_row_and_a_sparse_one", ()),
    (values(lambda row: {k: row.get(k, 0.0) for k in {*row, "train/loss"}}), "test_a_wide_row_and_a_sparse_one", ()),
    (values(lambda row: {k: v for k, v in row.items() if v == v}), "test_non_finite_values_are_visible", ()),
    (values(lambda row: {k: min(v, 3.4e38) for k, v in row.items()}), "test_non_finite_values_are_visible", ()),
    (values(lambda row: {k.replace("[", "_").replace("]", "_"): v for k, v in row.items()}), "test_ugly_names_stay_apart", ()),
    (values(lambda row: {k[:300]: v for k, v in row.items()}), "test_ugly_names_stay_apart", ()),
    (loses_old_attempts, "test_resume_goes_back", ()),
    (always_finished, "test_the_end_is_told", ("failed",)),
    (shortens_params, "test_params_and_anomalies_are_found", ()),
    (mumbles, "test_params_and_anomalies_are_found", ()),
]


@pytest.mark.parametrize(("breakage", "test", "arguments"), BROKEN)
def test_a_broken_backend_fails(tmp_path: Path, breakage: Any, test: str, arguments: tuple[Any, ...]) -> None:
    suite = Jsonl()
    suite.breakage = breakage
    with pytest.raises(AssertionError):
        getattr(suite, test)(tmp_path, run_info(tmp_path), *arguments)


def test_a_backend_that_forgets_what_it_holds_fails(tmp_path: Path) -> None:
    class Forgetful(Jsonl):
        def config(self, tmp_path: Path) -> JsonlConfig:
            return JsonlConfig(path=tmp_path / "jsonl", forgetful=True)

    with pytest.raises(AssertionError, match="train/loss"):
        Forgetful().test_nothing_twice(tmp_path, run_info(tmp_path))


def test_a_damaged_artifact_fails(tmp_path: Path) -> None:
    class Truncating(Jsonl):
        def read_back(self, config: Any, run: RunInfo) -> ReadBack:
            (config.path / "spike-3" / "window.parquet").write_bytes(b"")
            return read_jsonl(config)

    with pytest.raises(AssertionError):
        Truncating().test_artifacts_arrive_intact(tmp_path, run_info(tmp_path))


def test_newest_splits_by_attempt_and_keeps_doubles() -> None:
    points = [(0, 1, 1.0), (0, 2, 2.0), (0, 9, 9.0), (1, 2, 3.0), (1, 3, 4.0), (1, 3, 4.0)]
    assert newest(points) == ([(1, 1.0), (2, 3.0), (3, 4.0), (3, 4.0)], [(2, 2.0), (9, 9.0)])


def test_without_pytest_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['pytest'] = None; import trackbridge.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install pytest" in done.stderr.splitlines()[-1]
