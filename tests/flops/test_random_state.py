"""Counting on a copy of shapes runs the user's forward pass once more: what it draws is put back."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from trackbridge.flops.counting import count_shapes


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) + random.random() + float(np.random.rand())


def test_a_count_on_shapes_draws_nothing_from_pythons_and_numpys_generators() -> None:
    before, numpys = random.getstate(), np.random.get_state()[1].copy()
    place = np.random.get_state()[2]
    count_shapes(Noisy(), [torch.ones(2, 4)], {}, full_attention=False)
    assert random.getstate() == before
    assert np.array_equal(np.random.get_state()[1], numpys) and np.random.get_state()[2] == place
