"""Additions in an order that nothing records, as atomics on a GPU make them; on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests import replays
from trackbridge.replay import Rebuilt

POOLS = 4


class Pooled:
    """A forward hook: the rows of a block's output are added into pools, which go back into the output. How often the order is
    not that of the rows is `chance` (of each micro-batch); `source`, which draws the order, belongs to no replay."""

    def __init__(self, chance: float, source: random.Random) -> None:
        self.chance = chance
        self.source = source

    def __call__(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        rows = output.flatten(0, 1)
        order = list(range(len(rows)))
        if self.source.random() < self.chance:
            self.source.shuffle(order)
        place = torch.arange(len(rows)) % POOLS
        pools = torch.zeros(POOLS, rows.shape[1]).index_add(0, place[order], rows[order])
        return output + 0.01 * pools[place].view_as(output)


def build(
    chance: float, source: random.Random, flip: Callable[[Any, int], None] | None = None, *, bfloat16: bool = False
) -> Callable[[], Rebuilt]:
    """`build()` of the recorded training with the pools in it; `flip(model, step)` is called before each step. Under
    autocast, with `bfloat16`."""

    def build() -> Rebuilt:
        rebuilt = replays.build()
        rebuilt.model.blocks[1].register_forward_hook(Pooled(chance, source))
        inner = rebuilt.step

        def step(model: Any, optimizer: Any, batches: list[Any], index: int) -> Any:
            if flip is not None:
                flip(model, index)
            with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
                return inner(model, optimizer, batches, index)

        rebuilt.step = step
        return rebuilt

    return build


def flip_a_bit(model: Any, step: int, at: int, generator: random.Random, bits: range) -> None:
    """One bit of one weight, once."""
    if step == at:
        weight = generator.choice(list(model.parameters())).detach().view(-1)
        weight.view(torch.int32)[generator.randrange(weight.numel())] ^= 1 << generator.choice(bits)
