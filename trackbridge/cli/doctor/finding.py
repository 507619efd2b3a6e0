"""What ``trackbridge doctor`` says about one thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """`state`: "ok", "note" (works, but you should know) or "problem". `advice` is what to do, empty when nothing."""

    what: str
    state: Literal["ok", "note", "problem"]
    found: str
    advice: str = ""
