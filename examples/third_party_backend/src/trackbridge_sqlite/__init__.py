"""Runs in a SQLite file: a trackbridge backend by a third party."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from trackbridge.backends.base import Backend, BackendConfig
from trackbridge.errors import Rejected
from trackbridge.records import Anomaly, Artifact, Params, Record, Row, RunEnd, RunInfo
from trackbridge.rundir import dumps

TABLES = """
CREATE TABLE IF NOT EXISTS held (run PRIMARY KEY, seq INTEGER, status);
CREATE TABLE IF NOT EXISTS points (run, name, step, attempt, value BLOB, PRIMARY KEY (run, name, step, attempt));
CREATE TABLE IF NOT EXISTS facts (run, what, key, text, PRIMARY KEY (run, what, key));
CREATE TABLE IF NOT EXISTS files (run, artifact, path, bytes BLOB, PRIMARY KEY (run, artifact, path));
"""


class SqliteConfig(BackendConfig):
    """`path`: the database."""

    kind: Literal["sqlite"] = "sqlite"
    path: Path = Path("runs.db")

    def build(self) -> Backend:
        return SqliteBackend(self)

    def where(self, run: RunInfo) -> str:
        return f"sqlite3 {self.path}"


class SqliteBackend:
    """A batch and the number of its last record are one transaction: that is what makes each record arrive exactly once."""

    def __init__(self, config: SqliteConfig) -> None:
        self._db = sqlite3.connect(config.path, check_same_thread=False)
        self._db.executescript(TABLES)

    def open(self, run: RunInfo, /) -> int:
        self._run = run
        found = self._db.execute("SELECT seq FROM held WHERE run = ?", (run.run_id,)).fetchone()
        return int(found[0]) if found else -1

    def write(self, batch: Sequence[Record], /, *, timeout: float) -> int:
        held = self.open(self._run)
        gone = {r.seq: "not on this disk" for r in batch if isinstance(r, Artifact) and not self._path(r).exists()}
        if gone:
            raise Rejected(gone)
        with self._db:  # one transaction
            for record in batch:
                if record.seq > held:
                    self._put(record)
                    held = record.seq
            status = "running" if any(isinstance(record, Row) for record in batch) else None
            self._hold(held, status)
        return held

    def close(self, end: RunEnd | None, /, *, timeout: float) -> int:
        held = self.open(self._run)
        if end is not None:
            held = max(held, end.seq)
            with self._db:
                self._hold(held, end.status)
        return held

    def _hold(self, seq: int, status: str | None) -> None:
        update = "UPDATE SET seq = excluded.seq, status = COALESCE(excluded.status, status)"
        row = (self._run.run_id, seq, status)
        self._db.execute(f"INSERT INTO held VALUES (?, ?, ?) ON CONFLICT (run) DO {update}", row)

    def _put(self, record: Record) -> None:
        run, db = self._run.run_id, self._db
        if isinstance(record, Row):  # as bytes: a column of numbers would turn NaN into NULL
            values = [value.tobytes() for value in record.values]
            points = [(run, n, record.step, record.attempt, v) for n, v in zip(record.schema.names, values, strict=True)]
            db.executemany("INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?, ?)", points)
        elif isinstance(record, Artifact):
            path = self._path(record)
            root = path.parent if path.is_file() else path
            files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
            stored = [(run, record.name, file.relative_to(root).as_posix(), file.read_bytes()) for file in files]
            db.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)", stored)
        elif isinstance(record, Anomaly):
            db.execute("INSERT OR REPLACE INTO facts VALUES (?, 'anomaly', ?, ?)", (run, record.id, str(record)))
        elif isinstance(record, Params):
            db.execute("INSERT OR REPLACE INTO facts VALUES (?, 'params', ?, ?)", (run, record.seq, dumps(record.values)))

    def _path(self, artifact: Artifact) -> Path:
        return Path(self._run.directory) / artifact.path
