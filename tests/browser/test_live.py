"""`trackbridge view --live`: the page grows with the run, asks sparingly, and ends with it."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser.conftest import Opener
from tests.recordings import NAMES, Trainer
from tests.test_page import some_histograms
from trackbridge.errors import UsageError
from trackbridge.records import Row, Schema
from trackbridge.reports import live
from trackbridge.reports import page as pages
from trackbridge.reports.live import LiveRun
from trackbridge.reports.server import LiveServer


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path / "run")
    made.train(20)
    yield made
    made.writer.close()


def losses(news: dict[str, Any]) -> dict[int, float]:
    found: dict[int, float] = {}
    for block in news["blocks"]:
        steps = np.frombuffer(base64.b64decode(block["steps"]), "<f8")
        values = np.frombuffer(base64.b64decode(block["values"]), "<f4").reshape(len(steps), -1)
        column = block["names"].index("train/loss")
        found |= dict(zip(steps.astype(int).tolist(), values[:, column].tolist(), strict=True))
    return found


# -- what is told


def test_news_are_what_came_since_each_once(trainer: Trainer) -> None:
    run = LiveRun(trainer.directory.path, Clock())
    start = run._reader.position
    assert run.news(start, start)["blocks"] == []
    trainer.train(5, 3.0)
    first = run.news(start, start)
    assert losses(first) == dict.fromkeys(range(20, 25), 3.0)
    assert run.news(first["after"], start)["blocks"] == []
    assert losses(run.news(start, start)) == losses(first), "another reader is told the same"


def test_an_anomaly_brings_new_words_and_marks_and_an_end_ends_it(trainer: Trainer) -> None:
    clock = Clock()
    run = LiveRun(trainer.directory.path, clock)
    at = run._reader.position
    trainer.spike()
    news = run.news(at, at)
    assert "Spike in train/loss at step 20" in news["sections"]["head"] and news["marks"][0]["from"] == 20
    assert not news["ended"]
    trainer.finish()
    clock.now += 100
    last = run.news(news["after"], news["changed"])
    while not last["ended"]:  # how it ended is told first
        assert "sections" in last
        last = run.news(last["after"], last["changed"])
    assert "finished" in run.page()


def test_words_are_not_built_again_for_every_question(trainer: Trainer) -> None:
    clock = Clock()
    run = LiveRun(trainer.directory.path, clock)
    at = run._reader.position
    trainer.spike()
    first = run.news(at, at)
    trainer.spike()
    assert "sections" not in run.news(first["after"], first["changed"]), "not yet"
    clock.now += live.LEAST_AGE + 1
    assert "sections" in run.news(first["after"], first["changed"])


def test_answers_and_memory_are_bounded(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "ANSWER_BYTES", 240)
    monkeypatch.setattr(live, "HELD_BYTES", (24 + live.ROW_BYTES) * 100)
    run = LiveRun(trainer.directory.path, Clock())
    at = run._reader.position
    trainer.train(90)
    told: dict[int, float] = {}
    news = run.news(at, at)
    while news["blocks"]:
        told |= losses(news)
        assert len(losses(news)) <= 11
        news = run.news(news["after"], at)
    assert sorted(told) == list(range(20, 110))
    trainer.train(200)
    assert run.news(at, at) == {"reload": True}, "what was forgotten is not left out in silence"
    assert run.news(10**9, 0) == {"reload": True}
    assert len(run._held) == 100, "a row of three values is not only its 24 bytes"


def test_what_loading_again_would_bring_is_told(trainer: Trainer) -> None:
    clock = Clock()
    run = LiveRun(trainer.directory.path, clock)
    run.page()
    built = at = run._reader.position
    trainer.train(5)
    assert run.news(at, at)["page"] == built, "the page is kept for a while"
    clock.now += live.LEAST_AGE + 1
    assert run.news(at, at)["page"] == built + 5


def test_numbers_are_those_of_the_page(trainer: Trainer) -> None:
    run = LiveRun(trainer.directory.path, Clock())
    at = run._reader.position
    trainer.train(1, 1e300)
    assert list(losses(run.news(at, at)).values()) == [float(np.finfo(np.float32).max)], "not an infinity"


# -- the server


@pytest.fixture
def server(trainer: Trainer) -> Iterator[LiveServer]:
    with LiveServer(LiveRun(trainer.directory.path)) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def status(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_only_who_knows_the_address_is_answered(server: LiveServer) -> None:
    origin = server.url.rsplit("/", 2)[0]
    assert status(server.url) == 200
    assert status(f"{server.url}rows?after=0&changed=0") == 200
    assert status(f"{server.url}rows?after=nonsense") == 200, "answered with: load again"
    for wrong in ("/", "/rows?after=0", "/guess/", f"/{server.token}/../../etc/passwd", f"/{server.token}/run.json"):
        assert status(origin + wrong) == 404
    assert status(server.url, Host="evil.example") == 403
    assert server.server_address[0] == "127.0.0.1"


def test_too_many_at_once_are_told_to_come_again(server: LiveServer) -> None:
    for _ in range(8):
        server.slots.acquire()
    assert status(server.url) == 503


def test_a_port_in_use_is_said(trainer: Trainer, server: LiveServer) -> None:
    with pytest.raises(UsageError, match="--port"):
        LiveServer(LiveRun(trainer.directory.path), server.server_address[1])


def test_ctrl_c_ends_it_cleanly(trainer: Trainer) -> None:
    command = [sys.executable, "-m", "trackbridge.cli", "view", str(trainer.directory.path), "--live", "--no-open"]
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a suite in the background hands down a deaf ear
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listens) as serving:
        assert serving.stdout is not None and serving.stderr is not None
        url = serving.stdout.readline().strip()
        assert status(url) == 200
        serving.send_signal(signal.SIGINT)
        assert serving.wait(timeout=30) == 0
        assert serving.stderr.read().split()[-1] == "stopped"


# -- in a browser


def test_the_page_grows_with_the_run_and_stops_with_it(watch: Opener, trainer: Trainer, server: LiveServer) -> None:
    watched = watch()
    tab = watched.open(server.url)
    tab.wait_for_selector("#charts canvas")
    assert tab.locator("h1").inner_text() == "live"
    trainer.train(30, 2.5)
    tab.wait_for_selector("#step[max='49']")
    assert len(watched.charts()[0][0]["steps"]) == 50
    assert watched.charts()[0][0]["values"][-1] == 2.5
    trainer.spike()
    tab.wait_for_selector("h1:has-text('Spike in train/loss at step 50')")
    assert tab.evaluate("trackbridge.marks()")["from"] == 50
    assert tab.get_by_role("button", name="spike at 50").is_visible()
    trainer.finish()
    tab.wait_for_selector("#live[data-state=ended]")
    asked = len(watched.asked)
    tab.wait_for_timeout(1500)
    assert len(watched.asked) == asked, "a run that has ended is not asked about"
    assert watched.said == [] and watched.outside == []


def test_who_uses_the_page_is_not_disturbed_by_what_comes(watch: Opener, trainer: Trainer, server: LiveServer) -> None:
    for record in some_histograms(4, 1):
        trainer.writer.append(replace(record, names=("layer/head.weight/weight",)))
    trainer.train(1)
    tab = watch().open(server.url)
    tab.locator("#layers").scroll_into_view_if_needed()
    tab.locator("#histogram-step").fill("1")
    reading = tab.locator("#histogram-reading").inner_text()
    for where in ("#step", "#histogram-step", "#heatmap button", "#zooms button"):
        handle = tab.locator(where).first.element_handle()
        handle.focus()
        trainer.train(3)
        tab.wait_for_selector(f"#step[max='{trainer.step - 1}']", state="attached")
        assert handle.evaluate("at => at.isConnected && document.activeElement === at"), "the focus stays where it is"
    assert tab.locator("#histogram-reading").inner_text() == reading
    told = tab.locator("#told").inner_text()
    trainer.spike()
    tab.wait_for_selector("h1:has-text('Spike in train/loss')")
    assert tab.locator("#histogram-reading").inner_text() == reading, "not even by new words"
    assert told == "" == tab.locator("#told").inner_text(), "nothing is read aloud at every step"


def test_a_new_series_gets_a_chart(watch: Opener, trainer: Trainer, server: LiveServer) -> None:
    tab = watch().open(server.url)
    trainer.writer.append(Row(-1, 20, 1.7e9, 0, Schema(("train/loss", "mine/accuracy")), np.array([2.0, 0.5])))
    trainer.writer.sync()
    tab.locator("summary", has_text="Also recorded").wait_for()


def test_a_series_that_the_page_has_no_room_for_is_no_reason_to_load_again(
    watch: Opener, trainer: Trainer, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LEAST_AGE", 0.0)
    monkeypatch.setattr(live, "BUILD_SHARE", 0)
    odd = Schema((*NAMES.names, "x" * 500))
    watched = watch()
    trainer.writer.append(Row(-1, 20, 1.7e9, 0, odd, np.ones(4)))
    tab = watched.open(server.url)
    for step in range(21, 24):
        trainer.writer.append(Row(-1, step, 1.7e9, 0, odd, np.ones(4)))
        trainer.writer.sync()
        tab.wait_for_selector(f"#step[max='{step}']")
    assert watched.asked.count(server.url) == 1


def test_what_a_tab_keeps_is_bounded(
    watch: Opener, trainer: Trainer, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = pages._script().replace("ALL_LIVE_POINTS = 4e6", "ALL_LIVE_POINTS = 600")
    monkeypatch.setattr(pages, "_script", lambda: script)
    watched = watch()
    tab = watched.open(server.url)
    trainer.train(1, 7.0)
    trainer.train(600)
    tab.wait_for_selector("#step[max='620']")
    values = watched.charts()[0][0]["values"]
    assert len(values) <= 500 and max(values) == 7.0, "and the extremes stay"


def test_it_asks_one_question_at_a_time_and_less_often_in_silence(watch: Opener, server: LiveServer) -> None:
    watched = watch()
    tab = watched.open(server.url)
    tab.clock.install()
    tab.reload()
    tab.wait_for_selector("html[data-ready]")
    watched.asked.clear()
    for _ in range(60):
        tab.clock.run_for(1000)
    questions = [address for address in watched.asked if "/rows" in address]
    assert 3 <= len(questions) <= 12, "a minute of silence"


def test_a_server_that_is_gone_is_said(watch: Opener, trainer: Trainer) -> None:
    with LiveServer(LiveRun(trainer.directory.path)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        tab = watch().open(server.url)
        server.shutdown()
        thread.join()
    tab.wait_for_selector("#live[data-state=lost]")


def test_news_are_strict_json(trainer: Trainer) -> None:
    run = LiveRun(trainer.directory.path, Clock())
    at = run._reader.position
    trainer.writer.append(Row(-1, 20, 1.7e9, 0, NAMES, np.array([np.nan, np.inf, -np.inf])))
    trainer.spike()
    assert json.loads(json.dumps(run.news(at, at), allow_nan=False))["blocks"]
