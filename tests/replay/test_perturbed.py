"""Replays in which something differs are never exact, and what differs is found."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import replays
from trackbridge.capsule import SpikeCapsule
from trackbridge.replay import Rebuilt, rerun

# -- perturbed: never exact

Perturb = Callable[[random.Random, Rebuilt, list[Any]], None]


def flip(generator: random.Random, tensor: Tensor, bits: range) -> None:
    """Flip one bit of one element."""
    place = generator.randrange(tensor.numel())
    tensor.detach().view(-1).view(torch.int32)[place] ^= 1 << generator.choice(bits)


def flip_weight(generator: random.Random, made: Rebuilt, batches: list[Any]) -> None:
    flip(generator, generator.choice(list(made.models[""].parameters())), range(12, 31))


def flip_moment(generator: random.Random, made: Rebuilt, batches: list[Any]) -> None:
    state = generator.choice(list(made.optimizers[""].state.values()))
    flip(generator, state[generator.choice(["exp_avg", "exp_avg_sq"])], range(12, 31))


def change_token(generator: random.Random, made: Rebuilt, batches: list[Any]) -> None:
    tokens = list.__getitem__(batches, 0)[0]
    place = generator.randrange(tokens.numel())
    tokens.view(-1)[place] = (tokens.view(-1)[place] + 1 + generator.randrange(30)) % 32


def swap_samples(generator: random.Random, made: Rebuilt, batches: list[Any]) -> None:
    """Two samples in the other order: dropout falls on other elements."""
    tokens = list.__getitem__(batches, 1)[0]
    tokens.copy_(tokens[torch.tensor([1, 0, 2, 3])])


def swap_batches(generator: random.Random, made: Rebuilt, batches: list[Any]) -> None:
    first, second = list.__iter__(batches)
    list.__setitem__(batches, 0, second)
    list.__setitem__(batches, 1, first)


def drop_batch(generator: random.Random, made: Rebuilt, batches: list[Any]) -> None:
    list.pop(batches)


def draw(generator: random.Random, made: Rebuilt, batches: list[Any]) -> None:
    generator.choice([lambda: torch.rand(1), random.random, np.random.rand])()


def change_group(key: str, factor: float) -> Perturb:
    def perturb(generator: random.Random, made: Rebuilt, batches: list[Any]) -> None:
        made.optimizers[""].param_groups[0][key] *= factor

    perturb.__name__ = f"{key} times {factor}"
    return perturb


def change_beta(generator: random.Random, made: Rebuilt, batches: list[Any]) -> None:
    made.optimizers[""].param_groups[0]["betas"] = (0.9, 0.9989)


def change_dropout(generator: random.Random, made: Rebuilt, batches: list[Any]) -> None:
    generator.choice([m for m in made.models[""].modules() if isinstance(m, torch.nn.Dropout)]).p = 0.11


def evaluation_mode(generator: random.Random, made: Rebuilt, batches: list[Any]) -> None:
    made.models[""].eval()


def stale_gradient(generator: random.Random, made: Rebuilt, batches: list[Any]) -> None:
    parameter = generator.choice(list(made.models[""].parameters()))
    parameter.grad = torch.full_like(parameter, 1e-5)


def lost_moments(generator: random.Random, made: Rebuilt, batches: list[Any]) -> None:
    state = generator.choice(list(made.optimizers[""].state.values()))
    state["exp_avg"].zero_()


PERTURBATIONS: list[Perturb] = [
    flip_weight, flip_weight, flip_moment, change_token, swap_samples, swap_batches, drop_batch, draw,
    change_group("lr", 1.0 + 1e-6), change_group("lr", 10.0), change_group("weight_decay", 1.01), change_beta, change_dropout,
    evaluation_mode, stale_gradient, lost_moments,
]  # fmt: skip


def perturbed(perturb: Perturb, at: int, seed: int) -> Callable[[], Rebuilt]:
    """`build`, with `perturb` just before the step `at`; the same in every run, so that the replays agree with each other."""

    def build() -> Rebuilt:
        rebuilt = replays.build()
        inner = rebuilt.step

        def step(model: Any, optimizer: Any, batches: list[Any], index: int) -> Any:
            if index == at:
                perturb(random.Random(seed), rebuilt, batches)
            return inner(model, optimizer, batches, index)

        rebuilt.step = step
        return rebuilt

    return build


CASES = int(os.environ.get("PERTURBED_REPLAYS", "56"))


@pytest.mark.timeout(180 + 6 * CASES)
def test_no_perturbed_replay_is_exact(capsule: SpikeCapsule) -> None:
    generator = random.Random(20240607)
    for case in range(CASES):
        perturb = PERTURBATIONS[case % len(PERTURBATIONS)]
        at = generator.randrange(capsule.restart_step, capsule.span[1] + 1)
        report = rerun(capsule, perturbed(perturb, at, case))
        what = f"case {case}: {perturb.__name__} at step {at}"
        assert report.verdict == "not-reproduced", f"{what}: {report.verdict}: {report.reason}"
        assert report.first_divergence is not None and report.first_divergence.step >= at, what


def test_a_number_drawn_after_the_step_is_seen(capsule: SpikeCapsule) -> None:
    """It changes no number of the window, for every step starts from its recorded state; but it is not the same step."""

    def build() -> Rebuilt:
        rebuilt = replays.build()
        inner = rebuilt.step

        def step(model: Any, optimizer: Any, batches: list[Any], index: int) -> Any:
            loss = inner(model, optimizer, batches, index)
            if index == 50:
                torch.rand(1)
            return loss

        rebuilt.step = step
        return rebuilt

    report = rerun(capsule, build)
    assert report.verdict == "not-reproduced" and "step 50 left another random state behind" in report.reason
    assert [step.step for step in report.steps if step.rng == "differs after"] == [50]


@pytest.mark.parametrize("name", ["embed.weight", "blocks.0.up.weight", "blocks.1.down.weight", "blocks.1.norm.weight"])
def test_a_flipped_bit_is_traced_to_its_layer(capsule: SpikeCapsule, name: str) -> None:
    def perturb(generator: random.Random, made: Rebuilt, batches: list[Any]) -> None:
        weight = dict(made.models[""].named_parameters())[name]
        bits = weight.detach().view(-1).view(torch.int32)
        bits[batches_token(batches) if name == "embed.weight" else 5] ^= 1 << 29

    report = rerun(capsule, perturbed(perturb, replays.BAD, 0))
    found = report.first_divergence
    assert report.verdict == "not-reproduced" and found is not None and found.step == replays.BAD
    assert found.layer == name, str(found)
    assert name in report.to_markdown()


def batches_token(batches: list[Any]) -> int:
    """An element of the embedding row of a token that is in the batch."""
    return int(list.__getitem__(batches, 0)[0][0, 0]) * 16 + 3


# -- noise


def noisy(scale: float) -> Callable[[], Rebuilt]:
    """A step with a source of noise that is not captured, as atomics on a GPU are one."""

    def build() -> Rebuilt:
        rebuilt = replays.build()
        source = random.SystemRandom()
        for parameter in rebuilt.models[""].parameters():
            parameter.register_hook(lambda gradient: gradient * (1 + scale * source.uniform(-1, 1)))
        return rebuilt

    return build


def test_noise_is_told_from_a_difference(capsule: SpikeCapsule) -> None:
    """The replays differ from each other and from the record alike."""
    report = rerun(capsule, noisy(1e-6), runs=3)
    assert report.verdict == "within-noise", report.to_markdown()
    assert report.noise_ulp is not None and report.noise_ulp > 0
    assert "ULP" in report.reason


def test_a_difference_above_the_noise_is_not_noise(capsule: SpikeCapsule) -> None:
    def build() -> Rebuilt:
        rebuilt = noisy(1e-6)()
        inner = rebuilt.step

        def step(model: Any, optimizer: Any, batches: list[Any], index: int) -> Any:
            if index == replays.BAD:
                flip(random.Random(1), model.blocks[0].up.weight, range(28, 30))
            return inner(model, optimizer, batches, index)

        rebuilt.step = step
        return rebuilt

    assert rerun(capsule, build).verdict == "not-reproduced"
