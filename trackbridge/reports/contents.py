"""The texts and tables of the panels as Markdown, by their id in `panels.CONTENTS`: what trackers show beside charts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trackbridge.answers import how_far, moved_first, peak
from trackbridge.capsule import SpikeCapsule
from trackbridge.capsule_parts import BATCHES, read_frame
from trackbridge.harmless import in_cell, in_markdown
from trackbridge.records import Anomaly
from trackbridge.reports.post_mortem import post_mortem

POST_MORTEM = "post-mortem.md"
_SHOWN_FILES = 40


def of_capsule(capsule: SpikeCapsule) -> dict[str, str]:
    """What a loaded capsule tells: its post-mortem (as a person left it), the batch, counterfactuals, the files."""
    texts = {
        "post-mortem": post_mortem_of(capsule),
        "batch": _batch(capsule),
        "counterfactuals": _counterfactuals(capsule),
        "capsule": files(capsule),
    }
    return {name: text for name, text in texts.items() if text}


def post_mortem_of(capsule: SpikeCapsule) -> str:
    """``post-mortem.md`` of the capsule, where somebody may have filled in the blanks; made now if it has none."""
    written = Path(capsule.path) / POST_MORTEM
    return written.read_text(encoding="utf-8") if POST_MORTEM in capsule.files else post_mortem(capsule)


def anomalies(found: Sequence[Anomaly]) -> str:
    """A row per anomaly, "" without any."""
    columns = ("step", "what", "value", "expected", "how bad", "moved first", "over after", "first hypothesis")
    rows = [
        (
            a.onset,
            a.title,
            "" if a.fault else f"{a.value:.4g}",
            "" if a.fault else f"{a.expected:.4g}",
            " ".join(filter(None, (how_far(a), peak(a)))),
            moved_first(a),
            "" if a.recovered_after is None else a.recovered_after,
            a.hypotheses[0].name if a.hypotheses else "",
        )
        for a in found
    ]
    return table(columns, rows)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table of plain text; "" without rows."""
    lines = [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *lines]) if lines else ""


def _batch(capsule: SpikeCapsule) -> str:
    columns = ("micro-batch", "loader", "epoch", "index", "samples", "fingerprint")
    frame = read_frame(capsule.path / f"rank-{capsule.ranks[0]:04d}" / BATCHES)
    rows = []
    for row in frame[frame["step"] == capsule.anomaly.onset].to_dict("records"):
        ids = json.loads(row["sample_ids"]) if isinstance(row["sample_ids"], str) else []
        more = ", ..." if len(ids) > 8 else ""
        numbers = [None if row[name] != row[name] else int(row[name]) for name in ("micro", "loader", "epoch", "index")]
        rows.append((*numbers, ", ".join(map(str, ids[:8])) + more, str(row["fingerprint"] or "")[:16]))
    return table(columns, rows)


def _counterfactuals(capsule: SpikeCapsule) -> str:
    """The newest table of replays with one thing changed, "" before there is one."""
    found = capsule.counterfactuals
    if found is None:
        return ""
    columns = ("rank", "change", "outcome", "loss at its peak", "at the end", "why")
    rows = [
        (each.rank, each.what or each.name, each.outcome, _number(each.peak), _number(each.final), each.reason)
        for each in found.tries
    ]
    caution = in_markdown(found.caution or "")
    said = f"The plain replay of steps {found.restart_step} to {found.last_step}: **{found.verdict}**. {caution}"
    return f"{said.strip()}\n\n{table(columns, rows)}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def files(capsule: SpikeCapsule) -> str:
    """Its tier, what it lacks, and its files by size in bytes."""
    listed = sorted(capsule.files.items())
    rows: list[Sequence[Any]] = [(name, f"{entry.bytes:,}") for name, entry in listed[:_SHOWN_FILES]]
    lacks = "".join(f"\n- not in it: {in_markdown(text)}" for text in capsule.missing)
    more = f"\n\nand {len(listed) - _SHOWN_FILES} more" if len(listed) > _SHOWN_FILES else ""
    return f"Tier **{capsule.tier}**, restart at step {capsule.restart_step}.{lacks}\n\n{table(('file', 'bytes'), rows)}{more}"


def _cell(value: Any) -> str:
    return "" if value is None else in_cell(str(value))
