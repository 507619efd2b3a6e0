"""What the record knows around an anomaly, as the rules read it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trackbridge.diagnosis import trends
from trackbridge.diagnosis.batch import Batches
from trackbridge.records import Anomaly, MicroBatch, Row, StepContext

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Grown: TypeAlias = "tuple[float, str]"

LATER = 8
"""Steps past the onset at which it is asked whether something lasts: as far as a capsule reaches."""
_BLUR = 2  # steps by which the onset of a level may be dated too early, and so before the attempt that changed it
_BACK = 0.25  # of its height: an excursion below that is on its way out
JUMPED = 8.0
"""Robust sigmas from which an activation has jumped in one step."""
_RISE, _STEPWISE = 0.4, 0.4  # in log space; the share of one step in a gradual rise
_ACTIVATIONS = ("rms", "max", "std", "kurtosis")
_TOKENS_FROM, _SELDOM = 32, 0.2  # steps before the onset, and the share of new rows, with which a new one says something
_LOOKBACK = 64  # a first mover from further back is another story
_EMBEDDING = re.compile(r"(^|[._/])(\w*emb\w*|wte|wpe)([._/]|$)", re.IGNORECASE)
_HEAD = re.compile(r"(^|[._/])(\w*head|out|output|classifier|fc|final|logits|score)([._/]|$)", re.IGNORECASE)
_NORM = re.compile(r"(^|[._/])(\w*norm\w*|ln(_\w+|\d+)?|bn\d*)([._/]|$)", re.IGNORECASE)
_QUERY_KEY = re.compile(
    r"(^|[._/])(q|k|wq|wk|qk|qkv|query|key|query_key_value|c_attn|q_proj|k_proj|qkv_proj|in_proj\w*)([._/]|$)", re.IGNORECASE
)
_ATTENTION = re.compile(
    r"(^|[._/])(q|k|wq|wk|qk|qkv|query|key|query_key_value|c_attn|q_proj|k_proj|qkv_proj|in_proj\w*|attn|attention|self_attn)"
    r"([._/]|$)",
    re.IGNORECASE,
)


class View:
    """An anomaly with the rows and step contexts around it. "Before" means steps before the onset; what the record does not
    have is None or empty, never a guess."""

    def __init__(self, anomaly: Anomaly, window: Sequence[Row], contexts: Sequence[StepContext] = ()) -> None:
        self.anomaly = anomaly
        self.onset = anomaly.onset
        rows = {row.step: row for row in sorted(window, key=lambda row: row.seq) if row.kind == "step"}
        self.rows = [rows[step] for step in sorted(rows)]  # a repeated step is the newest
        self.contexts = sorted(contexts, key=lambda context: (context.step, context.seq))
        self.batches = Batches(self.contexts, self.onset)
        self._series: dict[str, tuple[IntArray, FloatArray]] = {}

    # -- series --------------------------------------------------------------------------------------------------------

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every series in the window, in order of first appearance."""
        return tuple(
            dict.fromkeys(name for schema in {id(r.schema): r.schema for r in self.rows}.values() for name in schema.names)
        )

    def family(self, head: str, tail: str) -> list[str]:
        return [name for name in self.names if name.startswith(head) and name.endswith(tail)]

    def series(self, name: str) -> tuple[IntArray, FloatArray]:
        """(steps, values) of one series; both empty when the record does not have it."""
        if name not in self._series:
            places = {schema: columns[name] for schema, columns in self._columns.items() if name in columns}
            found = [(row.step, row.values[places[id(row.schema)]]) for row in self.rows if id(row.schema) in places]
            self._series[name] = (
                np.array([step for step, _ in found], np.int64),
                np.array([value for _, value in found], np.float64),
            )
        return self._series[name]

    @cached_property
    def _columns(self) -> dict[int, dict[str, int]]:
        """{id of a schema: {series: its place in a row}}: of thousands of layers no series is searched for."""
        schemas = {id(row.schema): row.schema for row in self.rows}
        return {key: {name: place for place, name in enumerate(schema.names)} for key, schema in schemas.items()}

    def finite(self, name: str) -> tuple[IntArray, FloatArray]:
        """`series` without what is not finite."""
        steps, values = self.series(name)
        ok = np.isfinite(values)
        return steps[ok], values[ok]

    def before(self, name: str, last: int | None = None) -> FloatArray:
        """Finite values before the onset, oldest first; only the `last` ones if given."""
        steps, values = self.finite(name)
        found = values[steps < self.onset]
        return found if last is None else found[-last:]

    def near(self, name: str, after: int = 2) -> FloatArray:
        """Values from the onset to `after` steps past it, non-finite ones included."""
        steps, values = self.series(name)
        return values[(steps >= self.onset) & (steps <= self.onset + after)]

    def at(self, name: str) -> float | None:
        """The value at the onset."""
        found = self.near(name, 0)
        return float(found[0]) if len(found) else None

    def jump(self, name: str, after: int = 0) -> float | None:
        """How many robust sigmas, in log space, the largest value near the onset lies above the latest 100 before it, or above
        what the latest few lead to, whichever is less: what had been growing has not jumped. None with too little history.
        Excess kurtosis is taken from its least value, -3."""
        shift = 3.0 if name.endswith("/kurtosis") else 0.0
        base, near = self.before(name, 100) + shift, self.near(name, after) + shift
        far, leap = trends.jump(base, near), trends.leap(base, near)
        return None if far is None or leap is None else min(far, leap)

    def rise(self, name: str, after: int = 0) -> float | None:
        """The largest finite value near the onset over the median before it."""
        base, near = self.before(name, 100), self.near(name, after)
        near = near[np.isfinite(near)]
        if len(base) < 3 or not len(near) or np.median(base) <= 0:
            return None
        return float(near.max() / np.median(base))

    def growth(self, name: str) -> float | None:
        """How much larger a series was just before the onset than 48 steps earlier, beyond its usual growth; of a gradual
        anomaly also at the end of the window, for what grows is told while it grows."""
        steps, values = self.series(name)
        shifted = values + (3.0 if name.endswith("/kurtosis") else 0.0)
        found = [trends.growth(steps, shifted, self.onset)]
        if self.gradual and self.rows:
            found.append(trends.growth(steps, shifted, self.rows[-1].step + 1))
        return max((factor for factor in found if factor is not None), default=None)

    @cached_property
    def gradual(self) -> bool:
        """The anomaly grew over many steps: a drift, or a rise of its first series of which no single step made the most."""
        if self.lr_jumped or self.anomaly.kind in ("nonfinite", "rule") or not self.rows:
            return False
        if self.anomaly.kind == "drift":
            return True
        if self.loss_jump is not None and self.loss_jump > JUMPED:
            return False
        first = min(self.onset, self.mover[1] if self.mover else self.onset) - 4
        moved = {self.anomaly.series} if self.anomaly.series.startswith(("act/", "layer/", "grad/")) else set()
        for name in moved | ({self.mover[0]} if self.mover else moved or {self.anomaly.series}):
            steps, values = self.series(name)
            shift = 3.0 if name.endswith("/kurtosis") else 0.0
            found = trends.largest_share(steps, values + shift, first, self.rows[-1].step)
            if found is not None and found[0] > _RISE and found[1] < _STEPWISE:
                return True
        return False

    def grown(self, names: Sequence[str], least: float) -> list[Grown]:
        """(growth, name) of the series that grew at least `least` times, the most grown first."""
        found = [(factor, name) for name in names if (factor := self.growth(name)) is not None and factor >= least]
        return sorted(found, reverse=True)

    # -- the loss --------------------------------------------------------------------------------------------------------

    @cached_property
    def lasts(self) -> bool | None:
        """True if the loss has not come most of the way back by the end of the window, False if it has, None if the window ends
        too early to tell."""
        base, after = self.before("train/loss", 16), self.near("train/loss", max(LATER, self.anomaly.step - self.onset + LATER))
        if len(after) < 5 or len(base) < 5:
            return None
        finite = after[np.isfinite(after)]
        late = after[-3:]
        if not np.isfinite(late).all():
            return True
        level = float(np.median(base))
        return bool(np.median(late) > level + _BACK * (float(finite.max()) - level))

    @property
    def passed(self) -> bool:
        """It was over within a few steps."""
        return self.anomaly.recovered_after is not None and self.anomaly.recovered_after <= 5

    @cached_property
    def loss_jump(self) -> float | None:
        """By how many robust sigmas the loss lies above the line of its latest values at the onset."""
        base, now = self.before("train/loss", 32), self.at("train/loss")
        if len(base) < trends.LEAST or now is None:
            return None
        if not np.isfinite(now):
            return np.inf
        return trends.off_line(now, base, 0.01 * abs(float(np.median(base))))

    @cached_property
    def began(self) -> int:
        """The onset, or the step of the few before it at which the loss had left its line: a detector's band is wider where the
        loss is uneven, and what did it may have been measured by the onset."""
        steps, values = self.finite("train/loss")
        first = self.onset
        while first > self.onset - _BLUR:
            base, now = values[steps < first - 1][-32:], values[steps == first - 1]
            if len(base) < trends.LEAST or not len(now):
                break
            if trends.off_line(float(now[0]), base, 0.01 * abs(float(np.median(base)))) <= JUMPED:
                break
            first -= 1
        return first

    @cached_property
    def loss_shift(self) -> float | None:
        """By how many robust sigmas of its latest values the loss lies above them in the median of the window's end."""
        base, after = self.before("train/loss", 32), self.near("train/loss", LATER)
        after = after[np.isfinite(after)]
        if len(base) < trends.LEAST or len(after) < 4:
            return None
        return trends.deviation(float(np.median(after)), base, 0.01 * abs(float(np.median(base))))

    # -- before the onset --------------------------------------------------------------------------------------------------

    @property
    def mover(self) -> tuple[str, int] | None:
        """The first mover, unless it began so long before the onset that it is another story."""
        found = self.anomaly.first_mover
        return found if found is not None and self.onset - found[1] <= _LOOKBACK else None

    @property
    def lead(self) -> int:
        """How many steps the first mover was ahead of the onset, 0 if it was not."""
        return max(0, self.onset - self.mover[1]) if self.mover else 0

    @property
    def sudden(self) -> bool:
        """The loss jumped in one step, and nothing had left its band before: what grows is seen to grow."""
        return (self.loss_jump or 0.0) > JUMPED and self.lead <= 1 and not self.gradual

    @property
    def resumed(self) -> bool:
        return "after_resume" in self.anomaly.notes

    @cached_property
    def since_resume(self) -> int | None:
        return since_resume(self.anomaly, self.rows)

    @cached_property
    def lr_jump(self) -> tuple[float, int] | None:
        """(factor, step) of the largest change of the learning rate near the onset, beyond its usual change, in one step or in
        a few; None if the record has no learning rate. 1.0 is no jump."""
        steps, rates = self.finite("train/lr")
        if len(steps) < 3:
            return None
        climb = trends.climb(steps, rates, self.onset, self.anomaly.step + LATER)
        ok = (rates[1:] > 0) & (rates[:-1] > 0)
        ratio = np.where(ok, rates[1:] / np.where(ok, rates[:-1], 1.0), 1.0)
        near = np.flatnonzero((steps[1:] > self.onset - 50) & (steps[1:] <= self.anomaly.step))
        if not len(near):
            return None
        excess = np.where(trends.stand_out(np.diff(rates)), ratio / float(np.median(ratio)), 1.0)
        worst = int(near[np.argmax(np.abs(np.log(excess[near])))])
        if climb is not None and climb[0] > 1.5 * excess[worst]:
            return climb
        return float(excess[worst]), int(steps[worst + 1])

    @property
    def lr_jumped(self) -> bool:
        return self.lr_jump is not None and self.lr_jump[0] > 1.5

    @cached_property
    def clipping_lost(self) -> tuple[float, int] | None:
        """(the norm at which clipping had held the gradient, the first step near the onset at which it no longer did)."""
        both = [
            (row.step, raw, used)
            for row in self.rows
            if (raw := row.get("grad/norm")) is not None and (used := row.get("grad/norm_clipped")) is not None
        ]
        held = [(step, used) for step, raw, used in both if used < 0.99 * raw]
        if not held:
            return None
        bound = float(np.median([used for _, used in held]))
        free = [step for step, _, used in both if step >= self.onset - 16 and used > 1.5 * bound]
        return (bound, free[0]) if free and not any(step > free[0] for step, _ in held) else None

    @cached_property
    def common_growth(self) -> float:
        """The median growth of all weights' norms; 1.0 where none is known."""
        names = [name for name in self.family("layer/", "/weight_norm") if not name.endswith("bias/weight_norm")]
        factors = [f for name in names if (f := self.growth(name)) is not None]
        return float(np.median(factors)) if len(factors) > 2 else 1.0

    @cached_property
    def grown_weights(self) -> list[Grown]:
        """(growth, series) of weights, biases left out, whose norm had grown by a fifth and clearly more than the median."""
        names = [name for name in self.family("layer/", "/weight_norm") if not name.endswith("bias/weight_norm")]
        factors = {name: f for name in names if (f := self.growth(name)) is not None}
        usual = max(float(np.median(list(factors.values()))), 1.0) if factors else 1.0
        return sorted(((f, name) for name, f in factors.items() if f > 1.2 and f > 1.15 * usual), reverse=True)

    # -- activations -------------------------------------------------------------------------------------------------------

    @cached_property
    def sites(self) -> list[str]:
        """Measured modules, in the model's order."""
        return list(dict.fromkeys(n[4:].rpartition("/")[0] for n in self.names if n.startswith("act/")))

    @cached_property
    def jumps(self) -> list[tuple[str, str, float]]:
        """(module, its worst series, sigmas) at the onset, in the model's order."""
        found = []
        for site in self.sites:
            series = [f"act/{site}/{statistic}" for statistic in _ACTIVATIONS]
            known = [(z, name) for name in series if (z := self.jump(name)) is not None]
            lost = (self.at(f"act/{site}/nonfinite") or 0.0) > 0
            if known or lost:
                z, name = (np.inf, f"act/{site}/nonfinite") if lost else max(known)
                found.append((site, name, float(z)))
        return found

    @cached_property
    def first_jump(self) -> tuple[int, str, float] | None:
        """(place, series, sigmas) of the first module, in the model's order, whose output jumped at the onset."""
        return next(((k, name, z) for k, (_, name, z) in enumerate(self.jumps) if z > JUMPED), None)

    @cached_property
    def parameters(self) -> list[str]:
        """In the model's order."""
        return list(dict.fromkeys(n[6:].rpartition("/")[0] for n in self.names if n.startswith("layer/")))

    @cached_property
    def _last_layer(self) -> str:
        """The output layer by its place, where no parameter has such a name: that of the last weight, if it is no
        normalisation's and of no numbered block; "" if there is none."""
        if any(is_head(parameter) for parameter in self.parameters):
            return ""
        last = next((p.rpartition(".")[0] for p in reversed(self.parameters) if p.endswith(".weight") and not is_norm(p)), "")
        return "" if any(part.isdigit() for part in last.split(".")) else last

    def is_output(self, name: str) -> bool:
        """The series `name` is of the output layer: by its name or by its place."""
        last = self._last_layer
        return is_head(name) or (bool(last) and name.partition("/")[2].startswith((f"{last}.", f"{last}/")))

    def is_outer(self, name: str) -> bool:
        """The series `name` is of an embedding or of the output layer."""
        return is_embedding(name) or self.is_output(name)

    def downstream(self, name: str) -> bool:
        """The part that the series `name` measures comes after the module whose output jumped first at the onset: what enters
        there was no cause."""
        if self.first_jump is None:
            return False
        place = self.first_jump[0]
        site = self.sites[place]
        part = name.partition("/")[2].rpartition("/")[0]
        if name.startswith("act/"):
            return part in self.sites and self.sites.index(part) > place
        own = [k for k, parameter in enumerate(self.parameters) if parameter.startswith(f"{site}.")]
        return bool(own) and part in self.parameters and self.parameters.index(part) > own[-1]

    @cached_property
    def input_module(self) -> str | None:
        """The first measured module, if it is the one that maps the inputs as they are: it holds the first parameter, and
        looks nothing up."""
        if not self.sites or not self.parameters or is_embedding(self.sites[0]):
            return None
        return self.sites[0] if self.parameters[0].rpartition(".")[0] == self.sites[0] else None

    @cached_property
    def hot_rows(self) -> tuple[list[int], int, int] | None:
        """(token ids among the embedding rows with the largest gradients at the onset that never were among them before, how
        many rows that are, how many they usually are): what the inputs were, where no batch is recorded. None where it is not
        measured, or where new ones are usual."""
        series = [self.series(name) for name in self.names if name.startswith("embedding/hottest_row/")]
        by_step: dict[int, set[int]] = {}
        for steps, values in series:
            for step, value in zip(steps.tolist(), values.tolist(), strict=True):
                if np.isfinite(value):
                    by_step.setdefault(step, set()).add(int(value))
        before = [by_step[step] for step in sorted(by_step) if step < self.onset]
        now = by_step.get(self.onset)
        if not now or len(before) < _TOKENS_FROM:
            return None
        seen: set[int] = set().union(*before[: len(before) // 2])
        fresh = 0
        for rows in before[len(before) // 2 :]:
            fresh += len(rows - seen)
            seen |= rows
        usual = fresh / max(sum(map(len, before[len(before) // 2 :])), 1)
        many = int(np.median([len(rows) for rows in before]))
        return (sorted(now - seen), len(now), many) if usual < _SELDOM else None

    def lone_unit(self, parameter: str) -> str | None:
        """The series of a gradient before `parameter` in the model that one element alone has had all of since the onset, and
        not before: what came back to it came through one number. None if there is no such."""
        for other in self.parameters[: self.parameters.index(parameter)] if parameter in self.parameters else ():
            whole, top = (f"layer/{other}/grad_{what}" for what in ("norm", "max"))
            (steps, norms), (same, tops) = self.series(whole), self.series(top)
            if len(steps) != len(same) or not np.array_equal(steps, same):
                continue
            share = tops / np.maximum(norms, 1e-300)
            before, near = share[steps < self.onset], share[(steps >= self.onset) & (steps <= self.onset + 2)]
            if len(before) >= trends.LEAST and len(near) and float(np.median(before[-64:])) < 0.8 and near.max() > 0.98:
                return top
        return None

    @cached_property
    def moved_activation(self) -> tuple[str, float] | None:
        """(series, sigmas) of the activation statistic that moved most, up or down, at the onset. Later steps say less: the
        weights have moved by then."""
        return max(self.moved_activations, key=lambda pair: pair[1], default=None)

    @cached_property
    def moved_activations(self) -> list[tuple[str, float]]:
        """The same of every activation statistic."""
        return [one for site in self.sites for one in self._moved(site)]

    @property
    def moved_first_module(self) -> tuple[str, float] | None:
        """The same of the first module alone."""
        return max(self._moved(self.sites[0]), key=lambda pair: pair[1], default=None) if self.sites else None

    def _moved(self, site: str) -> list[tuple[str, float]]:
        found = []
        for statistic in _ACTIVATIONS:
            name = f"act/{site}/{statistic}"
            shift = 3.0 if statistic == "kurtosis" else 0.0
            z = trends.moved(self.before(name, 100) + shift, self.near(name, 0) + shift)
            if z is not None:
                found.append((name, z))
        return found

    def batch(self) -> tuple[MicroBatch, ...]:
        """The micro-batches of the onset."""
        return next((context.micro for context in self.contexts if context.step == self.onset), ())


def since_resume(anomaly: Anomaly, rows: Sequence[Row]) -> int | None:
    """Steps from the start of the anomaly's attempt to its onset. None in a first attempt, and where it began before this one:
    by more than a level's onset may be dated too early."""
    start = min((row.step for row in rows if row.attempt == anomaly.attempt), default=None)
    if start is None or anomaly.attempt == 0 or anomaly.onset < start - _BLUR:
        return None
    return max(anomaly.onset - start, 0)


def is_embedding(name: str) -> bool:
    """By name: token and position embeddings as the common models call them."""
    return bool(_EMBEDDING.search(name))


def is_head(name: str) -> bool:
    """By name: the output layer."""
    return bool(_HEAD.search(name)) and not is_attention(name)


def is_norm(name: str) -> bool:
    """By name: a normalisation."""
    return bool(_NORM.search(name))


def is_attention(name: str) -> bool:
    """By name: what makes attention logits, or the module around it."""
    return bool(_ATTENTION.search(name))


def is_query_or_key(name: str) -> bool:
    """By name: what makes queries or keys, alone or together with values."""
    return bool(_QUERY_KEY.search(name))


def number(value: float) -> str:
    """A value as evidence shows it: three significant digits."""
    return f"{value:.3g}"


def moved_by(name: str, z: float, how: str = "moved") -> str:
    """How far the series `name` moved, for evidence. What is not finite has no distance from what was."""
    if np.isfinite(z):
        return f"{name} {how} {number(z)} sigmas"
    return f"{name} is above 0 from one step to the next" if name.endswith("/nonfinite") else f"{name} is finite no more"


def in_steps(count: int | None) -> str:
    """``1 step``, ``2 steps``."""
    return f"{count} step{'' if count == 1 else 's'}"


def times(factor: float) -> str:
    return f"{number(factor)} times"
