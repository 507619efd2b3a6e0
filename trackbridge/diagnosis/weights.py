"""What the measurements of weights before and after the onset say: which changed, and whether in one element or in many."""

from __future__ import annotations

import numpy as np

from trackbridge.diagnosis import trends
from trackbridge.diagnosis.view import JUMPED, View

FEW = 3.0  # times what the root mean square of a module's output rose, from which a few of its elements make it
_ALL_OF_IT = 0.9  # of a weight's norm in one element
OTHER = 1.5  # times or part of a weight's norm, from which it is another weight
_MEASURED = 10  # steps past the onset by which every weight has been measured
_ALONE = 3.0  # times the change of any other layer: what an update does to all is no damage to one


def changed_weight(view: View) -> tuple[str, float, float] | None:
    """(series, factor, sigmas) of a weight norm that grew between two measurements around the onset while those of other
    layers changed far less. Where its own module is the first that jumped, they may have changed more: by then they were
    updated with the gradients that it made."""
    found = _weight_changes(view)
    if len(found) < 2:
        return None
    ordered = sorted(found, key=lambda name: abs(np.log(found[name][0])), reverse=True)
    factor, sigmas = found[ordered[0]]
    ahead = np.log(factor) / max(abs(np.log(found[ordered[1]][0])), 1e-12)
    began_there = view.first_jump is not None and ordered[0].startswith(f"layer/{view.jumps[view.first_jump[0]][0]}.")
    if factor > 1.1 and sigmas > 2 * JUMPED and ahead > (_ALONE / 2 if began_there else _ALONE):
        return ordered[0], factor, sigmas
    return None


def _weight_changes(view: View) -> dict[str, tuple[float, float]]:
    """{series: (factor, sigmas)} of weight norms between the measurements before and after the onset."""
    found = {}
    for name in view.family("layer/", "/weight_norm"):
        change = _step_change(view, name)
        if change is not None:
            found[name] = change
    return found


def _step_change(view: View, name: str) -> tuple[float, float] | None:
    return trends.step_change(*view.series(name), view.began, view.onset - view.began + _MEASURED)


def weights_as_they_were(view: View) -> bool:
    """The weights were measured since the onset, and none is another than before."""
    changes = _weight_changes(view)
    return bool(changes) and all(abs(np.log(factor)) < np.log(OTHER) for factor, _ in changes.values())


def changed_together(view: View) -> list[tuple[str, float]]:
    """(series, factor) of at least two weight norms that changed alike between two measurements around the onset, while those
    of most layers did not; the most changed first."""
    found = {}
    for name in view.family("layer/", "weight/weight_norm"):
        change = _step_change(view, name)
        if change is not None:
            found[name] = change
    changed = [(name, factor) for name, (factor, sigmas) in found.items() if factor > 1.3 and sigmas > 2 * JUMPED]
    if not 2 <= len(changed) <= len(found) // 3:
        return []
    return sorted(changed, key=lambda one: -one[1])


def largest_share(view: View, weight: str) -> float | None:
    """The largest element of a weight over its norm, as first measured since it began; None if that is not measured."""
    found = [view.series(name) for name in (weight.removesuffix("_norm") + "_max", weight)]
    tops, norms = (values[(steps >= view.began) & (steps <= view.onset + _MEASURED)] for steps, values in found)
    if not len(tops) or len(tops) != len(norms) or not norms[0] > 0:
        return None
    return float(tops[0] / norms[0])


def single_element(view: View, weight: str) -> bool:
    """One element of the series `weight` changed: what came back through it reached one unit alone, or its module's maximum
    rose far more than its root mean square."""
    share = largest_share(view, weight)
    if share is not None:
        return share > _ALL_OF_IT
    if view.lone_unit(weight.removeprefix("layer/").removesuffix("/weight_norm")) is not None:
        return True
    first = view.first_jump
    if first is None:
        return False
    site = view.jumps[first[0]][0]
    top, mean = view.rise(f"act/{site}/max"), view.rise(f"act/{site}/rms")
    return top is not None and mean is not None and top > FEW * mean
