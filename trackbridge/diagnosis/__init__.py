"""Why an anomaly happened: ranked hypotheses, each with its evidence for and against from the record."""

from __future__ import annotations

from collections.abc import Sequence

from trackbridge.diagnosis import data, numerics, optimization  # noqa: F401 - they register their rules
from trackbridge.diagnosis.registry import RULES, SOLID, Case, rule
from trackbridge.diagnosis.view import View
from trackbridge.records import Anomaly, Hypothesis, Row, StepContext

__all__ = ["Case", "View", "diagnose", "rule"]

ENOUGH = SOLID + 1  # a cause needs more than one solid piece of evidence to be named before "unknown"


def diagnose(anomaly: Anomaly, window: Sequence[Row], contexts: Sequence[StepContext] = ()) -> tuple[Hypothesis, ...]:
    """Ranked hypotheses, most likely first. `window` are the rows around the anomaly, from as long before the onset as the
    record has; `contexts` the step contexts with batch identities. Causes without any support are left out, and "unknown"
    ranks above every cause whose evidence is thin. Equal input gives equal output."""
    view = View(anomaly, window, contexts)
    weighed: list[tuple[int, Hypothesis]] = []
    for one in RULES.values():
        case = Case()
        one.weigh(view, case)
        if case.supports:
            by_weight = [sorted(side, key=lambda pair: -pair[0]) for side in (case.supports, case.opposes)]
            for_, against = (tuple(text for _, text in side) for side in by_weight)
            weighed.append((case.weight, Hypothesis(one.name, for_, against, one.intervention)))
    weighed.sort(key=lambda pair: (-pair[0], pair[1].name))
    named = [hypothesis for weight, hypothesis in weighed if weight >= ENOUGH]
    thin = [hypothesis for weight, hypothesis in weighed if 0 < weight < ENOUGH]
    return (*named, _unknown(named, thin), *thin)


def _unknown(named: list[Hypothesis], thin: list[Hypothesis]) -> Hypothesis:
    if named:
        return Hypothesis("unknown", (), (f"the record supports {named[0].name}",), "rerun")
    why = f"the best candidate, {thin[0].name}, has thin evidence" if thin else "no rule found evidence in the record"
    return Hypothesis("unknown", (why,), (), "rerun")
