"""What the W&B tests share: a config with a quick pace, and runs read back as the contract wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from trackbridge.backends import words
from trackbridge.backends.wandb import WandbBackend, WandbConfig
from trackbridge.backends.wandb_client import Pace
from trackbridge.backends.wandb_rows import ANOMALY, original
from trackbridge.names import ATTEMPT, SEQ, STEP
from trackbridge.records import RunInfo, RunStatus
from trackbridge.testing import Points, newest

if TYPE_CHECKING:
    from tests.wandb_server import WandbServer

Connect: TypeAlias = Callable[[RunInfo], WandbBackend]
"""The fixture ``connect``: open a run on the test server."""

QUICK = Pace(init=30.0, poll=0.1, transmit=1, flush=0.1, stall=8.0)


class QuickConfig(WandbConfig):
    def build(self) -> WandbBackend:
        return WandbBackend(self, QUICK)


def points(history: Iterable[Mapping[str, Any]]) -> tuple[Points, Points]:
    """(current, superseded) points of all series. W&B's readers give non-finite numbers as words."""
    found: dict[str, list[tuple[int, int, float]]] = {}
    for row in history:
        for key, value in row.items():
            if not key.startswith(("_", "trackbridge/")):
                found.setdefault(original(key), []).append((row[ATTEMPT], row[STEP], float(value)))
    split = {name: newest(series) for name, series in found.items()}
    return {name: now for name, (now, _) in split.items()}, {name: old for name, (_, old) in split.items()}


def status(exit_code: int | None) -> RunStatus | None:
    return None if exit_code is None else {0: "finished", 255: "killed"}.get(exit_code, "failed")  # type: ignore[return-value]


def params(config: Mapping[str, Any]) -> dict[str, str]:
    return words.flatten({"config": dict(config)})


def anomalies(summary: Mapping[str, Any]) -> dict[str, str]:
    return {key.removeprefix(ANOMALY): value["what"] for key, value in summary.items() if key.startswith(ANOMALY)}


def seqs(server: WandbServer, run: RunInfo) -> list[int]:
    """The seq of every history row the server holds, in its order."""
    return [row[SEQ] for row in server.run(run.project, run.run_id).history()]
