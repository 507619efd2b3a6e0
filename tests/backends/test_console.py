"""The console: few lines, the right ones, and nothing that a broken terminal could do to training."""

from __future__ import annotations

import io
import os

import pytest

from trackbridge.backends import words
from trackbridge.backends.console import ConsoleBackend, ConsoleConfig
from trackbridge.backends.resolve import resolve
from trackbridge.errors import ConfigError
from trackbridge.records import Record
from trackbridge.testing import anomaly, artifact, end, row, rows, run_info


def say(records: list[Record], **settings: float) -> list[str]:
    stream = io.StringIO()
    backend = ConsoleBackend(ConsoleConfig(**settings), stream)
    assert backend.open(run_info(os.devnull)) == -1  # type: ignore[arg-type]
    for record in records:
        assert backend.write([record], timeout=1) == record.seq
    assert backend.write(records, timeout=1) == records[-1].seq, "the same records again"
    backend.close(None, timeout=1)
    return [line.removeprefix("trackbridge: ") for line in stream.getvalue().splitlines()]


def test_a_row_now_and_then_by_the_records_own_clock() -> None:
    lines = say(list(rows(range(35))))
    assert [line.split()[:2] for line in lines] == [["step", str(step)] for step in (0, 10, 20, 30)]
    assert len(say(list(rows(range(35))), every=0)) == 35


def test_what_a_line_says() -> None:
    values = {
        "train/loss": 3.21987, "train/lr": 3e-4, "layer/h.0/grad_norm": 1.0, "grad/norm": float("nan"),
        "perf/tokens_per_s": 12_345.0, "perf/mfu": 0.4127, "mem/allocated_bytes": 7.2e9,
    }  # fmt: skip
    (line,) = say([row(0, 1200, values)])
    assert line == "step    1200  loss 3.22  lr 0.0003  grad norm nan  tokens/s 12.3k  mfu 41.3%  memory 7.2G"


def test_a_cause_that_is_found_later_is_said_once() -> None:
    first = anomaly(2, 5, hypotheses=())
    causes = anomaly(2, 5).hypotheses
    lines = say([first, first.updated(seq=3, hypotheses=causes), first.updated(seq=4, hypotheses=causes, recovered_after=1)])
    assert "perhaps" not in lines[0]
    assert lines[1:] == ["anomaly spike-5: not over; perhaps corrupt-batch", "anomaly spike-5: over after 1 step"]


def test_what_is_asked_for_or_bad_is_never_left_out() -> None:
    first = anomaly(2, 5)
    lines = say([
        row(0, 4, {"train/loss": 2.0}),
        row(1, 4, {"eval/loss": 1.25, "trackbridge/seq": 1.0}, kind="log"),
        first,
        first.updated(seq=3),
        first.updated(seq=4, recovered_after=3, capsule="capsules/spike-5"),
        artifact(5, 5, run_info(os.devnull), "a", {}),  # type: ignore[arg-type]
        end(6, "failed", error="RuntimeError: boom"),
    ])  # fmt: skip
    assert lines == [
        "step       4  loss 2",
        "step       4  eval/loss 1.25",
        f"ANOMALY {words.anomaly_line(first)}; perhaps corrupt-batch",
        "anomaly spike-5: over after 3 steps; capsule capsules/spike-5",
        "capsule a: artifacts/a",
        "run failed: RuntimeError: boom",
    ]


def test_the_default_is_standard_error_of_the_moment(capsys: pytest.CaptureFixture[str]) -> None:
    backend = ConsoleConfig().build()
    backend.open(run_info(os.devnull))  # type: ignore[arg-type]
    backend.close(end(0), timeout=1)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "trackbridge: run finished\n")


class Gone(io.StringIO):
    def flush(self) -> None:
        raise BrokenPipeError


def test_a_terminal_that_went_away_is_no_trouble() -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (closed, Gone()):
        assert ConsoleBackend(ConsoleConfig(), stream).write(list(rows([0])), timeout=1) == 0


def test_settings() -> None:
    assert resolve("console")[0].in_process
    with pytest.raises(ConfigError, match="every"):
        resolve({"kind": "console", "every": -1})
