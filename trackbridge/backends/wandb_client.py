"""What runs in the W&B client's process: the only file of this backend that calls the wandb SDK.

`Client` does what the shipper's side asks, one call at a time, and returns at once: rows go into the SDK's queue, uploads of
artifacts wait in a thread, and another reads back from the server what has arrived. Only `open` and `finish` may take long.
"""

from __future__ import annotations

import importlib
import os
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psutil

from trackbridge import children
from trackbridge.backends import exhibits, folders, wandb_history, wandb_views
from trackbridge.backends.wandb_arrived import EXIT_CODES, GOES_ON, Arrived, OfflineReader, OnlineReader, state_of, taken
from trackbridge.backends.wandb_fetch import KIND
from trackbridge.backends.wandb_log import Log
from trackbridge.backends.wandb_rows import CREATED, HistoryRow, Keys
from trackbridge.backends.wandb_trouble import deleted
from trackbridge.backends.wandb_views import Published, Survey, View
from trackbridge.names import ATTEMPT, CATALOGUE, STEP
from trackbridge.panels import PAGE
from trackbridge.rundir import RunDirectory

KILLED = "killed"
FINISH_SECONDS = 10.0
"""What closing a run may take in the user's process."""
OUR_SERIES = tuple(
    f"{family}/*" for family in dict.fromkeys(metric.name.partition("/")[0] for metric in CATALOGUE) if family != "trackbridge"
)
"""Patterns of our own series: what gets our step axis in a run of the user's."""
REPORT = "trackbridge/report"
"""Summary key: the address of the report that the run made itself."""
VIEWS = "trackbridge/views"
"""Summary key: the journal's end when the newest pictures of the whole run were made."""
HURRY_SECONDS = 0.3
"""Between read-backs when somebody is waiting for them."""
REPORT_SECONDS = 40.0
"""What a report may take: less than what a run has for its end."""

Mode: TypeAlias = Literal["online", "offline"]
Resume: TypeAlias = Literal["allow", "never", "must"]


@dataclass(frozen=True)
class Pace:
    """Seconds. `poll`: between read-backs; `transmit`: between the SDK's transmissions (whole seconds; None: as the SDK has
    it, 15); `flush`: between its writes to the run file; `stall`: without progress, while the server answers, until the
    connection is given up and made anew."""

    init: float = 20.0
    poll: float = 4.0
    transmit: int | None = None
    flush: float = 0.5
    stall: float = 90.0


@dataclass(frozen=True)
class Target:
    """The run to open. `mode` None: online if wandb finds a key, else offline. `name` None: as the run is called there. `new`:
    it was never opened, so that its id may be another run's there, whose recording began at another time than `created`.
    `report`: make the report of the first anomaly when its capsule has arrived. `own`: the run is ours, to configure and to
    end; else it is the user's, which is written into. Where that is not open in this process, `theirs` is the folder of its
    offline files, if they are known, and `again` says that we are the ones that have it open."""

    folder: str
    project: str
    run_id: str
    name: str | None
    keys: Keys
    entity: str | None = None
    base_url: str | None = None
    mode: Mode | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    report: bool = False
    pace: Pace = Pace()
    companion_of: str | None = None
    created: float = 0.0
    new: bool = False
    own: bool = True
    theirs: str | None = None
    again: bool = False


@dataclass(frozen=True)
class Opened:
    """`place` is the run's URL or its offline folder; `run_id` its id there; `arrived` what the tracker holds from earlier
    lives. `ended`: the exit code with which a run of the user's had ended, None if it had not or that is not known."""

    online: bool
    place: str
    run_id: str
    arrived: Arrived
    pids: list[int]
    ended: int | None = None


class Client:
    """`run`: the user's, open in this process, which is written into; `folder`: of its files, by its full path. `process`: this
    process is there for nothing else."""

    def __init__(self, *, run: Any = None, folder: Path | None = None, process: bool = False) -> None:
        self._run: Any = run
        self._folder = folder
        self._own = run is None
        self._past: OfflineReader | None = None  # has read what the user recorded offline, before us
        self._taken_keys: frozenset[str] = frozenset()  # of their config
        self._alone = process
        self._over = threading.Event()
        self._ended = False
        self._lock = threading.Lock()
        self._uploads: queue.Queue[tuple[int, Any, str, int] | None] = queue.Queue()
        self._artifacts: dict[int, str | None] = {}
        self._wake = threading.Event()
        self._hurry = threading.Event()  # somebody is waiting for what has arrived
        self._step = 0
        self._report: threading.Thread | None = None

    @property
    def run(self) -> Any:
        """The SDK's run object, None before `open` made it."""
        return self._run

    def open(self, target: Target) -> Opened:
        import wandb

        self._wandb = wandb
        self._target = target
        self._own = target.own
        if self._alone:
            self._prepare()
        ended = None
        if self._run is None:
            ended = None if self._own else self._ended_with(target)
            self._run = self._init(target)
        folder = self._folder or Path(self._run.dir).resolve().parent
        online = not self._run.offline
        self._reader: OnlineReader | OfflineReader
        if online:
            self._reader = OnlineReader(self._run, target.keys, empty=self._own and not self._run.resumed)
        else:
            self._reader = self._past or OfflineReader(self._run.id, target.keys)
            self._reader.follow(folder.parent)
        for name in (target.keys.seq, ATTEMPT):
            self._run.define_metric(name, hidden=True)
        self._run.define_metric(STEP)
        for pattern in ("*",) if self._own else OUR_SERIES:  # alone: every row has its step, so nothing has to look for it
            self._run.define_metric(pattern, step_metric=STEP, step_sync=not self._alone)
        self._log = Log(self._run, direct=self._alone)
        # Tags that somebody gave the run in the meantime stay; "killed" is no longer true.
        tags = [tag for tag in dict.fromkeys([*(self._run.tags or ()), *target.tags]) if tag != KILLED]
        if self._own and tags != list(self._run.tags or ()):
            self._run.tags = tags
        if self._own:
            self._run.config.update({CREATED: target.created}, allow_val_change=True)
        if target.companion_of is not None:
            self._run.config.update({"trackbridge/companion_of": target.companion_of}, allow_val_change=True)
        arrived = self._reader.first()
        threading.Thread(target=self._upload, name="uploads", daemon=True).start()
        if online:
            threading.Thread(target=self._poll, name="read-back", daemon=True).start()
        place = self._run.url if online else str(folder)
        return Opened(online, place, self._run.id, arrived, _family(), ended)

    def _prepare(self) -> None:
        """What the SDK would do one after the other, in a process that is ours: start its service and sleep, import its API
        (which reading back needs as well). And it would import pandas, to see that a page of ours is no table."""
        util: Any = importlib.import_module("wandb.util")
        if hasattr(util, "pd_available"):
            util.pd_available = False
        threading.Thread(target=self._wandb.setup, name="service", daemon=True).start()
        importlib.import_module("wandb.apis.public")

    def _init(self, target: Target) -> Any:
        """A run that was opened before must be there: made anew, it would lack what it had. The id of one that was deleted is
        not free any more."""
        if not (target.own and target.new):
            return self._begin(target, "must")
        for run_id in (target.run_id, f"{target.run_id}-{int(target.created)}"):
            try:
                return self._first(replace(target, run_id=run_id))
            except self._wandb.errors.Error as error:
                if not deleted(error):
                    raise
            if self._alone:
                self._wandb.teardown()
        return self._first(replace(target, run_id=f"{target.run_id}-{int(time.time())}"))

    def _first(self, target: Target) -> Any:
        """In a process of ours a run that was never opened is opened as one that must not be there; only where one is, it is
        asked whose that is. (The service keeps the id of a run that was not opened, and this one can be ended.)"""
        if target.new and self._alone:
            try:
                return self._begin(target, "never")
            except self._wandb.errors.UsageError as error:
                if _about_the_key(error):
                    raise
            self._wandb.teardown()
        unknown: Exception | None = None
        try:
            if target.new and target.mode != "offline" and self._taken(target):
                target = replace(target, run_id=f"{target.run_id}-{int(target.created)}")
        except self._wandb.errors.Error as error:  # no key, no server: `init` says it better
            unknown = error
        run = self._begin(target, "allow")
        if unknown is not None and not run.offline:
            raise unknown
        return run

    def _ended_with(self, target: Target) -> int | None:
        """How a run of the user's that is not open here ended. Raises `RuntimeError` while it goes on: two processes that write
        to one run overwrite each other's rows."""
        if target.mode == "offline":
            self._past = OfflineReader(target.run_id, target.keys)
            if target.theirs is not None:
                self._past.recall(Path(target.theirs))
            self._taken_keys = frozenset(self._past.config)
            return self._past.exit_code
        state = state_of(self._api(target), target.entity, target.project, target.run_id)
        if state in GOES_ON and not target.again:
            raise RuntimeError(f"the run {target.run_id} that this one was written into has not ended there: {state}")
        return EXIT_CODES.get(state)

    def _begin(self, target: Target, resume: Resume) -> Any:
        try:
            return self._start(target, target.mode or "online", resume)
        except self._wandb.errors.UsageError as error:
            if target.mode is not None or not _about_the_key(error):
                raise
            return self._start(target, "offline", resume)

    def _taken(self, target: Target) -> bool:
        """Whether another recording has this id there: its directory was deleted, or is on another machine."""
        return taken(self._api(target), target.entity, target.project, target.run_id, target.created)

    def _api(self, target: Target) -> Any:
        overrides = {} if target.base_url is None else {"base_url": target.base_url}
        return self._wandb.Api(overrides=overrides, timeout=10)

    def _start(self, target: Target, mode: Mode, resume: Resume) -> Any:
        settings = {
            "console": "off", "disable_code": True, "disable_git": True, "save_code": False, "disable_job_creation": True,
            "x_disable_stats": True, "x_disable_meta": True, "x_disable_machine_info": True, "x_save_requirements": False,
            "init_timeout": target.pace.init, "x_graphql_retry_max": 2, "x_file_stream_retry_wait_max_seconds": 15.0,
            "x_file_stream_transmit_interval": target.pace.transmit, "x_transaction_log_flush_interval": target.pace.flush,
            "base_url": target.base_url,
        }  # fmt: skip
        if not self._alone:  # in the user's process: their run stays the global one, and nobody waits for ours for ever
            settings |= {"reinit": "create_new", "finish_timeout": FINISH_SECONDS, "silent": True}
        settings = {key: value for key, value in settings.items() if value is not None}
        known = self._wandb.Settings.model_fields
        return self._wandb.init(
            mode=mode,
            dir=str(Path(target.folder).parent),
            entity=target.entity,
            project=target.project,
            id=target.run_id,
            name=target.name,
            group=target.group,
            resume="allow" if mode == "offline" else resume,
            settings=self._wandb.Settings(**{key: value for key, value in settings.items() if key in known}),
        )

    def log(self, rows: Sequence[HistoryRow], floor: int) -> None:
        for keys, values in rows:
            self._log.row(keys, values)
            self._step = int(values[-3])
        self._run.summary[self._target.keys.floor] = floor
        self._wake.set()

    def params(self, seq: int, values: dict[str, Any]) -> None:
        if not self._own:  # what the user's own config says stands
            theirs = self._taken_keys.union(self._run.config.keys())
            values = {key: value for key, value in values.items() if key.startswith("trackbridge/") or key not in theirs}
        self._run.config.update({**values, self._target.keys.params: seq}, allow_val_change=True)
        self._wake.set()

    def anomaly(self, anomaly_id: str, facts: dict[str, Any]) -> None:
        self._run.summary[self._target.keys.anomaly(anomaly_id)] = facts
        self._wake.set()

    def alert(self, title: str, text: str, level: str) -> None:
        self._run.alert(title=title, text=text, level=level)

    def artifact(self, seq: int, name: str, kind: str, path: str, metadata: dict[str, Any], step: int) -> None:
        """Queue an upload. Raises `ValueError` when W&B can never take it."""
        artifact = self._wandb.Artifact(name, type=kind, metadata={**metadata, self._target.keys.seq: seq})
        with self._lock:
            self._artifacts.pop(seq, None)
        self._uploads.put((seq, artifact, path, step))

    def arrived(self) -> Arrived:
        seen = self._reader.read() if isinstance(self._reader, OfflineReader) else self._reader.seen
        with self._lock:
            return replace(seen, artifacts={**seen.artifacts, **self._artifacts}, ended=seen.ended or self._ended)

    def download(self, where: str, step: int | None, dest: str, max_bytes: int, to_read: bool = False) -> str:
        from trackbridge.backends.wandb_fetch import download

        return download(where, step, dest, max_bytes, to_read)

    def history_columns(self, where: str) -> list[str]:
        return wandb_history.columns(where)

    def history_rows(self, where: str, keys: list[str]) -> list[dict[str, Any]]:
        return wandb_history.rows(where, keys)

    def survey(self, entity: str, project: str, run: str) -> Survey:
        return wandb_views.survey(entity, project, run)

    def publish(self, view: View) -> Published:
        return wandb_views.publish(view)

    def settle(self) -> None:
        """From now on read back quickly: somebody is waiting."""
        self._hurry.set()
        self._wake.set()

    def finish(self, exit_code: int | None, killed: bool, floor: int) -> None:
        """`exit_code` None: the run is the user's and goes on."""
        self._uploads.join()
        if self._report is not None:
            self._report.join(REPORT_SECONDS)
        self._show_views()
        self._run.summary[self._target.keys.floor] = floor
        if exit_code is None:
            self._ended = True
        else:
            if killed:
                self._run.tags = (*(self._run.tags or ()), KILLED)
            self._run.finish(exit_code=exit_code)
        self.settle()

    def leave(self) -> None:
        """Stop our threads. A run of ours in the user's process is closed as well, within `FINISH_SECONDS`."""
        self._over.set()
        self._hurry.set()
        self._wake.set()
        self._uploads.put(None)
        if self._own and not self._alone and self._run is not None:
            try:
                self._run.finish()
            except Exception as error:
                print(f"trackbridge: closing the W&B run: {type(error).__name__}: {error}", flush=True)

    def _upload(self) -> None:
        while (job := self._uploads.get()) is not None:
            seq, artifact, path, step = job
            try:
                # Our copy in the run directory is never changed, so W&B need not copy it again.
                for name, file in folders.files(Path(path)):
                    if not file.is_symlink():
                        artifact.add_file(str(file), name, policy="immutable", skip_cache=True)
                logged = self._run.log_artifact(artifact, aliases=[f"step-{step}"])
                if isinstance(self._reader, OnlineReader):
                    logged.wait()
                    self._note(seq, None)
                    self._report_once(artifact.type, step)
            except Exception as error:
                traceback.print_exc()
                self._note(seq, f"{type(error).__name__}: {error}")
            else:
                self._show(Path(path), step)
            finally:
                self._uploads.task_done()

    def _show(self, folder: Path, step: int) -> None:
        """The pictures and the page of an artifact as media of the history, on our axis, in a row of their own. What W&B cannot
        show is in the artifact all the same."""
        try:
            self._log_media(folder, step)
        except Exception:
            traceback.print_exc()

    def _log_media(self, folder: Path, step: int) -> None:
        _, pictures = exhibits.of(folder)
        page = exhibits.page(folder)
        media: dict[str, Any] = {name: self._wandb.Image(str(folder / f"{name}.png")) for name in pictures}
        if page is not None:
            media[PAGE] = self._wandb.Html(str(page), inject=False)
        if media:
            self._run.log({**media, STEP: step})

    def _show_views(self) -> None:
        """The pictures and the page of the whole run, once for each time that they were made."""
        views = RunDirectory(Path(self._target.folder).parent).views
        made = exhibits.made(views)
        if made >= 0 and self._run.summary.get(VIEWS) != made:
            self._show(views, self._step)
            self._run.summary[VIEWS] = made

    def _report_once(self, kind: str, step: int) -> None:
        """Make the report of the first anomaly, if that is asked for: by the command that a person would type."""
        if self._target.report and kind == KIND and self._report is None:
            self._report = threading.Thread(target=self._make_report, args=(step,), name="report", daemon=True)
            self._report.start()

    def _make_report(self, step: int) -> None:
        where = f"{Path(self._target.folder).parent}@{step}"
        base_url = {} if self._target.base_url is None else {"WANDB_BASE_URL": self._target.base_url}
        command = [sys.executable, "-m", "trackbridge.cli", "report", where]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=REPORT_SECONDS, env=children.environment(base_url), check=False
            )
        except subprocess.TimeoutExpired:
            print(f"the report of {where} took more than {REPORT_SECONDS:.0f} s", flush=True)
            return
        if done.returncode == 0:
            self._run.summary[REPORT] = done.stdout.strip()
        else:
            print(f"no report of {where}: {done.stderr.strip()}", flush=True)

    def _note(self, seq: int, trouble: str | None) -> None:
        with self._lock:
            self._artifacts[seq] = trouble

    def _poll(self) -> None:
        assert isinstance(self._reader, OnlineReader)
        poll, idle = self._target.pace.poll, 0.0
        while not self._over.is_set():
            self._wake.wait(min(poll, HURRY_SECONDS) if self._hurry.wait(poll) else idle)
            self._wake.clear()
            before = self._reader.seen
            try:
                self._reader.read()
            except Exception as error:
                print(f"reading back: {type(error).__name__}: {error}", flush=True)
            moved = replace(self._reader.seen, answers=before.answers) != before
            idle = 0.0 if moved or self._hurry.is_set() else min(2 * idle + poll, 8 * poll)


def _about_the_key(error: Exception) -> bool:
    """Whether `init` refuses because no key is configured; the other thing that it refuses is a run's id."""
    return str(error).lower().startswith("no api key")  # further on in the other messages there may be any id


def _family() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]


def serve(descriptor: int) -> None:
    """Answer calls until the other end of the pipe is gone, which means that the shipper is."""
    pipe = Connection(descriptor)
    calls: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue()

    def receive() -> None:
        try:
            while True:
                calls.put(pipe.recv())
        except (EOFError, OSError):
            for child in psutil.Process().children(recursive=True):
                child.kill()
            os._exit(0)

    threading.Thread(target=receive, name="calls", daemon=True).start()
    client = Client(process=True)
    while True:
        method, arguments = calls.get()
        try:
            answer: tuple[bool, Any] = (False, getattr(client, method)(*arguments))
        except Exception as error:
            traceback.print_exc()
            answer = (True, (type(error).__name__, str(error) or type(error).__name__))
        pipe.send(answer)
