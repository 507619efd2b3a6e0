"""Each tracker through trackbridge against its own SDK called directly in the loop: the same values, the same machine.

    python benchmarks/throughput.py                         # 2,000 rows of 500 series (1,000,000 values) to each tracker
    python benchmarks/throughput.py --rows 200 --trackers mlflow --json
    python benchmarks/throughput.py --rows 400 --trackers wandb-online    # through the loopback server of tests/

Two figures each. *Training thread*: milliseconds a step spends in the call, median. The SDK's is one call with 500 floats that
are there already, ours is `run.log` of the same; beside it `run.step` with the statistics of a model of 32 parameters on, about
500 series as well (`training_thread.py`). *End to end*: seconds until everything is in the tracker, and the peak memory of that
process: ours is `trackbridge sync` of a journal, the SDK's is the best way its documentation has (W&B: one `log` a row, then
`finish`; MLflow: `log_batch` of 1,000; TensorBoard: `SummaryWriter.add_scalar`). Every one of these is a process of its own.
"""

from __future__ import annotations

import argparse
import compileall
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

SERIES = 500
NAMES = tuple(f"own/{index}" for index in range(SERIES))


def journal(folder: Path, rows: int) -> Path:
    """A finished run with `rows` rows, half a second apart."""
    from trackbridge.journal import JournalWriter
    from trackbridge.records import Row, RunEnd, Schema
    from trackbridge.rundir import Attempt, RunDirectory, RunFile

    directory = RunDirectory(folder / "run")
    life = Attempt(number=0, start_step=0, time=1.75e9, pid=1, host="elsewhere")
    directory.write(RunFile(project="throughput", run_id="run", name="run", created=1.75e9, attempts=[life]))
    writer = JournalWriter(directory.rows(), segment_bytes=64 << 20, fsync_seconds=5.0)
    schema = Schema(NAMES)
    for step, values in enumerate(data(rows)):
        writer.append(Row(-1, step, 1.75e9 + 0.5 * step, 0, schema, values))
    writer.append(RunEnd(-1, 1.75e9 + 0.5 * rows, "finished"))
    writer.close()
    return directory.path


def data(rows: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(rows, SERIES))


def backend(tracker: str, folder: Path, uri: str) -> Any:
    from trackbridge.backends.resolve import resolve

    unlimited = {"rows_per_minute": None, "values_per_minute": None}
    return resolve(
        {
            "tensorboard": {"kind": "tensorboard", "logdir": str(folder / "tb")},
            "mlflow": {"kind": "mlflow", "tracking_uri": uri, **unlimited},
            "wandb": {"kind": "wandb", "mode": "offline", **unlimited},
            "wandb-online": {"kind": "wandb", "mode": "online", "base_url": uri, "entity": "team", **unlimited},
        }[tracker]
    )


def logged(folder: Path, rows: int) -> float:
    """Milliseconds that `run.log` of one row takes, median."""
    import trackbridge

    calls = []
    with trackbridge.init(dir=folder) as run:
        for step, row in enumerate(data(rows).tolist()):
            values = dict(zip(NAMES, row, strict=True))
            before = time.perf_counter()
            run.log(values, step=step)
            calls.append(time.perf_counter() - before)
    return 1000.0 * statistics.median(calls)


def ours(tracker: str, folder: Path, uri: str, rows: int) -> dict[str, float]:
    from trackbridge import shipper

    run = journal(folder, rows)
    begun = time.perf_counter()
    report = shipper.sync(run, backend(tracker, folder, uri))
    seconds = time.perf_counter() - begun
    assert report.complete, report
    return {"seconds": seconds}


def theirs(tracker: str, folder: Path, uri: str, rows: int) -> dict[str, float]:
    """`call_ms`: the time of one row's call in the calling thread."""
    values = data(rows).tolist()
    calls = []
    begun = time.perf_counter()
    if tracker.startswith("wandb"):
        import wandb

        online = tracker == "wandb-online"
        settings = wandb.Settings(base_url=uri) if online else None
        run = wandb.init(mode="online" if online else "offline", dir=folder, project="throughput", settings=settings)
        for row in values:
            named = dict(zip(NAMES, row, strict=True))
            before = time.perf_counter()
            run.log(named)
            calls.append(time.perf_counter() - before)
        run.finish()
    elif tracker == "mlflow":
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        client = MlflowClient(uri)
        run_id = client.create_run(client.create_experiment(f"theirs-{time.time()}")).info.run_id
        for step, row in enumerate(values):
            before = time.perf_counter()
            now = int(time.time() * 1000)
            client.log_batch(run_id, metrics=[Metric(name, value, now, step) for name, value in zip(NAMES, row, strict=True)])
            calls.append(time.perf_counter() - before)
        client.set_terminated(run_id)
    else:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder / "theirs"))
        for step, row in enumerate(values):
            before = time.perf_counter()
            for name, value in zip(NAMES, row, strict=True):
                writer.add_scalar(name, value, step)
            calls.append(time.perf_counter() - before)
        writer.close()
    return {"seconds": time.perf_counter() - begun, "call_ms": 1000.0 * statistics.median(calls)}


def theirs_packed(folder: Path, uri: str, rows: int) -> dict[str, float]:
    """MLflow's best way end to end: requests of 1,000 metrics, whatever their steps."""
    begun = time.perf_counter()  # its import too, as for ours
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    run_id = client.create_run(client.create_experiment(f"packed-{time.time()}")).info.run_id
    now = int(time.time() * 1000)
    points = [Metric(n, v, now, step) for step, row in enumerate(data(rows).tolist()) for n, v in zip(NAMES, row, strict=True)]
    for at in range(0, len(points), 1000):
        client.log_batch(run_id, metrics=points[at : at + 1000])
    return {"seconds": time.perf_counter() - begun}


def one(what: str, tracker: str, uri: str, rows: int) -> dict[str, float]:
    """In this process; with its peak memory, in MB."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        if what == "packed":
            result = theirs_packed(Path(place), uri, rows)
        else:
            result = (ours if what == "ours" else theirs)(tracker, Path(place), uri, rows)
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return {**result, "peak_mb": int(peak[1]) / 1000 if peak else 0.0}


def wandb_server(pipe: Connection) -> None:
    """A W&B server in a process of its own, until something is received."""
    from tests.wandb_server import WandbServer

    with WandbServer() as server:
        pipe.send(server.url)
        pipe.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trackers", nargs="+", default=["tensorboard", "mlflow", "wandb"])
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=3, metavar=("WHAT", "TRACKER", "URI"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    # As pip leaves a package, the SDKs' among them: without this a checkout is compiled at each start of a process.
    compileall.compile_dir(Path(__file__).parents[1] / "trackbridge", quiet=1)
    if options.one:
        print(json.dumps(one(*options.one, options.rows)))
        return
    from benchmarks.training_thread import step_cost
    from tests.faults.trackers import Mlflow
    from tests.wandb_server import KEY

    os.environ |= {"WANDB_SILENT": "true", "WANDB_API_KEY": KEY}
    results: dict[str, Any] = {"values": options.rows * SERIES}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        step = results["step"] = step_cost(Path(place) / "step", steps=1000, layers=16)
        call = results["log_ms"] = logged(Path(place) / "log", options.rows)
        server = Mlflow(Path(place)) if "mlflow" in options.trackers else None
        uris = {} if server is None else {"mlflow": f"http://127.0.0.1:{server.proxy.target}"}
        pipe, other = multiprocessing.Pipe()
        if "wandb-online" in options.trackers:
            multiprocessing.get_context("spawn").Process(target=wandb_server, args=(other,), daemon=True).start()
            uris["wandb-online"] = pipe.recv()
        for tracker in options.trackers:
            ways = ["ours", "theirs", *(["packed"] if tracker == "mlflow" else [])]
            found = results[tracker] = {way: _run(way, tracker, uris.get(tracker, "none"), options.rows) for way in ways}
            best = min(found[way]["seconds"] for way in ways if way != "ours")
            if not options.json:
                mine, sdk = found["ours"], found["theirs"]
                print(
                    f"{tracker}: training thread {call:.3f} ms of run.log against {sdk['call_ms']:.2f} ms "
                    f"({sdk['call_ms'] / call:.0f} times; run.step with as many statistics {step['median_us'] / 1000:.3f} ms, "
                    f"{1000 * sdk['call_ms'] / step['median_us']:.0f} times); end to end {results['values']} values in "
                    f"{mine['seconds']:.1f} s ({results['values'] / mine['seconds']:.0f}/s, {mine['peak_mb']:.0f} MB) against "
                    f"{best:.1f} s ({results['values'] / best:.0f}/s, {sdk['peak_mb']:.0f} MB)",
                    flush=True,
                )
        pipe.send("over")
        if server is not None:
            server.close()
    if options.json:
        print(json.dumps(results))


def _run(what: str, tracker: str, uri: str, rows: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--rows", str(rows), "--one", what, tracker, uri]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
