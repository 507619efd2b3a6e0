"""Causes in the network and its arithmetic: overflow, outliers, growing logits, unstable embeddings, damaged weights."""

from __future__ import annotations

import re

import numpy as np

from trackbridge.diagnosis.data import is_embedding, known, unusual
from trackbridge.diagnosis.registry import SOLID, STRONG, WEAK, Case, rule
from trackbridge.diagnosis.view import View, in_steps, number

FP16_MAX = 65504.0
_ATTENTION = re.compile(
    r"(^|[._/])(q|k|wq|wk|qkv|query|key|c_attn|q_proj|k_proj|in_proj\w*|attn|attention|self_attn)([._/]|$)", re.IGNORECASE
)


@rule("fp16-overflow", intervention="full-precision")
def fp16_overflow(view: View, case: Case) -> None:
    scales, before = view.near("train/loss_scale", 3), view.before("train/loss_scale", 1)
    if not len(scales):
        return
    if len(before) and scales.min() < 0.9 * before[0]:
        case.add(SOLID, f"train/loss_scale fell from {number(before[0])} to {number(float(scales.min()))} at the onset")
    skipped, earlier = view.near("optim/skipped", 3), view.before("optim/skipped", 1)
    if len(skipped) and len(earlier) and skipped.max() > earlier[0]:
        case.add(SOLID, f"the scaler skipped {int(skipped.max() - earlier[0])} updates at the onset")
    large = [(float(v.max()), name) for name in view.family("act/", "/max")
             if len(v := np.append(view.before(name, 4), view.near(name, 0))) and np.isfinite(v).all()]  # fmt: skip
    if large and max(large)[0] > FP16_MAX / 4:
        case.add(SOLID, f"{max(large)[1]} is {number(max(large)[0])}; fp16 ends at 65504")
    if view.anomaly.kind == "nonfinite" and case.supports:
        case.add(WEAK, "non-finite values under a loss scaler")


@rule("activation-outliers", intervention="lower-lr=0.5")
def activation_outliers(view: View, case: Case) -> None:
    mover = view.anomaly.first_mover
    if mover is not None and mover[0].endswith("/kurtosis") and view.lead >= 2 and not is_embedding(mover[0]):
        case.add(STRONG, f"{mover[0]} left its band {in_steps(view.lead)} before the onset")
    grown = [
        (ratio, name) for tail in ("/kurtosis", "/max") for name in view.family("act/", tail)
        if (ratio := view.growth(name)) is not None and ratio > 2 and not is_embedding(name)
        and (tail == "/max" or float(np.median(view.before(name)[-8:])) > 5)
    ]  # fmt: skip
    if grown:
        ratio, name = max(grown)
        case.add(SOLID, f"{name} had grown {number(ratio)} times before the onset ({len(grown)} activation statistics grew)")
    elif case.supports:
        case.against(WEAK, "no activation had grown over the window")


@rule("attention-logit-growth", intervention="lower-lr=0.5")
def attention_logit_growth(view: View, case: Case) -> None:
    for tail, weight in (("/weight_norm", SOLID), ("/grad_norm", WEAK)):
        names = view.family("layer/", tail)
        ratios = {name: ratio for name in names if (ratio := view.growth(name)) is not None}
        ours = {name: ratio for name, ratio in ratios.items() if _ATTENTION.search(name)}
        if ours and len(ratios) > len(ours):
            worst = max(ours, key=lambda name: ours[name])
            others = float(np.median([ratio for name, ratio in ratios.items() if name not in ours]))
            if ours[worst] > 1.3 * max(others, 1.0):
                case.add(
                    weight, f"{worst} had grown {number(ours[worst])} times before the onset, other layers {number(others)}"
                )
    mover = view.anomaly.first_mover
    if mover is not None and view.lead >= 2 and _ATTENTION.search(mover[0]):
        case.add(SOLID, f"{mover[0]} left its band {in_steps(view.lead)} before the onset")


@rule("embedding-instability", intervention="lower-lr=0.5")
def embedding_instability(view: View, case: Case) -> None:
    for name in [*view.family("layer/", "/weight_norm"), *view.family("act/", "/rms")]:
        ratio = view.growth(name)
        if (is_embedding(name) or "head" in name.lower()) and ratio is not None and ratio > 1.3:
            case.add(SOLID, f"{name} had grown {number(ratio)} times before the onset")
    mover = view.anomaly.first_mover
    if mover is not None and view.lead >= 2 and (is_embedding(mover[0]) or "head" in mover[0].lower()):
        case.add(SOLID, f"{mover[0]} left its band {in_steps(view.lead)} before the onset")


@rule("hardware-fault", intervention="rerun")
def hardware_fault(view: View, case: Case) -> None:
    """Weights that change from one step to the next, with nothing in the record that could have done it. Activations jump for
    many reasons: alone they are thin evidence."""
    act = view.worst_activation
    moved = {name: ratio for name in view.family("layer/", "/weight_norm") if (ratio := view.step_change(name)) is not None}
    far = {name: ratio for name, ratio in moved.items() if ratio > 1.2 * float(np.median(list(moved.values())))}
    if len(far) == 1:
        name, ratio = next(iter(far.items()))
        case.add(SOLID, f"{name} changed {number(ratio)} times across the onset, alone among the layers")
    if act is not None and act[1] > 20 and not is_embedding(act[0]):
        jumped = f"{act[0]} jumped {number(act[1])} sigmas from one step to the next"
        case.add(SOLID if case.supports else WEAK, jumped)
    elif act is not None and act[1] < 5:
        case.against(SOLID, f"no activation jumped (largest: {act[0]}, {number(act[1])} sigmas)")
    if not case.supports:
        return
    if known(view):
        odd = unusual(view, view.token_keys)
        if odd:
            case.against(SOLID, f"the batch is unusual: {odd[0]}")
        else:
            case.add(WEAK, "the batch's tokens are as usual")
    if view.lead > 0:
        case.against(SOLID, f"something moved {in_steps(view.lead)} before the onset")
    jump = view.lr_jump
    if jump is not None and jump[0] > 1.5:
        case.against(SOLID, f"train/lr rose {number(jump[0])} times at step {jump[1]}")
