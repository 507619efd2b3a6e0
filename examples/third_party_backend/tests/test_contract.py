"""trackbridge's own suite for backends, run against this one."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np
from trackbridge_sqlite import SqliteConfig

from trackbridge.backends.base import BackendConfig
from trackbridge.backends.resolve import resolve
from trackbridge.backends.words import flatten
from trackbridge.records import RunInfo
from trackbridge.testing import BackendContract, ReadBack, newest


class TestSqlite(BackendContract):
    def config(self, tmp_path: Path) -> SqliteConfig:
        return SqliteConfig(path=tmp_path / "runs.db")

    def read_back(self, config: BackendConfig, run: RunInfo) -> ReadBack:
        assert isinstance(config, SqliteConfig)
        db = sqlite3.connect(config.path)
        points: dict[str, list[tuple[int, int, float]]] = {}
        for name, attempt, step, value in db.execute("SELECT name, attempt, step, value FROM points"):
            points.setdefault(name, []).append((attempt, step, float(np.frombuffer(value, np.float64)[0])))
        split = {name: newest(found) for name, found in points.items()}
        files: dict[str, dict[str, bytes]] = {}
        for artifact, path, content in db.execute("SELECT artifact, path, bytes FROM files"):
            files.setdefault(artifact, {})[path] = content
        facts = db.execute("SELECT what, key, text FROM facts ORDER BY key").fetchall()
        (status,) = db.execute("SELECT status FROM held").fetchone()
        return ReadBack(
            series={name: now for name, (now, _) in split.items()},
            superseded={name: old for name, (_, old) in split.items()},
            artifacts=files,
            params={k: v for what, _, text in facts if what == "params" for k, v in flatten(json.loads(text)).items()},
            anomalies={key: text for what, key, text in facts if what == "anomaly"},
            status=None if status == "running" else status,
        )


def test_it_is_found_by_its_name() -> None:
    (config,) = resolve({"kind": "sqlite", "path": "x.db"})
    assert isinstance(config, SqliteConfig)
