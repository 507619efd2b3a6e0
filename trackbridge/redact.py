"""Keep secrets out of everything we write: configs, command lines, git remotes and diffs, log lines.

A best effort by shape: values under names that sound like secrets, credentials inside URLs, and the key formats of the
services a training script talks to. Redacted text keeps its name, so that a reader sees that something was there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "[redacted]"

_SECRET_NAME = re.compile(
    r"(?i)(api[_-]?key|access[_-]?key|secret|token(?!s|iz)|passw(or)?d|credential|private[_-]?key|webhook)"
)
_PATTERNS = (
    # user:password@ in any URL
    (re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s:@]+(?::[^/\s@]*)?@"), rf"\1{HIDDEN}@"),
    # NAME=value, "name": "value", --name value, for names that sound secret
    (
        re.compile(
            r"(?i)((?:--)?[\w.-]*(?:api[_-]?key|access[_-]?key|secret|passw(?:or)?d|private[_-]?key)[\w.-]*"
            r"[\"']?\s*(?:[=:]\s*|\s+))([\"']?)(?!\[redacted\])[^\s\"',;&]{6,}"
        ),
        rf"\1\2{HIDDEN}",
    ),
    # a token is a secret only when its value looks like one: every language model's code is full of the word
    (
        re.compile(
            r"(?i)((?:--)?[\w.-]*token(?!s|iz)[\w.-]*[\"']?\s*(?:[=:]\s*|\s+))([\"']?)"
            r"(?=[A-Za-z0-9_\-+/=.]*[0-9])(?=[A-Za-z0-9_\-+/=.]*[A-Za-z])[A-Za-z0-9_\-+/=.]{12,}"
        ),
        rf"\1\2{HIDDEN}",
    ),
    # chat and incident webhooks carry their secret in the path
    (re.compile(r"(?i)https?://(?:hooks\.slack\.com|discord(?:app)?\.com/api/webhooks|events\.pagerduty\.com)/\S+"), HIDDEN),
    # well-known key shapes
    (re.compile(r"\b(?:wandb_v1_|ghp_|gho_|github_pat_|hf_|sk-|xox[abprs]-|AKIA|glpat-)[A-Za-z0-9_-]{12,}"), HIDDEN),
)


def text(value: str) -> str:
    """`value` with everything that looks like a secret replaced."""
    for pattern, replacement in _PATTERNS:
        value = pattern.sub(replacement, value)
    return value


def tree(value: Any) -> Any:
    """A copy of a JSON-like value: strings redacted, and whole values under secret-sounding keys replaced."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if isinstance(item, str) and item and _SECRET_NAME.search(str(key)) else tree(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [tree(item) for item in value]
    return value
