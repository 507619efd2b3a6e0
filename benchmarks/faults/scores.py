"""Scores over outcomes, as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import median

from benchmarks.faults.judge import BITES, Outcome


def report(outcomes: Sequence[Outcome]) -> str:
    """Tables for each part: detection, causes, confusion, and what went wrong."""
    good = [outcome for outcome in outcomes if not outcome.error]
    parts = dict.fromkeys(outcome.plan.part for outcome in good)
    text = "\n".join(_part(part, [o for o in good if o.plan.part == part]) for part in parts)
    broken = [f"- {o.plan.label}: {o.error}" for o in outcomes if o.error]
    return "\n".join([text, "Trials that failed themselves, counted nowhere:", "", *broken]) if broken else text


def _part(part: str, outcomes: Sequence[Outcome]) -> str:
    injected = [o for o in outcomes if o.cause != "healthy"]
    faults = [o for o in injected if o.effect >= BITES]
    found = [o for o in faults if o.detected]
    healthy = sum(o.healthy_steps for o in outcomes)
    alarms = sum(len(o.false_alarms) for o in outcomes)
    counts = (
        f"{len(faults)} faults, {len(injected) - len(faults)} injections without an effect (left out), "
        f"{len(outcomes) - len(injected)} controls"
    )
    lines = [f"## {part}", "", counts, ""]
    lines += ["| what | value |", "|---|---|"]
    if faults:
        top1 = sum(o.place == 0 and o.first == o.cause for o in found)
        top3 = sum(o.place is not None and o.place < 3 for o in found)
        misses = [o for o in found if o.first != o.cause]
        unknown = sum(o.first == "unknown" for o in misses)
        delays = [o.delay for o in found if o.delay is not None]
        leads = [o.lead for o in found if o.gradual and o.lead is not None]
        lines += [
            f"| detection recall | {_share(len(found), len(faults))} |",
            f"| cause named first | {_share(top1, len(found))} |",
            f"| cause among the first three | {_share(top3, len(found))} |",
            f"| misses answered with unknown | {_share(unknown, len(misses))} |",
            f"| median delay, sudden causes (steps) | {median(delays) if delays else '-'} |",
            f"| median lead, growing causes (steps) | {median(leads) if leads else '-'} |",
        ]
    lines += [f"| false alarms | {alarms} in {healthy} healthy steps, {20000 * alarms / max(healthy, 1):.2f} per 20,000 |", ""]
    if faults:
        lines += [*_by_cause(faults), "", *_confusion(found), "", *_misses(faults), ""]
    return "\n".join(lines)


def _by_cause(faults: Sequence[Outcome]) -> Iterable[str]:
    yield "| cause | way | found | first | first three | delay | lead |"
    yield "|---|---|---|---|---|---|---|"
    for cause, way in dict.fromkeys((o.cause, o.plan.way) for o in faults):
        own = [o for o in faults if o.plan.way == way]
        found = [o for o in own if o.detected]
        delays = [o.delay for o in found if o.delay is not None]
        leads = [o.lead for o in found if o.gradual and o.lead is not None]
        cells = (
            f"{len(found)}/{len(own)}", f"{sum(o.first == cause for o in found)}/{len(found)}",
            f"{sum(o.place is not None and o.place < 3 for o in found)}/{len(found)}",
            median(delays) if delays else "", median(leads) if leads else "",
        )  # fmt: skip
        yield f"| {cause} | {way} | {' | '.join(map(str, cells))} |"


def _confusion(found: Sequence[Outcome]) -> Iterable[str]:
    """Rows: what was injected; columns: what was named first."""
    named = sorted({o.first for o in found})
    counts = Counter((o.cause, o.first) for o in found)
    yield f"| injected | {' | '.join(named)} |"
    yield "|---" * (len(named) + 1) + "|"
    for cause in sorted({o.cause for o in found}):
        yield f"| {cause} | {' | '.join(str(counts[cause, name] or '') for name in named)} |"


def _misses(faults: Sequence[Outcome]) -> Iterable[str]:
    yield "| missed: way | task | seed | effect | named |"
    yield "|---|---|---|---|---|"
    for o in faults:
        if o.first != o.cause:
            named = ", ".join(o.hypotheses[:4]) if o.detected else "not detected"
            yield f"| {o.plan.way} | {o.plan.task} | {o.plan.seed} | {o.effect:.3g} | {named} |"


def _share(part: int, whole: int) -> str:
    """With its 95% interval (Wilson, J. Am. Stat. Assoc. 22, 1927)."""
    if not whole:
        return "-"
    p, z = part / whole, 1.959964
    middle, half = p + z * z / (2 * whole), z * sqrt(p * (1 - p) / whole + z * z / (4 * whole * whole))
    low, high = ((middle - half) / (1 + z * z / whole), (middle + half) / (1 + z * z / whole))
    return f"{p:.3f} ({part} of {whole}) [{max(low, 0):.3f}, {min(high, 1):.3f}]"
