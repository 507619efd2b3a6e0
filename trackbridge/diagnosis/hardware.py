"""A number that changed by itself."""

from __future__ import annotations

import numpy as np

from trackbridge.diagnosis import nonfinite
from trackbridge.diagnosis.data import MANY_NEW, input_oddities
from trackbridge.diagnosis.growth import GROWN
from trackbridge.diagnosis.onset import became, broken_gradients, in_one_step, larger_output, lone_gradient, still_out
from trackbridge.diagnosis.registry import SOLID, STRONG, WEAK, Case, rule
from trackbridge.diagnosis.view import JUMPED, View, moved_by, number, times
from trackbridge.diagnosis.weights import changed_together, changed_weight, largest_share, single_element, weights_as_they_were

_APART = 4.0  # times `JUMPED`, from which a jump is no part of what moved before it


@rule("hardware-fault", intervention="rerun")
def hardware_fault(view: View, case: Case) -> None:
    """A number that changed by itself: from one step to the next, with an ordinary batch, and nothing growing before."""
    first = view.first_jump
    if first is not None and (view.lead <= 2 or first[2] > _APART * JUMPED):
        place, name, z = first
        if z > 2 * JUMPED:
            case.add(SOLID, moved_by(name, z, "jumped") + (" in one step" if np.isfinite(z) else ""))
            if place > 0:
                site, _, before = view.jumps[place - 1]
                case.add(SOLID, f"it began there: the module before it ({site}) is as usual ({number(before)} sigmas)")
    changed = changed_weight(view)
    if changed is not None and changed[0] in (name for _, name in view.grown_weights):
        case.against(STRONG, f"{changed[0]} was growing before: it did not change by itself in one step")
    elif changed is not None:
        name, factor, sigmas = changed
        once = in_one_step(view)
        what = f"{name} changed {times(factor)} in between ({number(sigmas)} sigmas), other weights did not"
        case.add(STRONG if once else WEAK, what if once else f"{what}; but nothing else shows that it was in one step")
        _explained(view, case, name)
    came = nonfinite.entry(view)
    if came is not None:
        _entered(came, case)
    gradient = lone_gradient(view)
    if gradient is not None and first is None:
        case.add(
            STRONG, f"{gradient[0]} jumped {number(gradient[1])} sigmas alone; activations, loss and other gradients did not"
        )
    broken = broken_gradients(view)
    if len(broken) == 1:
        case.add(WEAK, f"{broken[0]} {became(view, broken[0])} alone; activations, loss and other gradients were finite")
    if not case.supports:
        return
    if view.batches.known and not input_oddities(view):
        case.add(WEAK, "the inputs' statistics are as usual")
    for one in input_oddities(view)[:1]:
        case.against(STRONG, f"the batch is unusual: {one[2]} of tensor {one[1]!r}, {number(abs(one[3]))} sigmas")
    bad, at = view.batches.nonfinite()
    if bad:
        case.against(STRONG + WEAK, f"the batch of step {at} holds {bad} non-finite values")
    if view.batches.new_tokens()[0] > MANY_NEW:
        case.against(STRONG, "many tokens of the batch are new")
    together = changed_together(view)
    if together:
        case.against(STRONG, f"{len(together)} weights changed together: {together[0][0]}, {together[1][0]}")
    larger = larger_output(view) if changed is None else None
    if larger is not None:
        case.against(STRONG, f"all that {larger[0]} puts out is {times(larger[1])} as large, not one number of it")
    if view.gradual:
        case.against(STRONG, "it grew over many steps; a number that changes by itself does so in one")
    grown = view.grown_weights or view.grown([n for t in ("/rms", "/max") for n in view.family("act/", t)], GROWN)
    grown = [one for one in grown if not view.downstream(one[1])]
    if grown:
        case.against(STRONG, f"{grown[0][1]} had grown {times(grown[0][0])}")
    if view.lr_jumped and view.lr_jump is not None:
        case.against(STRONG, f"train/lr rose {times(view.lr_jump[0])} at step {view.lr_jump[1]}")
    if view.since_resume is not None and view.since_resume <= 1:
        case.against(SOLID, "the run was resumed in that step: the code may have changed")
    scales, before_scale = view.near("train/loss_scale", 10), view.before("train/loss_scale", 1)
    if len(scales) and len(before_scale) and scales.min() < 0.9 * before_scale[0]:
        case.against(SOLID, "the loss scale fell: half precision explains it")
    if (
        changed is None
        and first is not None
        and view.anomaly.kind != "nonfinite"
        and view.lasts
        and weights_as_they_were(view)
        and still_out(view)
    ):
        case.against(STRONG, "the activations stay different while the weights are as they were: no bit flips for so long")


def _entered(came: nonfinite.Entry, case: Case) -> None:
    """The other side of what `data` says: where the record does not tell, as much speaks for a weight as for the batch."""
    if came.speaks == "weight":
        case.add(STRONG, came.why)
    elif came.speaks == "batch" and came.sure:
        case.against(STRONG, came.why)
    else:
        case.add(WEAK, f"a weight of {came.site} that is not finite does it, and so does a batch, which is not recorded")


def _explained(view: View, case: Case, name: str) -> None:
    """What else may have changed the weight `name` so much: its own update, or all of a table at once."""
    layer = name.removesuffix("/weight_norm")
    moved = view.rise(f"{layer}/update_ratio", 10)
    if moved is not None and moved > 5:
        case.against(STRONG, f"{layer}: an update of {times(moved)} the usual size did it")
    steps, moments = view.series(f"{layer}/exp_avg_sq_norm")
    inside = moments[(steps >= view.onset - 30) & (steps <= view.anomaly.step + 10)]
    if len(inside) > 1 and inside.max() > 0 and (inside[1:] / np.maximum(inside[:-1], 1e-300)).min() < 0.5:
        case.against(STRONG, f"{layer}: its second moment had fallen, so its update was too large")
    if not view.is_outer(name):
        return
    share = largest_share(view, name)
    if single_element(view, name):
        lone = view.lone_unit(layer.removeprefix("layer/"))
        if share is not None:
            case.add(SOLID, f"one number in it: its largest element has {share:.0%} of its norm")
        elif lone is not None:
            case.add(SOLID, f"one number in it: since the onset all of {lone.removesuffix('_max')} is one element")
    elif view.first_jump is not None or share is not None:
        case.against(STRONG, "many of its elements changed, not one")
