"""How well the detectors find what is there, and how often they cry wolf.

    python benchmarks/detection.py                     synthetic bench and speed
    python benchmarks/detection.py CURVES              also real curves: a folder with score.py, labels.json and one CSV per run
    python benchmarks/detection.py CURVES --validate   also choose the parameters anew with each family left out
    python benchmarks/detection.py --seeds 20          so many seeds of the synthetic bench
    python benchmarks/detection.py --trade             false alarms against recall, over thresholds, on 100 other seeds
    python benchmarks/detection.py --memory 1000000    only: memory and state of a watch over so many steps

The synthetic bench: loss 2 + 8 / sqrt(step), noise sigma 0.05 (Gaussian, AR(1) with 0.5 and 0.9, Student t with 4 degrees
of freedom, all of equal variance), 4,000 steps, one-step spikes at random steps, a drift of 0.01 per step, a NaN.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from trackbridge.config import DetectionConfig
from trackbridge.detectors.band import BandDetector, Tuning
from trackbridge.detectors.base import Detector
from trackbridge.detectors.reference import REFERENCES
from trackbridge.detectors.watch import Watch
from trackbridge.records import MicroBatch, Row, Schema, StepContext

STEPS = 4000
SPIKES = (0.3, 0.5, 1.0, 3.0)
NOISES = ("gaussian", "ar 0.5", "ar 0.9", "t4")
SIGMA = 0.05
_EMPTY = np.zeros((8, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", nargs="?", type=Path, help="folder of real curves with their judge, score.py")
    parser.add_argument("--validate", action="store_true", help="leave-one-family-out choice of the parameters")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trade", action="store_true", help="false alarms against recall over thresholds")
    parser.add_argument("--memory", type=int, metavar="STEPS", help="only watch memory over so many steps")
    arguments = parser.parse_args()
    if arguments.memory:
        print_memory(arguments.memory)
        return
    if arguments.trade:
        print_trade()
    print_synthetic(arguments.seeds)
    print_speed()
    if arguments.curves:
        bench = Curves(arguments.curves)
        bench.report()
        if arguments.validate:
            bench.validate()


# -- a column per curve: every detector judges many curves in one pass ------------------------------------------------


def alarms(detector: Detector, curves: np.ndarray) -> list[list[tuple[int, str]]]:
    """(step, kind) of every verdict, per column of `curves` (steps, n); NaN past a curve's end is absent."""
    steps, n = curves.shape
    detector.bind([f"train/loss/{i}" for i in range(n)])
    lengths = np.array([np.flatnonzero(np.isfinite(curves[:, j]))[-1] + 1 for j in range(n)])
    found: list[list[tuple[int, str]]] = [[] for _ in range(n)]
    for step in range(steps):
        for verdict in detector.update(step, curves[step], step < lengths):
            found[verdict.index].append((step, verdict.kind))
    return found


def watched(loss: np.ndarray, settings: DetectionConfig | None = None) -> list[tuple[int, str, int]]:
    """(step, kind, onset) of the anomalies of one curve, through `Watch` as in a live run."""
    watch, schema = Watch(settings), Schema(("train/loss",))
    last: dict[str, Any] = {}
    for step, value in enumerate(loss):
        for anomaly in watch.update(Row(step, step, 0.0, 0, schema, np.array([value]))):
            last[anomaly.id] = anomaly
    last.update({anomaly.id: anomaly for anomaly in watch.finish()})
    return [(a.step, a.kind, a.onset) for a in last.values()]


def events(found: Sequence[tuple[int, str]]) -> int:
    """Alarms on consecutive steps are one event."""
    steps = [step for step, _ in found]
    return sum(1 for i, step in enumerate(steps) if i == 0 or step - steps[i - 1] > 1)


# -- synthetic ------------------------------------------------------------------------------------------------------


def trend() -> np.ndarray:
    return 2 + 8 / np.sqrt(np.arange(1, STEPS + 1))


def noise(kind: str, random: np.random.Generator) -> np.ndarray:
    if kind == "t4":
        return SIGMA * random.standard_t(4, STEPS) / np.sqrt(2)
    white = random.standard_normal(STEPS)
    if kind == "gaussian":
        return SIGMA * white
    phi = float(kind.split()[1])
    out = np.empty(STEPS)
    out[0] = white[0]
    for i in range(1, STEPS):
        out[i] = phi * out[i - 1] + np.sqrt(1 - phi * phi) * white[i]
    return SIGMA * out


@dataclass
class Score:
    false_alarms: dict[str, int]  # counts
    recall: dict[float, float]
    nan: float
    drift: float
    drift_worst: float


def spiked(seeds: Sequence[int], size: float) -> tuple[np.ndarray, list[np.ndarray]]:
    """A curve per seed with twenty one-step spikes of `size`, and the steps of those."""
    curves, truth = [], []
    for seed in seeds:
        random = np.random.default_rng([seed, 77])
        curve = trend() + noise("gaussian", random)
        at = np.sort(random.choice(np.arange(100, STEPS, 20), 20, replace=False)) + random.integers(0, 10, 20)
        curve[at] += size
        curves.append(curve), truth.append(at)
    return np.stack(curves, 1), truth


def synthetic(make: Callable[[], Detector], seeds: int) -> Score:
    clean = np.stack([trend() + noise(k, np.random.default_rng([s, i])) for s in range(seeds) for i, k in enumerate(NOISES)], 1)
    found = alarms(make(), clean)
    false = {k: sum(events(found[s * len(NOISES) + i]) for s in range(seeds)) for i, k in enumerate(NOISES)}
    hits: dict[float, list[float]] = {}
    for size in SPIKES:
        curves, truth = spiked(range(seeds), size)
        hits[size] = [
            float(np.isin(at, [step for step, _ in steps]).mean())
            for steps, at in zip(alarms(make(), curves), truth, strict=True)
        ]
    drifting = np.stack([trend() + noise("gaussian", np.random.default_rng([s, 99])) for s in range(seeds)], 1)
    drifting[2000:] += 0.01 * np.arange(1, STEPS - 2000 + 1)[:, None]
    delays = [next((step - 2000 + 1 for step, _ in steps if step >= 2000), np.inf) for steps in alarms(make(), drifting)]
    broken = clean[:, :: len(NOISES)].copy()
    broken[1500] = np.nan
    seen = [(1500, "nonfinite") in steps for steps in alarms(make(), broken)]
    return Score(
        false, {k: float(np.mean(v)) for k, v in hits.items()}, float(np.mean(seen)),
        float(np.median(delays)), float(np.max(delays)),
    )  # fmt: skip


def print_synthetic(seeds: int) -> None:
    print(f"synthetic, {seeds} seeds x {STEPS} steps: false alarms per 1,000 [95%] | recall at {SPIKES} | NaN | drift")
    for name, make in {"trackbridge": BandDetector, **REFERENCES}.items():
        s = synthetic(make, seeds)
        false = " ".join(f"{k} {rate(v, seeds * STEPS)}" for k, v in s.false_alarms.items())
        recall = " ".join(f"{v:.2f}" for v in s.recall.values())
        print(f"  {name:34s} {false} | {recall} | {s.nan:.0%} | {s.drift:g}, {s.drift_worst:g}")
    per_episode = []
    for seed in range(seeds):
        curve = trend() + noise("gaussian", np.random.default_rng([seed, 5]))
        curve[1000:1012] += np.linspace(1.5, 0.4, 12)
        curve[2500:] += 1.0
        per_episode.append(len(watched(curve)))
    print(f"  events for one 12-step spike and one lasting shift (2 is right): {per_episode}")


def rate(count: int, steps: int) -> str:
    """Events per 1,000 steps with their exact Poisson interval (Garwood 1936)."""
    from scipy.stats import chi2

    low = chi2.ppf(0.025, 2 * count) / 2 if count else 0.0
    high = chi2.ppf(0.975, 2 * count + 2) / 2
    return f"{1000 * count / steps:.3f} [{1000 * low / steps:.3f}, {1000 * high / steps:.3f}]"


def print_trade(seeds: int = 100) -> None:
    """What a lower rate of false alarms would cost in recall, on seeds that nothing was chosen on."""
    clean = np.stack([trend() + noise(k, np.random.default_rng([s, i])) for s in range(1000, 1000 + seeds)
                      for i, k in enumerate(NOISES)], 1)  # fmt: skip
    curves, truth = spiked(range(1000, 1000 + seeds // 2), 0.3)
    print(f"trade-off on {seeds} other seeds: false alarms per 1,000 [95%] | recall at +0.3 (6 sigma)")
    makers: dict[str, Callable[[], Detector]] = {
        f"threshold {t}": partial(BandDetector, DetectionConfig(threshold=t)) for t in (4.2, 4.4, 4.5, 4.6, 4.8, 5.2, 6.0)
    }
    for name, make in {**makers, **REFERENCES}.items():
        found = alarms(make(), clean)
        false = " ".join(
            f"{k} {rate(sum(map(events, found[i :: len(NOISES)])), seeds * STEPS)}" for i, k in enumerate(NOISES)
        )
        judged = zip(alarms(make(), curves), truth, strict=True)
        recall = np.mean([np.isin(at, [step for step, _ in steps]).mean() for steps, at in judged])
        print(f"  {name:34s} {false} | {recall:.3f}")



# -- speed ----------------------------------------------------------------------------------------------------------


def print_speed(series: int = 2000, steps: int = 2000) -> None:
    names = [f"layer/p{i}/{kind}" for i in range(series // 2) for kind in ("grad_norm", "update_ratio")]
    detector = BandDetector()
    detector.bind([*names[:-2], "train/loss", "grad/norm"])
    random, present = np.random.default_rng(0), np.ones(series, bool)
    values = np.exp(random.normal(0, 0.2, (256, series)))
    took = []
    for step in range(steps):
        start = time.perf_counter()
        detector.update(step, values[step % 256], present)
        took.append(time.perf_counter() - start)
    low, middle = np.percentile(np.array(took[200:]) * 1e6, [5, 50])
    print(f"update() of {series:,} series: median {middle:.0f} microseconds, 5th percentile {low:.0f}")
    watch, schema = Watch(), Schema((*detector.series, "train/lr", "train/tokens", "perf/step_s", "perf/tokens_per_s"))
    took = []
    for step in range(steps):
        row = Row(step, step, 0.0, 0, schema, np.append(values[step % 256], [1e-3, 4096.0 * step, 1.0, 4096.0]))
        start = time.perf_counter()
        watch.update(row)
        took.append(time.perf_counter() - start)
    low, middle = np.percentile(np.array(took[200:]) * 1e6, [5, 50])
    print(f"a whole watch, monitors included: median {middle:.0f} microseconds, 5th percentile {low:.0f}")


def print_memory(steps: int, layers: int = 20) -> None:
    """Memory of the process and size of the state of a watch that sees everything it can see, at each power of ten."""
    import json
    import resource

    names = ["train/loss", "grad/norm", "train/lr", "train/tokens", "train/loss_scale", "perf/step_s", "perf/tokens_per_s",
             "mem/allocated_bytes", "mem/reserved_bytes", "optim/exp_avg_sq_norm"]  # fmt: skip
    names += [f"layer/{i}/{kind}" for i in range(layers) for kind in ("grad_norm", "update_ratio", "exp_avg_sq_norm")]
    watch, schema, random = Watch(), Schema(tuple(names)), np.random.default_rng(0)
    told, shown = 0, 1000
    for step in range(steps + 1):
        values = np.exp(random.normal(0, 0.05, len(names)))
        values[3] = 4096.0 * step
        if step % 5000 == 4999:
            values[0] += 5
        micro = MicroBatch(loader=0, epoch=step // 1000, fingerprint=f"{step:032x}", tensors={"x": _EMPTY})
        told += len(watch.update(Row(step, step, float(step), 0, schema, values), StepContext(-1, step, 0, {}, (micro,))))
        if step == shown:
            state, resident = len(json.dumps(watch.state_dict())), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(f"after {step:9,} steps: {resident:.1f} MiB resident at most, state {state:,} bytes, {told} anomaly records")
            shown *= 10


# -- real curves ----------------------------------------------------------------------------------------------------


class Curves:
    """Real curves, judged by the folder's own ``score.py``."""

    def __init__(self, folder: Path) -> None:
        self.judge = _load(folder / "score.py")
        self.runs = list(self.judge.load(folder))
        self.families = [_family(name) for name, *_ in self.runs]

    def matrix(self) -> np.ndarray:
        out = np.full((max(len(loss) for _, _, loss, _ in self.runs), len(self.runs)), np.nan)
        for j, (_, _, loss, _) in enumerate(self.runs):
            out[: len(loss), j] = loss
        return out

    def scores(self, found: Sequence[Sequence[int]]) -> np.ndarray:
        """(runs, 5): spikes, hits, points, false alarms, false alarms strictly; `found` are indices per run."""
        rows = []
        for steps, (_, x, _, label) in zip(found, self.runs, strict=True):
            spikes, hits, _, false, points = self.judge.score_run(x, steps, label, False)
            rows.append((spikes, hits, points, false, self.judge.score_run(x, steps, label, True)[3]))
        return np.array(rows, float)

    def report(self) -> None:
        table = {"trackbridge": self.scores([[step for step, _, _ in watched(loss)] for _, _, loss, _ in self.runs])}
        for name, detect in self.judge.BASELINES.items():
            table[name] = self.scores([detect(x, loss) for _, x, loss, _ in self.runs])
        print(f"real curves, {len(self.runs)} runs of {len(set(self.families))} families, 95% intervals by bootstrap over runs")
        for name, rows in table.items():
            print(f"  {name:28s} {_summary(rows)}")

    def validate(self) -> None:
        """Leave one family out: choose the parameters on the rest, count misses and false alarms on the family."""
        grid = list(_grid())
        curves = self.matrix()
        rows = []
        for settings, tuning in grid:
            rows.append(self.scores([[s for s, _ in found] for found in alarms(BandDetector(settings, tuning), curves)]))
        held = np.zeros_like(rows[0])
        for family in sorted(set(self.families)):
            inside = np.array([f == family for f in self.families])
            cost = [_cost(row[~inside]) for row in rows]
            best = min(range(len(grid)), key=lambda i: (cost[i], i))
            held[inside] = rows[best][inside]
            settings, tuning = grid[best]
            print(
                f"  without {family:14s}: threshold {settings.threshold:g}, level {tuning.level_gain:g}, scale 1/"
                f"{1 / tuning.scale_gain:.0f}, tail span {tuning.tail_span:g} -> here {_counts(rows[best][inside])}"
            )
        print(f"  held-out families together     {_summary(held)}")
        print(f"  over the whole grid of {len(grid)}: {_spread(rows)}")


def _grid() -> Iterator[tuple[DetectionConfig, Tuning]]:
    for threshold, level, scale, span in itertools.product(
        (4.2, 4.5, 5.2), (0.12, 0.2, 0.3), (30, 45, 60), (3.5, 5.0, 6.5)
    ):
        yield (
            DetectionConfig(threshold=threshold),
            replace(Tuning(), level_gain=level, scale_gain=1 / scale, tail_span=span),
        )


def _cost(rows: np.ndarray) -> float:
    """What a choice is judged by: misses, false alarms, and a little for alarms on heavy-tailed batches."""
    return float((rows[:, 0] - rows[:, 1]).sum() + rows[:, 3].sum() + 0.02 * rows[:, 4].sum())


def _counts(rows: np.ndarray) -> str:
    spikes, hits, _, false, strict = rows.sum(axis=0).astype(int)
    return f"{hits}/{spikes} found, {false} false, {strict} strictly"


def _spread(rows: Sequence[np.ndarray]) -> str:
    hits = [int(r[:, 1].sum()) for r in rows]
    false = [int(r[:, 3].sum()) for r in rows]
    strict = [int(r[:, 4].sum()) for r in rows]
    return f"found {min(hits)} to {max(hits)}, false {min(false)} to {max(false)}, strictly {min(strict)} to {max(strict)}"


def _summary(rows: np.ndarray, draws: int = 2000) -> str:
    random = np.random.default_rng(0)
    picks = random.integers(0, len(rows), (draws, len(rows)))
    sums = rows[picks].sum(axis=1)
    recall = np.percentile((sums[:, 1] / np.maximum(sums[:, 0], 1))[sums[:, 0] > 0], [2.5, 97.5])
    per = [np.percentile(1000 * sums[:, k] / sums[:, 2], [2.5, 97.5]) for k in (3, 4)]
    total = rows.sum(axis=0)
    has = rows[:, 0] > 0
    return (
        f"{_counts(rows)}; recall {total[1] / total[0]:.3f} [{recall[0]:.2f}, {recall[1]:.2f}], macro "
        f"{np.mean(rows[has, 1] / rows[has, 0]):.3f}; false per 1,000 {1000 * total[3] / total[2]:.3f} "
        f"[{per[0][0]:.3f}, {per[0][1]:.3f}], strictly {1000 * total[4] / total[2]:.2f} [{per[1][0]:.2f}, {per[1][1]:.2f}]"
    )


def _family(run: str) -> str:
    """Runs of one code base and data set belong together."""
    parts = run.split("_")
    return "_".join(parts[:2]) if parts[0] == "meg" else parts[0]


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("curve_score", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
