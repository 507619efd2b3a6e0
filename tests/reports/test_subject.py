"""What a report is about, gathered from a run on this disk: where the run is in W&B, and what it sends, in bounded memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from tests.recordings import Trainer
from trackbridge import load
from trackbridge.history import RunRecord
from trackbridge.records import Anomaly, Row
from trackbridge.reports import subject
from trackbridge.rundir import dumps
from trackbridge.testing import anomaly, row


class Long:
    """Of a record what `sent` asks for: a run that is read row by row."""

    settings: dict[str, Any] = {}

    def rows(self) -> Iterator[Row]:
        return (row(step, step, {f"act/{k}/rms": 1.0 for k in range(100)}) for step in range(4000))


@pytest.mark.parametrize("about", [None, anomaly(9000, 2000)])
def test_a_long_run_is_not_held_in_memory(about: Anomaly | None) -> None:
    tracemalloc.start()
    try:
        found = subject.sent(cast(RunRecord, Long()), about)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found >= {"act/0/rms"} and peak < 8 << 20


def test_a_run_that_writes_into_one_of_the_users_is_known_by_the_id_it_has_there(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path / "ours")
    trainer.train(5)
    trainer.finish()
    folder = trainer.directory.path / "wandb"
    folder.mkdir()
    (folder / "where.json").write_text(dumps({"url": "https://wandb.example/team/pro%20ject/runs/theirs"}))
    about = subject.of_run(load(trainer.directory.path))
    assert (about.entity, about.project, about.run_id) == ("team", "pro ject", "theirs")
    (folder / "where.json").write_text(dumps({"url": None}))
    assert subject.of_run(load(trainer.directory.path)).run_id == "live"
