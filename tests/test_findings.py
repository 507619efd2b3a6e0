"""What `show --findings` says of a record, and what it must not say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import trackbridge
from trackbridge.findings import findings


@pytest.mark.parametrize(("model", "told"), [(nn.Linear(4, 1), False), (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), True)])
def test_of_a_model_without_parts_no_activation_is_missed(model: nn.Module, told: bool, tmp_path: Path) -> None:
    """Of one with parts, which do not run in training mode, it is; nothing is said of a compiler that it may not have met."""
    model.eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with trackbridge.init(dir=tmp_path) as run:
        run.watch(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            run.step(loss=loss.item())
    said = [found for found in findings(trackbridge.load(run.dir)) if found.what == "no activation was seen"]
    assert bool(said) == told and all("before torch.compile" not in found.advice for found in said)
