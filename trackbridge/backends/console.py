"""Lines for a person at a terminal: a row now and then, every anomaly at once.

Served by a thread of the training process (`in_process`): the shipper has no terminal, and must not hold the trainer's. What it
says is decided by the records' own times, so a replayed journal gives the same lines at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Literal, TextIO

from pydantic import Field

from trackbridge.answers import plural
from trackbridge.backends import words
from trackbridge.backends.base import Backend, BackendConfig
from trackbridge.records import Anomaly, Artifact, Record, Row, RunEnd, RunInfo


def _plain(value: float) -> str:
    return f"{value:.4g}"


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"


def _count(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


_SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("train/loss", "loss", _plain),
    ("train/lr", "lr", _plain),
    ("grad/norm", "grad norm", _plain),
    ("perf/tokens_per_s", "tokens/s", _count),
    ("perf/step_s", "s/step", _plain),
    ("perf/mfu", "mfu", _share),
    ("mem/allocated_bytes", "memory", _count),
)


_NOT_SHOWN = ("trackbridge/", "nonfinite/", "coalesced/")  # what the stream adds to a row


class ConsoleConfig(BackendConfig):
    """`every`: seconds between two lines about steps; 0 shows every step."""

    kind: Literal["console"] = "console"
    every: float = Field(10.0, ge=0)

    @property
    def in_process(self) -> bool:
        return True

    def build(self) -> Backend:
        return ConsoleBackend(self)


class ConsoleBackend:
    """Writes to `stream`, by default the standard error of this process at the time of writing. A stream that is gone (a
    closed pipe, a terminal that went away) ends the output, nothing else."""

    def __init__(self, config: ConsoleConfig, stream: TextIO | None = None) -> None:
        self._every = config.every
        self._stream = stream
        self._last_row = float("-inf")
        self._told: dict[str, tuple[int | None, str | None, str | None]] = {}
        self._seq = -1

    def open(self, run: RunInfo, /) -> int:
        return self._seq

    def write(self, batch: Sequence[Record], /, *, timeout: float) -> int:
        lines = [line for record in batch if record.seq > self._seq and (line := self._line(record))]
        self._seq = max([self._seq, *(record.seq for record in batch)])
        self._say(lines)
        return self._seq

    def close(self, end: RunEnd | None, /, *, timeout: float) -> int:
        return self._seq if end is None else self.write([end], timeout=timeout)

    def _line(self, record: Record) -> str | None:
        if isinstance(record, Row):
            return self._row(record)
        if isinstance(record, Anomaly):
            return self._anomaly(record)
        if isinstance(record, Artifact):
            return f"{record.kind} {record.name}: {record.path}"
        if isinstance(record, RunEnd):
            return f"run {record.status}" + (f": {record.error}" if record.error else "")
        return None

    def _row(self, row: Row) -> str | None:
        """A step's line when it is due; what `run.log` logged always, being rare and asked for."""
        if row.kind == "log":
            shown = [f"{name} {value:.6g}" for name, value in row.items() if not name.startswith(_NOT_SHOWN)]
            return f"step {row.step:>7}  " + "  ".join(shown)
        if row.time - self._last_row < self._every:
            return None
        self._last_row = row.time
        found = ((label, show, row.get(name)) for name, label, show in _SHOWN)
        return f"step {row.step:>7}  " + "  ".join(
            f"{label} {show(value)}" for label, show, value in found if value is not None
        )

    def _anomaly(self, anomaly: Anomaly) -> str | None:
        """The news in it: that it happened, that it is over, its cause, where the capsule is."""
        lead = anomaly.hypotheses[0].name if anomaly.hypotheses else None
        news = (anomaly.recovered_after, anomaly.capsule, lead)
        before = self._told.get(anomaly.id)
        self._told[anomaly.id] = news
        if before is None:
            guess = f"; perhaps {lead}" if lead else ""
            where = f"; capsule {anomaly.capsule}" if anomaly.capsule else ""
            return f"ANOMALY {words.anomaly_line(anomaly)}{guess}{where}"
        if news == before:
            return None
        over = f"over after {plural(anomaly.recovered_after, 'step')}" if anomaly.recovered_after is not None else "not over"
        guess = f"; perhaps {lead}" if lead and lead != before[2] else ""
        return f"anomaly {anomaly.id}: {over}{guess}" + (f"; capsule {anomaly.capsule}" if anomaly.capsule else "")

    def _say(self, lines: Sequence[str]) -> None:
        if not lines:
            return
        stream = self._stream or sys.stderr
        try:
            stream.write("".join(f"trackbridge: {line}\n" for line in lines))
            stream.flush()
        except (OSError, ValueError):  # a closed file raises ValueError
            pass
