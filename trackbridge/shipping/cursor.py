"""How far each tracker is: one small JSON file per backend in ``shipper/``, and the records that were refused for good."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trackbridge import redact
from trackbridge.records import Record
from trackbridge.rundir import RunDirectory, dumps, write_atomic


@dataclass
class Cursor:
    """What ``shipper/<kind>.json`` says. Every record up to `seq` is in the tracker, was left out by the stream policy, or is a
    dead letter. `attempt` is that of the newest record delivered; `rows` and `artifacts` count what was delivered."""

    kind: str
    target: str = ""  # fingerprint of the backend's settings: another place starts from nothing
    seq: int = -1
    attempt: int = 0
    rows: int = 0
    artifacts: int = 0
    dead_letters: int = 0
    error: str | None = None
    updated: float = 0.0

    @classmethod
    def load(cls, directory: RunDirectory, kind: str, target: str | None = None) -> Cursor:
        """The saved cursor, or a new one when there is none for this `target` or it is unreadable: trackers skip repetition."""
        try:
            saved = json.loads(_file(directory, kind).read_text(encoding="utf-8"))
            cursor = cls(kind, str(saved.get("target", "")), int(saved["seq"]), error=saved.get("error"))
            for name in ("attempt", "rows", "artifacts", "dead_letters"):
                setattr(cursor, name, int(saved.get(name, 0)))
            cursor.updated = float(saved.get("updated", 0.0))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return cls(kind, target or "")
        return cursor if target in (None, cursor.target) else cls(kind, target or "")

    def save(self, directory: RunDirectory) -> None:
        self.updated = time.time()
        write_atomic(_file(directory, self.kind), dumps(asdict(self)).encode())


def _file(directory: RunDirectory, kind: str) -> Path:
    return directory.shipper / f"{kind}.json"


def cursors(directory: RunDirectory) -> dict[str, Cursor]:
    """Every saved cursor, by backend kind."""
    kinds = sorted(path.stem for path in directory.shipper.glob("*.json") if not path.name.startswith("."))
    return {kind: Cursor.load(directory, kind) for kind in kinds}


def first_free_seq(directory: RunDirectory) -> int:
    """The least `seq` that no tracker can know: what a resumed run's journal must go on with (`JournalWriter(floor=...)`)."""
    return 1 + directory.delivered()


@dataclass
class DeadLetters:
    """``shipper/dead-letters.jsonl``: one line per record that a tracker refused for good. The record stays in the journal."""

    directory: RunDirectory
    kind: str
    _known: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._known = {entry["seq"] for entry in self._entries() if entry.get("kind") == self.kind and "seq" in entry}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, records: Iterable[Record], reasons: dict[int, str]) -> None:
        """Write down `records` with the tracker's words; those already there are not repeated."""
        lines = []
        for record in records:
            if record.seq not in self._known:
                entry = {
                    "kind": self.kind,
                    "seq": record.seq,
                    "record": type(record).__name__,
                    "step": getattr(record, "step", None),
                    "why": redact.text(str(reasons[record.seq])),
                    "time": time.time(),
                }
                lines.append(dumps(entry) + "\n")
                self._known.add(record.seq)
        if lines:
            self.directory.shipper.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                file.write("".join(lines).encode())  # one call: workers share the file
                os.fsync(file.fileno())

    @property
    def _path(self) -> Path:
        return self.directory.shipper / "dead-letters.jsonl"

    def _entries(self) -> list[dict[str, Any]]:
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # torn by a crash
            if isinstance(entry, dict):
                found.append(entry)
        return found
