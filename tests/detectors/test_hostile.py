"""Rows that no training means: series come and go, steps jump and go back, rates and losses reach the ends of a float."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest

from trackbridge.backends.words import anomaly_markdown
from trackbridge.config import DetectionConfig
from trackbridge.detectors import Watch
from trackbridge.records import Row, Schema

_NAMES = (
    "train/loss", "train/lr", "train/lr/0", "train/lr/1", "grad/norm", "grad/norm_clipped", "layer/a/grad_norm",
    "layer/b/grad_norm", "layer/a/update_ratio", "act/x/kurtosis", "act/x/nonfinite", "optim/skipped", "train/loss_scale",
    "optim/exp_avg_sq_norm", "layer/a/exp_avg_sq_norm", "mem/reserved_bytes", "perf/step_s", "param/replicas_differ",
)  # fmt: skip
_ENDS = (math.nan, math.inf, -math.inf, 0.0, -1.0, 1e300, -1e300, 5e-324)
_JUMPS = (0, -30, -1, 500, 10**6)


def hostile(seed: int, count: int = 250) -> list[Row]:
    r, normal = random.Random(seed), np.random.default_rng(seed)
    names = tuple(name for name in _NAMES if r.random() < 0.6) or _NAMES[:1]
    size = {name: 10 ** r.uniform(-3, 3) for name in names}
    vanish, step, rate, schemas, out = r.random() < 0.3, r.choice([0, 1000, 2**40]), 1.0, {names: Schema(names)}, []
    for i in range(count):
        now = tuple(name for name in names if not vanish or r.random() < 0.97)
        rate = 10 ** r.uniform(-2, 2) if r.random() < 0.02 else rate
        burst = 10 ** r.uniform(0, 3) if r.random() < 0.05 else 1.0
        of = {"train/loss": burst, "grad/norm": burst, "train/loss_scale": 2.0 ** -(i // 10)}
        values = [
            r.choice(_ENDS) if r.random() < 0.004
            else size[name] * rate if name.startswith("train/lr")
            else size[name] * of.get(name, 1.0) * (1 + 0.05 * float(normal.standard_normal()))
            for name in now
        ]  # fmt: skip
        out.append(Row(i, step, 1000.0 + i, 0, schemas.setdefault(now, Schema(now)), np.array(values)))
        step += 1 if r.random() < 0.97 else r.choice(_JUMPS)
    return out


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", range(30))
def test_what_is_told_can_be_said_and_is_the_same_after_any_restore(seed: int) -> None:
    r = random.Random(seed)
    cuts, further = r.sample(range(250), 12), r.choice([(), ("z-100", "olmo")])
    rules = ("layer/*/update_ratio > 0.1", "grad/norm < 0.5 for 3 steps")
    config = DetectionConfig(rules=rules, detectors=further, warmup=20)  # type: ignore[arg-type]
    whole, parted = Watch(config), Watch(config)
    for row in hostile(seed):
        if row.seq in cuts:
            state, ids = json.loads(json.dumps(parted.state_dict(), allow_nan=False)), parted._events._ids
            parted = Watch(config)
            parted.load_state_dict(state)
            parted._events._ids = ids  # what a process has told it does not tell again under the same id
        told = whole.update(row)
        assert repr(told) == repr(parted.update(row))
        for anomaly in told:
            assert 0 <= anomaly.severity <= 1 and len(anomaly.notes) < 60
            assert anomaly.recovered_after is None or anomaly.recovered_after >= 0
            assert str(anomaly) and anomaly_markdown(anomaly)
