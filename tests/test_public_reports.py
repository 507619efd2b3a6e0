"""The table of public reports names tests that exist, for every row of groups A, B, C, E and F."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = (ROOT / "docs" / "public_reports.md").read_text()
ROWS = {f"A{n}" for n in (1, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14)}
ROWS |= {f"B{n}" for n in (1, 2, 3, 5, 6, 8, 9, 10, 11, 13, 14)}
ROWS |= {f"C{n}" for n in (1, 2, 4, 5, 6, 7, 8, 9)}
ROWS |= {f"E{n}" for n in (1, 2, 3, 4, 6, 7, 9, 10)} | {f"F{n}" for n in (1, 2, 4, 6, 7, 8)}


def test_every_row_has_a_test() -> None:
    with_tests = re.findall(r"^\| ([ABCEF]\d+) \|.*`tests/", TABLE, re.M)
    assert set(with_tests) == ROWS and len(with_tests) == len(ROWS)


def test_every_test_in_the_table_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TABLE)
    assert len(named) > 40
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / file).read_text()]
    assert missing == []
