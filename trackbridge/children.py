"""Python processes of ours that a training starts: what they find around them."""

from __future__ import annotations

import os
from collections.abc import Mapping


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours and `more`, and that a module is not looked for in the folder we are in, which may hold a queue.py or an mlflow.py.
    (Python 3.10 does not know PYTHONSAFEPATH and looks there all the same.)"""
    return {**os.environ, **(more or {}), "PYTHONSAFEPATH": "1"}
