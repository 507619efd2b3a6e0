"""The post-mortem of one anomaly as Markdown: seven sections, filled in with what the record knows.

What only a person knows is a marked blank (`BLANK`), so that an empty section is seen. The symptoms hold numbers and no theory;
the root cause is "not known yet" until a replay has shown it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from trackbridge import answers
from trackbridge.capsule import SpikeCapsule
from trackbridge.config import DetectionConfig
from trackbridge.diagnosis.feedback import MARK
from trackbridge.errors import UsageError
from trackbridge.harmless import in_cell, in_markdown
from trackbridge.history import RunRecord
from trackbridge.lab.counterfactuals import Try
from trackbridge.panels import PANELS
from trackbridge.records import Anomaly, Hypothesis, MicroBatch
from trackbridge.reports.band import band
from trackbridge.reports.known import Known
from trackbridge.tokens import tokens_of

SECTIONS = (
    "Symptoms",
    "Hypotheses, ranked",
    "Discriminating evidence",
    "Root cause",
    "Remediation",
    "Verification",
    "Lesson",
)
TWO_SIGMAS = (
    "Sigmas in the evidence are of the recorded values just before the onset; the score in section 1 is of the "
    "detector's own band, in its unit of judgement."
)
BLANK = "**[to be filled in]**"
NO_BATCHES = "none: there are no batches to feed a replay with."
EMA_STEPS = 50
_EXTRA = 50  # steps past the window over which a change must hold

# Which panels (by id) show the series that speak for a hypothesis.
_PANELS: Mapping[str, tuple[str, ...]] = {
    "corrupt-batch": ("loss", "batch"),
    "rare-token": ("batch", "gradients"),
    "label-fault": ("loss", "batch"),
    "repeated-batch": ("batch", "loss"),
    "lr-discontinuity": ("lr", "update-ratio"),
    "optimizer-state-lost": ("moments", "update-ratio"),
    "stale-second-moment": ("moments", "updates"),
    "gradient-explosion": ("gradient-norm", "gradient-map"),
    "fp16-overflow": ("loss-scale", "applied"),
    "attention-logit-growth": ("weight-map", "gradients"),
    "embedding-instability": ("weight-map", "activations"),
    "activation-outliers": ("kurtosis-map", "activations"),
    "data-regime-change": ("loss", "batch"),
    "hardware-fault": ("activations", "weight-map"),
    "config-change": ("loss", "lr"),
    "unknown": ("loss", "gradient-norm"),
}
_TITLES = {panel.id: panel.title for panel in PANELS}


def post_mortem(of: SpikeCapsule | RunRecord, anomaly: Anomaly | None = None) -> str:
    """The post-mortem of a capsule (its data files must be readable) or of a run's record, ending in a newline. `anomaly` is
    which: in a record the most severe by default, in a capsule its own; another one that shares the capsule may be given.

    Raises `UsageError` for a record without an anomaly to speak of.
    """
    if isinstance(of, SpikeCapsule):
        known = Known.of_capsule(of, anomaly)
    else:
        anomaly = anomaly or max(of.anomalies, key=lambda found: found.severity, default=None)
        if anomaly is None:
            raise UsageError(f"run {of.info.run_id} has no anomaly to write a post-mortem of")
        known = Known.of_record(of, anomaly)
    told = known.anomaly
    bodies = (
        _symptoms(known),
        _hypotheses(told),
        _evidence(known),
        _root_cause(known),
        _remediation(known),
        _verification(known),
        _lesson(known),
    )
    lines = [f"# Post-mortem: {in_markdown(told.what)} at step {told.step} of {in_markdown(known.name)}", ""]
    for number, (title, body) in enumerate(zip(SECTIONS, bodies, strict=True), 1):
        lines += [f"## {number}. {title}", "", *body, ""]
    return "\n".join(lines)


# -- 1


def _symptoms(known: Known) -> list[str]:
    anomaly = known.anomaly
    facts: list[tuple[str, str]] = [
        ("Run", f"{known.run}, attempt {anomaly.attempt}, rank(s) {', '.join(map(str, anomaly.ranks))}"),
        ("Detected", f"step {anomaly.step}, {anomaly.fault or f'in {anomaly.series}'}"),
        ("Onset", f"step {anomaly.onset}"),
        ("Value", _value(anomaly)),
    ]
    ema, count = known.ema(anomaly.series, EMA_STEPS)
    if count:
        recorded = answers.plural(count, "recorded step")
        facts.append((f"{EMA_STEPS}-step EMA before the onset", f"{_number(ema)} (from {recorded})"))
    peak = known.peak(anomaly.series)
    if peak is not None:
        facts.append(("Peak", f"{_number(peak[0])} at step {peak[1]}"))
    over = anomaly.recovered_after
    unrecovered = f"did not recover by step {known.window[1]}"
    facts.append(("Recovery", unrecovered if over is None else f"after {answers.plural(over, 'step')}"))
    facts += list(_at_onset(known))
    if anomaly.first_mover:
        facts.append(("First mover", answers.moved_first(anomaly)))
    if anomaly.cascade:
        facts.append(("Cascade", ", ".join(f"{series} (step {step})" for series, step in anomaly.cascade[:8])))
    facts.append(("Number formats", _dtypes(known)))
    facts += list(_batch_facts(known))
    return ["| what | value |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in facts)]


def _value(anomaly: Anomaly) -> str:
    if anomaly.fault:
        return anomaly.terms
    value = _number(anomaly.value) if math.isfinite(anomaly.value) else "not finite"
    at = "" if anomaly.value_step is None else f" at step {anomaly.value_step}"
    against = f", {anomaly.against}" if anomaly.terms or math.isfinite(anomaly.expected) else ""
    return f"{value}{at}{against}"


def _at_onset(known: Known) -> Iterator[tuple[str, str]]:
    for series, title in (
        ("grad/norm", "Gradient norm (before clipping where that is recorded)"),
        ("grad/norm_clipped", "Gradient norm that the optimizer used"),
        ("train/lr", "Learning rate"),
        ("train/loss_scale", "Loss scale"),
    ):
        at = known.at_onset(series)
        if at is not None:
            base = known.before(series, EMA_STEPS)
            baseline = f"; median before {_number(float(np.median(base)))}" if len(base) else ""
            yield f"{title} at the onset", _number(at) + baseline
    worst = known.peak("grad/norm")
    if worst is not None and worst[1] != known.anomaly.onset:
        yield "Largest gradient norm from the onset on", f"{_number(worst[0])} at step {worst[1]}"


def _dtypes(known: Known) -> str:
    flags = known.provenance.get("torch", {})
    if not isinstance(flags, dict) or not flags:
        return BLANK
    shown = [f"{key} {flags[key]}" for key in ("default_dtype", "autocast", "float32_matmul_precision") if key in flags]
    scaled = "loss scaling on" if "train/loss_scale" in known.values else "no loss scaling"
    return ", ".join([*shown, scaled])


def _batch_facts(known: Known) -> Iterator[tuple[str, str]]:
    micros = known.batches.get(known.anomaly.onset, ())
    if not micros:
        yield "Batch at the onset", f"not recorded {BLANK}"
        return
    for k, micro in enumerate(micros):
        yield f"Batch at the onset, micro-batch {k}", _describe(micro)
    yield "Unusual in it", _unusual(known)


def _unusual(known: Known) -> str:
    """What of the batch is unlike those before it, in numbers."""
    identity = known.identity
    found = [f"{key} of {tensor}: {z:+.3g} sigmas (step {step})" for step, tensor, key, z in identity.oddities[:6]]
    share, at = identity.new_tokens()
    if share:
        found.append(f"{share:.1%} of the tokens of step {at} came in no recorded batch before")
    bad, where = identity.nonfinite()
    if bad:
        found.append(f"{bad} non-finite values (step {where})")
    if found:
        return "; ".join(found)
    # the diagnosis saw more of the past, and the raw batches, which a capsule may lack
    said = [text for hypothesis in known.anomaly.hypotheses for text in hypothesis.of_batch]
    if said:
        return "; ".join(dict.fromkeys(said))
    if not identity.known:
        earlier = sum(step < known.anomaly.onset and bool(micro) for step, micro in known.batches.items())
        return (
            f"not known: too little is recorded here of the batches before it ({answers.plural(earlier, 'step')} with batches)"
        )
    # of raw batches more was compared, when the cause was looked for, than these statistics hold
    return "nothing in these statistics, against the recorded batches before it; what their contents say is in section 2"


def _describe(micro: MicroBatch) -> str:
    parts = [f"{name} {value}" for name, value in (("epoch", micro.epoch), ("index", micro.index)) if value is not None]
    if micro.sample_ids is not None:
        shown = ", ".join(map(str, micro.sample_ids[:8]))
        parts.append(f"samples {shown}{', ...' if len(micro.sample_ids) > 8 else ''}")
    if micro.fingerprint:
        parts.append(f"fingerprint {micro.fingerprint[:16]}")
    parts += [f"{name}: {_statistics(value)}" for name, value in tokens_of(micro).items()]
    return "; ".join(parts) or "identity unknown"


def _statistics(of: Any) -> str:
    """Token statistics of one tensor (`trackbridge.tokens.token_statistics`) in words; anything else as it is."""
    if not isinstance(of, dict):
        return _short(of)
    words = []
    if "length" in of:
        words.append(answers.plural(of["length"], "value"))
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
        words.append(f"one run of 8 comes {answers.plural(of['ngram']['count'], 'time')}")
    if "nonfinite" in of:
        words.append(f"{of['nonfinite'] or 'none'} not finite")
    return ", ".join(words) or _short(of)


# -- 2 and 3


def _hypotheses(anomaly: Anomaly) -> list[str]:
    if not anomaly.hypotheses:
        return [f"{BLANK} {in_markdown(answers.without_cause(anomaly))}"]
    lines = []
    for place, hypothesis in enumerate(answers.shown(anomaly.hypotheses), 1):
        panels = ", ".join(_TITLES[name] for name in _PANELS.get(hypothesis.name, ()))
        lines.append(f"{place}. **{in_markdown(hypothesis.name)}**{f' (panels: {panels})' if panels else ''}")
        lines += [f"   - for: {in_markdown(text)}" for text in hypothesis.evidence_for]
        lines += [f"   - against: {in_markdown(text)}" for text in hypothesis.evidence_against]
    if not anomaly.terms and any(" sigmas" in line for line in lines):
        lines += ["", TWO_SIGMAS]
    return lines


def _evidence(known: Known) -> list[str]:
    lines = []
    shown = [h for h in answers.shown(known.anomaly.hypotheses) if h.name != "unknown"]
    if len(shown) > 1:
        first, second = shown[:2]
        apart = [*first.evidence_for[:1], *(f"against {second.name}: {text}" for text in second.evidence_against[:2])]
        names, why = f"{first.name} rather than {second.name}", "; ".join(apart)
        lines.append(f"- {in_markdown(names)}: {in_markdown(why)}.")
    for hypothesis in shown:
        if hypothesis.intervention:
            test = answers.how_to_test(hypothesis.intervention)
            lines.append(f"- To test {in_markdown(hypothesis.name)}: {in_markdown(test)}. Result: {_result(known, hypothesis)}")
    tier = f" The capsule's tier is {known.capsule.tier}." if known.capsule is not None else ""
    report = known.capsule.replay if known.capsule is not None else None
    verdict = BLANK if _can_run(known) else NO_BATCHES
    if report is not None:
        verdict = f"**{report.verdict}**: {in_markdown(report.reason)}."
    if known.capsule is not None:
        lines.append(f"- Replay as recorded (`trackbridge replay`), verdict: {verdict}{tier}")
    else:
        lines.append("- Replay: this is made from the run's record alone; without a capsule of it there is nothing to replay.")
    for t in _tries(known):
        why = f" ({in_markdown(t.reason)})" if t.reason else ""
        lines.append(f"- Replay with {in_markdown(t.what)}: {t.outcome}{why}.")
    lines += [f"- Not here: {in_markdown(text)}" for text in known.missing]
    return lines


def _can_run(known: Known) -> bool:
    """Whether a replay has batches to feed, here or on the machine that recorded them."""
    capsule = known.capsule
    return capsule is not None and (capsule.local or capsule).tier != "explain"


def _result(known: Known, hypothesis: Hypothesis) -> str:
    """What a replay has said of it so far; a blank before, where one can be run."""
    said = [t.removeprefix(MARK) for t in (*hypothesis.evidence_for, *hypothesis.evidence_against) if t.startswith(MARK)]
    return f"{in_markdown('; '.join(said))}." if said else BLANK if _can_run(known) else NO_BATCHES


def _tries(known: Known) -> tuple[Try, ...]:
    found = known.counterfactuals
    return () if found is None else tuple(t for t in found.tries if t.ran)[:6]


# -- 4 to 7


def _root_cause(known: Known) -> list[str]:
    first = next(iter(known.anomaly.hypotheses), None)
    shown = [text for text in first.evidence_for if text.startswith(MARK)] if first is not None else []
    if first is None or not shown:
        return [f"Not known yet. {BLANK}"]
    why = next((text for text in first.evidence_for if not text.startswith(MARK)), "")
    said = f"{first.name}{f' ({why})' if why else ''}: {shown[0].removeprefix(MARK)}."
    return [in_markdown(said[0].upper() + said[1:]), "", f"Confirmed by a person: {BLANK}"]


def _remediation(known: Known) -> list[str]:
    report = known.counterfactuals
    best = report.best if report is not None else None
    if best is not None:
        cost = f", giving up {best.given_up:.1%} of the training there" if best.given_up else ""
        return [
            f"In the replay the anomaly was gone with {in_markdown(best.what)}{cost}.",
            "",
            f"The smallest change that was made: {BLANK}",
        ]
    lines = [f"{BLANK} The smallest change that would do."]
    first = next(iter(known.anomaly.hypotheses), None)
    if first is not None and first.intervention and _can_run(known):
        lines.append(f"To try first, for {in_markdown(first.name)}: {in_markdown(answers.how_to_test(first.intervention))}.")
    return lines


def _verification(known: Known) -> list[str]:
    anomaly, (first, last) = known.anomaly, known.window
    restart = known.capsule.restart_step if known.capsule is not None else first
    seeds = {name: value for name, value in known.config.items() if "seed" in str(name).lower()}
    seed = ", ".join(f"{name} = {_short(value)}" for name, value in seeds.items())
    recorded = "the recorded random state (a replay restores it)" if known.capsule is not None else BLANK
    settings = DetectionConfig.model_validate(known.settings.get("detection", {}))
    expected, found = _number(anomaly.expected), band(anomaly, known.before(anomaly.series), settings)
    if anomaly.fault:
        within = f"not told again ({anomaly.fault})"
    elif anomaly.terms:
        within = f"not told again (it was {_number(anomaly.value)}, {anomaly.terms})"
    elif found is None:
        within = f"stays near {expected}"
    else:
        over = f"{_number(found.bar)} sigmas of {_number(found.sigma)}{' of its logarithm' if found.by_factor else ''}"
        within = f"stays below {_number(found.limit)} (expected {expected} plus {over})"
    return [
        f"- Seed: {in_markdown(seed) or recorded}; a second one: {BLANK}",
        f"- Band: {in_markdown(anomaly.series)} {in_markdown(within)}.",
        f"- Steps: from {restart} to {last + _EXTRA} with the change, {_EXTRA} past what is recorded here.",
        f"- Result: {BLANK}",
    ]


def _lesson(known: Known) -> list[str]:
    lines = [f"{BLANK} What would have caught this earlier, or made it harmless?"]
    mover = known.anomaly.first_mover
    if mover is not None and mover[0] != known.anomaly.series and mover[1] < known.anomaly.step:
        early = answers.plural(known.anomaly.step - mover[1], "step")
        lines.append(f"{in_markdown(mover[0])} had left its band {early} before the anomaly was told.")
    return lines


def _number(value: float) -> str:
    return f"{value:.6g}"


def _short(value: Any) -> str:
    text = _number(value) if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _cell(text: str) -> str:
    """Plain text, but for the blanks in it."""
    return BLANK.join(in_cell(part) for part in " ".join(text.split()).split(BLANK))
