"""A small honest backend that keeps a run as lines of JSON, and ways to break it: what `BackendContract` is tested with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trackbridge.backends.base import Backend, BackendConfig
from trackbridge.records import Anomaly, Artifact, Params, Record, Row, RunEnd, RunInfo
from trackbridge.testing import ReadBack, newest

Break = Callable[[dict[str, Any]], list[dict[str, Any]]]


def honest(line: dict[str, Any]) -> list[dict[str, Any]]:
    return [line]


class JsonlConfig(BackendConfig):
    kind: str = "jsonl"
    path: Path
    breakage: Any = honest
    forgetful: bool = False

    def build(self) -> Backend:
        return JsonlBackend(self)


class JsonlBackend:
    """One line per record; `breakage` turns each line into the lines that are really written."""

    def __init__(self, config: JsonlConfig) -> None:
        self._config, self._file = config, config.path / "run.jsonl"
        self._held = -1

    def open(self, run: RunInfo, /) -> int:
        self._run = run
        self._config.path.mkdir(parents=True, exist_ok=True)
        lines = self._file.read_text().splitlines() if self._file.exists() and not self._config.forgetful else []
        self._held = max((json.loads(line)["seq"] for line in lines), default=-1)
        return self._held

    def write(self, batch: Sequence[Record], /, *, timeout: float) -> int:
        for record in batch:
            if record.seq > self._held:
                self._append(record)
        return self._held

    def close(self, end: RunEnd | None, /, *, timeout: float) -> int:
        if end is not None:  # its seq may be held already: what was sealed after the end came first
            self._append(end)
        return self._held

    def _append(self, record: Record) -> None:
        with self._file.open("a") as handle:
            handle.writelines(json.dumps(line) + "\n" for line in self._config.breakage(self._line(record)))
        self._held = max(self._held, record.seq)

    def _line(self, record: Record) -> dict[str, Any]:
        line: dict[str, Any] = {"seq": record.seq, "type": type(record).__name__}
        if isinstance(record, Row):
            return {**line, "step": record.step, "attempt": record.attempt, "values": dict(record.items())}
        if isinstance(record, Artifact):
            shutil.copytree(Path(self._run.directory) / record.path, self._config.path / record.name, dirs_exist_ok=True)
            return {**line, "name": record.name}
        if isinstance(record, Params):
            return {**line, "params": _flatten(record.values)}
        if isinstance(record, Anomaly):
            return {**line, "id": record.id, "text": f"{record.kind} in {record.series}: {record.value}"}
        assert isinstance(record, RunEnd)
        return {**line, "status": record.status, "attempt": record.attempt}


def _flatten(values: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(values, dict):
        return {prefix.rstrip("."): str(values)}
    return {k: v for key, item in values.items() for k, v in _flatten(item, f"{prefix}{key}.").items()}


def read_jsonl(config: JsonlConfig) -> ReadBack:
    lines = [json.loads(line) for line in (config.path / "run.jsonl").read_text().splitlines()]
    points: dict[str, list[tuple[int, int, float]]] = {}
    for line in lines:
        for name, value in line.get("values", {}).items():
            points.setdefault(name, []).append((line["attempt"], line["step"], value))
    split = {name: newest(found) for name, found in points.items()}
    names = [line["name"] for line in lines if line["type"] == "Artifact"]
    ends = [line["status"] for line in lines if line["type"] == "RunEnd"]
    return ReadBack(
        series={name: current for name, (current, _) in split.items()},
        superseded={name: old for name, (_, old) in split.items() if old},
        artifacts={name: _files(config.path / name) for name in names},
        params={k: v for line in lines for k, v in line.get("params", {}).items()},
        anomalies={line["id"]: line["text"] for line in lines if line["type"] == "Anomaly"},
        status=ends[-1] if ends else None,
    )


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
