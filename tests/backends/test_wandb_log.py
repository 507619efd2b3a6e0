"""The two ways of a row into the SDK's queue, with the real client: the same rows, to the bit."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trackbridge.backends.wandb_file import load

ODD = (0.1, 1e22, 1e-7, 5e-324, 1.7976931348623157e308, 2.0**60, float("nan"), float("inf"), float("-inf"), 3.0)
KEYS = (*(f"x/{at}" for at in range(len(ODD))), 'quote"d \\ β', "trackbridge/step")

SCRIPT = """
import json, os, struct, sys
import wandb
from trackbridge.backends.wandb_log import Log

class Other:
    \"\"\"A run of an SDK that has nothing of what the direct way needs.\"\"\"
    def __init__(self, run): self._real = run
    def log(self, values): self._real.log(values)

keys, hexes = json.loads(sys.argv[1])
values = [struct.unpack(">d", bytes.fromhex(text))[0] for text in hexes]
run = wandb.init(mode="offline", project="p", settings=wandb.Settings(**{settings}))
log = Log({run}, direct={direct})
for step in range(4):
    log.row(keys, [*values, 0.5, step])
print(json.dumps([log.direct, run.step]))
run.finish()
"""


def logged(folder: Path, *, run: str = "run", direct: bool = True, **settings: Any) -> tuple[bool, int, list[dict[str, Any]]]:
    """(whether rows went directly, the SDK's count of rows, the history) of four rows."""
    text = SCRIPT.replace("{settings}", repr(settings)).replace("{run}", run).replace("{direct}", repr(direct))
    given = json.dumps([KEYS, [struct.pack(">d", value).hex() for value in ODD]])
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")} | {"WANDB_SILENT": "true"}
    done = subprocess.run(
        [sys.executable, "-c", text, given], cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    went, steps = json.loads(done.stdout.splitlines()[-1])
    return went, steps, load(folder / "wandb").history


@pytest.mark.parametrize(
    ("given", "directly"),
    [
        ({}, True),
        ({"direct": False}, False),
        ({"x_history_value_encoding": "json,typed"}, False),  # `Run.log` sends more than we would
        ({"run": "Other(run)"}, False),
    ],
    ids=["direct", "not allowed", "an SDK that sends something else", "an SDK without the private parts"],
)
def test_each_way_writes_the_same_rows(tmp_path: Path, given: dict[str, Any], directly: bool) -> None:
    went, steps, history = logged(tmp_path, **given)
    assert went == directly
    assert steps == len(history) == 4
    for step, row in enumerate(history):
        assert [bits(row[key]) for key in KEYS] == [bits(value) for value in (*ODD, 0.5, step)]
        assert (row["_step"], isinstance(row["trackbridge/step"], int)) == (step, True)
        assert row["_timestamp"] > 1.7e9
        assert set(row) == {*KEYS, "_step", "_timestamp", "_runtime"}


def bits(value: float) -> bytes:
    return struct.pack(">d", value)
