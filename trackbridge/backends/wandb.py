"""Weights & Biases, online and offline.

One row of the journal is one row of the history, on our own axis ``trackbridge/step``; W&B's step only counts rows and is
never given. The SDK runs in a child process (`wandb_process`). W&B acknowledges nothing, so a row counts as safe when its
``trackbridge/seq`` was read back: from the server, or, offline, from the flushed run file. An artifact is safe when the
server has committed it, params and anomalies when the run's config and summary show them. Until then we keep the record.

A server that is away when the run opens is `RetryLater`, not a change to offline mode: the journal holds everything, and
rows that went to a run file in between would be in two places. A server that goes away later costs nothing either: the
SDK's queue is bounded here by what has not been read back. If rows stop arriving while the server answers (W&B gives up for
good after a 401 or 404), the child is killed and a new one resumes the run after the last row the server has.

Anomalies are in the run's summary (``anomaly/<id>``) and raise an alert once each, after the server has them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, field_validator

from trackbridge import plugins
from trackbridge.backends import wandb_near, wandb_trouble, words
from trackbridge.backends.base import Backend, BackendConfig, to_a_new_run
from trackbridge.backends.wandb_arrived import EXIT_CODES, Arrived
from trackbridge.backends.wandb_client import Opened, Pace, Target
from trackbridge.backends.wandb_fetch import fetch_capsule
from trackbridge.backends.wandb_process import ClientError, Process
from trackbridge.backends.wandb_rows import (
    LONGEST,
    anomaly_facts,
    artifact_type,
    config_values,
    history_row,
    keys_of,
    project_name,
    tags,
)
from trackbridge.backends.wandb_turn import Turn
from trackbridge.errors import ConfigError, Rejected, RetryLater
from trackbridge.records import Anomaly, Artifact, Params, Record, Row, RunEnd, RunInfo
from trackbridge.rundir import dumps, write_atomic

__all__ = ["WandbBackend", "WandbConfig", "fetch_capsule"]

logger = logging.getLogger("trackbridge")

OFFLINE_MODES = ("offline", "dryrun", "disabled")
UNCONFIRMED_VALUES = 1_000_000
"""Values that may be on their way at once; about 100 MB in the SDK."""
CALL_SECONDS = 20.0
LOW = 0.3  # severity up to which an alert is an information
CALL_VALUES = 20_000
ARTIFACT_TRIES = 5
TURN_SECONDS = 1.0
"""Between looks whether another process has ended that writes into the same joined run."""


class WandbConfig(BackendConfig):
    """`entity` and `project` default to W&B's default entity and to the run's project. `mode` None is W&B's own rule: what
    ``WANDB_MODE`` says, else online if a key is configured (``WANDB_API_KEY`` or netrc), else offline, with a warning.
    `base_url` is a server of your own. The key is never here: use ``wandb login`` or ``WANDB_API_KEY``. `report`: make the
    spike-forensics report when the first capsule has arrived; its address is in the run's summary, ``trackbridge/report``.

    The budget is W&B's documented one, of which the stream policy uses what it needs."""

    kind: Literal["wandb"] = "wandb"
    entity: str | None = None
    project: str | None = None
    mode: Literal["online", "offline"] | None = None
    base_url: str | None = None
    report: bool = False
    rows_per_minute: int | None = Field(1000, ge=10)
    values_per_minute: int | None = Field(100_000, ge=1000)
    joined: str | None = Field(None, description="id of the user's run that ours is written into (`join=True`)")
    beside: wandb_near.Beside | None = Field(None, description="the user's run that ours is a companion of")
    _near: bool = PrivateAttr(False)

    @field_validator("project")
    @classmethod
    def _legal(cls, value: str | None) -> str | None:
        if value is not None and value != project_name(value):
            raise ConfigError(
                f"wandb project {value[:64]!r}: W&B takes up to {LONGEST} characters, none of / \\ # ? % : (the team is entity)"
            )
        return value

    def project_of(self, run: RunInfo) -> str:
        """The W&B project of `run`: the chosen one, else what its own project is called there."""
        return self.project or project_name(run.project)

    def check(self) -> None:
        if not plugins.installed("wandb"):  # importing it takes most of a second, of the training process too
            plugins.require("wandb", "wandb")
        if self.report:
            plugins.require("wandb_workspaces", "reports")

    @property
    def in_process(self) -> bool:
        """A joined run's object is in the process that opened it. Anywhere else the run is resumed by its id."""
        return self.joined is not None and wandb_near.joined(self.joined) is not None

    def met(self, *, join: bool) -> WandbConfig:
        run = wandb_near.active()
        if run is None:
            return self
        theirs = wandb_near.facts(run)
        if join:
            wandb_near.join(run)
            where = {"entity": theirs.entity, "project": theirs.project, "joined": theirs.id}
            return self.model_copy(update={**where, "mode": "offline" if run.offline else "online"})
        same = self.project in (None, theirs.project) and self.entity in (None, theirs.entity)
        here = {"entity": theirs.entity, "project": theirs.project} if same else {}
        return self.model_copy(update={**here, "beside": theirs})

    def introduce(self, run: RunInfo) -> None:
        if self.beside is not None:
            wandb_near.introduce(self.beside.id, f"{self.project_of(run)}/{run.run_id}")

    def nearby(self) -> WandbConfig:
        near = self.model_copy()
        near._near = True
        return near

    def anew(self, run: RunInfo) -> WandbConfig:
        """A run of ours is opened as if for the first time; one that is still there is found by its id. A joined one is the
        user's to restore."""
        if self.joined is None:
            _note(run).unlink(missing_ok=True)
        return self

    def build(self) -> Backend:
        return WandbBackend(self)

    def where(self, run: RunInfo) -> str | None:
        """The run's URL, or the command that uploads it. None before the run was opened."""
        noted = _noted(run)
        if not noted:
            return None
        return str(noted["url"]) if noted.get("url") else f"wandb sync {_folder(run)}/offline-run-*"


class WandbBackend:
    """`clock` gives monotonic seconds."""

    def __init__(self, config: WandbConfig, pace: Pace | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._pace = pace or Pace()
        self._clock = clock
        self._process: Process | wandb_near.Local | None = None
        self._turn: Turn | None = None

    @property
    def native(self) -> Any:
        """The SDK's run object, where it is in this process."""
        return self._process.native if isinstance(self._process, wandb_near.Local) else None

    # -- the protocol ------------------------------------------------------------------------------------------------

    def open(self, run: RunInfo, /) -> int:
        self._info = run
        self._keys = keys_of(run, joined=self._config.joined is not None)
        self._rows: deque[Row] = deque()
        self._facts: dict[int, Record] = {}
        self._given = -1
        self._tries: dict[int, int] = {}
        self._refused: dict[int, str] = {}
        self._told: set[str] = set()
        self._end: RunEnd | None = None
        self._deadline = math.inf
        self._met = False
        self._left_with: int | None = None
        try:
            arrived = self._connect()
        except BaseException:
            self._leave()
            raise
        self._told.update(arrived.anomalies)
        return min(arrived.rows, arrived.floor)

    def write(self, batch: Sequence[Record], /, *, timeout: float) -> int:
        if self._process is None:
            self._reconnect()
        new = self._affordable([record for record in batch if record.seq > self._given])
        self._refuse(new)
        self._hand_over(new)
        safe = self._confirm()
        self._refuse([])
        return safe

    def close(self, end: RunEnd | None, /, *, timeout: float) -> int:
        if self._process is None:
            self._leave()
            return self._safe()
        self._end, self._deadline = end, self._clock() + timeout
        try:
            self._finish()
            while (safe := self._confirm()) < self._given and self._clock() < self._deadline:
                time.sleep(0.02)
            return safe
        except (RetryLater, ClientError) as error:
            logger.warning("trackbridge: W&B did not confirm everything within %.0f s: %s", timeout, error)
            return self._safe()
        finally:
            self._drop()
            self._leave()

    def _finish(self) -> None:
        """Ask for everything to be sent, and for the run to be marked if this is its end."""
        code = self._exit_code()
        if self._end is None and code is None:
            self._call("settle")
            return
        if self._end is not None:
            for record in list(self._facts.values()):
                if isinstance(record, Anomaly):
                    self._alert(record)  # a run that has ended takes no alert
            self._facts[self._end.seq] = self._end
            self._given = max(self._given, self._end.seq)
        killed = self._config.joined is None and self._end is not None and self._end.status == "killed"
        self._call("finish", code, killed, self._floor(), timeout=self._left() - 1.0)
        self._moved = self._clock()
        if self._config.joined is not None and code is not None:
            noted = _noted(self._info)
            write_atomic(_note(self._info), dumps({**noted, "ended": None}).encode())

    def _exit_code(self) -> int | None:
        """With what the run ends now; None: not at all. A run of the user's ends as it had ended before we took it up again."""
        ours = None if self._end is None else EXIT_CODES[self._end.status]
        if self._config.joined is None:
            return ours
        if self._config.in_process:
            return None
        # An offline file without an end is a failed run to `wandb sync`; where theirs has none, ours says how it ended.
        return ours if self._left_with is None and not self._online else self._left_with

    # -- the connection ----------------------------------------------------------------------------------------------

    def _connect(self) -> Arrived:
        """Start a client and open the run. Sets what the tracker holds. Raises `RetryLater`."""
        run, config = self._info, self._config
        mode = config.mode or os.environ.get("WANDB_MODE") or None
        place = [config.base_url, config.entity, config.project_of(run)]
        noted = _noted(run)
        if noted.get("place", place) != place:  # synced to another project or server since
            noted = {}
        target = Target(
            folder=str(_folder(run)),
            project=config.project_of(run),
            run_id=config.joined or noted.get("id") or run.run_id,
            name=None if noted or config.joined else run.name[:LONGEST],  # somebody may have renamed it since
            entity=config.entity,
            base_url=config.base_url,
            mode=None if mode is None else ("offline" if mode in OFFLINE_MODES else "online"),
            group=self._group(run),
            companion_of=(config.beside.url or config.beside.id) if config.beside else None,
            tags=() if config.joined else tags(run.tags),
            report=config.report,
            pace=self._pace,
            created=run.created,
            new=not (noted.get("url") or config.joined),
            keys=self._keys,
            own=config.joined is None,
            theirs=noted.get("theirs"),
            again=self._met,
        )
        self._drop()
        self._take_turn(target)
        self._process = self._client(run)
        try:
            opened: Opened = self._process.call("open", target, timeout=min(self._pace.init * 2 + CALL_SECONDS, self._left()))
        except (ClientError, TimeoutError) as error:
            self._drop()
            there = "/".join(part for part in (config.entity, target.project, target.run_id) if part)
            otherwise = "" if config.joined is not None else f"; else {to_a_new_run(run, config.kind)}"
            raise wandb_trouble.meaning(error, there, otherwise) from None
        self._process.remember(opened.pids)
        if not opened.online and target.mode is None:
            logger.warning(
                "trackbridge: no W&B key is configured, so the run is recorded offline in %s; run 'wandb login' to change that",
                opened.place,
            )
        self._online = opened.online
        self._arrived = opened.arrived
        self._answers, self._moved = 0, self._clock()
        note = {"url": opened.place if opened.online else None, "id": opened.run_id, "place": place}
        if config.joined is not None:
            note |= self._theirs(noted, opened)
        write_atomic(_note(run), dumps(note).encode())
        self._met = True
        return opened.arrived

    def _group(self, run: RunInfo) -> str | None:
        """W&B's group of our run; None: none, or the run is theirs."""
        beside = self._config.beside
        if self._config.joined is not None:
            return None
        if run.group or beside is None:
            return run.group[:LONGEST] if run.group else None
        return beside.group or beside.id

    def _theirs(self, noted: Mapping[str, Any], opened: Opened) -> dict[str, Any]:
        """What to remember of a run of the user's: where its offline files are, and, while we have it open in a process of
        ours, how it had ended: a later life of ours ends it so, should this one be cut short."""
        if self._config.in_process:
            return {} if opened.online else {"theirs": str(Path(opened.place).parent)}
        if not self._met:
            self._left_with = noted.get("ended") if opened.ended is None else opened.ended
        return {"theirs": noted.get("theirs"), "ended": self._left_with}

    def _client(self, run: RunInfo) -> Process | wandb_near.Local:
        if self._config.in_process:
            return wandb_near.Local(wandb_near.joined(self._config.joined or ""))
        _folder(run).mkdir(parents=True, exist_ok=True)
        return wandb_near.Local() if self._config._near else Process(_folder(run))

    def _take_turn(self, target: Target) -> None:
        """Where a joined run is taken up again: not while another process does. Held until `close`. Raises `RetryLater`."""
        if target.own or self._config.in_process or target.mode == "offline":
            return
        server = target.base_url or os.environ.get("WANDB_BASE_URL", "")
        self._turn = self._turn or Turn(server, target.entity or "", target.project, target.run_id)
        if not self._turn.take():
            raise RetryLater(TURN_SECONDS, f"another process is writing into the W&B run {target.run_id}; waiting for it")

    def _leave(self) -> None:
        if self._turn is not None:
            self._turn.leave()
            self._turn = None

    def _reconnect(self) -> None:
        """A new client for the same run: what the tracker does not have is handed over again."""
        self._connect()
        waiting = sorted([*self._rows, *self._facts.values()], key=lambda record: record.seq)
        self._rows.clear()
        self._facts.clear()
        self._hand_over(waiting)
        if self._deadline < math.inf:
            self._finish()

    def _left(self) -> float:
        """Seconds that `close` still has."""
        return max(self._deadline - self._clock(), 1.0)

    def _drop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _call(self, method: str, *arguments: Any, timeout: float = CALL_SECONDS) -> Any:
        assert self._process is not None
        try:
            return self._process.call(method, *arguments, timeout=timeout)
        except TimeoutError as error:
            self._drop()
            raise RetryLater(1.0, str(error)) from None

    # -- records out -------------------------------------------------------------------------------------------------

    def _refuse(self, new: Sequence[Record]) -> None:
        """Raise `Rejected` for artifacts that can never arrive; before anything of `new` is handed over."""
        for record in new:
            if isinstance(record, Artifact) and not (Path(self._info.directory) / record.path).exists():
                self._refused[record.seq] = f"{record.path} is not in the run directory any more"
        if self._refused:
            reasons, self._refused = self._refused, {}
            for seq in reasons:
                self._facts.pop(seq, None)
            raise Rejected(reasons)

    def _affordable(self, records: Sequence[Record]) -> Sequence[Record]:
        """As many of `records` as may be on their way at once; the rest will be offered again."""
        size = sum(row.values.size for row in self._rows)
        for index, record in enumerate(records):
            if size > UNCONFIRMED_VALUES:
                return records[:index]
            size += record.values.size if isinstance(record, Row) else 0
        return records

    def _hand_over(self, records: Sequence[Record]) -> None:
        if not (self._rows or self._facts):
            self._answers, self._moved = self._arrived.answers, self._clock()
        rows: list[Row] = []
        for record in records:
            self._given = max(self._given, record.seq)
            if not isinstance(record, Row):
                self._facts[record.seq] = record
            elif record.seq > self._arrived.rows:
                rows.append(record)
        self._rows.extend(rows)
        for record in records:
            self._tell(record)
        for part in _parts(rows):
            self._call("log", [history_row(row, self._keys.seq) for row in part], self._floor())

    def _tell(self, record: Record) -> None:
        if isinstance(record, Params):
            self._call("params", record.seq, config_values(record))
        elif isinstance(record, Anomaly):
            self._call("anomaly", record.id, anomaly_facts(record))
            if not self._online:
                self._alert(record)
        elif isinstance(record, Artifact):
            path = str(Path(self._info.directory) / record.path)
            metadata = json.loads(dumps(dict(record.metadata)))
            try:
                self._call("artifact", record.seq, record.name, artifact_type(record.kind), path, metadata, record.step)
            except ClientError as error:
                self._refused[record.seq] = str(error)

    def _alert(self, anomaly: Anomaly) -> None:
        if anomaly.id not in self._told:
            self._told.add(anomaly.id)
            usual = "WARN" if anomaly.severity > LOW else "INFO"
            level = "ERROR" if anomaly.kind in ("nonfinite", "divergence") else usual
            title = f"{anomaly.what} at step {anomaly.step}{'' if anomaly.fault else f': {anomaly.series}'}"
            self._call("alert", title[:64], words.anomaly_markdown(anomaly), level)

    # -- confirmations back ------------------------------------------------------------------------------------------

    def _confirm(self) -> int:
        """Look what has arrived; returns the highest safe seq. Reconnects when nothing moves although the server answers."""
        before, arrived = self._arrived, self._call("arrived")
        self._arrived = arrived
        while self._rows and self._rows[0].seq <= arrived.rows:
            self._rows.popleft()
        for record in list(self._facts.values()):
            self._settle(record)
        moved = (arrived.rows, arrived.params, arrived.anomalies, arrived.artifacts) != (
            before.rows, before.params, before.anomalies, before.artifacts,
        )  # fmt: skip
        if moved or not (self._rows or self._facts):
            self._answers, self._moved = arrived.answers, self._clock()
        elif isinstance(self._process, wandb_near.Local):
            pass  # a queue in the user's process cannot be taken back: what is in it would arrive twice
        elif arrived.answers > self._answers + 1 and self._clock() - self._moved > self._pace.stall:
            logger.warning("trackbridge: W&B takes no rows although its server answers; connecting again")
            self._reconnect()
        return self._safe()

    def _settle(self, record: Record) -> None:
        """Forget `record` if it has arrived; try an artifact again that failed."""
        arrived, seq = self._arrived, record.seq
        if isinstance(record, Params):
            there = arrived.params >= seq
        elif isinstance(record, Anomaly):
            there = arrived.anomalies.get(record.id, -1) >= seq
            if there:
                self._alert(record)
        elif isinstance(record, Artifact):
            there = arrived.artifacts.get(seq, "") is None
            if arrived.artifacts.get(seq):
                self._again(record, str(arrived.artifacts[seq]))
        else:
            there = not isinstance(record, RunEnd) or arrived.ended
        if there:
            del self._facts[seq]

    def _again(self, record: Artifact, why: str) -> None:
        self._tries[record.seq] = self._tries.get(record.seq, 0) + 1
        if self._tries[record.seq] < ARTIFACT_TRIES:
            logger.warning("trackbridge: W&B did not take artifact %s (%s); trying again", record.name, why)
            self._tell(record)
        else:
            self._refused[record.seq] = why

    def _floor(self) -> int:
        """Every fact up to this seq has arrived."""
        return min(self._facts, default=self._given + 1) - 1

    def _safe(self) -> int:
        first = self._rows[0].seq if self._rows else self._given + 1
        return min(first - 1, self._floor())


def _folder(run: RunInfo) -> Path:
    return Path(run.directory) / "wandb"


def _note(run: RunInfo) -> Path:
    return _folder(run) / "where.json"


def _noted(run: RunInfo) -> dict[str, Any]:
    """What was written down when the run was last opened; empty if it never was."""
    try:
        noted = json.loads(_note(run).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}


def _parts(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """`rows` in pieces that the SDK takes in well under a second each."""
    start, size = 0, 0
    for index, row in enumerate(rows):
        size += row.values.size
        if size > CALL_VALUES:
            yield rows[start : index + 1]
            start, size = index + 1, 0
    if rows[start:]:
        yield rows[start:]
