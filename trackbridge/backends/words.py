"""What several trackers show in the same words: an anomaly, a table of settings, flattened params."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trackbridge.answers import answers, how_to_test, moved_before, moved_first, peak, shown
from trackbridge.harmless import as_code, in_cell, in_markdown
from trackbridge.records import Anomaly
from trackbridge.rundir import dumps

CASCADE = 8
"""Series of a cascade that are named."""


def anomaly_line(anomaly: Anomaly) -> str:
    """One line: ``spike in train/loss at step 120: 9.5, expected 2.25 (31 sigma); first to move: grad/norm at step 119``."""
    before = moved_before(anomaly)
    return f"{anomaly}; first to move: {before}" if before else str(anomaly)


def anomaly_markdown(anomaly: Anomaly, commands: Sequence[str] = ()) -> str:
    """The anomaly as a short page: the five questions, then the facts and the hypotheses with their evidence."""
    # one paragraph with hard breaks: MLflow's page folds a description after some five lines
    lines = [f"**{question}.** {answer}  " for question, answer in answers(anomaly, commands)]
    lines.append("")
    facts = {
        "ranks": ", ".join(map(str, anomaly.ranks)),
        "cascade": in_markdown(_cascade(anomaly)),
        "capsule": as_code(anomaly.capsule) if anomaly.capsule else "",
        "notes": in_markdown("; ".join(anomaly.notes)),
    }
    lines += [f"- {name}: {fact}" for name, fact in facts.items() if fact]
    for rank, hypothesis in enumerate(shown(anomaly.hypotheses), 1):
        lines += ["", f"{rank}. **{in_markdown(hypothesis.name)}**"]
        lines += [f"   - for: {in_markdown(evidence)}" for evidence in hypothesis.evidence_for]
        lines += [f"   - against: {in_markdown(evidence)}" for evidence in hypothesis.evidence_against]
        lines += [f"   - to test it: {in_markdown(how_to_test(hypothesis.intervention))}"] if hypothesis.intervention else []
    return "\n".join(lines)


def _cascade(anomaly: Anomaly) -> str:
    """What left its band, in order, with its step: the first few."""
    told = ", ".join(f"{series} ({step})" for series, step in anomaly.cascade[:CASCADE])
    return f"{told} and {len(anomaly.cascade) - CASCADE} more" if len(anomaly.cascade) > CASCADE else told


ANOMALY_COLUMNS = (
    "id", "step", "onset", "kind", "series", "value", "expected", "sigma", "peak", "moved first", "over after", "hypothesis",
)  # fmt: skip


def anomaly_row(anomaly: Anomaly) -> list[Any]:
    """A row of a table of anomalies, under `ANOMALY_COLUMNS`."""
    lead = anomaly.hypotheses[0].name if anomaly.hypotheses else ""
    return [
        anomaly.id, anomaly.step, anomaly.onset, anomaly.kind, anomaly.series, anomaly.value, anomaly.expected,
        None if anomaly.terms else anomaly.score,
        peak(anomaly).removeprefix("peak "), moved_first(anomaly), anomaly.recovered_after, lead,
    ]  # fmt: skip


def table(rows: Mapping[str, str]) -> str:
    """A two-column Markdown table of plain text."""
    cells = [f"| {in_cell(name)} | {in_cell(text)} |" for name, text in rows.items()]
    return "\n".join(["| name | value |", "|---|---|", *cells])


def flatten(values: Mapping[str, Any]) -> dict[str, str]:
    """Leaves of `values` by dotted name, as text; a list is one leaf, as JSON. The user's own config, ``{"config": {...}}``,
    keeps its own names. No leaf hides another: the second of a name is called ``name (2)``."""
    flat: dict[str, str] = {}
    own = values.get("config")
    config = own if isinstance(own, Mapping) else {}
    rest = {key: item for key, item in values.items() if not (key == "config" and isinstance(own, Mapping))}
    for name, text in [*_leaves(config, ""), *_leaves(rest, "")]:
        unique, count = name, 1
        while unique in flat:
            count += 1
            unique = f"{name} ({count})"
        flat[unique] = text
    return flat


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, item in values.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping) and item:
            yield from _leaves(item, f"{name}.")
        else:
            yield name, dumps(item) if isinstance(item, (list, tuple, dict)) else str(item)
