"""The shipper: delivers a run's journal to its trackers, during the run or any time after.

``python -m trackbridge.shipper RUN_DIR [--follow] [--parent PID] [--to KIND]...`` is the child process that a run starts, and
the same code is ``trackbridge sync``. One thread per tracker, each with its own cursor, so a slow one never delays another.
It needs no torch.

While following a run it ends by itself: when the newest attempt's end is delivered everywhere, or `LINGER_SECONDS` after the
trainer ended. What is left then is delivered by ``trackbridge sync``. When the trainer dies without a word (its parent
process is gone), the shipper becomes the journal's writer, seals the open capsules and marks the run as killed
(`trackbridge.shipping.settle`).
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trackbridge import children, redact
from trackbridge.backends.base import BackendConfig
from trackbridge.config import StreamConfig
from trackbridge.errors import TrackbridgeError, UsageError
from trackbridge.history import find
from trackbridge.rundir import RunDirectory
from trackbridge.shipping.claim import Claim
from trackbridge.shipping.settle import Settled, settle
from trackbridge.shipping.status import BackendStatus, configured, status, statuses
from trackbridge.shipping.trainer import Trainer
from trackbridge.shipping.worker import Situation, Worker

__all__ = ["BackendStatus", "Shipper", "SyncReport", "configured", "start", "status", "sync"]

logger = logging.getLogger("trackbridge")

LINGER_SECONDS = 1800.0
"""How long a following shipper goes on after the trainer has ended, when a tracker does not take what is left."""
TERM_SECONDS = 20.0
"""How long it goes on after SIGTERM: schedulers kill soon after."""
STOP_SECONDS = 10.0
"""How long a tracker gets to flush when we must stop."""
_WATCH_SECONDS = 0.25
_EXIT_SECONDS = 20.0
_LOG_BYTES = 10 << 20


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What `sync` achieved. `sealed`: capsules made now; `killed`: the run was found dead and marked; `busy`: by backend kind,
    which other process serves it."""

    backends: tuple[BackendStatus, ...]
    sealed: tuple[str, ...] = ()
    killed: bool = False
    busy: Mapping[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return all(backend.lag == 0 for backend in self.backends)


class Shipper:
    """Serves `backends` from one run directory. `run` blocks until done; see the module.

    `follow`: wait for what the run still writes. `parent`: the trainer's process id, when this is its child process. `settles`:
    do what a trainer that ended could not do itself (never inside the trainer). `timeout` bounds everything, in seconds.
    `anew`: deliver all of it again, but for what a tracker says it has.
    """

    def __init__(
        self,
        run_dir: str | Path,
        backends: Sequence[BackendConfig],
        *,
        follow: bool = False,
        parent: int | None = None,
        settles: bool = False,
        timeout: float | None = None,
        on_progress: Callable[[list[BackendStatus]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        anew: bool = False,
    ) -> None:
        self._directory = RunDirectory(run_dir)
        self._configs = {config.kind: config for config in backends}
        self._follow = follow
        self._settles = settles
        self._clock = clock
        self._on_progress = on_progress
        self._deadline = None if timeout is None else clock() + timeout
        self._situation = Situation(follow=follow)
        self._stop = threading.Event()
        self._trainer = Trainer(self._directory, parent, clock)
        self._journal_claim = Claim(self._directory.shipper / "journal.claim")
        self._settling: threading.Thread | None = None
        self._settled = Settled()
        policy = StreamConfig.model_validate(self._directory.read().settings.get("stream", {}))
        seeds = random.Random(os.urandom(16))
        self._workers = [
            Worker(
                config, self._directory, policy, self._situation, clock=clock, rng=random.Random(seeds.random()), anew=anew
            )
            for config in backends
        ]

    def run(self) -> None:
        """Deliver until there is nothing left to do, or no time."""
        self._watch()  # first of all: a dead run gets its end before it is delivered
        threads = [threading.Thread(target=self._serve, args=(worker,), daemon=True) for worker in self._workers]
        for thread in threads:
            thread.start()
        while (alive := [thread for thread in threads if thread.is_alive()]) or self._unsettled():
            if self._on_progress is not None:
                self._on_progress(self.status())
            if self._stop.is_set() or (self._deadline is not None and self._clock() >= self._deadline):
                break
            if alive:
                alive[0].join(_WATCH_SECONDS)
            else:
                self._stop.wait(_WATCH_SECONDS)
            self._watch()
        self._stop.set()
        end = time.monotonic() + STOP_SECONDS
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0.1))

    def stop(self, within: float) -> None:
        """End in `within` seconds, whatever is left. May be called from a signal handler."""
        deadline = self._clock() + within
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def status(self) -> list[BackendStatus]:
        return statuses(self._directory, self._configs)

    def serves(self, kind: str) -> bool:
        return kind in self._configs

    def native(self, kind: str) -> Any:
        """The run object of the backend's SDK in this process; None while it is not open, or where there is none."""
        return next((getattr(worker.backend, "native", None) for worker in self._workers if worker.kind == kind), None)

    def report(self) -> SyncReport:
        busy = {worker.kind: worker.waiting_for for worker in self._workers if worker.waiting_for is not None}
        return SyncReport(tuple(self.status()), tuple(self._settled.capsules), self._settled.killed, busy)

    def _unsettled(self) -> bool:
        """Something may still have to be done to the journal, with or without a tracker."""
        waiting = self._follow and self._settles and not self._workers
        return not self._situation.over and (waiting or (self._settling is not None and self._settling.is_alive()))

    def _serve(self, worker: Worker) -> None:
        try:
            while not worker.done and not self._stop.is_set():
                self._stop.wait(worker.step())
        except Exception:
            logger.exception("trackbridge: shipping to %s failed; run: trackbridge sync %s", worker.kind, self._directory.path)
        finally:
            worker.finish(STOP_SECONDS)

    # -- the trainer's end

    def _watch(self) -> None:
        """Keep the claims, and see whether the run has ended."""
        if not self._directory.file.exists():
            logger.warning("trackbridge: the run directory %s is gone", self._directory.path)
            self._stop.set()
            return
        try:
            for claim in (self._journal_claim, *(worker.claim for worker in self._workers)):
                claim.keep(self._clock())
            if not self._situation.over:
                self._look()
        except (OSError, TrackbridgeError) as error:
            logger.debug("trackbridge: cannot look at %s: %s", self._directory.path, error)

    def _look(self) -> None:
        if self._trainer.superseded():
            self._stop.set()
            return
        if not (self._trainer.ended() or (self._settles and self._trainer.dead())):
            return
        if self._follow and self._deadline is None:
            self._deadline = self._clock() + LINGER_SECONDS
        if not self._settles:
            self._situation.over = True
        elif self._settling is None or not self._settling.is_alive():
            self._situation.follow = True  # wait for what is appended now
            self._settling = threading.Thread(target=self._settle, name="trackbridge-settle", daemon=True)
            self._settling.start()

    def _settle(self) -> None:
        settled: Settled | None = Settled()
        try:
            settled = settle(self._directory, self._trainer.attempt, self._journal_claim, dead=not self._trainer.ended())
        except (OSError, TrackbridgeError) as error:
            logger.warning("trackbridge: cannot finish what the trainer left in %s: %s", self._directory.path, error)
        except Exception:
            logger.exception("trackbridge: cannot finish what the trainer left in %s", self._directory.path)
        if settled is None:
            self._situation.follow = self._follow  # another process is at it
        else:
            self._settled = settled
            self._views()
            self._situation.over = True

    def _views(self) -> None:
        """What trackers show of the run as a whole. A run without it is delivered all the same."""
        from trackbridge.reports import whole

        try:
            whole.make(self._directory)
        except OSError as error:
            logger.warning("trackbridge: no views of %s: %s", self._directory.path, error)
        except Exception:
            logger.exception("trackbridge: cannot make the views of %s", self._directory.path)


def sync(
    run_dir: str | Path,
    to: Sequence[BackendConfig] | None = None,
    *,
    follow: bool = False,
    timeout: float | None = None,
    on_progress: Callable[[list[BackendStatus]], None] | None = None,
    anew: bool = False,
) -> SyncReport:
    """Deliver what is not delivered yet: to the run's own trackers, or `to` others, which get the whole run. `anew`: go through
    all of the journal again, for what the tracker has lost; where its run is gone, to a new one.

    A tracker that is away is waited for; one that takes nothing until a person has done something is given up, with what that
    is in its `BackendStatus.last_error`.
    Works on a copied directory and on another machine. A run whose trainer died gets its capsules sealed and is marked as
    killed; on another host only when its newest record is older than `trackbridge.liveness.STALE_SECONDS`. Raises
    `UsageError` when there is no tracker to deliver to or the directory is read-only, `ReferenceNotFoundError` when there is no
    run, `MissingExtraError` for a missing package.
    """
    directory = find(run_dir)
    _check_writable(directory.shipper)
    backends = configured(directory) if to is None else list(to)
    _environment(backends)
    shipper = Shipper(
        directory.path, backends, follow=follow, timeout=timeout, on_progress=on_progress, settles=True, anew=anew
    )
    shipper.run()
    report = shipper.report()
    if not backends and not (report.sealed or report.killed):
        raise UsageError(f"run {directory.path.name} was recorded without a tracker: name one, as in --to tensorboard")
    return report


def start(
    run_dir: str | Path, parent_pid: int, environment: Mapping[str, str] | None = None, kinds: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Start the child process that follows a run. It has its own session, and a log file instead of our terminal. `environment`
    is for it alone: secrets that must be in no file. It serves `kinds`; none named: all that a process of ours serves."""
    directory = RunDirectory(run_dir)
    directory.shipper.mkdir(parents=True, exist_ok=True)
    log = directory.shipper / "shipper.log"
    if log.exists() and log.stat().st_size > _LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))
    command = [sys.executable, "-m", "trackbridge.shipper", str(directory.path), "--follow", "--parent", str(parent_pid)]
    for kind in kinds:
        command += ["--to", kind]
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env=children.environment(environment),
        )


def _check_writable(folder: Path) -> None:
    """A disk that is full may have space in a minute; one that is read-only stays so."""
    writable = True
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError as error:
        writable = error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM)
    if not writable:
        raise UsageError(f"cannot write to {folder}, which keeps how far each tracker is: sync a copy of the run directory")


def _environment(backends: Sequence[BackendConfig]) -> None:
    for backend in backends:
        for name, value in backend.environment.items():
            os.environ.setdefault(name, value)


class _Redacted(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redact.text(super().format(record))


def main(arguments: Sequence[str] | None = None) -> int:
    """The child process. Exit status: 0 everything delivered, 1 not everything, 2 wrong usage, 3 broken."""
    parser = argparse.ArgumentParser(prog="python -m trackbridge.shipper", description="Deliver a run to its trackers.")
    parser.add_argument("run_dir")
    parser.add_argument("--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("--parent", type=int, metavar="PID", help="the trainer, whose death ends the run")
    parser.add_argument("--to", action="append", metavar="KIND", help="a tracker; default: those of the run")
    options = parser.parse_args(arguments)
    handler = logging.StreamHandler()
    handler.setFormatter(_Redacted("%(asctime)s %(process)d %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        directory = find(options.run_dir)
        backends = configured(directory, options.to)
        _environment(backends)
        shipper = Shipper(directory.path, backends, follow=options.follow, parent=options.parent, settles=True)
    except TrackbridgeError as error:
        logger.error("%s", error)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: shipper.stop(TERM_SECONDS))
    os.nice(5)  # training comes first, but a busy machine must not starve us
    logger.info("shipping %s to %s", directory.path, ", ".join(config.kind for config in backends) or "nobody")
    try:
        shipper.run()
    except Exception:
        logger.exception("a bug; the trainer starts another shipper")
        return 3
    report = shipper.report()
    logger.info("ended: %s", ", ".join(f"{b.kind} at {b.shipped_seq} of {b.last_seq}" for b in report.backends))
    return 0 if report.complete else 1


def _exit(code: int) -> None:
    """Leave even when a vendor's exit handler or thread hangs."""
    timer = threading.Timer(_EXIT_SECONDS, os._exit, (code,))
    timer.daemon = True
    timer.start()
    sys.exit(code)


if __name__ == "__main__":
    _exit(main())
