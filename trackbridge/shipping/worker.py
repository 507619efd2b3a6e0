"""One tracker being served: read the journal, apply the stream policy, write, move the cursor when the tracker really has it.

The worker keeps what it has offered until the backend says that it is safe, and offers it again until then: `Backend.write` is
idempotent in `seq`. Nothing here waits: `step` does one thing and says when to come back, so that time is a test's to give.
"""

from __future__ import annotations

import hashlib
import logging
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from trackbridge import redact
from trackbridge.backends.base import Backend, BackendConfig, to_a_new_run
from trackbridge.coalesce import Budget
from trackbridge.config import StreamConfig
from trackbridge.errors import Rejected, RetryLater, TrackbridgeError
from trackbridge.journal import JournalReader
from trackbridge.records import Anomaly, Artifact, Params, Record, Row, RunEnd, RunInfo
from trackbridge.rundir import RunDirectory
from trackbridge.shipping.backoff import Backoff
from trackbridge.shipping.claim import Claim
from trackbridge.shipping.cursor import Cursor, DeadLetters
from trackbridge.shipping.pending import Pending
from trackbridge.stream import Stream, with_lag

logger = logging.getLogger("trackbridge")

IDLE_SECONDS = 0.25  # between looks at the journal when it has nothing new
CONFIRM_SECONDS = 1.0  # between questions whether what was offered is safe by now
WRITE_SECONDS = 30.0
CLOSE_SECONDS = 60.0
_READ = 512  # records a read
_REOPEN_AFTER = 3  # failures in a row
_WARN_SECONDS = 60.0
_SAVE_SECONDS = 2.0  # between saves of a cursor that only has a new error to tell
_CLAIM_SECONDS = 2.0  # between tries to take over from another process
_LET_GO_SECONDS = 5.0
_LINE = 600  # characters of an error: a command at its end must be whole
STUCK_SECONDS = 300.0  # between tries while a person has to do something first
_FLUSH_SECONDS = 120.0  # without progress and full: let the backend flush by closing it


@dataclass
class Situation:
    """What the shipper knows and its workers need. `over`: nobody will append to the journal any more. `follow`: until then,
    wait for what comes."""

    over: bool = False
    follow: bool = False


class Worker:
    """Serves one backend. Call `step` until `done`, waiting in between as long as it says; then `finish`."""

    def __init__(
        self,
        config: BackendConfig,
        directory: RunDirectory,
        stream: StreamConfig,
        situation: Situation,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        anew: bool = False,
    ) -> None:
        """`anew`: deliver everything again from the journal's beginning, but for what the tracker says it has."""
        self.kind = config.kind
        self.done = False
        self.backend: Backend | None = None
        self.claim = Claim(directory.shipper / f"{config.kind}.claim")
        self.waiting_for: str | None = None  # who has the claim
        self._config = config
        self._directory = directory
        self._policy = stream
        self._budget = Budget(config.rows_per_minute, config.values_per_minute)
        self._situation = situation
        self._clock = clock
        self._backoff = Backoff(rng)
        self._warned = self._saved = float("-inf")
        self._told: tuple[int, int, str | None] = (-2, 0, None)  # what the cursor's file says
        self._opened: RunInfo | None = None
        self._started = False
        self._anew = anew
        self._stuck_until = float("-inf")
        self._cursor = Cursor(self.kind)
        self._pending = Pending()
        self._reader = JournalReader(directory.rows())

    def step(self) -> float:
        """Do one thing. Returns how many seconds may pass until the next. Never raises for what a tracker or a disk does."""
        if self._goes_on and self._clock() < self._stuck_until:
            return min(self._stuck_until - self._clock(), CONFIRM_SECONDS)
        if not self.claim.held:
            if self.backend is not None:
                self._let_go()  # the claim was lost: this process was stopped for minutes
            self._started = False
            try:
                before, self.waiting_for = self.waiting_for, self.claim.take()
            except OSError as error:
                return self._failed(error)
            if self.waiting_for is not None:
                if before is None:
                    logger.warning("trackbridge: %s is being served by %s; waiting", self.kind, self.waiting_for)
                return _CLAIM_SECONDS
        try:
            if not self._started:
                self._start()
            delay = self._advance()
            self._backoff.ok()
            self._cursor.error = None
        except RetryLater as later:
            delay = self._failed(later, at_least=later.after)
        except Rejected as refusal:
            delay = self._refused(refusal)
        except TrackbridgeError as error:
            delay = self._stuck(error)
        except (Exception, SystemExit) as error:  # an SDK that wants to end the process ends nothing here
            delay = self._failed(error)
            if self._backoff.failures % _REOPEN_AFTER == 0:
                self._let_go()
        self._save()
        return delay

    def finish(self, timeout: float) -> None:
        """Let go of the tracker without ending the run there, and of the claim."""
        if self._opened is not None and self.backend is not None:
            try:
                self._confirm(operator.index(self.backend.close(None, timeout=timeout)))
            except (Exception, SystemExit) as error:
                self._failed(error)
        self.backend = self._opened = None
        if self._started and self.claim.touch():
            self._save(force=True)
        self.claim.release()

    def _start(self) -> None:
        """Begin at the cursor, with what the records before it leave behind: anomalies, and the ends of attempts."""
        rows = self._directory.rows()
        place = self._config.model_dump_json(exclude={"rows_per_minute", "values_per_minute"})
        target = hashlib.blake2b(place.encode(), digest_size=8).hexdigest()
        if self._anew:
            self._config = self._config.anew(self._directory.info())
            self._cursor = Cursor(self.kind, target)
            self._cursor.save(self._directory)
            self._anew = False
        self._cursor = Cursor.load(self._directory, self.kind, target)
        self._dead = DeadLetters(self._directory, self.kind)
        self._starts: dict[int, int] = {}
        self._learn_attempts()
        self._attempt = self._cursor.attempt  # of the newest record read
        self._ends: dict[int, RunEnd] = {}
        known: list[Anomaly] = []
        earlier = JournalReader(rows, kinds={Anomaly, RunEnd}).read() if self._cursor.seq >= 0 else []
        for record in earlier:
            if record.seq <= self._cursor.seq:
                if isinstance(record, Anomaly):
                    known.append(record)
                elif isinstance(record, RunEnd):
                    self._ends[record.attempt] = record
        self._reader = JournalReader(rows, self._cursor.seq)
        self._stream = Stream(self._policy, after=self._cursor.seq, known=known, budget=self._budget, starts=self._starts)
        self._pending = Pending()
        self._held = -1  # the tracker has these, as it said itself
        self._idle = 0  # looks in a row that found nothing
        self._progress = self._clock()
        self._started = True

    def _advance(self) -> float:
        over = self._situation.over  # before reading: then what is not found will not come
        found = self._fill(over)
        if not self._pending:
            self._move()
            return 0.0 if found else self._rest(over)
        attempt = self._pending.first_attempt
        self._open(attempt)
        if self._write(attempt):
            self._progress = self._clock()
            return 0.0
        if found:
            return 0.0
        nothing_more = not self._pending.full and (over or not self._situation.follow)
        overdue = self._pending.full and self._clock() - self._progress > _FLUSH_SECONDS
        if self._pending and (nothing_more or overdue or self._pending.last_attempt > attempt):
            self._close(attempt)
            return 0.0
        return CONFIRM_SECONDS if any(self._offers(attempt)) else IDLE_SECONDS

    def _rest(self, over: bool) -> float:
        """Nothing to do now. With nothing to come, that is the end."""
        if self._situation.follow and not over:
            return IDLE_SECONDS
        if self._opened is not None:
            self._close(self._opened.attempt)
        self.done = True
        return 0.0

    # -- reading

    def _fill(self, over: bool) -> bool:
        """Take what the journal has, through the stream policy. False when there is nothing new (or no room)."""
        if self._pending.full:
            return False
        records = self._reader.read(_READ)
        if any(getattr(record, "attempt", 0) not in self._starts for record in records):
            self._learn_attempts()  # the run was resumed
        out = self._stream.push(records)
        self._idle = 0 if records else self._idle + 1
        if not records and over:
            out += self._stream.finish()
        elif not records and (self._idle > 1 or not self._situation.follow):
            out += self._stream.settle()
        before, self._stream.before = self._stream.before, {}
        out = [record for record in out if record.seq > self._held or isinstance(record, RunEnd)]
        if out and isinstance(out[-1], Row):
            out[-1] = with_lag(out[-1], self._reader.position - self._cursor.seq)
        for record in out:
            self._attempt = max(self._attempt, self._attempt_of(record))
            self._pending.add(self._attempt, record, before.get(record.seq))
        return bool(records or out)

    def _learn_attempts(self) -> None:
        attempts = self._directory.read().attempts
        self._lives = [(life.time, life.number) for life in attempts]
        self._starts.update({life.number: life.start_step for life in attempts})

    def _attempt_of(self, record: Record) -> int:
        """Which attempt a record belongs to; artifacts and params do not say, but their time does."""
        if isinstance(record, (Artifact, Params)):
            return max((number for begun, number in self._lives if begun <= record.time), default=0)
        return record.attempt

    # -- writing

    def _open(self, attempt: int) -> None:
        if self._opened is not None and self._opened.attempt == attempt:
            return
        if self._opened is not None:
            self._close(self._opened.attempt)
        if self.backend is None:
            self.backend = self._config.build()
        info = self._info(attempt)
        self._held = operator.index(self.backend.open(info))  # a whole number, whatever a third party gives
        if self._held < 0 and self._cursor.rows and self._config.keeps:
            raise TrackbridgeError(
                f"{self.kind} had {self._cursor.rows} rows of this run and has none any more: put back what was removed there, "
                f"or {to_a_new_run(info, self.kind)}"
            )
        self._opened = info
        self._pending.drop(self._held, ended=False)
        self._move()

    def _info(self, attempt: int) -> RunInfo:
        numbers = [life.number for life in self._directory.read().attempts]
        if attempt in numbers:
            return self._directory.info(numbers.index(attempt))
        return replace(self._directory.info(), attempt=attempt)

    def _write(self, attempt: int) -> bool:
        """Offer everything of `attempt` that is not safe yet. True if something became safe."""
        batch = list(self._offers(attempt))
        if not batch or self.backend is None:
            return False
        last = batch[-1].seq
        return self._confirm(min(operator.index(self.backend.write(batch, timeout=WRITE_SECONDS)), last))

    def _offers(self, attempt: int) -> Iterator[Record]:
        return (record for record in self._pending.of(attempt) if not isinstance(record, RunEnd))

    def _close(self, attempt: int) -> None:
        """End the attempt in the tracker, if it has an end, and let it flush. What is not safe then is offered again."""
        ends = [record for record in self._pending.of(attempt) if isinstance(record, RunEnd)]
        end = ends[-1] if ends else self._ends.get(attempt)
        self._opened = None
        if self.backend is None:
            return
        safe = operator.index(self.backend.close(end, timeout=CLOSE_SECONDS))
        if end is not None and safe >= end.seq:
            self._ends[attempt] = end
        self._confirm(safe, ended=end is not None)
        if any(True for _ in self._pending.of(attempt)):
            raise RetryLater(CONFIRM_SECONDS, "the tracker did not confirm the last records in time")

    def _confirm(self, safe: int, *, ended: bool = False) -> bool:
        """The tracker has everything up to `safe`. Returns whether that is news."""
        gone = self._pending.drop(safe, ended=ended)
        for attempt, record in gone:
            self._cursor.attempt = max(self._cursor.attempt, attempt)
            self._cursor.rows += isinstance(record, Row)
            self._cursor.artifacts += isinstance(record, Artifact)
        self._move()
        return bool(gone)

    def _move(self) -> None:
        seq = self._pending.before if self._pending else self._stream.decided
        self._cursor.seq = max(self._cursor.seq, seq)

    # -- trouble

    def _refused(self, refusal: Rejected) -> float:
        """Some records will never be taken: write them down and go on with the rest."""
        letters = [record for _, record in self._pending.refuse(refusal.reasons.keys())]
        if not letters:
            return self._failed(refusal)
        try:
            self._dead.add(letters, refusal.reasons)
        except OSError as error:
            self._warn(f"cannot write down what {self.kind} refuses: {error.strerror or error}")
        self._cursor.dead_letters = len(self._dead)
        self._move()
        self._warn(f"{self.kind} refuses {len(letters)} records for good: {_line(refusal)} (shipper/dead-letters.jsonl)")
        return 0.0

    def _failed(self, error: BaseException, *, at_least: float = 0.0) -> float:
        delay = self._backoff.fail(at_least)
        self._cursor.error = _line(error)
        behind = max(self._reader.position - self._cursor.seq, 0)
        self._warn(f"{self.kind}: {_line(error)}; next try in {delay:.0f} s, {behind} records behind", error)
        return delay

    @property
    def _goes_on(self) -> bool:
        """More may come, so there is reason to wait."""
        return self._situation.follow and not self._situation.over

    def _stuck(self, error: TrackbridgeError) -> float:
        """Nothing is taken until a person has done something. While the run goes on, ask now and then, without the claim: what
        they do may be a `sync`. Else that is the end."""
        self._cursor.error = _line(error)
        self._warn(f"{self.kind}: {_line(error)}", error)
        self._let_go()
        self._save(force=True)
        if not self._goes_on:
            self.done = True
            return 0.0
        self._stuck_until = self._clock() + STUCK_SECONDS
        self.claim.release()
        return CONFIRM_SECONDS

    def _let_go(self) -> None:
        """Give up the connection; the next step makes a new one."""
        backend, self.backend, self._opened = self.backend, None, None
        try:
            if backend is not None:
                backend.close(None, timeout=_LET_GO_SECONDS)
        except (Exception, SystemExit) as error:
            logger.debug("%s: %s while closing", self.kind, _line(error))

    def _warn(self, words: str, error: BaseException | None = None) -> None:
        if self._clock() - self._warned >= _WARN_SECONDS:
            self._warned = self._clock()
            logger.warning("trackbridge: %s", words)
            if error is not None and not isinstance(error, (RetryLater, TrackbridgeError)):
                logger.info("trackbridge: where %s failed", self.kind, exc_info=error)

    def _save(self, *, force: bool = False) -> None:
        """The cursor's file: at once when it moved, else now and then. A full disk delays it, no more."""
        tell = (self._cursor.seq, self._cursor.dead_letters, self._cursor.error)
        due = tell[:2] != self._told[:2] or (tell != self._told and self._clock() - self._saved >= _SAVE_SECONDS)
        if not (due or force):
            return
        try:
            self._cursor.save(self._directory)
        except OSError as error:
            self._warn(f"cannot save the cursor of {self.kind}: {error.strerror or error}")
            return
        self._told, self._saved = tell, self._clock()


def _line(error: BaseException) -> str:
    """One line about `error`, without secrets."""
    try:
        words = str(error).strip().splitlines()
    except Exception:  # its own fault, but delivery goes on
        words = []
    text = words[0] if words else type(error).__name__
    ours = isinstance(error, (RetryLater, Rejected, TrackbridgeError))
    return redact.text(text if ours else f"{type(error).__name__}: {text}")[:_LINE]
