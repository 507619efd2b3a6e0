"""Causes in the network and its arithmetic: overflow, outliers, growing logits, unstable embeddings, damaged weights."""

from __future__ import annotations

import numpy as np

from trackbridge.diagnosis import trends
from trackbridge.diagnosis.data import input_oddities
from trackbridge.diagnosis.registry import SOLID, STRONG, WEAK, Case, rule
from trackbridge.diagnosis.view import (
    JUMPED,
    LATER,
    Grown,
    View,
    in_steps,
    is_attention,
    is_embedding,
    is_query_or_key,
    number,
    times,
)

FP16_MAX = 65504.0
_GROWN = 1.6  # of an activation over some 50 steps
_APART = 4.0  # times `JUMPED`, from which a jump is no part of what moved before it
_FEW = 3.0  # times what the root mean square of a module's output rose, from which a few of its elements make it
_FEW_OF_IT = 0.5  # of a weight's norm in one element, from which few elements make it
_ALL_OF_IT = 0.9  # of a weight's norm in one element
_OTHER = 1.5  # times or part of a weight's norm, from which it is another weight
_BROKE = 2.5  # times its size, from which growth may show all at once
_STEADY, _FAST, _SOON = 8, 1.1, 40  # steps of growth, its least factor in one, steps ahead
_WHOLE = 1.3  # a weight's largest element grows at most so much more than its norm where all of it grows
_ALONE = 3.0  # times the change of any other layer: what an update does to all is no damage to one


@rule("fp16-overflow", intervention="full-precision")
def fp16_overflow(view: View, case: Case) -> None:
    scales, before = view.near("train/loss_scale", 10), view.before("train/loss_scale", 1)
    if len(scales) and len(before) and scales.min() < 0.9 * before[0]:
        case.add(SOLID, f"train/loss_scale fell from {number(before[0])} to {number(float(scales.min()))} at the onset")
    skipped, earlier = view.near("optim/skipped", 10), view.before("optim/skipped", 1)
    if len(scales) and len(skipped) and len(earlier) and skipped.max() > earlier[0]:
        count = int(skipped.max() - earlier[0])
        case.add(SOLID if count < 4 else STRONG, f"the scaler skipped {count} updates from the onset on")
    edge = _near_the_edge(view)
    if edge is not None:
        case.add(SOLID, f"{edge[1]} had reached {number(edge[0])}; fp16 ends at 65504")
        broken = [name for name in view.family("act/", "/nonfinite") if (np.nan_to_num(view.near(name, 2), nan=1.0) > 0).any()]
        if broken:
            case.add(SOLID, f"{broken[0]} counts what did not fit")
    if view.anomaly.kind == "nonfinite" and case.supports:
        case.add(WEAK, "non-finite values under a loss scaler" if len(scales) else "then values were not finite")
    pace = _pace(view) if len(scales) and edge is None else None
    if pace is not None:
        name, factor, left = pace
        how = f"{name} grows {times(factor)} a step under a loss scaler"
        case.add(SOLID, f"{how}: fp16 does not hold it {in_steps(left)} later")
    bad, at = view.batches.nonfinite()
    if bad:
        case.against(STRONG + WEAK, f"the batch of step {at} itself holds {bad} non-finite values")


def _pace(view: View) -> tuple[str, float, int] | None:
    """(series, its growth in a step, steps until it leaves what fp16 holds) of the activation that will do so first, where one
    has been growing from step to step up to the end of the window, and would within `_SOON` steps."""
    found = []
    for name in view.family("act/", "/max"):
        last = view.series(name)[1][-_STEADY - 1 :]
        if len(last) <= _STEADY or not (np.isfinite(last) & (last > 0)).all() or last[-1] >= FP16_MAX:
            continue
        factor = float((last[-1] / last[0]) ** (1 / _STEADY))
        if factor > _FAST and (np.diff(last) > 0).mean() > 0.8:
            found.append((float(np.log(FP16_MAX / last[-1]) / np.log(factor)), factor, name))
    left, factor, name = min(found, default=(np.inf, 0.0, ""))
    return (name, factor, int(np.ceil(left))) if left <= _SOON else None


def _near_the_edge(view: View) -> tuple[float, str] | None:
    """(value, series) of the largest activation around the onset, if it was close to what fp16 holds, and not beyond."""
    found = []
    for name in view.family("act/", "/max"):
        values = np.concatenate((view.before(name, 4), view.near(name, LATER)))
        values = values[np.isfinite(values)]
        if len(values) and FP16_MAX / 8 < values.max() < 1.5 * FP16_MAX:
            found.append((float(values.max()), name))
    return max(found, default=None)


@rule("activation-outliers", intervention="lower-lr=0.5")
def activation_outliers(view: View, case: Case) -> None:
    if view.mover is not None and view.mover[0].endswith("/kurtosis") and view.lead >= 2 and not is_embedding(view.mover[0]):
        case.add(SOLID, f"{view.mover[0]} left its band {in_steps(view.lead)} before the onset")
    grown = view.grown([n for t in ("/kurtosis", "/max") for n in view.family("act/", t) if not is_embedding(n)], _GROWN)
    if grown:
        factor, name = grown[0]
        case.add(
            STRONG if factor > 3 else SOLID,
            f"{name} had grown {times(factor)} ({len(grown)} activation statistics grew)",
        )
        peaked = [n for _, n in grown if n.endswith("/kurtosis")]
        if peaked:
            case.add(WEAK, f"few elements made it: {peaked[0]} grew too")
    few = _few_grew(view)
    if few is not None:
        name, share = few
        case.add(SOLID, f"few elements of {name} grew: the largest has {share:.0%} of its norm")
    if not case.supports:
        return
    _not_sudden(view, case, grown[0][0] if grown else 0.0)
    if grown:
        _not_downstream(view, case, grown[0][1])
        _not_out(view, case, grown[0][1])
    if view.lr_jumped and view.lr_jump is not None:
        case.against(STRONG, f"train/lr rose {times(view.lr_jump[0])} at step {view.lr_jump[1]}, which explains the growth")
    whole = _grew_as_a_whole(view)
    if whole is not None:
        case.against(STRONG, f"{whole[1]} had grown {times(whole[0])}, all of it alike: no few elements stand out of it")
    _not_elsewhere(view, case, hidden=True)


def _few_grew(view: View) -> tuple[str, float] | None:
    """(series, share of its largest element) of the one hidden weight that changed, if few elements of it did and nothing shows
    that they did in one step."""
    changed = changed_weight(view)
    share = _largest_share(view, changed[0]) if changed is not None else None
    if changed is None or share is None or share < _FEW_OF_IT or view.is_outer(changed[0]) or _in_one_step(view):
        return None
    return changed[0], share


def _grew_as_a_whole(view: View) -> Grown | None:
    """The weight that grew most, if its norm more than doubled and its largest element grew no more than that."""
    for factor, name in view.grown_weights[:1]:
        top = view.growth(name.removesuffix("_norm") + "_max")
        if factor > 2.0 and top is not None and top < _WHOLE * factor:
            return factor, name
    return None


def _not_sudden(view: View, case: Case, growth: float) -> None:
    """What has only grown a little, as much does in a net that learns, breaks nothing from one step to the next."""
    if view.sudden:
        weight = SOLID if growth > _BROKE else STRONG
        case.against(weight, "the loss jumped in one step, and nothing had left its band before")


def _not_out(view: View, case: Case, name: str) -> None:
    """Outliers act by being large. A kurtosis also grows where all the others shrink; and what acts on the loss is at least as
    large in that step as it had been before."""
    site = name.removeprefix("act/").rpartition("/")[0]
    top = f"act/{site}/max"
    size = view.growth(top)
    if size is not None and size < 1.0:
        case.against(
            STRONG + SOLID, f"{top} had not grown ({times(size)}): its other elements shrank, none stands out for its size"
        )
    now, before = view.at(top), view.before(top, _STEADY)
    if not view.gradual and view.lead <= 1 and now is not None and len(before) and now <= before.max():
        case.against(
            STRONG, f"when the loss rose {top} was {number(now)}, and up to {number(before.max())} in the steps before"
        )


def _not_downstream(view: View, case: Case, name: str) -> None:
    """What enters a step somewhere leaves everything before that place as it was."""
    if view.first_jump is not None and not view.gradual and view.downstream(name):
        case.against(STRONG, f"{view.first_jump[1]} jumped in one step, and comes before {name}")


def _not_elsewhere(view: View, case: Case, *, hidden: bool) -> None:
    """Growth that began in a part with its own hypothesis speaks against the general one."""
    first = next(
        (
            site
            for site in view.sites
            if (view.growth(f"act/{site}/rms") or 0) > 1.3 or (view.growth(f"act/{site}/max") or 0) > _GROWN
        ),
        None,
    )
    if hidden and first is not None and is_embedding(first):
        case.against(STRONG, f"the growth begins in {first}")
    own = [name for _, name in view.grown_weights]
    for part, test in (("attention", is_attention), ("the embedding or the head", view.is_outer)):
        if own and test(own[0]):
            case.against(STRONG, f"the weight that grew most is one of {part}: {own[0]}")
    if view.clipping_lost is not None:
        case.against(STRONG, f"clipping was lost at step {view.clipping_lost[1]}, which explains the growth")
    if view.common_growth > 1.15:
        case.against(STRONG, f"all weights had grown together (median {times(view.common_growth)})")
    names = view.family("layer/", "/weight_norm")
    if len(own) > max(3, len(names) // 3):
        case.against(SOLID, f"{len(own)} of {len(names)} weights had grown together")


@rule("attention-logit-growth", intervention="lower-lr=0.5")
def attention_logit_growth(view: View, case: Case) -> None:
    grown = [(factor, name) for factor, name in view.grown_weights if is_attention(name)]
    if grown:
        factor, name = grown[0]
        weight = STRONG if grown[0] == view.grown_weights[0] else SOLID
        case.add(weight, f"{name} had grown {times(factor)}, more than other layers")
        if len(grown) > 1:
            case.add(WEAK, f"so had {grown[1][1]}, {times(grown[1][0])}")
    elif view.grown_weights:
        factor, name = view.grown_weights[0]
        case.against(SOLID, f"the weight that grew most is none of attention: {name}, {times(factor)}")
    together = _changed_together(view)
    if together and all(is_attention(name) for name, _ in together):
        case.add(STRONG + WEAK, f"{len(together)} weights of attention changed in between and no other did: {together[0][0]} "
                                f"{times(together[0][1])}")  # fmt: skip
    sampled = view.grown(view.family("act/", "/sampled_logit_max"), _GROWN)
    if sampled:
        case.add(STRONG + WEAK, f"{sampled[0][1]} had grown {times(sampled[0][0])}")
    apart = _gradients_apart(view) if view.gradual or view.lead >= 2 else None
    if apart is not None:
        name, own, others = apart
        case.add(
            STRONG if len(grown) == 0 else SOLID,
            f"the gradients of queries and keys left the others: {name} {times(own)} its size, others {number(others)}",
        )
    mover = view.mover
    if mover is not None and view.lead >= 2 and is_attention(mover[0]):
        case.add(SOLID if case.supports else WEAK, f"{mover[0]} left its band {in_steps(view.lead)} before the onset")


def _gradients_apart(view: View) -> tuple[str, float, float] | None:
    """(series, its change, the median change of the others) where the gradients of queries and keys alone grew over the window,
    or vanished: the softmax between them saturates. What both have part in is left out."""
    changes = {name: f for name in view.family("layer/", "weight/grad_norm") if (f := view.growth(name)) is not None and f > 0}
    own = {name: f for name, f in changes.items() if is_query_or_key(name)}
    rest = [f for name, f in changes.items() if name not in own and not is_attention(name)]
    if not own or len(rest) < 2:
        return None
    others = float(np.median(rest))
    worst = max(own, key=lambda name: abs(np.log(own[name] / others)))
    aside = sum(abs(np.log(f / others)) > np.log(2.0) for f in own.values())
    spread = max(abs(np.log(f / others)) for f in rest)
    if abs(np.log(own[worst] / others)) > max(np.log(3.0), 1.2 * spread) and aside * 2 >= len(own):
        return worst, own[worst], others
    return None


@rule("embedding-instability", intervention="lower-lr=0.5")
def embedding_instability(view: View, case: Case) -> None:
    weights = [(factor, name) for factor, name in view.grown_weights if view.is_outer(name)]
    if weights:
        factor, name = weights[0]
        case.add(
            STRONG if weights[0] == view.grown_weights[0] else SOLID,
            f"{name} had grown {times(factor)}, more than other layers",
        )
    changed = changed_weight(view)
    if changed is not None and view.is_outer(changed[0]) and not _single_element(view, changed[0]):
        case.add(
            STRONG + SOLID,
            f"{changed[0]} changed {times(changed[1])} in between, in many of its elements; other weights did not",
        )
    larger = _larger_output(view) if changed is None else None
    if larger is not None:
        site, factor = larger
        case.add(SOLID + WEAK, f"from one step to the next all that {site} puts out is {times(factor)} as large, and stays so")
    sites = view.grown([n for t in ("/rms", "/max") for n in view.family("act/", t) if view.is_outer(n)], 1.3)
    if sites and (weights or is_embedding(sites[0][1])):
        case.add(SOLID, f"{sites[0][1]} had grown {times(sites[0][0])}")
    mover = view.mover
    if mover is not None and view.lead >= 2 and view.is_outer(mover[0]):
        case.add(SOLID if case.supports else WEAK, f"{mover[0]} left its band {in_steps(view.lead)} before the onset")
    if case.supports and changed is None and larger is None:
        _not_sudden(view, case, weights[0][0] if weights else 0.0)
        if weights:
            _not_downstream(view, case, weights[0][1])
    if case.supports and view.lr_jumped and view.lr_jump is not None:
        case.against(STRONG, f"train/lr rose {times(view.lr_jump[0])} at step {view.lr_jump[1]}, which explains the growth")
    if case.supports and input_oddities(view):
        case.against(SOLID, "the batch of the onset is unusual itself")


def _larger_output(view: View) -> tuple[str, float] | None:
    """(module, factor) where the embedding or the head is the first module that jumped, in all of what it puts out, not in a
    few elements; the batch is as usual; and it lasts. So its weight changed, measured yet or not."""
    first = view.first_jump
    if first is None or not view.batches.known or input_oddities(view) or not _still_out(view):
        return None
    site = view.jumps[first[0]][0]
    top, mean = view.rise(f"act/{site}/max"), view.rise(f"act/{site}/rms")
    if not view.is_outer(f"act/{site}/rms") or top is None or mean is None or mean < 2.0 or top > _FEW * mean:
        return None
    return site, mean


def _single_element(view: View, weight: str) -> bool:
    """One element of the series `weight` changed: what came back through it reached one unit alone, or its module's maximum
    rose far more than its root mean square."""
    share = _largest_share(view, weight)
    if share is not None:
        return share > _ALL_OF_IT
    if view.lone_unit(weight.removeprefix("layer/").removesuffix("/weight_norm")) is not None:
        return True
    first = view.first_jump
    if first is None:
        return False
    site = view.jumps[first[0]][0]
    top, mean = view.rise(f"act/{site}/max"), view.rise(f"act/{site}/rms")
    return top is not None and mean is not None and top > _FEW * mean


def _largest_share(view: View, weight: str) -> float | None:
    """The largest element of a weight over its norm, as first measured from the onset on; None if that is not measured."""
    tops, norms = (view.near(name, 10) for name in (weight.removesuffix("_norm") + "_max", weight))
    if not len(tops) or len(tops) != len(norms) or not norms[0] > 0:
        return None
    return float(tops[0] / norms[0])


def _changed_together(view: View) -> list[tuple[str, float]]:
    """(series, factor) of at least two weight norms that changed alike between two measurements around the onset, while those
    of most layers did not; the most changed first."""
    found = {}
    for name in view.family("layer/", "weight/weight_norm"):
        steps, values = view.series(name)
        change = trends.step_change(steps, values, view.onset, 10)
        if change is not None:
            found[name] = change
    changed = [(name, factor) for name, (factor, sigmas) in found.items() if factor > 1.3 and sigmas > 2 * JUMPED]
    if not 2 <= len(changed) <= len(found) // 3:
        return []
    return sorted(changed, key=lambda one: -one[1])


@rule("hardware-fault", intervention="rerun")
def hardware_fault(view: View, case: Case) -> None:
    """A number that changed by itself: from one step to the next, with an ordinary batch, and nothing growing before."""
    first = view.first_jump
    if first is not None and (view.lead <= 2 or first[2] > _APART * JUMPED):
        place, name, z = first
        if z > 2 * JUMPED:
            case.add(SOLID, f"{name} jumped {number(z)} sigmas in one step")
            if place > 0:
                site, _, before = view.jumps[place - 1]
                case.add(SOLID, f"it began there: the module before it ({site}) is as usual ({number(before)} sigmas)")
    changed = changed_weight(view)
    if changed is not None and changed[0] in (name for _, name in view.grown_weights):
        case.against(STRONG, f"{changed[0]} was growing before: it did not change by itself in one step")
    elif changed is not None:
        name, factor, sigmas = changed
        once = _in_one_step(view)
        what = f"{name} changed {times(factor)} in between ({number(sigmas)} sigmas), other weights did not"
        case.add(STRONG if once else WEAK, what if once else f"{what}; but nothing else shows that it was in one step")
        _explained(view, case, name)
    gradient = _lone_gradient(view)
    if gradient is not None and first is None:
        case.add(
            STRONG, f"{gradient[0]} jumped {number(gradient[1])} sigmas alone; activations, loss and other gradients did not"
        )
    if not case.supports:
        return
    if view.batches.known and not input_oddities(view):
        case.add(WEAK, "the inputs' statistics are as usual")
    for one in input_oddities(view)[:1]:
        case.against(STRONG, f"the batch is unusual: {one[2]} of tensor {one[1]!r}, {number(abs(one[3]))} sigmas")
    bad, at = view.batches.nonfinite()
    if bad:
        case.against(STRONG + WEAK, f"the batch of step {at} holds {bad} non-finite values")
    if view.batches.new_tokens()[0] > 0.02:
        case.against(STRONG, "many tokens of the batch are new")
    together = _changed_together(view)
    if together:
        case.against(STRONG, f"{len(together)} weights changed together: {together[0][0]}, {together[1][0]}")
    larger = _larger_output(view) if changed is None else None
    if larger is not None:
        case.against(STRONG, f"all that {larger[0]} puts out is {times(larger[1])} as large, not one number of it")
    if view.gradual:
        case.against(STRONG, "it grew over many steps; a number that changes by itself does so in one")
    grown = view.grown_weights or view.grown([n for t in ("/rms", "/max") for n in view.family("act/", t)], _GROWN)
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
        and _weights_as_they_were(view)
        and _still_out(view)
    ):
        case.against(STRONG, "the activations stay different while the weights are as they were: no bit flips for so long")


def _in_one_step(view: View) -> bool:
    """Something that is measured in every step jumped at the onset. Between two measurements of a weight there are several
    steps, in which it may as well have grown."""
    if view.first_jump is not None or (view.loss_jump or 0.0) > JUMPED or _lone_gradient(view) is not None:
        return True
    return view.anomaly.kind == "nonfinite" or (view.jump("grad/norm") or 0.0) > JUMPED


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
    share = _largest_share(view, name)
    if _single_element(view, name):
        lone = view.lone_unit(layer.removeprefix("layer/"))
        if share is not None:
            case.add(SOLID, f"one number in it: its largest element has {share:.0%} of its norm")
        elif lone is not None:
            case.add(SOLID, f"one number in it: since the onset all of {lone.removesuffix('_max')} is one element")
    elif view.first_jump is not None or share is not None:
        case.against(STRONG, "many of its elements changed, not one")


def _still_out(view: View) -> bool:
    """The series that jumped first is still out some steps later."""
    if view.first_jump is None:
        return False
    name = view.first_jump[1]
    shift = 3.0 if name.endswith("/kurtosis") else 0.0
    z = trends.jump(view.before(name, 100) + shift, view.near(name, LATER)[-3:] + shift)
    return z is not None and z > JUMPED


def _weights_as_they_were(view: View) -> bool:
    """The weights were measured since the onset, and none is another than before."""
    changes = _weight_changes(view)
    return bool(changes) and all(abs(np.log(factor)) < np.log(_OTHER) for factor, _ in changes.values())


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
        change = trends.step_change(*view.series(name), view.onset, 10)
        if change is not None:
            found[name] = change
    return found


def _lone_gradient(view: View) -> tuple[str, float] | None:
    """(series, sigmas) of the only layer whose gradient jumped at the onset, or at the step before it."""
    for step in (0, 1):
        found: dict[str, float] = {}
        for name in view.family("layer/", "/grad_norm"):
            steps, values = view.series(name)
            z = trends.jump(view.before(name, 100)[: -step or None], values[steps == view.onset - step])
            if z is not None:
                found[name] = z
        ordered = sorted(found, key=lambda name: found[name], reverse=True)
        if len(ordered) < 2 or found[ordered[0]] < 2 * JUMPED or found[ordered[1]] > JUMPED / 2:
            continue
        if step or (view.loss_jump or 0.0) < JUMPED:
            return ordered[0], found[ordered[0]]
    return None
