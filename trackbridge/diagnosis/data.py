"""Causes in the data: a damaged batch, rare tokens, wrong labels, a batch seen twice, other data from now on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trackbridge.diagnosis.registry import SOLID, STRONG, WEAK, Case, rule
from trackbridge.diagnosis.view import View, in_steps, number, numbers

_ODD = 6.0  # sigmas from which a token statistic, or an activation, is called unusual
_SHAPE = ("entropy", "length", "unique")  # what damaged data changes; "min" and "max" only say that some token is new


def unusual(view: View, among: Iterable[str]) -> list[str]:
    """Token statistics of the onset's batch that stand out from the batches before, in words."""
    found = []
    for key in among:
        z = view.odd(key) if key in view.token_keys else None
        if z is not None and abs(z) > _ODD:
            found.append(
                f"token statistic {key!r} of the batch is {number(abs(z))} sigmas {'above' if z > 0 else 'below'} usual"
            )
    return found


def new_tokens(view: View) -> list[int]:
    """The rarest tokens of the onset's batch that lie outside the range of all tokens before."""
    low, high = view.token_series("min")[0], view.token_series("max")[0]
    if len(low) < 8 or not len(high):
        return []
    rare = {token for micro in view.batch() for token in _rarest(micro.tokens)}
    return sorted(token for token in rare if not low.min() <= token <= high.max())


def _rarest(tree: Any) -> Iterable[int]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name == "rarest":
                yield from (int(token) for token, _ in value)
            else:
                yield from _rarest(value)


def known(view: View) -> bool:
    """Statistics of tokens exist for the onset's batch and enough batches before it. In a batch with floats (which have a
    `nonfinite` count) the integers are labels: of such data nothing is said about tokens."""
    if "nonfinite" in view.token_keys:
        return False
    return any(view.odd(key) is not None for key in ("entropy", "unique") if key in view.token_keys)


def abrupt(view: View, case: Case) -> None:
    """The shape every fault of one batch has: nothing before the onset, everything at it, and it passes."""
    a = view.anomaly
    if a.first_mover is not None and view.lead == 0:
        case.add(WEAK, "no series left its band before the onset")
    elif a.first_mover is not None:
        case.against(SOLID, f"{a.first_mover[0]} moved {in_steps(view.lead)} before the onset; a batch acts at once")
    if view.passed:
        case.add(WEAK, f"back in its band {in_steps(a.recovered_after)} after the onset")
    elif a.kind in ("shift", "divergence"):
        case.against(SOLID, "it lasts, and one batch would pass")
    jump = view.lr_jump
    if jump is not None and jump[0] > 1.5:
        case.against(SOLID, f"train/lr rose {number(jump[0])} times at step {jump[1]}")


@rule("corrupt-batch", intervention="skip-batch")
def corrupt_batch(view: View, case: Case) -> None:
    bad = int(sum(sum(numbers(micro.tokens, "nonfinite")) for micro in view.batch()))
    if bad:
        case.add(STRONG, f"the batch of step {view.onset} holds {bad} non-finite values")
    shape = unusual(view, _SHAPE)
    for text in shape:
        case.add(SOLID, text)
    for text in unusual(view, ("min", "max")):
        case.add(WEAK, text)
    if known(view) and not shape and not bad:
        case.against(SOLID, "length, unique count and entropy of the batch's tokens are as usual")
    abrupt(view, case)


@rule("rare-token", intervention="skip-batch")
def rare_token(view: View, case: Case) -> None:
    new = new_tokens(view)
    if new:
        case.add(SOLID, f"tokens {', '.join(map(str, new[:5]))} of the batch are outside the range of all batches before")
    layers = {name: z for name in view.family("layer/", "/grad_norm") if (z := view.rise(name)) is not None}
    if layers:
        worst = max(layers, key=lambda name: layers[name])
        if is_embedding(worst) and layers[worst] > 3:
            case.add(SOLID, f"the largest rise of a gradient is in the embedding: {worst}, {number(layers[worst])} times")
    shape = unusual(view, _SHAPE)
    if new and not shape:
        case.add(WEAK, "otherwise the batch's tokens are distributed as usual")
    for text in shape:
        case.against(SOLID, f"more than rare tokens: {text}")
    if case.supports:
        abrupt(view, case)


@rule("label-fault", intervention="skip-batch")
def label_fault(view: View, case: Case) -> None:
    act = view.worst_activation
    if act is None or view.anomaly.kind == "nonfinite" or not view.anomaly.series.startswith("train/loss"):
        return
    if act[1] < 5:
        case.add(SOLID, f"activations are as usual (largest jump: {act[0]}, {number(act[1])} sigmas) while the loss is not: "
                        "the targets changed, not the inputs")  # fmt: skip
    else:
        case.against(SOLID, f"{act[0]} jumped {number(act[1])} sigmas: the inputs or the weights changed")
    if known(view):
        odd = unusual(view, (*_SHAPE, "min", "max"))
        if not odd:
            case.add(WEAK, "the batch's tokens are as usual")
        for text in odd:
            case.against(SOLID, text)
    if fingerprints(view)[1]:
        case.against(SOLID, "batches near the onset were used twice")
    abrupt(view, case)


@rule("repeated-batch", intervention="skip-batch")
def repeated_batch(view: View, case: Case) -> None:
    seen, repeats = fingerprints(view)
    if repeats:
        step, earlier = repeats[-1]
        case.add(STRONG, f"the batch of step {step} has the fingerprint of step {earlier}; {len(repeats)} such repeats nearby")
    elif seen:
        case.against(SOLID, f"{seen} different batches before the anomaly, none twice")


def fingerprints(view: View) -> tuple[int, list[tuple[int, int]]]:
    """How many different batches were seen up to the anomaly, and (step, earlier step) of close repeats near the onset. An
    epoch later the same data comes round again: only a close repeat is a fault."""
    seen: dict[str, int] = {}
    repeats: list[tuple[int, int]] = []
    for context in view.contexts:
        if context.step > view.anomaly.step:
            break
        for micro in context.micro:
            earlier = seen.setdefault(micro.fingerprint, context.step) if micro.fingerprint else context.step
            if 0 < context.step - earlier <= 50 and abs(context.step - view.onset) <= 30:
                repeats.append((context.step, earlier))
    return len(seen), repeats


@rule("data-regime-change", intervention="rerun")
def data_regime_change(view: View, case: Case) -> None:
    a = view.anomaly
    if a.kind != "shift" and (a.kind != "spike" or view.passed):
        return
    for key in _SHAPE:
        before, _, after = view.token_series(key)
        if len(before) >= 8 and len(after) >= 4:
            z = (float(_median(after)) - float(_median(before))) / max(
                1.4826 * _spread(before), 0.01 * abs(_median(before)), 1e-9
            )
            if abs(z) > 3:
                case.add(
                    SOLID, f"token statistic {key!r} has stayed {number(abs(z))} sigmas {'above' if z > 0 else 'below'} usual"
                )
    if a.kind == "shift":
        case.add(WEAK, "the loss settled at a new level")
    act = view.worst_activation
    if act is not None:
        if act[1] < 10:
            case.add(WEAK, f"no activation jumped (largest: {act[0]}, {number(act[1])} sigmas): the weights are as they were")
        else:
            case.against(SOLID, f"{act[0]} jumped {number(act[1])} sigmas")
    if a.first_mover is not None and view.lead == 0:
        case.add(WEAK, "no series left its band before the onset")
    elif view.lead:
        case.against(SOLID, f"something moved {in_steps(view.lead)} before the onset")
    jump = view.lr_jump
    if jump is not None and jump[0] > 1.5:
        case.against(SOLID, f"train/lr rose {number(jump[0])} times at step {jump[1]}")


def _median(values: Any) -> float:
    ordered = sorted(values)
    return float(ordered[len(ordered) // 2])


def _spread(values: Any) -> float:
    middle = _median(values)
    return _median([abs(value - middle) for value in values])


def is_embedding(name: str) -> bool:
    """By name: token embeddings as the common models call them."""
    return any(part in name.lower() for part in ("embed", "wte", "tok_emb", "word_emb"))
