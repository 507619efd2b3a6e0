"""Which column is the loss? Guessed from names, and only where the guess is plain."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trackbridge.errors import UsageError, nearest

_OTHER = {"val", "valid", "validation", "eval", "evaluation", "test", "dev", "holdout", "best", "min", "max", "smooth", "ema",
          "aux", "scale", "mask", "reg", "nonfinite", "weight", "coef"}  # fmt: skip
_NORMS = {"gnorm", "gradnorm", "grad norm", "gradient norm", "grads norm", "total norm", "global norm", "norm grad"}
_RATES = {"lr", "learning rate", "train lr", "train learning rate"}
_STEPS = ("_step", "step", "steps", "global_step", "iteration", "iter", "iterations", "update")


@dataclass(frozen=True, slots=True)
class Choice:
    """The names the user gave; None: to be guessed."""

    loss: str | None = None
    grad_norm: str | None = None


def choose(columns: Sequence[str], given: Choice) -> dict[str, str]:
    """Our series -> the source's column. Loss always, gradient norm and learning rate where there is one. Raises `UsageError`
    when there is no loss, or more than one that could be meant."""
    loss = _given("--loss", given.loss, columns) or _plain_loss(columns)
    if loss is None:
        raise UsageError(f"no column looks like a training loss; name it with --loss, one of: {_listed(columns)}")
    found = {"train/loss": loss}
    norm = _given("--grad-norm", given.grad_norm, columns) or _best(columns, _norm)
    rate = _best(columns, _rate)
    return found | ({"grad/norm": norm} if norm else {}) | ({"train/lr": rate} if rate else {})


def like_loss(column: str) -> bool:
    """Whether its name is that of a training loss."""
    return _loss(_words(column)) > 0


def step_column(columns: Sequence[str], given: str | None) -> str | None:
    """The column that counts steps; None: the order of the rows does."""
    plain = {column.strip().lower(): column for column in reversed(columns)}
    return _given("--step", given, columns) or next((plain[name] for name in _STEPS if name in plain), None)


def _given(option: str, name: str | None, columns: Sequence[str]) -> str | None:
    if name is not None and name not in columns:
        raise UsageError(f"{option} {name!r}: there is no such column{nearest(name, columns)}; there are: {_listed(columns)}")
    return name


def _plain_loss(columns: Sequence[str]) -> str | None:
    """The one column that looks most like the loss; None where none does. Raises `UsageError` for several that do alike, but
    for one of several runs (``RUN:loss``): which run is meant is the source's to ask."""
    worth = {column: _loss(_words(column)) for column in columns}
    most = max(worth.values(), default=0.0)
    alike = [column for column in worth if worth[column] == most]
    if most > 0 and len({column.rpartition(":")[2] for column in alike}) > 1:
        raise UsageError(f"several columns may be the training loss; name one with --loss: {_listed(alike)}")
    return alike[0] if most > 0 else None


def _best(columns: Sequence[str], worth: Callable[[list[str]], float]) -> str | None:
    """The column that is worth most; the shorter name among equals. None where none is worth anything."""
    ranked = sorted(((worth(_words(column)), -len(column), column) for column in columns), reverse=True)
    return ranked[0][2] if ranked and ranked[0][0] > 0 else None


def _words(column: str) -> list[str]:
    """``trainLoss/step`` -> train, loss, step."""
    return re.findall(r"[a-z]+|\d+", re.sub(r"([a-z])([A-Z])", r"\1 \2", column).lower())


def _loss(words: list[str]) -> float:
    if "loss" not in words or _OTHER & set(words):
        return 0.0
    worth = 1.0 + (words[-1] == "loss") + 2.0 * bool({"train", "training"} & set(words)) + (words == ["loss"])
    return worth - 0.5 * ("epoch" in words) - 0.1 * len(words)


def _norm(words: list[str]) -> float:
    text = " ".join(words)
    if {"layer", "layers", "clipped", "param", "weight"} & set(words) or not any(norm in text for norm in _NORMS):
        return 0.0
    return 2.0 - 0.1 * len(words)


def _rate(words: list[str]) -> float:
    return 2.0 - 0.1 * len(words) if " ".join(words) in _RATES else 0.0


def _listed(columns: Sequence[str], most: int = 20) -> str:
    more = f" and {len(columns) - most} more" if len(columns) > most else ""
    return ", ".join(columns[:most]) + more if columns else "none"
