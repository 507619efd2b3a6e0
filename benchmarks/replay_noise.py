"""How often a healthy recording is accused, and a flipped bit missed, where two runs of the same code differ in the last bits.

Run: ``python -m benchmarks.replay_noise`` (CPU, some minutes). Noise is made on the CPU (tests/replay/noise_kit.py): additions
in an order drawn from the operating system, in every step or rarely, in float32 or under autocast to bfloat16, which swallows
most of it. Of `DRAWS` replays of one capsule each in turn is taken for the record and judged by `MOST` others, drawn at random;
and so is each of `DRAWS` more with one flipped bit of a weight at a random step. What was seen is in docs/replay.md.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

import trackbridge
from tests import replays
from tests.replay import noise_kit
from trackbridge.capsule import SpikeCapsule
from trackbridge.replay import settings
from trackbridge.replay.compare import LOSS, compare, family, is_id
from trackbridge.replay.engine import Replay
from trackbridge.replay.judge import Ran, judge
from trackbridge.replay.noise import MOST, Noise, typical

DRAWS = 60
NOISE = {  # (chance in a micro-batch, of which a step has two; bfloat16)
    "every step": (1.0, False),
    "one step in ten": (0.05, False),
    "one step in fifty": (0.01, False),
    "every step, bfloat16": (1.0, True),
    "one step in ten, bfloat16": (0.05, True),
}
FLIPS = {"mantissa, high": range(18, 23), "exponent": range(23, 31)}

History = Mapping[int, Ran]


def draws(capsule: SpikeCapsule, noise: tuple[float, bool], count: int, bits: range | None = None) -> list[History]:
    """So many replays; with `bits`, each with a bit of these flipped, at a step and in a weight of its own."""
    found = []
    for number in range(count):
        generator = random.Random(number)
        at = generator.randrange(capsule.restart_step + 1, capsule.step + 1)
        flip = None if bits is None else partial(noise_kit.flip_a_bit, at=at, generator=generator, bits=bits)
        replay = Replay(capsule, noise_kit.build(noise[0], random.SystemRandom(), flip, bfloat16=noise[1]), 0, None, None)
        with settings.kept(), replay.random_state_kept():
            found.append(replay.run(0))
    return found


def as_record(history: History) -> dict[int, dict[str, float]]:
    return {step: {LOSS: ran.seen.loss, **ran.seen.values} for step, ran in history.items()}


def verdict(record: History, others: list[History]) -> str:
    return judge(as_record(record), others).verdict


def furthest(record: History, others: list[History]) -> tuple[float, float]:
    """By how much the record goes beyond the replays, the worst step: (typically, in one series); the limits are TYPICAL and
    SINGLE of trackbridge/replay/noise.py."""
    steps = sorted(record)
    noise = Noise([[history[step].seen for step in steps] for history in others])
    recorded, alone, most = as_record(record), None, (0.0, 0.0)
    for place, step in enumerate(steps):
        results = [compare(recorded[step], history[step].seen, first=place == 0) for history in others]
        distances = [{d.series: d.ulp for d in found if not is_id(d.series)} for _, found in results]
        if alone is None and all(distances):
            alone = place
        if alone is None:
            continue
        bounds = noise.bounds(place, place - alone)
        near = {name: min(known.get(name, 0.0) for known in distances) for name in set().union(*distances)}
        near = {name: distance for name, distance in near.items() if distance}
        single = max((d / (bounds.families.get(family(name), 0.0) + 1.0) for name, d in near.items()), default=0.0)
        most = (max(most[0], typical(near.values(), results[0][0]) / (bounds.typical + 1.0)), max(most[1], single))
    return most


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--steps", type=int, default=30, help="between two snapshots: up to so many before the spike")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as where:
        recorder = {"snapshot_every": options.steps, "before": 3, "after": 4}
        capsule = trackbridge.pull(replays.record(Path(where), recorder=recorder))
        print(f"steps {capsule.restart_step} to {capsule.span[1]}, {options.draws} draws, {MOST} replays each")
        for words, noise in NOISE.items():
            healthy = draws(capsule, noise, options.draws)
            for kind, bits in {"healthy": None, **FLIPS}.items():
                records = healthy if bits is None else draws(capsule, noise, options.draws, bits)
                found: Counter[str] = Counter()
                excess = []
                for number, record in enumerate(records):
                    others = [history for history in healthy if history is not record]
                    chosen = random.Random(number).sample(others, MOST)
                    found[verdict(record, chosen)] += 1
                    excess.append(furthest(record, chosen))
                typically, single = (sorted(column) for column in zip(*excess, strict=True))
                shares = ", ".join(f"{name} {count}" for name, count in found.most_common())
                middle = len(excess) // 2
                print(
                    f"{words}; {kind}: {shares}; beyond the replays typically {typically[0]:.3g} / {typically[middle]:.3g} / "
                    f"{typically[-1]:.3g}, in one series {single[0]:.3g} / {single[middle]:.3g} / {single[-1]:.3g}"
                )


if __name__ == "__main__":
    main()
