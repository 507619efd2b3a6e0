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


@pytest.mark.parametrize("every", [1, 2], ids=["one update a step", "run.step at every micro-batch"])
def test_steps_without_an_update_are_told_with_what_to_call_instead(every: int, tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with trackbridge.init(dir=tmp_path) as run:
        run.watch(model, optimizer)
        for batch in range(24):
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            if batch % every == 0:
                optimizer.step()
                optimizer.zero_grad()
            run.step(loss=loss.detach())
    said = [found for found in findings(trackbridge.load(run.dir)) if "no watched optimizer stepped" in found.what]
    assert [found.what.split()[1] for found in said] == (["52%"] if every == 2 else [])
    assert all("run.micro" in found.advice and "scaler=scaler" in found.advice for found in said)


def test_two_optimizers_that_never_step_together_have_no_total_norm_and_that_is_said(tmp_path: Path) -> None:
    models = {"g": nn.Linear(4, 1), "d": nn.Linear(4, 1)}
    optimizers = {key: torch.optim.SGD(model.parameters(), 0.01) for key, model in models.items()}
    with trackbridge.init(dir=tmp_path) as run:
        run.watch(models, optimizers)
        for key in "gdgd":
            models[key](torch.ones(2, 4)).square().mean().backward()
            optimizers[key].step()
            run.step(loss=1.0)
    (found,) = (found for found in findings(trackbridge.load(run.dir)) if "no gradient norm" in found.what)
    assert "once after all of them" in found.advice
