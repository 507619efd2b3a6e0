"""Every anomaly of a live run has hypotheses in the end: one without a capsule, and a neighbour in another's capsule too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trackbridge
from trackbridge.explain import main
from trackbridge.history import load


def trained(folder: Path, *, factor: float, **recorder: Any) -> trackbridge.Run:
    """An MLP whose loss jumps at step 60 for two steps, where the batch is garbage, and is not a number at step 64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    weight = torch.randn(8, 4)
    run = trackbridge.init(dir=folder, recorder={"snapshot_every": 20, **recorder})
    run.watch(model, optimizer)

    def batches() -> Any:
        for step in range(80):
            x = torch.randn(32, 8)
            y = (x @ weight).argmax(1)
            yield (factor * torch.randn(32, 8) if step in (60, 61) else x * float("nan") if step == 64 else x), y

    for x, y in run.batches(batches()):
        loss = nn.functional.cross_entropy(model(x), y)
        if torch.isfinite(loss):
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss)
    run.finish()
    return run


@pytest.mark.parametrize("capsules", [0, 20])
def test_each_has_hypotheses(tmp_path: Path, capsules: int) -> None:
    run = trained(tmp_path, factor=40.0, max_capsules=capsules)
    kinds = {anomaly.kind: anomaly for anomaly in run.anomalies}
    assert {"spike", "nonfinite"} <= set(kinds)
    for kind in ("spike", "nonfinite"):
        assert kinds[kind].hypotheses[0].name == "corrupt-batch", kind
    assert (kinds["spike"].capsule is None) == (capsules == 0)
    journalled = {anomaly.id: anomaly for anomaly in load(run.dir).anomalies}
    assert all(journalled[anomaly.id].hypotheses == anomaly.hypotheses for anomaly in run.anomalies)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setattr(os, "nice", lambda _: 0)
    run = trained(tmp_path, factor=40.0, max_capsules=0)
    assert main([str(run.dir), run.anomalies[0].id, "no-such-anomaly"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert '"corrupt-batch"' in line
    assert main([str(run.dir)]) == 2
