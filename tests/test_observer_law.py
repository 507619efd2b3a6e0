"""A watched run draws no random number and ends bit-identical to the unwatched run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import trackbridge
from tests.training import fingerprint, loader, setup, train

EVERYTHING: dict[str, Any] = {
    "parameters": {"gradients_every": 1, "weights_every": 1, "moments_every": 1},
    "activations": {"sites": "leaf"},
    "recorder": {"snapshot_every": 3},
}


def unwatched(workers: int) -> dict[str, bytes]:
    made = setup()
    return fingerprint(train(made, loader(workers=workers), steps=12))


def watched(
    directory: Path, workers: int, *, feed: bool, backend: Any, delivers: bool = True, **settings: Any
) -> dict[str, bytes]:
    run = trackbridge.init(dir=directory, backend=backend, strict=True, **settings)
    made = setup(run=run)
    data = loader(workers=workers)
    ended = fingerprint(train(made, run.batches(data) if feed else data, steps=12))
    assert bool(run.finish(timeout=60 if delivers else 0.5)) is delivers
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it may be gone already
            if "trackbridge.shipper" in child.cmdline():
                child.kill()  # a tracker that is down would keep it for half an hour
    return ended


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("feed", [True, False], ids=["run.batches", "bare loader"])
def test_bit_identical_with_every_probe_on(tmp_path: Path, workers: int, feed: bool) -> None:
    assert watched(tmp_path, workers, feed=feed, backend=None, **EVERYTHING) == unwatched(workers)


def test_bit_identical_with_defaults(tmp_path: Path) -> None:
    assert watched(tmp_path, 2, feed=True, backend=None) == unwatched(2)


@pytest.mark.parametrize("tracker", ["up", "down"])
def test_bit_identical_with_mlflow(tmp_path: Path, tracker: str) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db" if tracker == "up" else "http://127.0.0.1:9"
    backend = {"kind": "mlflow", "tracking_uri": uri}
    assert watched(tmp_path, 0, feed=True, backend=backend, delivers=tracker == "up", **EVERYTHING) == unwatched(0)


def test_the_law_can_be_broken(tmp_path: Path) -> None:
    """The comparison sees a single random number drawn by an observer."""
    import random

    made = setup()
    random.random()
    assert fingerprint(train(made, loader(), steps=12)) != unwatched(0)
