"""On a GPU, an optimizer with several parameter groups: each statistic under its own name. Skipped where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.probes.kit import Lab
from tests.probes.test_activations import Stack, batch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


def measured(device: str, *, clip: bool) -> dict[str, float]:
    torch.manual_seed(0)
    model = Stack().to(device)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer: Any = torch.optim.SGD([{"params": decayed, "lr": 0.1}, {"params": others, "lr": 0.2}])
    lab = Lab(model, optimizer)
    model(batch().to(device)).square().sum().backward()
    if clip:
        lab.instruments.clip_grad_norm_(0.5)
    optimizer.step()
    found = lab.close()
    lab.instruments.detach()
    return {name: value for name, value in found.items() if name.startswith("layer/")}


@pytest.mark.parametrize("clip", [False, True])
def test_statistics_stand_under_their_own_names(clip: bool) -> None:
    here, there = measured("cpu", clip=clip), measured("cuda", clip=clip)
    assert here.keys() == there.keys() and len(here) > 20
    off = {name: (here[name], there[name]) for name in here if here[name] != pytest.approx(there[name], rel=1e-3, abs=1e-6)}
    assert not off
