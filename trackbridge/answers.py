"""A newcomer's five questions about an anomaly, answered in this order by every tracker, page and report.

What happened, when, how bad, what moved first, what to do now. Plain Markdown, in which names and notes are shown as they are
(`harmless.in_markdown`); nothing but records is needed.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from trackbridge import names
from trackbridge.harmless import as_code, in_markdown
from trackbridge.records import FAULTS, UNDER_WAY, Anomaly, Hypothesis

QUESTIONS = ("What happened", "When", "How bad", "What moved first", "What to do now")

DIAGNOSED = ("spike", "nonfinite", "divergence", "shift", "drift")
"""Kinds of anomalies whose cause is looked for; of others only that of a fault by name."""

# What `trackbridge replay REF --build module:function --try NAME` changes, in words for a reader.
INTERVENTIONS = {
    "skip-batch": "replay with the suspected batch left out",
    "lower-lr=0.5": "replay with half the learning rate",
    "hold-lr": "replay with the learning rate held at its value before the jump",
    "clip=1.0": "replay with the gradient clipped to a norm of 1",
    "full-precision": "replay in float32, without autocast",
    "reset-momentum": "replay with the optimizer's moments forgotten before the onset",
    "restore-optimizer": "replay with the optimizer's state of the newest checkpoint before it put back",
    "rerun": "replay as recorded: what does not come back was not in the data, the weights or the code",
}


def answers(anomaly: Anomaly, commands: Sequence[str] = ()) -> list[tuple[str, str]]:
    """(question, answer) in the order of `QUESTIONS`; an answer is Markdown of one or a few sentences. `commands` are what to
    type for the capsule, such as ``trackbridge pull ...``."""
    given = (happened(anomaly), when(anomaly), how_bad(anomaly), first(anomaly), now(anomaly, commands))
    return list(zip(QUESTIONS, given, strict=True))


def happened(anomaly: Anomaly) -> str:
    """``**train/loss** was **9.5** where **2.25** was expected (spike).``"""
    if anomaly.fault:
        return f"{in_markdown(anomaly.terms[0].upper() + anomaly.terms[1:])} (**{in_markdown(anomaly.fault)}**)."
    value = f"**{amount(anomaly.value, anomaly.series)}**" if math.isfinite(anomaly.value) else f"not finite ({anomaly.value})"
    at = "" if anomaly.value_step is None else f" at step {anomaly.value_step}"
    usual = amount(anomaly.expected, anomaly.series)
    expected = f" where **{usual}** was expected" if math.isfinite(anomaly.expected) else ""
    against = f", {in_markdown(anomaly.terms)}" if anomaly.terms else expected
    return f"**{in_markdown(anomaly.series)}** was {value}{at}{against} ({in_markdown(anomaly.kind)})."


def when(anomaly: Anomaly) -> str:
    at = f" ({time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(anomaly.time))})" if anomaly.time else ""
    over = anomaly.recovered_after
    back = "Not back to normal so far." if over is None else f"Back to normal after {plural(over, 'step')}."
    return f"From step **{anomaly.onset}**, seen at step {anomaly.step}{at}. {back}"


def how_bad(anomaly: Anomaly) -> str:
    far = f"**{sigmas(anomaly.score)}** from what was expected" if math.isfinite(anomaly.score) else "Not a finite number"
    if anomaly.fault:
        far = f"Of severity {anomaly.severity:.2g} out of 1"
    elif anomaly.terms:
        far = f"**{in_markdown(anomaly.terms[0].upper() + anomaly.terms[1:])}**, of severity {anomaly.severity:.2g} out of 1"
    further = in_markdown(peak(anomaly))
    return f"{far}.{f' {further.capitalize()}.' if further else ''}"


def first(anomaly: Anomaly) -> str:
    moved = in_markdown(moved_first(anomaly) or "nobody looked")
    return f"{moved[0].upper()}{moved[1:]}." if moved.startswith(("nothing", "nobody")) else f"{moved}."


def now(anomaly: Anomaly, commands: Sequence[str] = ()) -> str:
    """`to_do`, then the commands."""
    return " ".join([in_markdown(to_do(anomaly)), *(as_code(command) for command in commands)])


def to_do(anomaly: Anomaly) -> str:
    """The experiment that the first hypothesis asks for, as plain text."""
    lead = anomaly.hypotheses[0] if anomaly.hypotheses else None
    if lead is not None and lead.intervention:
        return f"To test the first hypothesis, {lead.name}: {how_to_test(lead.intervention)}."
    return f"Look at the evidence for {lead.name}." if lead is not None else without_cause(anomaly)


def without_cause(anomaly: Anomaly) -> str:
    """What is said, as plain text, of an anomaly that has no hypotheses: they come when its capsule is sealed, or some steps
    later without one, and always with one at least. A fault by name is known at once."""
    named = [note for note in anomaly.notes if note.partition(": ")[0] in FAULTS]
    if named:
        return f"It is a fault by name, {named[0]}."
    if anomaly.kind in DIAGNOSED:
        return "Its cause is looked for, some steps after the detection; it was not known yet when this was written."
    under_way = next((note.removeprefix(UNDER_WAY) for note in anomaly.notes if note.startswith(UNDER_WAY)), "")
    if under_way:
        return f"A fault by name is under way, {under_way}."
    return f"No cause is looked for in an event of the kind {anomaly.kind}."


def evidence_command(directory: str | Path, step: int) -> str:
    """What to type for the evidence of the anomaly at `step` of the run in `directory`."""
    return f"trackbridge report {shlex.quote(f'{directory}@{step}')} --post-mortem"


def how_to_test(intervention: str) -> str:
    """A sentence, without its full stop, for the name of an intervention; a rule of a third party may give its own sentence."""
    words = INTERVENTIONS.get(intervention)
    if words is None:
        return intervention.rstrip(".")
    return words if intervention == "rerun" else f"{words} (--try {intervention})"


def shown(hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """The hypotheses worth a reader's time: "unknown" only where it leads."""
    return [hypothesis for place, hypothesis in enumerate(hypotheses) if place == 0 or hypothesis.name != "unknown"]


def plural(count: int, what: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def amount(value: float, series: str) -> str:
    """``9.5``, ``0.412 s``, ``42.9 GB``: with the unit that the catalogue gives `series`."""
    metric = names.describe(series)
    unit, size = metric.unit if metric else "", abs(value)
    if unit == "B":
        prefixes = ("", "k", "M", "G", "T")
        power = min(int(math.log10(size)) // 3, len(prefixes) - 1) if 1 <= size < math.inf else 0
        value, unit = value / 1000.0**power, f"{prefixes[power]}B"
    return f"{value:.4g}{f' {unit}' if unit else ''}"


def moved_first(anomaly: Anomaly) -> str:
    """What left its band before the series that raised the alarm, in words; "" when nobody looked."""
    mover = anomaly.first_mover
    if mover is None:
        return ""
    if before := moved_before(anomaly):
        return before
    name = "the loss" if anomaly.series == "train/loss" else anomaly.fault or anomaly.series
    together = all(step == mover[1] for _, step in anomaly.cascade)
    return f"nothing before {name} itself ({'all ' if together else ''}at step {mover[1]})"


def moved_before(anomaly: Anomaly) -> str:
    """``grad/norm at step 119``, where that is earlier than the series that tells the event; "" otherwise. Of what is not
    finite also the first of the same step to be computed: it is where the others have it from."""
    if anomaly.first_mover is None or anomaly.first_mover[0] == anomaly.series:
        return ""
    series, step = anomaly.first_mover
    since = anomaly.onset if anomaly.value_step is None else anomaly.value_step
    own = dict(anomaly.cascade).get(anomaly.series, since)
    if step < own:
        return f"{series} at step {step}"
    return f"{series}, in the same step" if anomaly.kind == "nonfinite" and step == own else ""


def how_far(anomaly: Anomaly) -> str:
    """How far the value is from what was expected, for a table or a figure: in sigmas, or in the fault's own terms."""
    return anomaly.terms or sigmas(anomaly.score)


def sigmas(score: float) -> str:
    """``40.3 sigma``, or what is said of a value that is not a number at all."""
    return f"{score:.3g} sigma" if math.isfinite(score) else "not finite"


def peak(anomaly: Anomaly) -> str:
    """The note on how far it went after its own step, "" without one."""
    return next((note for note in anomaly.notes if note.startswith("peak ")), "")
