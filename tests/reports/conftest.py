"""A recorded spike, and the same run on a W&B server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import replays
from tests.wandb_server import KEY, WandbServer
from trackbridge import shipper

sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))  # for wandb_kit, as the tests of backends find it

PROJECT = "reports"


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a spike, its capsule sealed, delivered nowhere."""
    detection = {"warmup": 16, "threshold": 2.0}  # whether this spike is one is not what is tested here
    return replays.record(
        tmp_path_factory.mktemp("reports") / "runs", project=PROJECT, name="tiny/lr=1e-3", detection=detection
    )


@pytest.fixture(scope="session")
def served(recorded: Path) -> Iterator[WandbServer]:
    """A server that has the run, its anomaly and its capsule."""
    from wandb_kit import QuickConfig

    patch = pytest.MonkeyPatch()
    for name, value in {"API_KEY": KEY, "SILENT": "true"}.items():
        patch.setenv(f"WANDB_{name}", value)
    with WandbServer() as server, patch.context() as context:
        context.setenv("WANDB_BASE_URL", server.url)
        report = shipper.sync(recorded, [QuickConfig(base_url=server.url)], timeout=90)
        assert report.complete
        yield server
        assert not server.unknown, f"the client asked for fields the server does not have: {dict(server.unknown)}"
    patch.undo()
