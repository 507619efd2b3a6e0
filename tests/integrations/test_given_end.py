"""What a training that found something says when it ends, where no loop of the user's would."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from trackbridge.integrations.given import Given


@pytest.mark.parametrize("bad", [True, False])
def test_the_end_says_where_what_was_found_is(bad: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "trackbridge")
    given = Given(None, {"dir": tmp_path, "id": "r1", "detection": {"warmup": 16}})
    run = given.begin({})
    for step in range(48):
        run.step(9.0 if bad and step == 40 else 1.0 + 0.01 * (step % 3))
    given.end(run)
    said = [message for message in caplog.messages if "what was found" in message]
    assert len(said) == bad and all(f"trackbridge view {run.dir}" in message for message in said)
