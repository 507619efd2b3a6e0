"""Alerts: an anomaly as a message to where people are (Slack, PagerDuty, e-mail, a webhook, ...), through apprise URLs.

This is a backend like any other: it reads the journal from its own cursor in the shipper's process, so an outage of the chat
costs no training and no alert, and a restart repeats none. Rows it passes over. What was sent is kept in
``shipper/alerts-sent.jsonl``, a line per anomaly and address, by a digest of the address.

The URLs are secrets. They are in no file of ours: `init` hands them to the shipper's process in its environment (`VARIABLE`),
where ``trackbridge sync`` looks for them too. Without them the alerts wait.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from trackbridge import redact
from trackbridge.answers import evidence_command
from trackbridge.backends import words
from trackbridge.backends.base import Backend, BackendConfig
from trackbridge.errors import ConfigError, Rejected, RetryLater
from trackbridge.harmless import as_code, in_markdown
from trackbridge.plugins import require
from trackbridge.records import Anomaly, Record, RunEnd, RunInfo

VARIABLE = "TRACKBRIDGE_ALERTS__URLS"
"""A JSON list of apprise URLs."""
TRIES = 10
"""Failures after which an alert goes to the dead letters: with the shipper's back-off, some five minutes."""
_HOUR = 3600.0
_RETRY_SECONDS = 2.0
_LEVELS = ((0.7, "failure"), (0.4, "warning"), (0.0, "info"))

logger = logging.getLogger("trackbridge")


class AlertsConfig(BackendConfig):
    """`severity`: least severity of an anomaly that is worth a message. `cooldown`: seconds after a message in which no other
    is sent about the same kind and series. `per_hour`: messages at most, over all; what is left out is counted in the next.
    `stale`: seconds after which an anomaly is no news (a run that is synced a day later)."""

    kind: Literal["alerts"] = "alerts"
    severity: float = Field(0.5, ge=0, le=1)
    cooldown: float = Field(600.0, ge=0)
    per_hour: int = Field(12, ge=1)
    stale: float = Field(86_400.0, gt=0)

    _urls: tuple[str, ...] = PrivateAttr(())

    def to(self, urls: Sequence[str]) -> AlertsConfig:
        """This config with its addresses, which it never writes down. Raises `ConfigError` for what is no apprise URL."""
        found = self.model_copy()
        found._urls = tuple(urls)
        for number, url in enumerate(found._urls):
            _address(url, number)
        return found

    @property
    def urls(self) -> tuple[str, ...]:
        return self._urls or from_environment(os.environ.get(VARIABLE, ""))

    def check(self) -> None:
        require("apprise", "alerts")

    def secrets(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(self.urls)}

    def lacking(self) -> str | None:
        return None if self.urls else f"there is nobody to alert: set {VARIABLE} to a JSON list of apprise URLs"

    def build(self) -> Backend:
        return AlertsBackend(self)


class AlertsBackend:
    """See the module. `clock` gives epoch seconds."""

    def __init__(self, config: AlertsConfig, clock: Callable[[], float] = time.time) -> None:
        logging.getLogger("apprise").addHandler(logging.NullHandler())
        logging.getLogger("apprise").propagate = False  # its messages may show an address
        self._config = config
        self._clock = clock
        self._addresses = [_address(url, number) for number, url in enumerate(config.urls)]
        self._keys = [hashlib.blake2b(url.encode(), digest_size=6).hexdigest() for url in config.urls]
        self._seq = -1
        self._failures = 0
        self._left_out = 0

    def open(self, run: RunInfo, /) -> int:
        self._run = run
        self._ledger = Path(run.directory) / "shipper" / "alerts-sent.jsonl"
        self._done: dict[str, set[str]] = {}
        self._latest: dict[str, float] = {}  # of one kind and series: the time of the anomaly that was sent last
        self._times: deque[float] = deque()  # of the messages of the last hour
        for entry in _entries(self._ledger):
            self._note(entry)
        return self._seq

    def write(self, batch: Sequence[Record], /, *, timeout: float) -> int:
        for record in batch:
            if record.seq > self._seq:
                if isinstance(record, Anomaly):
                    self._consider(record)
                self._seq = record.seq
        return self._seq

    def close(self, end: RunEnd | None, /, *, timeout: float) -> int:
        return self._seq if end is None else max(self._seq, end.seq)

    # -- which

    def _consider(self, anomaly: Anomaly) -> None:
        """Send it, unless it is not worth a message or has been sent. Raises `RetryLater` when an address does not take it."""
        done = self._done.get(anomaly.id, set())
        if anomaly.severity < self._config.severity or "" in done:
            return
        missing = [number for number, key in enumerate(self._keys) if key not in done]
        if not missing:
            return
        if not done:
            why = self._unwanted(anomaly)
            if why is not None:
                self._left_out += 1
                self._write(anomaly, "", why)
                return
        failed = [number for number in missing if not self._deliver(anomaly, number)]
        if failed:
            self._fail(anomaly, failed)
        self._failures = self._left_out = 0

    def _unwanted(self, anomaly: Anomaly) -> str | None:
        """Why no message is sent; None: one is."""
        now = self._clock()
        if anomaly.time and now - anomaly.time > self._config.stale:
            return "stale"
        latest = self._latest.get(_topic(anomaly))
        if latest is not None and 0 <= anomaly.time - latest < self._config.cooldown:
            return "cooldown"
        while self._times and now - self._times[0] >= _HOUR:
            self._times.popleft()
        return "rate" if len(self._times) >= self._config.per_hour else None

    # -- sending

    def _deliver(self, anomaly: Anomaly, number: int) -> bool:
        level = next(name for least, name in _LEVELS if anomaly.severity >= least)
        title = f"{anomaly.what} at step {anomaly.step} of {self._run.name}{'' if anomaly.fault else f': {anomaly.series}'}"
        try:
            address, body = self._addresses[number], self._body(anomaly)
            sent = address.notify(title=title, body=body, notify_type=level, body_format="markdown")
        except Exception as error:  # a plugin of apprise
            logger.debug("alert address %d: %s", number + 1, type(error).__name__)
            sent = False
        if sent:
            self._write(anomaly, self._keys[number], "sent")
        return bool(sent)

    def _body(self, anomaly: Anomaly) -> str:
        more = f"\n\n{self._left_out} more anomalies since the last message were not sent one by one." if self._left_out else ""
        where = f"\n\nrun {as_code(self._run.run_id)} of {in_markdown(self._run.project)}, in {as_code(self._run.directory)}"
        # the alert goes out at the detection, and its cause is found later
        ask = evidence_command(self._run.directory, anomaly.step)
        return redact.text(words.anomaly_markdown(anomaly, () if anomaly.hypotheses else (ask,)) + where + more)

    def _fail(self, anomaly: Anomaly, failed: Sequence[int]) -> None:
        """Later again; after `TRIES` failures, never."""
        self._failures += 1
        which = ", ".join(f"{number + 1} ({self._scheme(number)})" for number in failed)
        if self._failures >= TRIES:
            self._failures = 0
            self._seq = anomaly.seq  # the rest goes on without it
            raise Rejected({anomaly.seq: f"alert address {which} did not take it in {TRIES} tries"})
        raise RetryLater(_RETRY_SECONDS, f"alert address {which} does not take the message")

    def _scheme(self, number: int) -> str:
        return self._config.urls[number].partition("://")[0]

    # -- the ledger

    def _write(self, anomaly: Anomaly, key: str, what: str) -> None:
        entry = {"id": anomaly.id, "to": key, "what": what, "topic": _topic(anomaly), "at": anomaly.time, "time": self._clock()}
        self._ledger.parent.mkdir(parents=True, exist_ok=True)
        with self._ledger.open("ab", buffering=0) as file:
            file.write(json.dumps(entry).encode() + b"\n")
            os.fsync(file.fileno())
        self._note(entry)

    def _note(self, entry: dict[str, Any]) -> None:
        fresh = entry["id"] not in self._done
        self._done.setdefault(entry["id"], set()).add(entry["to"])
        if entry["what"] == "sent" and fresh:
            self._latest[entry["topic"]] = max(entry["at"], self._latest.get(entry["topic"], entry["at"]))
            self._times.append(entry["time"])


def from_environment(value: str) -> tuple[str, ...]:
    """The addresses that `VARIABLE` holds."""
    try:
        found = json.loads(value or "[]")
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise ConfigError(f"{VARIABLE} is no JSON list of apprise URLs")
    return tuple(str(url) for url in found)


def counts(ledger: Path) -> Counter[str]:
    """How many messages were sent, and how many were left out and why (cooldown, rate, stale)."""
    return Counter(entry["what"] for entry in _entries(ledger))


def _topic(anomaly: Anomaly) -> str:
    return f"{anomaly.kind} {anomaly.series}"


def _address(url: str, number: int) -> Any:
    """An apprise object with this one address. The message of the error never shows it."""
    apprise = require("apprise", "alerts")
    address = apprise.Apprise()
    logging.getLogger("apprise").propagate = False
    if not address.add(url):
        scheme = url.partition("://")[0] if "://" in url else "no scheme"
        raise ConfigError(f"alerts.urls[{number}] ({scheme}) is no URL that apprise knows; see its list of services")
    return address


def _entries(ledger: Path) -> list[dict[str, Any]]:
    try:
        lines = ledger.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # torn by a crash: at worst one message comes twice
    return found
