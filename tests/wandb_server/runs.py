"""Runs: creation, resume, the file stream with its offsets, history (whole, ranged and sampled), alerts, files."""

# ruff: noqa: N803 - arguments of resolvers have the names that the client gives them
from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.wandb_server.graphql import Object, connection, node_id

NOW = "2026-01-01T00:00:00Z"
HISTORY = "wandb-history.jsonl"


@dataclass
class Run:
    entity: str
    project: str
    name: str
    display: str = ""
    config: str = "{}"
    tags: list[str] = field(default_factory=list)
    group: str | None = None
    job_type: str | None = None
    notes: str | None = None
    state: str = "running"
    exit_code: int | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    streams: dict[str, list[str]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    alerts: list[Object] = field(default_factory=list)
    used: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        return node_id("Run", f"v1:{self.name}:{self.project}:{self.entity}")

    def history(self) -> list[dict[str, Any]]:
        """The rows as a reader sees them, with non-finite numbers as floats."""
        return [_revive(json.loads(line)) for line in self.streams.get(HISTORY, ()) if line]

    def settings(self) -> dict[str, Any]:
        """The config as the user gave it, without W&B's own part."""
        return {key: item["value"] for key, item in json.loads(self.config).items() if key != "_wandb"}


class RefusalError(Exception):
    """A GraphQL error that comes with an HTTP status of its own, as W&B sends it. `code` is for its ``extensions``."""

    def __init__(self, status: int, message: str, path: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.path, self.code = status, path, code


class Runs:
    """All runs of the server, and the operations on them. `storage_url` turns a storage path into a URL. The id of a run that
    was deleted is not free, for as long as there is its project; `closed` are projects in which one may not write."""

    def __init__(
        self, storage_url: Callable[[str], str], project: Callable[[str, str], Object], viewer: Callable[[], Object]
    ) -> None:
        self.all: dict[tuple[str, str, str], Run] = {}
        self.deleted: dict[tuple[str, str, str], Run] = {}
        self.closed: set[tuple[str, str]] = set()
        self.storage_url, self.project, self.viewer = storage_url, project, viewer
        self.artifacts_of: Callable[[Run], list[Object]] = lambda run: []
        self.artifact: Callable[[str], Object | None] = lambda id: None

    def find(self, entity: str, project: str, name: str) -> Run | None:
        return self.all.get((entity, project, name))

    def of(self, entity: str, project: str, filters: str | None = None) -> list[Run]:
        wanted = json.loads(filters) if filters else {}
        return [run for (e, p, _), run in self.all.items() if (e, p) == (entity, project) and _matches(run, wanted)]

    # -- what people do in the app ------------------------------------------------------------------------------------

    def delete(self, entity: str, project: str, name: str) -> None:
        key = (entity, project, name)
        self.deleted[key] = self.all.pop(key)

    def undelete(self, entity: str, project: str, name: str) -> None:
        key = (entity, project, name)
        self.all[key] = self.deleted.pop(key)

    def delete_project(self, entity: str, project: str) -> None:
        for held in (self.all, self.deleted):
            for key in [key for key in held if key[:2] == (entity, project)]:
                del held[key]

    def rename_project(self, entity: str, project: str, name: str) -> None:
        for held in (self.all, self.deleted):
            for key in [key for key in held if key[:2] == (entity, project)]:
                run = held.pop(key)
                run.project = name
                held[entity, name, run.name] = run

    # -- mutations ---------------------------------------------------------------------------------------------------

    def upsert(self, given: Object, entity: str) -> Object:
        given = {key: value for key, value in given.items() if value is not None}
        if "id" in given and "name" not in given:
            found = next((run for run in self.all.values() if run.id == given["id"]), None)
            if found is None:
                raise RefusalError(404, "run not found during upsertBucket", "upsertBucket")
            run, inserted = found, False
        else:
            key = (given.get("entityName", entity), given.get("modelName", "uncategorized"), given["name"])
            if key[:2] in self.closed:
                raise RefusalError(403, "permission denied", "upsertBucket", "PERMISSION_ERROR")
            if key in self.deleted:
                said = f"run {'/'.join(key)} was previously created and deleted; try a new run name"
                raise RefusalError(409, said, "upsertBucket")
            inserted = key not in self.all
            run = self.all.setdefault(key, Run(*key, display=given["name"]))
        fields = {
            "displayName": "display",
            "config": "config",
            "tags": "tags",
            "groupName": "group",
            "jobType": "job_type",
            "notes": "notes",
        }
        for theirs, ours in fields.items():
            if theirs in given:
                setattr(run, ours, given[theirs])
        if "summaryMetrics" in given:
            run.summary = json.loads(given["summaryMetrics"])
        return {"bucket": self.show(run), "inserted": inserted}

    def create_files(self, given: Object) -> Object:
        run = self.all[given["entityName"], given["projectName"], given["runName"]]
        for name in given["files"]:
            run.files[name] = f"runs/{run.entity}/{run.project}/{run.name}/{name}"
        return {
            "runID": run.id,
            "uploadHeaders": [],
            "files": [{"name": name, "uploadUrl": self.storage_url(run.files[name])} for name in given["files"]],
        }

    def alert(self, given: Object) -> Object:
        self.all[given["entityName"], given["projectName"], given["runName"]].alerts.append(given)
        return {"success": True}

    def stream(self, run: Run, body: Object) -> Object:
        """A file-stream request: lines replace what is at their offset, so a repeated request changes nothing."""
        for name, chunk in (body.get("files") or {}).items():
            lines, offset = run.streams.setdefault(name, []), chunk["offset"]
            if name == "wandb-summary.json":
                run.summary = json.loads(chunk["content"][-1])
            lines.extend([""] * (offset - len(lines)))
            lines[offset : offset + len(chunk["content"])] = chunk["content"]
        run.state = "running"
        if body.get("complete"):
            run.exit_code = body.get("exitcode")
            run.state = "finished" if run.exit_code == 0 else "failed"
        if body.get("preempting"):
            run.state = "preempting"
        return {"exitcode": None, "limits": {}}

    # -- queries -----------------------------------------------------------------------------------------------------

    def show(self, run: Run | None) -> Object | None:
        if run is None:
            return None
        lines = run.streams.get(HISTORY, [])
        return {
            "__typename": "Run", "id": run.id, "name": run.name, "displayName": run.display, "projectId": 1,
            "project": lambda: self.project(run.entity, run.project), "user": self.viewer, "tags": run.tags,
            "state": run.state, "group": run.group, "jobType": run.job_type, "notes": run.notes, "description": run.notes,
            "config": run.config, "commit": None, "sweepName": None, "readOnly": False, "stopped": False,
            "createdAt": NOW, "heartbeatAt": NOW, "systemMetrics": "{}", "wandbConfig": lambda keys=(): '{"t": 1}',
            "summaryMetrics": json.dumps(_strict(run.summary), allow_nan=False),
            "historyLineCount": len(lines), "historyTail": json.dumps(lines[-1:]), "eventsTail": "[]",
            "eventsLineCount": len(run.streams.get("wandb-events.jsonl", ())),
            "logLineCount": len(run.streams.get("output.log", ())),
            "historyKeys": lambda: _keys(run), "history": lambda **asked: _history(run, **asked), "events": lambda **asked: [],
            "sampledHistory": lambda specs: [_sampled(run, **json.loads(spec)) for spec in specs],
            "parquetHistory": lambda liveKeys=(): {"parquetUrls": [], "liveData": [{"_step": 0}]},
            "fileCount": len(run.files), "files": lambda **asked: self._files(run, **asked),
            "outputArtifacts": lambda first=None, after=None: connection(self.artifacts_of(run), first=first, after=after),
            "inputArtifacts": lambda first=None, after=None: (
                connection([self.artifact(i) for i in run.used], first=first, after=after)
            ),
            "outputArtifactsCount": 0,
        }  # fmt: skip

    def _files(
        self, run: Run, names: list[str] | None = None, first: int | None = None, after: str | None = None, **_: Any
    ) -> Object:
        found = [(name, path) for name, path in sorted(run.files.items()) if not names or name in names]

        def show(item: tuple[str, str]) -> Object:
            url = self.storage_url(item[1])
            return {
                "__typename": "File", "id": node_id("File", item[1]), "name": item[0], "url": lambda upload=False: url,
                "directUrl": url, "sizeBytes": "0", "mimetype": "", "updatedAt": NOW, "md5": "",
            }  # fmt: skip

        return connection(found, show, first, after)


def _keys(run: Run) -> Object:
    rows = run.history()
    kinds = {key: {"typeCounts": [{"type": "number", "count": 1}]} for row in rows for key in row}
    return {"sets": [], "keys": kinds, "lastStep": max((row["_step"] for row in rows), default=-1)}


def _between(run: Run, low: int | None, high: int | None) -> Iterator[dict[str, Any]]:
    """Rows with low <= _step < high."""
    for row in run.history():
        if row["_step"] >= (low or 0) and (high is None or row["_step"] < high):
            yield row


def _thin(rows: list[dict[str, Any]], samples: int | None) -> list[dict[str, Any]]:
    """At most `samples` rows, drawn at random as W&B does it: who needs all rows must not ask for a sample."""
    if samples is None or len(rows) <= samples:
        return rows
    return [rows[i] for i in sorted(random.Random().sample(range(len(rows)), samples))]


def _history(run: Run, minStep: int | None = None, maxStep: int | None = None, samples: int = 500) -> list[str]:
    return [json.dumps(_strict(row), allow_nan=False) for row in _thin(list(_between(run, minStep, maxStep)), samples)]


def _sampled(
    run: Run,
    keys: list[str],
    minStep: int | None = None,
    maxStep: int | None = None,
    samples: int = 500,
) -> list[dict[str, Any]]:
    """Rows that have all `keys`, reduced to them. `maxStep` is inclusive here, unlike in ``history``."""
    rows = [row for row in _between(run, minStep, None if maxStep is None else maxStep + 1) if all(key in row for key in keys)]
    return [_strict({key: row[key] for key in keys}) for row in _thin(rows, samples)]


def _matches(run: Run, wanted: dict[str, Any]) -> bool:
    """The part of W&B's filter language that the tests use: equality, ``$and``, ``$or`` and ``$in``."""
    known = {
        "name": [run.name],
        "displayName": [run.display],
        "display_name": [run.display],
        "tags": run.tags,
        "state": [run.state],
    }
    for key, value in wanted.items():
        if key == "$and":
            good = all(_matches(run, part) for part in value)
        elif key == "$or":
            good = any(_matches(run, part) for part in value)
        else:
            options = value.get("$in", [value.get("$eq")]) if isinstance(value, dict) else [value]
            good = any(option in known[key] for option in options)
        if not good:
            return False
    return True


def _strict(value: Any) -> Any:
    """JSON-typed replies must not hold bare NaN: W&B sends strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, list) else value


def _revive(value: Any) -> Any:
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return {key: _revive(item) for key, item in value.items()} if isinstance(value, dict) else value
