"""What our records are in W&B: a history row, entries of the run's config and summary; and the way back.

Series keep their names but for the few that W&B keeps for itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from trackbridge.backends import words
from trackbridge.names import ATTEMPT, SEQ, STEP
from trackbridge.records import Anomaly, Params, Row
from trackbridge.rundir import dumps

FLOOR = "trackbridge/facts_until"
"""Summary key: every anomaly, artifact and params record up to this seq has arrived."""
CREATED = "trackbridge/created"
"""Config key: when the recording began, in seconds since the epoch. It tells two recordings of one id apart."""
PARAMS = "trackbridge/params_seq"
"""Config key: the seq of the newest params record."""
ANOMALY = "anomaly/"
"""Prefix of summary keys, before the anomaly's id."""


def history_row(row: Row) -> dict[str, float]:
    """One call of ``run.log``; its seq is how we recognise it when it is read back."""
    values = {key(name): value for name, value in row.items()}
    return {**values, STEP: row.step, SEQ: row.seq, ATTEMPT: row.attempt}


LONGEST = 128
"""Characters of a project, group, run or artifact type name."""
_ILLEGAL_PROJECT = re.compile(r"[/\\#?%:\r\n]")
_ILLEGAL_TYPE = re.compile(r"[/:]")
_OWN_TYPES = ("job", "run_table", "code")
_TAG = 64  # characters


def project_name(name: str) -> str:
    """A project that W&B takes, from any name: what it refuses in one becomes ``-``."""
    return _ILLEGAL_PROJECT.sub("-", name)[:LONGEST]


def artifact_type(kind: str) -> str:
    """The type of an artifact of `kind`. Some types are W&B's own."""
    own = kind in _OWN_TYPES or kind.startswith("wandb-")
    return _ILLEGAL_TYPE.sub("-", f"trackbridge-{kind}" if own else kind)[:LONGEST] or "file"


def tags(given: Sequence[str]) -> tuple[str, ...]:
    """Tags that W&B takes: for one that it does not, it would drop them all."""
    return tuple(dict.fromkeys(tag[:_TAG] for tag in given if tag))


_RESERVED = re.compile(r"u*_")


def key(name: str) -> str:
    """The history key of a series. Keys that begin with ``_`` are W&B's own, so those and what they become get a ``u``."""
    return f"u{name}" if _RESERVED.match(name) else name


def original(key_: str) -> str:
    """The series name of a history key; the inverse of `key`."""
    return key_[1:] if _RESERVED.match(key_) and key_.startswith("u") else key_


def config_values(params: Params) -> dict[str, Any]:
    """The user's own config under its own names, what else there is under ``trackbridge/``; strict JSON."""
    values = dict(params.values)
    own = values.pop("config", {})
    config = {f"trackbridge/{name}": value for name, value in values.items()}
    return dict(json.loads(dumps({**config, **own})))


def anomaly_facts(anomaly: Anomaly) -> dict[str, Any]:
    facts = {
        "seq": anomaly.seq, "what": words.anomaly_line(anomaly),
        "kind": anomaly.kind, "step": anomaly.step, "onset": anomaly.onset,
        "severity": anomaly.severity, "series": anomaly.series, "value": anomaly.value, "expected": anomaly.expected,
        "score": anomaly.score, "recovered_after": anomaly.recovered_after, "capsule": anomaly.capsule,
        "hypotheses": [hypothesis.name for hypothesis in anomaly.hypotheses],
    }  # fmt: skip
    return dict(json.loads(dumps(facts)))
