"""``python -m tests.faults [tensorboard] [mlflow] [wandb] --schedules 200 [--first 0]``: many schedules; prints the seeds."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.faults import schedule
from tests.faults.trackers import FORK, Mlflow, Tensorboard, Tracker, Wandb


def make(name: str, folder: Path) -> Tracker:
    """The tracker `name`, its server running."""
    FORK.set_forkserver_preload(["tests.faults.trainer", "wandb", "trackbridge.backends.wandb_client", "tests.faults.trackers"])
    if name == "tensorboard":
        return Tensorboard()
    if name == "mlflow":
        for variable, text in {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "2"}.items():
            os.environ[variable] = text
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        return Mlflow(folder)
    return Wandb()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trackers", nargs="*", default=["tensorboard", "mlflow", "wandb"])
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="a line per schedule")
    options = parser.parse_args()
    logging.getLogger("trackbridge").setLevel(logging.CRITICAL)
    failed = 0
    for name in options.trackers:
        with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as place:
            tracker = make(name, Path(place))
            total: Counter[str] = Counter()
            bad = []
            for seed in range(options.first, options.first + options.schedules):
                outcome = schedule.run(tracker, seed, Path(place))
                total["rows"] += outcome.rows
                total["artifacts"] += outcome.artifacts
                total["faults"] += sum(not words.startswith("attempt") for words in outcome.story)
                total["milliseconds"] += int(outcome.seconds * 1000)
                if options.verbose:
                    print(f"{name} seed {seed}: {outcome.seconds:.1f} s, {outcome.rows} rows, {outcome.story}", flush=True)
                if outcome.faults:
                    bad.append(seed)
                    print(f"{name} seed {seed}: {outcome.faults}\n  {outcome.story}", flush=True)
            tracker.close()
            failed += len(bad)
            print(
                f"{name}: {options.schedules} schedules (seeds {options.first} to {seed}), {total['rows']} rows and "
                f"{total['artifacts']} artifacts, {total['faults']} faults and kills, {total['milliseconds'] / 1000:.0f} s; "
                f"failed: {bad or 'none'}",
                flush=True,
            )
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
