"""Why an anomaly happened: ranked hypotheses, each with its evidence for and against from the record."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from trackbridge.diagnosis import data, growth, hardware, optimization, precision, registry  # noqa: F401 - they register their rules
from trackbridge.diagnosis.registry import RULES, SOLID, STRONG, Case, Rule, rule
from trackbridge.diagnosis.view import View
from trackbridge.records import Anomaly, Hypothesis, Row, StepContext

__all__ = ["Case", "View", "diagnose", "rule"]

ENOUGH = SOLID + 1  # a cause needs more than one solid piece of evidence to be named before "unknown"


def diagnose(anomaly: Anomaly, window: Sequence[Row], contexts: Sequence[StepContext] = ()) -> tuple[Hypothesis, ...]:
    """Ranked hypotheses, most likely first. `window` are the rows around the anomaly, from as long before the onset as the
    record has; `contexts` the step contexts with batch identities. Causes without any support are left out, and "unknown"
    ranks above every cause whose evidence is thin, and above two that have as much for them. Equal input gives equal output."""
    registry.load()
    view = View(anomaly, window, contexts)
    weighed: list[tuple[int, Hypothesis]] = []
    for one in RULES.values():
        case = _case(one, view)
        if case.supports:
            by_weight = [sorted(side, key=lambda pair: -pair[0]) for side in (case.supports, case.opposes)]
            for_, against = (tuple(text for _, text in side) for side in by_weight)
            of_batch = tuple(text for text in for_ if text in case.of_batch)
            weighed.append((case.weight, Hypothesis(one.name, for_, against, one.intervention, of_batch)))
    weighed.sort(key=lambda pair: (-pair[0], pair[1].name))
    named = [hypothesis for weight, hypothesis in weighed if weight >= ENOUGH]
    thin = [hypothesis for weight, hypothesis in weighed if 0 < weight < ENOUGH]
    if len(named) > 1 and weighed[0][0] == weighed[1][0]:
        why = f"as much speaks for {named[0].name} as for {named[1].name}"
        return (Hypothesis("unknown", (why,), (), "rerun"), *named, *thin)
    return (*named, _unknown(named, thin), *thin)


def _case(one: Rule, view: View) -> Case:
    """The evidence of one rule. A note that begins with its name is what a monitor saw as it happened."""
    case = Case()
    for note in view.anomaly.notes:
        if note.startswith(f"{one.name}: "):
            case.add(STRONG, note.removeprefix(f"{one.name}: "))
    try:
        with np.errstate(all="ignore"):  # a record of a broken run holds anything
            one.weigh(view, case)
    except Exception:
        if "PYTEST_CURRENT_TEST" in os.environ:
            raise
        registry.broken(one.name)
    return case


def _unknown(named: list[Hypothesis], thin: list[Hypothesis]) -> Hypothesis:
    if named:
        return Hypothesis("unknown", (), (f"the record supports {named[0].name}",), "rerun")
    why = f"the best candidate, {thin[0].name}, has thin evidence" if thin else "no rule found evidence in the record"
    return Hypothesis("unknown", (why,), (), "rerun")
