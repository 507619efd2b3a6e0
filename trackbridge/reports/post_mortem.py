"""The post-mortem of one spike as Markdown: seven sections, filled in with what the record knows.

What only a person knows is a marked blank (`BLANK`), so that an empty section is seen. The symptoms hold numbers and no
theory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trackbridge.capsule import SpikeCapsule
from trackbridge.records import Anomaly, MicroBatch
from trackbridge.reports import wording

if TYPE_CHECKING:
    import pandas as pd

SECTIONS = (
    "Symptoms",
    "Hypotheses, ranked",
    "Discriminating evidence",
    "Root cause",
    "Remediation",
    "Verification",
    "Lesson",
)
BLANK = "**[to be filled in]**"
EMA_STEPS = 50

# Which panel of the dashboards shows the series that speak for a hypothesis.
_PANELS = {
    "corrupt-batch": "loss, and the batch table at the onset",
    "rare-token": "loss, and the token statistics at the onset",
    "label-fault": "loss against batch identity",
    "repeated-batch": "batch identity",
    "lr-discontinuity": "train/lr",
    "optimizer-state-lost": "optim/exp_avg_sq_norm",
    "stale-second-moment": "grad/norm against optim/exp_avg_sq_norm",
    "gradient-explosion": "grad/norm and layer/*/grad_norm",
    "fp16-overflow": "train/loss_scale and optim/skipped",
    "attention-logit-growth": "act/*/max of the attention modules",
    "embedding-instability": "layer/*/grad_norm of embedding and head",
    "activation-outliers": "act/*/kurtosis",
    "data-regime-change": "loss and token statistics around the onset",
    "hardware-fault": "replay verdict",
    "config-change": "provenance",
}


def post_mortem(capsule: SpikeCapsule) -> str:
    """The post-mortem of `capsule` (its data files must be readable), ending in a newline."""
    anomaly = capsule.anomaly
    bodies = (
        _symptoms(capsule),
        _hypotheses(anomaly),
        _evidence(capsule),
        [f"{BLANK} One sentence, or: not known yet."],
        _remediation(anomaly),
        _verification(capsule),
        [f"{BLANK} What would have caught this earlier, or made it harmless?"],
    )
    lines = [f"# Post-mortem: {anomaly.kind} at step {anomaly.step} of {capsule.name or capsule.run}", ""]
    for number, (title, body) in enumerate(zip(SECTIONS, bodies, strict=True), 1):
        lines += [f"## {number}. {title}", "", *body, ""]
    return "\n".join(lines)


def _symptoms(capsule: SpikeCapsule) -> list[str]:
    anomaly, window = capsule.anomaly, capsule.window
    facts: list[tuple[str, str]] = [
        ("Run", f"{capsule.run}, attempt {capsule.attempt}, rank(s) {', '.join(map(str, anomaly.ranks))}"),
        ("Detected", f"step {anomaly.step}, in {anomaly.series}"),
        ("Onset", f"step {anomaly.onset}"),
        ("Value", _value(anomaly)),
    ]
    before = window[window["step"] < anomaly.onset]
    after = window[window["step"] >= anomaly.onset]
    if anomaly.series in window.columns:
        ema, count = _ema(before[anomaly.series])
        if count:
            recorded = wording.plural(count, "recorded step")
            facts.append((f"{EMA_STEPS}-step EMA before the onset", f"{_number(ema)} (from {recorded})"))
        peak, where = _peak(after, anomaly.series)
        if where is not None:
            facts.append(("Peak", f"{_number(peak)} at step {where}"))
    over = anomaly.recovered_after
    facts.append(("Recovery", "did not recover within this capsule" if over is None else wording.plural(over, "step")))
    facts += list(_at_onset(window, before, anomaly))
    if anomaly.first_mover:
        facts.append(("First mover", wording.moved_first(anomaly)))
    if anomaly.cascade:
        facts.append(("Cascade", ", ".join(f"{series} (step {step})" for series, step in anomaly.cascade[:8])))
    facts.append(("Number formats", _dtypes(capsule)))
    facts += list(_batch_facts(capsule))
    return ["| what | value |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in facts)]


def _value(anomaly: Anomaly) -> str:
    value = _number(anomaly.value) if math.isfinite(anomaly.value) else "not finite"
    expected = f", expected {_number(anomaly.expected)}" if math.isfinite(anomaly.expected) else ""
    return f"{value}{expected}" + (f" ({anomaly.score:.3g} robust sigmas)" if math.isfinite(anomaly.score) else "")


def _at_onset(window: pd.DataFrame, before: pd.DataFrame, anomaly: Anomaly) -> Iterator[tuple[str, str]]:
    row = window[window["step"] == anomaly.onset]
    if row.empty:
        return
    for series, title in (("grad/norm", wording.GRADIENT_NORM.capitalize()), ("train/lr", "Learning rate")):
        if series in window.columns:
            at, base = float(row[series].iloc[0]), before[series].median()
            baseline = "" if math.isnan(base) else f"; median before {_number(float(base))}"
            yield f"{title} at the onset", _number(at) + baseline


def _dtypes(capsule: SpikeCapsule) -> str:
    flags = capsule.provenance.get("torch", {})
    if not isinstance(flags, dict) or not flags:
        return BLANK
    known = [f"{key} {flags[key]}" for key in ("default_dtype", "autocast", "float32_matmul_precision") if key in flags]
    scaled = "loss scaling on" if "train/loss_scale" in capsule.window.columns else "no loss scaling"
    return ", ".join([*known, scaled])


def _batch_facts(capsule: SpikeCapsule) -> Iterator[tuple[str, str]]:
    micros = capsule.batches.get(capsule.anomaly.onset, ())
    if not micros:
        yield "Batch at the onset", f"not recorded {BLANK}"
    for k, micro in enumerate(micros):
        yield f"Batch at the onset, micro-batch {k}", _describe(micro)


def _describe(micro: MicroBatch) -> str:
    parts = [f"{name} {value}" for name, value in (("epoch", micro.epoch), ("index", micro.index)) if value is not None]
    if micro.sample_ids is not None:
        shown = ", ".join(map(str, micro.sample_ids[:8]))
        parts.append(f"samples {shown}{', ...' if len(micro.sample_ids) > 8 else ''}")
    if micro.fingerprint:
        parts.append(f"fingerprint {micro.fingerprint[:16]}")
    parts += [f"{name}: {_statistics(value)}" for name, value in micro.tokens.items()]
    return "; ".join(parts) or "identity unknown"


def _statistics(of: Any) -> str:
    """Token statistics of one tensor (`trackbridge.fingerprints.token_statistics`) in words; anything else as it is."""
    if not isinstance(of, dict):
        return _short(of)
    words = []
    if "length" in of:
        words.append(wording.plural(of["length"], "value"))
    if "unique" in of:
        words.append(f"{of['unique']} different")
    if "min" in of and "max" in of:
        words.append(f"from {of['min']} to {of['max']}")
    if "entropy" in of:
        words.append(f"entropy {of['entropy']:.3g} bits")
    if of.get("top"):
        words.append(f"most frequent {of['top'][0]} ({of['top'][1]:.1%})")
    if of.get("rarest"):
        words.append(f"rarest {' '.join(str(token) for token, _ in of['rarest'][:3])}")
    if of.get("ngram"):
        words.append(f"one run of 8 comes {wording.plural(of['ngram']['count'], 'time')}")
    if "nonfinite" in of:
        words.append(f"{of['nonfinite'] or 'none'} not finite")
    return ", ".join(words) or _short(of)


def _hypotheses(anomaly: Anomaly) -> list[str]:
    if not anomaly.hypotheses:
        return [f"{BLANK} The record suggests no cause."]
    lines = []
    for place, hypothesis in enumerate(wording.shown(anomaly.hypotheses), 1):
        panel = f" (panel: {_PANELS[hypothesis.name]})" if hypothesis.name in _PANELS else ""
        lines.append(f"{place}. **{hypothesis.name}**{panel}")
        lines += [f"   - for: {text}" for text in hypothesis.evidence_for]
        lines += [f"   - against: {text}" for text in hypothesis.evidence_against]
    return lines


def _evidence(capsule: SpikeCapsule) -> list[str]:
    lines = []
    for hypothesis in wording.shown(capsule.anomaly.hypotheses):
        if hypothesis.intervention:
            lines.append(f"- To test {hypothesis.name}: {wording.how_to_test(hypothesis.intervention)}. Result: {BLANK}")
    lines.append(f"- Replay as recorded (`trackbridge replay`), verdict: {BLANK} The capsule's tier is {capsule.tier}.")
    lines += [f"- Not in the capsule: {text}" for text in capsule.missing]
    return lines


def _remediation(anomaly: Anomaly) -> list[str]:
    lines = [f"{BLANK} The smallest change that would do."]
    first = anomaly.hypotheses[0] if anomaly.hypotheses else None
    if first is not None and first.intervention:
        lines.append(f"To try first, for {first.name}: {wording.how_to_test(first.intervention)}.")
    return lines


def _verification(capsule: SpikeCapsule) -> list[str]:
    first, last = capsule.span
    expected = _number(capsule.anomaly.expected)
    return [
        f"- Run again from step {capsule.restart_step} (the capsule holds steps {first} to {last}) with the change.",
        f"- Band: {capsule.anomaly.series} stays near {expected} past step {last}. Width, further steps and seeds: {BLANK}",
    ]


def _ema(values: pd.Series[Any]) -> tuple[float, int]:
    finite = values[values.map(math.isfinite)]
    if finite.empty:
        return math.nan, 0
    return float(finite.ewm(span=EMA_STEPS, adjust=True).mean().iloc[-1]), len(finite)


def _peak(after: pd.DataFrame, series: str) -> tuple[float, int | None]:
    """The largest value from the onset on; a non-finite one outranks all."""
    column = after[["step", series]].dropna() if after[series].map(math.isfinite).any() else after[["step", series]]
    if column.empty:
        return math.nan, None
    at = int(column[series].argmax()) if column[series].notna().any() else 0
    return float(column[series].iloc[at]), int(column["step"].iloc[at])


def _number(value: float) -> str:
    return f"{value:.6g}"


def _short(value: Any) -> str:
    text = _number(value) if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
