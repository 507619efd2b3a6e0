"""W&B online when the server misbehaves: every row arrives once, and an artifact counts when the server has it."""

from __future__ import annotations

import os

import pytest
from wandb_kit import Connect, seqs

from tests.wandb_server import Cut, Drop, Status, WandbServer
from tests.wandb_server.faults import Action
from trackbridge.errors import Rejected
from trackbridge.records import Artifact, RunInfo
from trackbridge.testing import T0, artifact, deliver, end, rows

STREAM = ".*/file_stream"


def test_a_stream_that_hiccups_loses_and_doubles_nothing(wandb_server: WandbServer, connect: Connect, run: RunInfo) -> None:
    backend = connect(run)
    for turn, action in enumerate((Status(503), Status(429), Drop(), Drop(after=True), Cut(100))):
        with wandb_server.fault(action, path=STREAM, times=1) as fault:
            deliver(backend, rows(range(10 * turn, 10 * turn + 10), first_seq=10 * turn))
            assert fault.hit.wait(20), action
    assert backend.close(end(50), timeout=30) == 50
    assert seqs(wandb_server, run) == list(range(50))


def test_a_stream_that_is_dead_for_good_is_made_anew(wandb_server: WandbServer, connect: Connect, run: RunInfo) -> None:
    """W&B's client gives up after a 401, also when the server has long come to its senses."""
    backend = connect(run)
    records = [*rows(range(6)), artifact(6, 5, run, "a", {"x": b"1"})]
    with wandb_server.fault(Status(401), path=STREAM, times=1):
        deliver(backend, records)
        assert backend.close(None, timeout=40) == 6
    assert seqs(wandb_server, run) == list(range(6))


@pytest.mark.parametrize(
    ("action", "where"),
    [
        (Cut(1000), {"path": "/storage/blobs/.*", "method": "PUT"}),
        (Status(404), {"path": "/storage/blobs/.*", "method": "PUT"}),
        (Status(400), {"operation": "CommitArtifact"}),
    ],
    ids=["killed mid-upload", "refused upload", "refused commit"],
)
def test_an_artifact_counts_only_when_the_server_has_it(
    wandb_server: WandbServer, connect: Connect, run: RunInfo, action: Action, where: dict[str, str]
) -> None:
    backend = connect(run)
    files = {"big.bin": os.urandom(200_000), "sub/small.txt": b"hello"}
    records = [*rows(range(3)), artifact(3, 2, run, "capsule", files), *rows(range(3, 6), first_seq=4)]
    with wandb_server.fault(action, times=1, **where) as fault:
        assert deliver(backend, records) < 3
        assert fault.hit.wait(20)
    assert backend.close(end(7), timeout=40) == 7
    assert wandb_server.artifacts.files((wandb_server.entity, run.project, "capsule"), "step-2") == files
    assert len(wandb_server.artifacts.collections[wandb_server.entity, run.project, "capsule"].versions) == 1
    assert seqs(wandb_server, run) == [0, 1, 2, 4, 5, 6]


def test_a_picture_that_cannot_be_shown_is_an_artifact_all_the_same(
    wandb_server: WandbServer, connect: Connect, run: RunInfo
) -> None:
    backend = connect(run)
    files = {"pictures/broken.png": b"\x89PNG\r\n\x1a\n" + bytes(40), "manifest.json": b"{}"}
    deliver(backend, [*rows(range(2)), artifact(2, 1, run, "capsule", files)])
    assert backend.close(end(3), timeout=30) == 3
    collection = wandb_server.artifacts.collections[wandb_server.entity, run.project, "capsule"]
    assert len(collection.versions) == 1, "and is not sent again"
    assert seqs(wandb_server, run) == [0, 1]


def test_an_artifact_that_is_gone_is_refused_and_the_rest_goes_on(
    wandb_server: WandbServer, connect: Connect, run: RunInfo
) -> None:
    backend = connect(run)
    gone = Artifact(seq=2, step=1, time=T0, name="gone", kind="file", path="artifacts/gone")
    with pytest.raises(Rejected, match="artifacts/gone is not in the run directory"):
        backend.write([*rows(range(2)), gone], timeout=5)
    deliver(backend, rows(range(2)))
    assert backend.close(end(3), timeout=20) == 3
    assert seqs(wandb_server, run) == [0, 1]
