"""What of a run has arrived in W&B: read back from the server, or from the run files of offline mode.

W&B acknowledges nothing, so this is how anything is known to be safe.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from trackbridge.backends.wandb_file import HISTORY, SUMMARY, RecordedRun, RunFile, item_key, kind_of, number_in, run_files
from trackbridge.backends.wandb_rows import ANOMALY, CREATED, Keys
from trackbridge.errors import TrackbridgeError

PAGE = 2000

READ_BACK = """
query TrackbridgeReadBack($entity: String!, $project: String!, $run: String!, $spec: JSONString!) {
  project(name: $project, entityName: $entity) {
    run(name: $run) { state config summaryMetrics historyLineCount sampledHistory(specs: [$spec]) }
  }
}
"""


OWNER = """
query TrackbridgeOwner($entity: String!, $project: String!, $run: String!) {
  project(name: $project, entityName: $entity) { run(name: $run) { config state } }
}
"""


RUNNING = ("running", "pending", "preempting")
GOES_ON = (*RUNNING, "preempted")
"""States of a run that somebody writes to or will write to: a preempted one waits to be resumed, which W&B arranges itself in a
sweep. Were it opened, it would not be preempted any more."""
EXIT_CODES = {"finished": 0, "failed": 1, "killed": 255}
"""What a run ends with, by how it ended; gives a run one of these states again. W&B calls one that it has not heard of for
minutes crashed."""


def state_of(api: Any, entity: str | None, project: str, run_id: str) -> str:
    """The state of a run on the server; empty where there is no such run."""
    return str(_owner(api, entity, project, run_id).get("state") or "")


def taken(api: Any, entity: str | None, project: str, run_id: str, created: float) -> bool:
    """Whether the server has, under this id, a run of another recording than the one that began at `created`."""
    held = _owner(api, entity, project, run_id)
    noted = json.loads(held.get("config") or "{}").get(CREATED) or {}
    return "value" in noted and float(noted["value"]) != created


def _owner(api: Any, entity: str | None, project: str, run_id: str) -> dict[str, Any]:
    where = {"entity": entity or api.default_entity, "project": project, "run": run_id}
    answer = api._service_api.execute_graphql(OWNER, where, timeout=15)
    return (answer.get("project") or {}).get("run") or {}


@dataclass(frozen=True)
class Arrived:
    """What the tracker holds. `rows`: highest seq of a row; `params` and `anomalies` (by id) likewise; `floor`: see
    `wandb_rows.FLOOR`.
    `artifacts`: by seq, None for arrived, else why not. `ended`: the run is marked as ended. `answers` counts the
    successful read-backs."""

    rows: int = -1
    floor: int = -1
    params: int = -1
    anomalies: dict[str, int] = field(default_factory=dict)
    artifacts: dict[int, str | None] = field(default_factory=dict)
    ended: bool = False
    answers: int = 0


class OnlineReader:
    """Reads back from the server what has arrived: only new rows, only their seq. `empty`: the run was made just now, so there
    is nothing to ask about before something was sent."""

    def __init__(self, run: Any, keys: Keys, *, empty: bool = False) -> None:
        self._keys = keys
        self._empty = empty
        self._base_url = run.settings.base_url
        self._where = {"entity": run.entity, "project": run.project, "run": run.id}
        self._next = int(run.starting_step) or int(run.step)  # in a run of the user's there may be rows before ours
        self.seen = Arrived()

    def first(self) -> Arrived:
        """What the run held when it was resumed. Rows are looked for backwards: they are in the order of their seq."""
        if self._empty:
            return self.seen
        stop, rows = self._next, -1
        while stop > 0 and rows < 0:
            start = max(0, stop - PAGE)
            rows = max((row[self._keys.seq] for row in self._page(start, stop - 1)[1]), default=-1)
            stop = start
        answer, _ = self._page(self._next, self._next)
        self.seen = self._facts(answer, rows)
        return self.seen

    def read(self) -> None:
        more = True
        while more:
            answer, rows = self._page(self._next, self._next + PAGE - 1)
            highest = max((row[self._keys.seq] for row in rows), default=self.seen.rows)
            self._next = max((row["_step"] + 1 for row in rows), default=self._next)
            self.seen = self._facts(answer, highest)
            more = len(rows) == PAGE
            if not rows and int(answer.get("historyLineCount") or 0) > self._next + PAGE:
                self._next += PAGE  # so many rows that are not ours
                more = True

    @cached_property
    def _api(self) -> Any:
        """The SDK's. Importing it and its greeting of the server take a third of a second: not before it is needed."""
        import wandb

        return wandb.Api(overrides={"base_url": self._base_url}, timeout=10)

    def _page(self, first: int, last: int) -> tuple[dict[str, Any], list[dict[str, int]]]:
        """The run's facts, and `_step` and seq of its rows with first <= `_step` <= last: all of them, not a sample."""
        wanted = ["_step", self._keys.seq]
        spec = json.dumps({"keys": wanted, "minStep": first, "maxStep": last, "samples": last - first + 1})
        answer = self._api._service_api.execute_graphql(READ_BACK, {**self._where, "spec": spec}, timeout=15)
        run = (answer.get("project") or {}).get("run") or {}
        rows = (run.get("sampledHistory") or [[]])[0]
        return run, [{key: int(row[key]) for key in wanted} for row in rows]

    def _facts(self, run: dict[str, Any], rows: int) -> Arrived:
        summary = json.loads(run.get("summaryMetrics") or "{}")
        config = json.loads(run.get("config") or "{}")
        params = config.get(self._keys.params) or {}
        return Arrived(
            rows=rows,
            floor=int(summary.get(self._keys.floor, -1)),
            params=int(params.get("value", -1)),
            anomalies=self._keys.anomalies(summary),
            ended=run.get("state", "running") not in RUNNING,
            answers=self.seen.answers + 1,
        )


class OfflineReader:
    """Reads what is in the run files that it follows, oldest first. Synchronises the newest to the disk before it says so.

    Of a row's hundreds of values only its seq is looked at, of the summary only our own keys: reading back must not cost more
    than writing.
    """

    def __init__(self, run_id: str, keys: Keys) -> None:
        self._run_id, self._keys = run_id, keys
        self._files: list[RunFile] = []
        self._run = RecordedRun()  # what is neither a row nor the summary
        self._summary: dict[str, Any] = {}
        self._rows = -1
        self.seen = Arrived()

    def recall(self, folder: Path) -> None:
        """Take what the files in `folder` say, now and once; they are the user's. What cannot be read, or is not there any
        more, is not known; nor, then, how the run ended."""
        try:
            for path in run_files(folder, self._run_id):
                self._follow(RunFile(path))
        except (TrackbridgeError, OSError) as error:
            print(f"not known what {folder} holds: {error}", flush=True)
            self._run.exit_code = None

    def follow(self, folder: Path) -> None:
        """From now on read the files in `folder`. Raises `ReferenceNotFoundError` if it has none of the run."""
        self._files = [RunFile(path) for path in run_files(folder, self._run_id)]

    def _follow(self, file: RunFile) -> None:
        for data in file.payloads():
            self._take(data, file)

    def first(self) -> Arrived:
        return self.read()

    def read(self) -> Arrived:
        artifacts = dict(self.seen.artifacts)
        for file in self._files:
            self._follow(file)
        for artifact in self._run.artifacts:
            artifacts[int(artifact.metadata.get(self._keys.seq, -1))] = None
        self._run.artifacts.clear()
        seen = Arrived(
            rows=self._rows,
            floor=int(self._summary.get(self._keys.floor, -1)),
            params=int(self._run.config.get(self._keys.params, -1)),
            anomalies=self._keys.anomalies(self._summary),
            artifacts=artifacts,
            ended=self._run.exit_code is not None,
            answers=self.seen.answers + 1,
        )
        if seen != replace(self.seen, answers=seen.answers):
            with self._files[-1].path.open("rb") as handle:
                os.fsync(handle.fileno())
        self.seen = seen
        return seen

    @property
    def exit_code(self) -> int | None:
        """With which the run ended, as far as it was read."""
        return self._run.exit_code

    @property
    def config(self) -> dict[str, Any]:
        return self._run.config

    def _take(self, data: bytes, file: RunFile) -> None:
        kind = kind_of(data)
        if kind == HISTORY:
            self._rows = max(self._rows, -1 if (seq := number_in(data, self._keys.seq)) is None else seq)
        elif kind == SUMMARY:  # W&B repeats every series there; ours are few, and rare
            floor = self._keys.floor
            if (floor.encode() in data or ANOMALY.encode() in data) and (record := file.parsed(data)) is not None:
                for item in record.summary.update:
                    if (name := item_key(item)).startswith((floor, ANOMALY)):
                        self._summary[name] = json.loads(item.value_json)
                for item in record.summary.remove:
                    self._summary.pop(item_key(item), None)
        elif (record := file.parsed(data)) is not None:
            self._run.add(record)
