"""What our records are in W&B: a history row, entries of the run's config and summary; and the way back.

Series keep their names but for the few that W&B keeps for itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from trackbridge.backends import words
from trackbridge.names import ATTEMPT, SEQ, STEP
from trackbridge.records import Anomaly, Params, Row, RunInfo
from trackbridge.rundir import dumps

FLOOR = "trackbridge/facts_until"
"""Summary key: every anomaly, artifact and params record up to this seq has arrived."""
CREATED = "trackbridge/created"
"""Config key: when the recording began, in seconds since the epoch. It tells two recordings of one id apart."""
PARAMS = "trackbridge/params_seq"
"""Config key: the seq of the newest params record."""
ANOMALY = "anomaly/"
"""Prefix of summary keys, before the anomaly's id."""


@dataclass(frozen=True)
class Keys:
    """What is called how in one run of W&B. In a run of the user's, which other recordings may have joined as well, `mark`
    tells ours from theirs: a seq of theirs is none of ours."""

    mark: str = ""

    @property
    def seq(self) -> str:
        return SEQ + self.mark

    @property
    def floor(self) -> str:
        return FLOOR + self.mark

    @property
    def params(self) -> str:
        return PARAMS + self.mark

    def anomaly(self, anomaly_id: str) -> str:
        return f"{ANOMALY}{anomaly_id}{self.mark}"

    def anomalies(self, summary: Mapping[str, Any]) -> dict[str, int]:
        """The newest seq of each anomaly, by its id, in a run's summary."""
        ours = {key: value for key, value in summary.items() if key.startswith(ANOMALY) and key.endswith(self.mark)}
        return {
            key[len(ANOMALY) :].removesuffix(self.mark): int(value.get("seq", -1))
            for key, value in ours.items()
            if isinstance(value, dict)
        }


def keys_of(run: RunInfo, *, joined: bool) -> Keys:
    """`joined`: it is written into a run of the user's."""
    recording = f"{run.run_id} {run.created!r}".encode()
    return Keys(f":{hashlib.blake2b(recording, digest_size=4).hexdigest()}" if joined else "")


HistoryRow: TypeAlias = tuple[tuple[str, ...], list[float]]
"""What one call of ``run.log`` gets: the keys, the same object for rows of one kind, and their values. The last three are step,
seq and attempt, which are whole numbers."""


def history_row(row: Row, seq: str = SEQ) -> HistoryRow:
    """`row` in W&B, with its seq, under the key `seq`, by which we recognise it when it is read back."""
    keys, places = _keys(row.schema.names, seq)
    return keys, [*row.values[places].tolist(), row.step, row.seq, row.attempt]


@lru_cache(maxsize=64)
def _keys(names: tuple[str, ...], seq: str) -> tuple[tuple[str, ...], npt.NDArray[np.intp]]:
    """The keys of a row of these series, and where its values are but for those of the last three."""
    places = [at for at, name in enumerate(names) if name not in (STEP, SEQ, ATTEMPT)]
    return (*(key(names[at]) for at in places), STEP, seq, ATTEMPT), np.array(places, np.intp)


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


_RESERVED = re.compile(r"u*(_.*|\\)", re.DOTALL)


def key(name: str) -> str:
    """The history key of a series. Keys that begin with ``_`` are W&B's own, and a lone backslash ends W&B's service (it splits
    names at dots, and nothing is left of that one), so those and what they become get a ``u``."""
    return f"u{name}" if _RESERVED.fullmatch(name) else name


def original(key_: str) -> str:
    """The series name of a history key; the inverse of `key`."""
    return key_[1:] if _RESERVED.fullmatch(key_) and key_.startswith("u") else key_


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
        "score": anomaly.score, "terms": anomaly.terms, "value_step": anomaly.value_step,
        "recovered_after": anomaly.recovered_after, "capsule": anomaly.capsule,
        "hypotheses": [hypothesis.name for hypothesis in anomaly.hypotheses],
    }  # fmt: skip
    return dict(json.loads(dumps(facts)))
