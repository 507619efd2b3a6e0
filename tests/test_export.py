"""Exported rows against the journal: every value, every attempt, absent apart from NaN, in bounded memory."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from trackbridge import history
from trackbridge.cli import app
from trackbridge.errors import UsageError
from trackbridge.export import export
from trackbridge.journal import JournalWriter
from trackbridge.records import Anomaly, Record, Row, RunEnd, Schema
from trackbridge.rundir import Attempt, RunDirectory, RunFile

EVERY = Schema(("train/loss", "grad/norm", "layer/a/grad_norm"))
SOME = Schema(("train/loss", "grad/norm"))
EVAL = Schema(("eval/loss",))


def row(step: int, schema: Schema, *values: float, attempt: int = 0, kind: Any = "step") -> Row:
    return Row(-1, step, 0.1 * step, attempt, schema, np.array(values), kind)


RECORDS: list[Record] = [
    row(0, EVERY, 1 / 3, 2.0, 3.0),
    row(1, SOME, math.nan, math.inf),
    Anomaly("a", "nonfinite", 1, 1, 1.0, "train/loss", math.nan, 1.0, math.inf),
    row(1, EVAL, 0.25, kind="log"),
    row(2, SOME, -math.inf, 5e-324),
    RunEnd(-1, 1.0, "killed"),
    row(2, EVERY, 7.0, 8.0, 9.0, attempt=1),
]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "runs" / "r1")
    life = Attempt(number=0, start_step=0, time=0.0, pid=1, host="h")
    directory.write(RunFile(project="p", run_id="r1", name="a run", created=0.0, attempts=[life]))
    writer = JournalWriter(directory.rows(), segment_bytes=1 << 14, fsync_seconds=1e9)
    for record in RECORDS:
        writer.append(record)
    writer.close()
    return directory


def expected() -> list[dict[str, Any]]:
    found = []
    for seq, record in enumerate(RECORDS):
        if isinstance(record, Row):
            head = {"seq": seq, "attempt": record.attempt, "kind": record.kind, "step": record.step, "time": record.time}
            found.append({**head, **dict(record.items())})
    return found


def same(got: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert one[key] == value or (value != value and one[key] != one[key]), (key, one, other)


def test_parquet(run: RunDirectory, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    done = export(run.path, "parquet", tmp_path / "r.parquet")
    assert (done.rows, done.series) == (5, ("train/loss", "grad/norm", "layer/a/grad_norm", "eval/loss"))
    table = pq.read_table(tmp_path / "r.parquet")
    same([{k: v for k, v in line.items() if v is not None} for line in table.to_pylist()], expected())
    assert table.schema.field("step").type == "int64"


def test_csv(run: RunDirectory, tmp_path: Path) -> None:
    export(run.path, "csv", tmp_path / "r.csv")
    with (tmp_path / "r.csv").open(newline="") as file:
        kinds: dict[str, Any] = {"kind": str, "seq": int, "attempt": int, "step": int}
        lines = [{k: kinds.get(k, float)(v) for k, v in line.items() if v != ""} for line in csv.DictReader(file)]
    same(lines, expected())


def test_jsonl_is_strict(run: RunDirectory, tmp_path: Path) -> None:
    export(run.path, "jsonl", tmp_path / "r.jsonl")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    values = [{name: float(value) for name, value in line.pop("values").items()} for line in lines]
    same([{**line, **named} for line, named in zip(lines, values, strict=True)], expected())


def test_names_and_mistakes(run: RunDirectory, tmp_path: Path) -> None:
    assert export(run.path, "csv", tmp_path / "a.csv", names=["grad/*", "eval/loss"]).series == ("grad/norm", "eval/loss")
    with pytest.raises(UsageError, match=r"no series 'grad/nrm' \(did you mean 'grad/norm'\?\); there are: .*eval/loss"):
        export(run.path, "csv", tmp_path / "b.csv", names=["grad/nrm"])
    with pytest.raises(UsageError, match=r"a\.csv exists: name another file with --out"):
        export(run.path, "csv", tmp_path / "a.csv")
    with pytest.raises(UsageError, match="rank 3 has no journal"):
        export(run.path, "csv", tmp_path / "b.csv", rank=3)
    with pytest.raises(UsageError, match="cannot write"):
        export(run.path, "csv", tmp_path / "no" / "such" / "b.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "runs"]


def test_the_command(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["export", "r1", "--to", "csv"])
    assert done.exit_code == 0 and "r1.csv: 5 rows, 4 series" in done.output
    done = CliRunner().invoke(app, ["export", "r1", "--out", "named.csv"])
    assert done.exit_code == 0 and Path("named.csv").read_text().startswith("seq,")  # no parquet under that name
    done = CliRunner().invoke(app, ["export", "r1", "--to", "jsonl", "--out", "other.csv"])
    assert done.exit_code == 0 and Path("other.csv").read_text().startswith("{")
    done = CliRunner().invoke(app, ["export", str(run.path), "--to", "parket"])
    assert done.exit_code == 2 and "did you mean 'parquet'" in done.output


def test_a_run_larger_than_what_is_held_is_read_series_by_series(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """`load` gives the same either way."""
    small = history.load(run.path)
    monkeypatch.setattr(history, "_MOST_VALUES", 4)
    monkeypatch.setattr(history, "_MOST_SCHEMAS", 1)
    large = history.load(run.path)
    assert large._columns._blocks is None
    assert large.names == small.names
    for name in small.names:
        for one, other in zip(large.series(name), small.series(name), strict=True):
            np.testing.assert_array_equal(one, other)
    assert large.frame().equals(small.frame())
    assert large.layers.equals(small.layers)


def test_series_that_are_called_like_our_own_columns(tmp_path: Path) -> None:
    """Readers of tables refuse two columns of one name, or rename them as they like."""
    directory = RunDirectory(tmp_path / "runs" / "r2")
    life = Attempt(number=0, start_step=0, time=0.0, pid=1, host="h")
    directory.write(RunFile(project="p", run_id="r2", name="a run", created=0.0, attempts=[life]))
    writer = JournalWriter(directory.rows(), segment_bytes=1 << 14, fsync_seconds=1e9)
    writer.append(row(3, Schema(("step", "series/step", "time", "values", "")), 0.5, 1.5, 2.5, 3.5, 4.5))
    writer.close()
    columns = ["seq", "attempt", "kind", "step", "time", "series/series/step", "series/step", "series/time", "values", ""]
    for to in ("parquet", "csv"):
        done = export(directory.path, to, tmp_path / f"a.{to}")
        assert done.series == ("step", "series/step", "time", "values", "")
    import pandas as pd

    table = pd.read_parquet(tmp_path / "a.parquet")
    assert list(table.columns) == columns and table.iloc[0].tolist()[3:] == [3, 0.1 * 3, 0.5, 1.5, 2.5, 3.5, 4.5]
    assert next(csv.reader((tmp_path / "a.csv").open())) == columns


@pytest.mark.parametrize("readable", [True, False])
def test_a_journal_that_is_cut_off_is_not_called_whole(run: RunDirectory, tmp_path: Path, readable: bool) -> None:
    """After a crash of the machine, or of a copy: nothing behind the cut tells of it."""
    (segment,) = run.rows().iterdir()
    segment.write_bytes(segment.read_bytes()[:-20])
    if not readable:
        run.file.write_text("")
    done = export(run.path, "csv", tmp_path / "a.csv")
    assert done.rows == 4 and done.damage and "the end of the newest segment" in done.damage.where
