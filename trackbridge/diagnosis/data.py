"""Causes in the data: a damaged batch, rare tokens, a batch seen twice."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from trackbridge.diagnosis.registry import SOLID, STRONG, WEAK, Case, rule
from trackbridge.diagnosis.view import View, number
from trackbridge.records import MicroBatch


def abrupt(view: View, case: Case) -> None:
    """The shape every data fault has: nothing before the onset, everything at it, and it passes."""
    a = view.anomaly
    if view.lead == 0:
        case.add(WEAK, "no series left its band before the onset")
    else:
        mover, step = a.first_mover or ("", view.onset)
        case.against(SOLID, f"{mover} moved {view.onset - step} steps before the onset, a batch acts at once")
    if a.recovered_after is not None and a.recovered_after <= 5:
        case.add(WEAK, f"back in its band {a.recovered_after} steps after the onset")
    rate = lr_change(view)
    if rate is not None and not 0.67 < rate < 1.5:
        case.against(SOLID, f"the learning rate changed by a factor of {number(rate)} at the onset")


def lr_change(view: View) -> float | None:
    """Learning rate at the onset over the step before; None when unknown."""
    now, before = view.at("train/lr"), view.before("train/lr", 1)
    return now / float(before[0]) if now is not None and len(before) and before[0] > 0 else None


@rule("corrupt-batch", intervention="skip-batch")
def corrupt_batch(view: View, case: Case) -> None:
    odd = unusual_tokens(view)
    bad = sum(int(_statistic(micro, "nonfinite") or 0) for micro in view.batch())
    if bad:
        case.add(STRONG, f"the batch of step {view.onset} holds {bad} non-finite values")
    for text in odd:
        case.add(SOLID, text)
    if not odd and not bad and any(micro.tokens for micro in view.batch()):
        case.against(SOLID, "the token statistics of the batch are like those of its neighbours")
    abrupt(view, case)


@rule("rare-token", intervention="skip-batch")
def rare_token(view: View, case: Case) -> None:
    layers = view.ending("/grad_norm")
    ratios = {name: view.peak_ratio(name, 0) or 0.0 for name in layers if name.startswith("layer/")}
    if ratios:
        worst = max(ratios, key=lambda name: ratios[name])
        rest = [ratio for name, ratio in ratios.items() if name != worst]
        typical = float(np.median(rest)) if rest else 1.0
        if is_embedding(worst) and ratios[worst] > 3 * max(typical, 1.0):
            case.add(SOLID, f"{worst} rose {number(ratios[worst])} times, the median layer {number(typical)} times")
        elif not is_embedding(worst):
            case.against(WEAK, f"the largest rise is in {worst}, not in the embedding")
    z = odd_statistic(view, "rare_share")
    if z is not None and z > 6:
        case.add(SOLID, f"share of rare tokens in the batch: {number(z)} sigmas above its neighbours")
    if case.supports:
        abrupt(view, case)


@rule("repeated-batch", intervention="skip-batch")
def repeated_batch(view: View, case: Case) -> None:
    seen: dict[str, int] = {}
    repeats: list[tuple[int, int]] = []
    for context in view.contexts:
        if context.step > view.anomaly.step:
            break
        for micro in context.micro:
            if micro.fingerprint is None:
                continue
            earlier = seen.setdefault(micro.fingerprint, context.step)
            if earlier != context.step:
                repeats.append((context.step, earlier))
    near = [pair for pair in repeats if abs(pair[0] - view.onset) <= 20]
    if near:
        step, earlier = near[-1]
        case.add(STRONG, f"the batch of step {step} has the fingerprint of step {earlier}; {len(near)} repeats near the onset")
    elif seen:
        case.against(SOLID, f"{len(seen)} batches around the onset, no fingerprint twice")


def is_embedding(name: str) -> bool:
    return any(part in name.lower() for part in ("embed", "wte", "tok_emb", "lm_head", "head.weight"))


def _statistic(micro: MicroBatch, key: str) -> float | None:
    """One number from the token statistics, found by name at any depth (one entry per tensor of the batch)."""
    values = list(_numbers(micro.tokens, key))
    return float(np.mean(values)) if values else None


def _numbers(tree: Any, key: str) -> Iterable[float]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name == key and isinstance(value, (int, float)) and math.isfinite(value):
                yield float(value)
            else:
                yield from _numbers(value, key)


def odd_statistic(view: View, key: str) -> float | None:
    """Robust z of the worst micro-batch of the onset against the batches before it; None when unknown."""
    before = [
        value for context in view.contexts if context.step < view.onset
        for micro in context.micro if (value := _statistic(micro, key)) is not None
    ]  # fmt: skip
    now = [value for micro in view.batch() if (value := _statistic(micro, key)) is not None]
    if len(before) < 4 or not now:
        return None
    middle = float(np.median(before))
    spread = max(1.4826 * float(np.median(np.abs(np.array(before) - middle))), 0.02 * abs(middle), 1e-9)
    return max(((value - middle) / spread for value in now), key=abs)


def unusual_tokens(view: View) -> list[str]:
    """Token statistics of the onset's batch that stand out from the batches before, in words."""
    keys = sorted({key for micro in view.batch() for key in _keys(micro.tokens)} - {"nonfinite"})
    found = []
    for key in keys:
        z = odd_statistic(view, key)
        if z is not None and abs(z) > 6:
            found.append(
                f"token statistic {key!r} of the batch is {number(abs(z))} sigmas {'above' if z > 0 else 'below'} usual"
            )
    return found[:3]


def _keys(tree: Any) -> Iterable[str]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                yield name
            else:
                yield from _keys(value)
