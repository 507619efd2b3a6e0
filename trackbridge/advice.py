"""What to do about an anomaly of a run on this disk: the likeliest cause, and a command that works with what was kept of it."""

from __future__ import annotations

import shlex
from pathlib import Path

from trackbridge import untrusted
from trackbridge.answers import INTERVENTIONS, evidence_command, how_to_test
from trackbridge.capsule import LOCAL, MANIFEST, SpikeCapsule, Tier, parse_manifest
from trackbridge.errors import CapsuleError
from trackbridge.records import Anomaly

BUILD = "--build my_module:build"


def what_to_do(run: Path, anomaly: Anomaly) -> str:
    """One line for a terminal, "" where no cause was looked for. A replay is advised only where there are batches to feed."""
    folder = run / anomaly.capsule if anomaly.capsule else None
    capsule = _manifest(folder) if folder is not None else None
    hypotheses = anomaly.hypotheses or (capsule.anomaly.hypotheses if capsule is not None else ())  # it was sealed later
    if not hypotheses:
        return ""
    guess = f"perhaps {hypotheses[0].name}"
    intervention = hypotheses[0].intervention
    if folder is not None and capsule is not None and _tier(folder, capsule) != "explain":
        if intervention is None:
            return guess
        if intervention not in INTERVENTIONS:  # a third party's own sentence
            return f"{guess}; to test it: {how_to_test(intervention)}"
        return f"{guess}; to test it: trackbridge replay {shlex.quote(str(folder))} {BUILD} --try {intervention}"
    return f"{guess}; it cannot be replayed, {_lack(folder, capsule)}; the evidence: {evidence_command(run, anomaly.step)}"


def _lack(folder: Path | None, capsule: SpikeCapsule | None) -> str:
    if folder is None:
        return "it has no capsule"
    return "its capsule is not on this disk" if capsule is None else "not all its batches were kept (run.batches keeps them)"


def _manifest(folder: Path) -> SpikeCapsule | None:
    """None where none can be read. No other file is looked at: a capsule may be gigabytes, and is checked when it is used."""
    try:
        return parse_manifest(untrusted.read_json(folder / MANIFEST))
    except (OSError, CapsuleError):
        return None


def _tier(folder: Path, capsule: SpikeCapsule) -> Tier:
    here = folder.with_name(folder.name + LOCAL).is_dir()
    return capsule.local.tier if here and capsule.local is not None else capsule.tier
