"""Keep secrets out of everything we write: configs, command lines, git remotes and diffs, log lines.

A best effort by shape: values under names that sound like secrets, credentials inside URLs, and the key formats of the
services a training script talks to. Redacted text keeps its name, so that a reader sees that something was there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "[redacted]"

_SECRET = r"(?:api[_-]?key|access[_-]?key|private[_-]?key|secret|passw(?:or)?d|credential|webhook)"
_SECRET_NAME = re.compile(rf"(?i){_SECRET}")
_TOKEN_NAME = re.compile(r"(?i)token(?!s|iz)")

# Bounded, and anchored at the start of a word: a diff may hold a line of a million letters.
_BEFORE = r"(?<![\w.-])((?:--)?[\w.-]{0,40}?"
_IS = r"[\w.-]{0,40}[\"']?\s{0,4}(?:[=:]\s{0,4}|\s))([\"']?)"
_PATTERNS = (
    # user:password@ in any URL
    (re.compile(r"(?i)(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{0,20}://)[^/\s:@]{1,200}(?::[^/\s@]{0,200})?@"), rf"\1{HIDDEN}@"),
    # NAME=value, "name": "value", --name value, for names that sound secret
    (re.compile(rf"(?i){_BEFORE}{_SECRET}{_IS}(?!\[redacted\])[^\s\"',;&]{{6,500}}"), rf"\1\2{HIDDEN}"),
    # a token is a secret only when its value looks like one: every language model's code is full of the word
    (
        re.compile(
            rf"(?i){_BEFORE}token(?!s|iz){_IS}(?=[A-Za-z0-9_\-+/=.]{{0,500}}[0-9])"
            r"(?=[A-Za-z0-9_\-+/=.]{0,500}[A-Za-z])[A-Za-z0-9_\-+/=.]{12,500}"
        ),
        rf"\1\2{HIDDEN}",
    ),
    (re.compile(r"(?i)\b(bearer|basic)\s{1,4}[A-Za-z0-9_\-+/=.]{16,500}"), rf"\1 {HIDDEN}"),
    # chat and incident webhooks carry their secret in the path
    (
        re.compile(r"(?i)https?://(?:hooks\.slack\.com|discord(?:app)?\.com/api/webhooks|events\.pagerduty\.com)/\S{1,500}"),
        HIDDEN,
    ),
    # well-known key shapes
    (re.compile(r"\b(?:wandb_v1_|ghp_|gho_|github_pat_|hf_|sk-|xox[abprs]-|AKIA|glpat-)[A-Za-z0-9_-]{12,500}"), HIDDEN),
)


def text(value: str) -> str:
    """`value` with everything that looks like a secret replaced."""
    for pattern, replacement in _PATTERNS:
        value = pattern.sub(replacement, value)
    return value


def tree(value: Any) -> Any:
    """A copy of a JSON-like value: strings redacted, and everything below a secret-sounding key replaced."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, bytes):
        return text(value.decode("utf-8", "replace"))
    if isinstance(value, Mapping):
        return {key: HIDDEN if _hidden(str(key), item) else tree(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [tree(item) for item in value]
    return value


def _hidden(name: str, value: Any) -> bool:
    if value is None or value == "" or isinstance(value, bool):
        return False
    # a number under "token..." is a count or an id of a vocabulary
    return bool(_SECRET_NAME.search(name) or (_TOKEN_NAME.search(name) and not isinstance(value, (int, float))))
