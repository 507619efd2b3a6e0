"""Alerts through apprise to a real HTTP server on loopback, that may fail."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import trackbridge
from trackbridge import shipper
from trackbridge.backends.alerts import TRIES, VARIABLE, AlertsBackend, AlertsConfig, counts
from trackbridge.errors import ConfigError, Rejected, RetryLater
from trackbridge.records import Anomaly, Hypothesis, RunInfo
from trackbridge.rundir import RunDirectory
from trackbridge.testing import run_info

SECRET = "s3cr3t-p4th-of-a-w3bh00k"


class Inbox:
    """Keeps every message; answers with `status`, by path."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, dict[str, Any]]] = []
        self.status: dict[str, int] = {}
        inbox = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                name = self.path.strip("/").split("/")[0]
                code = inbox.status.get(name, 200)
                if code == 200:
                    inbox.messages.append((name, json.loads(body)))
                self.send_response(code)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def url(self, name: str = "a") -> str:
        return f"json://127.0.0.1:{self._server.server_address[1]}/{name}/{SECRET}"

    def titles(self) -> list[str]:
        return [message["title"] for _, message in self.messages]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    found = Inbox()
    yield found
    found.close()


@pytest.fixture
def run(tmp_path: Path) -> RunInfo:
    return run_info(tmp_path)


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def opened(run: RunInfo, urls: list[str], clock: Clock | None = None, **settings: Any) -> AlertsBackend:
    backend = AlertsBackend(AlertsConfig(**settings).to(urls), clock or Clock())
    backend.open(run)
    return backend


def anomaly(seq: int, *, step: int | None = None, severity: float = 0.8, kind: str = "spike", at: float = 0.0) -> Anomaly:
    step = seq if step is None else step
    return Anomaly(f"0-{step}-{kind}", kind, step, step, severity, "train/loss", 9.5, 2.25, 31.0, time=Clock.now + at, seq=seq)


def test_one_message_per_anomaly_that_is_worth_it(inbox: Inbox, run: RunInfo) -> None:
    backend = opened(run, [inbox.url()], cooldown=0)
    mild, worse = anomaly(3, severity=0.4), anomaly(4, step=3, severity=0.7)
    assert backend.write([mild], timeout=5) == 3 and inbox.messages == []
    assert backend.write([worse, worse.updated(seq=5, recovered_after=2)], timeout=5) == 5
    ((_, message),) = inbox.messages
    assert message["title"] == f"spike at step 3 of {run.name}: train/loss" and message["type"] == "failure"
    assert "**9.5** where **2.25** was expected" in message["message"] and run.run_id in message["message"]


def test_an_alert_does_not_deny_a_cause_that_is_found_later(inbox: Inbox, run: RunInfo) -> None:
    backend = opened(run, [inbox.url()], cooldown=0)
    backend.write([anomaly(3)], timeout=5)
    backend.write([anomaly(4).updated(notes=("lr-discontinuity: train/lr rose 30 times, to 0.03",))], timeout=5)
    backend.write([anomaly(5).updated(hypotheses=(Hypothesis("corrupt-batch"),))], timeout=5)
    early, named, late = (message["message"] for _, message in inbox.messages)
    assert "Its cause is looked for" in early and f"trackbridge report {run.directory}@3 --post-mortem" in early
    assert "It is a fault by name, lr-discontinuity: train/lr rose 30 times" in named
    assert "Look at the evidence for corrupt-batch." in late and "trackbridge report" not in late


def test_a_restart_repeats_nothing(inbox: Inbox, run: RunInfo) -> None:
    opened(run, [inbox.url()], cooldown=0).write([anomaly(1), anomaly(2)], timeout=5)
    again = opened(run, [inbox.url()], cooldown=0)
    assert again.write([anomaly(1), anomaly(2), anomaly(3)], timeout=5) == 3
    assert [title.split()[3] for title in inbox.titles()] == ["1", "2", "3"]


def test_an_address_that_fails_is_asked_again_and_the_other_is_not(inbox: Inbox, run: RunInfo) -> None:
    backend = opened(run, [inbox.url("a"), inbox.url("b")], cooldown=0)
    inbox.status["b"] = 500
    for _ in range(3):
        with pytest.raises(RetryLater, match=r"^alert address 2 \(json\) does not take the message$"):
            backend.write([anomaly(1)], timeout=5)
    del inbox.status["b"]
    assert backend.write([anomaly(1), anomaly(2)], timeout=5) == 2
    assert [name for name, _ in inbox.messages] == ["a", "b", "a", "b"]


def test_an_address_that_never_takes_it_costs_this_message_only(inbox: Inbox, run: RunInfo) -> None:
    backend = opened(run, [inbox.url()], cooldown=0)
    inbox.status["a"] = 404
    for _ in range(TRIES - 1):
        with pytest.raises(RetryLater):
            backend.write([anomaly(1), anomaly(2)], timeout=5)
    with pytest.raises(Rejected) as refused:
        backend.write([anomaly(1), anomaly(2)], timeout=5)
    assert set(refused.value.reasons) == {1} and SECRET not in str(refused.value)
    del inbox.status["a"]
    assert backend.write([anomaly(2)], timeout=5) == 2
    assert len(inbox.messages) == 1


def test_cooldown_is_per_kind_and_series_and_what_is_left_out_is_counted(inbox: Inbox, run: RunInfo) -> None:
    backend = opened(run, [inbox.url()], cooldown=100)
    batch = [anomaly(1), anomaly(2, at=50), anomaly(3, at=99), anomaly(4, kind="nonfinite", at=60), anomaly(5, at=101)]
    assert backend.write(batch, timeout=5) == 5
    assert [title.split()[0] + title.split()[3] for title in inbox.titles()] == ["spike1", "nonfinite4", "spike5"]
    assert "2 more anomalies since the last message" in inbox.messages[1][1]["message"]
    assert counts(Path(run.directory) / "shipper" / "alerts-sent.jsonl") == {"sent": 3, "cooldown": 2}
    again = opened(run, [inbox.url()], cooldown=100)
    again.write([*batch, anomaly(6, at=150)], timeout=5)  # the cooldown outlives the process, and so does what was left out
    assert len(inbox.messages) == 3


def test_no_more_than_so_many_an_hour(inbox: Inbox, run: RunInfo) -> None:
    clock = Clock()
    backend = opened(run, [inbox.url()], clock, cooldown=0, per_hour=3)
    backend.write([anomaly(i, at=i) for i in range(1, 11)], timeout=5)
    assert len(inbox.messages) == 3
    clock.now += 3601
    backend.write([anomaly(20, at=3600)], timeout=5)
    assert len(inbox.messages) == 4 and "7 more anomalies" in inbox.messages[-1][1]["message"]


def test_old_news_is_none(inbox: Inbox, run: RunInfo) -> None:
    backend = opened(run, [inbox.url()])
    backend.write([anomaly(1, at=-90_000)], timeout=5)
    assert inbox.messages == []


def test_what_is_no_address_is_an_error_that_does_not_show_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"alerts.urls\[1\] \(nonsense\) is no URL that apprise knows") as raised:
        trackbridge.init(dir=tmp_path, alerts={"urls": ["json://localhost", f"nonsense://{SECRET}"]})
    assert SECRET not in str(raised.value) and list(tmp_path.iterdir()) == []
    monkeypatch.setenv(VARIABLE, "json://not-a-list")
    with pytest.raises(ConfigError, match="JSON"):
        trackbridge.init(dir=tmp_path)


def spiky_run(folder: Path, **settings: Any) -> trackbridge.Run:
    run = trackbridge.init(dir=folder, recorder={"enabled": False}, **settings)
    model = torch.nn.Linear(2, 1)
    run.watch(model)
    for step in range(60):
        run.step(loss=2.0 + 0.01 * (step % 7) + 50.0 * (step == 50))
    return run


def test_a_run_alerts_through_its_shipper_and_writes_the_address_nowhere(
    inbox: Inbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    run = spiky_run(tmp_path, alerts={"urls": [inbox.url()], "severity": 0.5})
    report = run.finish(timeout=60)
    assert report, str(report)
    assert inbox.titles() == [f"spike at step 50 of {run.id}: train/loss"]
    for path in run.dir.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    # Later, without the address: nobody is served, and who asks for it is told. With it: nothing is sent twice.
    assert shipper.configured(RunDirectory(run.dir)) == []
    with pytest.raises(ConfigError, match=f"set {VARIABLE}"):
        shipper.configured(RunDirectory(run.dir), ["alerts"])
    assert not shipper.sync(run.dir, timeout=20, to=[AlertsConfig().to([inbox.url()])]).busy
    assert len(inbox.messages) == 1


def test_an_address_that_is_down_does_not_hold_the_run_up(
    inbox: Inbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps([inbox.url()]))
    inbox.status["a"] = 503
    run = spiky_run(tmp_path)
    begun = time.monotonic()
    report = run.finish(timeout=3)
    assert time.monotonic() - begun < 15 and report.unshipped.get("alerts", 0) > 0
    del inbox.status["a"]
    assert shipper.sync(run.dir, timeout=60).complete
    assert len(inbox.messages) == 1
