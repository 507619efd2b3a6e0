"""A small capsule written by the real writer, without a training, and how to spoil one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trackbridge import capsule as capsules
from trackbridge import capsule_parts as parts
from trackbridge import untrusted
from trackbridge.capsule import LocalFiles, SpikeCapsule
from trackbridge.records import Anomaly, Hypothesis, MicroBatch, Row, Schema, StepContext

STEPS = range(10, 16)
NAMES = ("train/loss", "grad/norm", "layer/head.weight/grad_norm", "act/blocks.0/rms")


def an_anomaly(**changes: Any) -> Anomaly:
    return Anomaly(
        **{
            "id": "spike-13",
            "kind": "spike",
            "step": 13,
            "onset": 12,
            "severity": 0.8,
            "series": "train/loss",
            "value": 9.5,
            "expected": 2.25,
            "score": 31.0,
            "first_mover": ("grad/norm", 12),
            "cascade": (("grad/norm", 12), ("train/loss", 13)),
            "time": 1.75e9,
            "hypotheses": (Hypothesis("corrupt-batch", ("entropy 7.9 bits",), ("loss recovered",), "skip-batch"),),
            **changes,
        }
    )


def some_rows() -> list[Row]:
    """Values with all bits used; step 12 has a NaN, step 14 lacks the last two series."""
    rows = []
    for step in STEPS:
        values = np.sqrt(np.arange(4.0) + step)
        if step == 12:
            values[1] = np.nan
        names = NAMES[:2] if step == 14 else NAMES
        rows.append(Row(step, step, 1.75e9 + step, 0, Schema(names), values[: len(names)]))
    return rows


def some_contexts() -> list[StepContext]:
    contexts = []
    for step in STEPS:
        micros = tuple(
            MicroBatch(
                loader=0,
                epoch=step // 13,
                index=step,
                sample_ids=(step, step + 1),
                fingerprint=f"{step:04x}",
                tokens={"length": 8},
                rng={"torch.cpu": np.full(16, step, np.uint8)} if k == 1 else None,
                skeleton={"x": {"$tensor": "x", "dtype": "float32"}, "text": f"a secret sentence {step}"},
                tensors={"x": np.arange(6, dtype=np.float32).reshape(2, 3) + step},
            )
            for k in range(2)
        )
        contexts.append(
            StepContext(step, step, 0, {"python": np.arange(5) + step, "torch.cpu": np.zeros(16, np.uint8)}, micros)
        )
    return contexts


def make(destination: Path, *, local: bool = False, anomaly: Anomaly | None = None, rows: Sequence[Row] | None = None) -> Path:
    """A capsule of `STEPS` with two micro-batches a step; with `local` the tensors stay beside it."""
    anomaly = anomaly or an_anomaly()

    def fill(folder: Path) -> None:
        own = folder / "rank-0000"
        own.mkdir()
        parts.write_rows(folder, some_rows() if rows is None else rows)
        parts.write_rng(own, some_contexts())
        parts.write_batches(own, some_contexts(), runs=True)
        if not local:
            parts.write_tensors(own, some_contexts())
        (folder / "post-mortem.md").write_text("# nothing yet\n", encoding="utf-8")

    manifest = SpikeCapsule(
        tier="re-feed",
        run="run-1",
        step=anomaly.step,
        restart_step=STEPS[0],
        anomaly=anomaly,
        span=(STEPS[0], STEPS[-1]),
        local=LocalFiles(tier="re-feed", files={}) if local else None,
        missing=["raw batches: elsewhere"] if local else [],
    )
    return capsules.write(destination, manifest, fill, lambda folder: _tensors(folder))


def _tensors(folder: Path) -> None:
    parts.write_tensors(folder / "rank-0000", some_contexts())


def edit(capsule: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest's JSON in place."""
    path = capsule / capsules.MANIFEST
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")


def adopt(capsule: Path, name: str, content: bytes) -> None:
    """Write `content` as the capsule's file `name`, with a digest that fits: a liar who is good at it."""
    target = capsule / name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    entry = {"sha256": untrusted.digest(target), "bytes": len(content)}
    edit(capsule, lambda manifest: manifest["files"].update({name: entry}))
