"""The local page of a long run: seconds to build it, its size, and the seconds until a headless Chromium can use it.

    python benchmarks/page.py [--steps 100000] [--series 500] [--runs 5] [--keep FILE]

Writes a journal of that size (outside what is timed), builds the page from it, and opens the file from disk in fresh tabs.
"Usable" is when the page's scripts have drawn what is in sight and the next frame has been painted; "longest task" is the
longest time for which the main thread did not answer while the page was scrolled to its end, zoomed and scrubbed.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from trackbridge import histograms, history
from trackbridge.journal import JournalWriter
from trackbridge.records import Anomaly, Histograms, Hypothesis, Row, RunEnd, Schema
from trackbridge.reports.run_page import run_page
from trackbridge.rundir import Attempt, RunDirectory, RunFile

NARROW = (
    "train/loss", "grad/norm", "grad/norm_clipped", "train/lr", "train/tokens", "perf/step_s", "perf/fetch_s", "perf/forward_s",
    "perf/backward_s", "perf/optimizer_s", "perf/tokens_per_s", "host/rss_bytes", "param/norm", "optim/update_ratio",
    "optim/exp_avg_norm", "optim/exp_avg_sq_norm", "layers/grad_norm_max", "layers/kurtosis_max", "layers/act_max",
    "layers/update_ratio_max",
)  # fmt: skip
STATISTICS = ("grad_norm", "weight_norm", "update_ratio", "grad_max")
LAYERS = ("attention.qkv.weight", "attention.project.weight", "mlp.expand.weight", "mlp.contract.weight", "norm.weight")


def names(count: int) -> tuple[str, ...]:
    """`count` series: the run-level ones, four statistics of parameters, kurtosis and RMS of modules."""
    found = list(NARROW)
    for block in range(10_000):
        found += [f"layer/blocks.{block}.{layer}/{statistic}" for layer in LAYERS for statistic in STATISTICS]
        found += [f"act/blocks.{block}/{statistic}" for statistic in ("kurtosis", "rms")]
        if len(found) >= count:
            return tuple(found[:count])
    raise ValueError(f"{count} series are more than this benchmark makes")


def write_run(folder: Path, steps: int, series: int, *, anomalies: int = 6, seed: int = 0) -> RunDirectory:
    """A finished run with spikes of three steps at even distances, and histograms every thousand steps."""
    rng = np.random.default_rng(seed)
    directory = RunDirectory(folder)
    attempt = Attempt(number=0, start_step=0, time=1.7e9, pid=1, host="benchmark")
    directory.write(RunFile(project="benchmark", run_id="long", name="long", created=1.7e9, attempts=[attempt]))
    schema = Schema(names(series))
    spikes = [(k + 1) * steps // (anomalies + 1) for k in range(anomalies)]
    size = np.exp(rng.normal(size=series))
    tensors = tuple(
        f"layer/blocks.{block}.{layer}/{kind}" for block in range(8) for layer in LAYERS for kind in ("weight", "grad")
    )
    every = max(1, steps // 100)
    with_spike = np.zeros(steps)
    for onset in spikes:
        with_spike[onset : onset + 3] = 1.0
    writer = JournalWriter(directory.rows(0), segment_bytes=64 << 20, fsync_seconds=3600)
    for step in range(steps):
        values = size * (1 + 3 * np.exp(-5 * step / steps) + 0.05 * rng.standard_normal(series) + 4 * with_spike[step])
        writer.append(Row(-1, step, 1.7e9 + step, 0, schema, values))
        if step % every == 0:
            scale = 1 + with_spike[step]
            counts = np.stack([histograms.count(rng.normal(scale=scale * 0.02, size=2000)) for _ in tensors])
            writer.append(Histograms(-1, step, 1.7e9 + step, 0, tensors, counts, np.ones(len(tensors))))
    for number, onset in enumerate(spikes):
        writer.append(anomaly(number, onset))
    writer.append(RunEnd(-1, 1.7e9 + steps, "finished"))
    writer.close()
    return directory


def anomaly(number: int, onset: int) -> Anomaly:
    causes = (Hypothesis("corrupt-batch", ("back in its band after 3 steps",), (), "skip-batch"),)
    first = ("layer/blocks.0.mlp.expand.weight/grad_norm", onset)
    return Anomaly(
        f"0-{onset}-spike", "spike", onset + 1, onset, 0.9 - 0.1 * number, "train/loss", 8.0, 2.0, 40.0, first,
        (first, ("train/loss", onset)), 3, hypotheses=causes, time=1.7e9 + onset,
    )  # fmt: skip


def opened(file: Path, executable: str) -> dict[str, float]:
    """One visit of a fresh browser: seconds until the page is usable, longest task while it is used, and its memory in MB."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": 1366, "height": 768})
        tab.add_init_script(
            "window.longest = 0; new PerformanceObserver((list) => { for (const entry of list.getEntries())"
            " longest = Math.max(longest, entry.duration); }).observe({ type: 'longtask', buffered: true })"
        )
        start = time.perf_counter()
        tab.goto(file.as_uri(), wait_until="commit")
        tab.wait_for_selector("html[data-ready]")
        tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        usable = time.perf_counter() - start
        first = tab.evaluate("longest")
        tab.evaluate("longest = 0")
        tab.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true })")
        height = tab.evaluate("document.documentElement.scrollHeight")
        for y in range(0, height, 400):
            tab.evaluate(f"scrollTo(0, {y})")
            tab.wait_for_timeout(30)
        tab.locator("#toolbar button").nth(1).click()
        tab.locator("#step").focus()
        for _ in range(10):
            tab.keyboard.press("ArrowRight")
        tab.locator("#toolbar button").nth(0).click()
        tab.wait_for_timeout(300)
        found = {"usable_s": usable, "first_task_ms": first, "longest_task_ms": tab.evaluate("longest")}
        found["heap_mb"] = tab.evaluate("performance.memory.usedJSHeapSize / 1e6")
        browser.close()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--series", type=int, default=500)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="keep the page here")
    options = parser.parse_args()
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder:
        directory = write_run(Path(folder) / "long", options.steps, options.series)
        start = time.perf_counter()
        record = history.RunRecord(directory)
        loaded = time.perf_counter() - start
        start = time.perf_counter()
        html = run_page(record)
        built = time.perf_counter() - start
        print(f"{options.steps} steps, {options.series} series")
        print(f"read the journal  {loaded:8.2f} s")
        print(f"build the page    {built:8.2f} s")
        print(f"size of the page  {len(html.encode()) / 1e6:8.2f} MB")
        file = options.keep or Path(folder) / "page.html"
        file.write_text(html, encoding="utf-8")
        if executable is None:
            print("no chromium here: not opened")
            return
        visits: list[dict[str, Any]] = [opened(file.absolute(), executable) for _ in range(options.runs)]
    for name in visits[0]:
        values = sorted(visit[name] for visit in visits)
        print(f"{name:18}{statistics.median(values):8.2f}   ({values[0]:.2f} to {values[-1]:.2f}, {len(values)} visits)")


if __name__ == "__main__":
    main()
