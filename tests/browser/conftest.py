"""A headless Chromium, and one quick demo run that all tests in here look at."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trackbridge import capsule as capsules
from trackbridge import history
from trackbridge.capsule import SpikeCapsule
from trackbridge.history import RunRecord

LAPTOP, PHONE = (1366, 768), (390, 844)
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--no-first-run"]
MUST = "BROWSER_TESTS_MUST_RUN"
"""Set where these tests have to run (``.ci/run``): then a missing Chromium is a failure and no reason to skip."""


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if executable is None:
        why = "no chromium on this machine; .ci/run installs it (apt-get install chromium)"
        pytest.fail(why) if os.environ.get(MUST) else pytest.skip(why)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        running = play.chromium.launch(executable_path=executable, args=QUIET)
        yield running
        running.close()


@dataclass(frozen=True)
class Demo:
    """What ``trackbridge demo --quick`` left behind."""

    folder: Path
    record: RunRecord
    capsule: SpikeCapsule
    onset: int


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """One demo for all processes of the suite: the first to come makes it, the others wait for it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    told = shared / "browser-demo.json"
    with (shared / "browser-demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not told.exists():
            command = [sys.executable, "-m", "trackbridge.cli", "demo", "--quick", "--json", "--dir", "browser-demo"]
            done = subprocess.run(command, cwd=shared, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            told.write_text(done.stdout, encoding="utf-8")
    found = json.loads(told.read_text(encoding="utf-8"))
    record = history.RunRecord(history.find(found["directory"]))
    spike = next(anomaly for anomaly in record.anomalies if anomaly.onset == found["anomaly"]["onset"])
    return Demo(record.path.parents[1], record, capsules.load(record.path / str(spike.capsule)), spike.onset)


@dataclass
class Watched:
    """A tab, with everything its console said and every address it asked for."""

    tab: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tab.on("console", lambda m: self.said.append(f"{m.type}: {m.text}") if m.type in ("error", "warning") else None)
        self.tab.on("pageerror", lambda error: self.said.append(f"exception: {error}"))
        self.tab.on("request", lambda request: self.asked.append(request.url))

    def open(self, address: str) -> Any:
        """The tab, when the page's scripts have run."""
        self.tab.goto(address)
        self.tab.wait_for_selector("html[data-ready]")
        return self.tab

    def charts(self) -> Any:
        """What each drawn chart of our page holds: [{label, steps, values}], non-finite values as null."""
        return self.tab.evaluate("trackbridge.charts()")

    @property
    def outside(self) -> list[str]:
        """Addresses that are neither this file, nor inline, nor on the loopback."""
        here = ("file:", "data:", "blob:", "about:", "http://127.0.0.1:", "http://localhost:")
        return [address for address in self.asked if not address.startswith(here)]


Opener = Callable[..., Watched]


@pytest.fixture
def watch(chromium: Any) -> Iterator[Opener]:
    """Opens tabs, each in a context of its own: ``watch(scheme="dark", size=PHONE)``."""
    contexts = []

    def opener(scheme: str = "light", size: tuple[int, int] = LAPTOP, **options: Any) -> Watched:
        viewport = {"width": size[0], "height": size[1]}
        context = chromium.new_context(color_scheme=scheme, viewport=viewport, reduced_motion="reduce", **options)
        contexts.append(context)
        context.set_default_timeout(20_000)
        return Watched(context.new_page())

    yield opener
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def run_file(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of the run's page on disk."""
    from trackbridge.reports.run_page import run_page

    file = tmp_path_factory.mktemp("pages") / "run.html"
    file.write_text(run_page(demo.record), encoding="utf-8")
    return file.as_uri()
