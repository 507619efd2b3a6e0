from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from wandb_kit import Connect

    from tests.wandb_server import WandbServer
    from trackbridge.backends.wandb import WandbBackend
    from trackbridge.records import RunInfo

pytest.register_assert_rewrite("trackbridge.testing")


@pytest.fixture(scope="module")
def wandb_module_server() -> Iterator[WandbServer]:
    from tests.wandb_server import WandbServer

    with WandbServer() as server:
        yield server
        assert not server.unknown, f"the client asked for fields the server does not have: {dict(server.unknown)}"


@pytest.fixture
def wandb_server(wandb_module_server: WandbServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[WandbServer]:
    """An empty W&B server, and an environment in which the client finds the key for it."""
    from tests.wandb_server import KEY

    for name, value in {
        "API_KEY": KEY,
        "SILENT": "true",
        "CACHE_DIR": tmp_path / "cache",
        "DATA_DIR": tmp_path / "data",
    }.items():
        monkeypatch.setenv(f"WANDB_{name}", str(value))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for what in ("FILE_STREAM", "GRAPHQL", "FILE_TRANSFER"):
        monkeypatch.setenv(f"WANDB__{what}_RETRY_WAIT_MIN_SECONDS", "1")
    wandb_module_server.start()
    yield wandb_module_server
    wandb_module_server.forget()


@pytest.fixture
def run(tmp_path: Path) -> RunInfo:
    from trackbridge.testing import run_info

    return run_info(tmp_path)


@pytest.fixture
def connect(wandb_server: WandbServer) -> Connect:
    from wandb_kit import QuickConfig

    def connect(run: RunInfo) -> WandbBackend:
        backend = QuickConfig(base_url=wandb_server.url).build()
        backend.open(run)
        return backend

    return connect
