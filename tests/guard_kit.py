"""Two ranks with one guard: ``torchrun --nproc-per-node 2 -m tests.guard_kit FOLDER CASE...``; each writes what it did."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

import trackbridge
from trackbridge.errors import GuardError

STEPS, BAD, ODD_RANK = 60, (40, 41), 1


def main(case: str, folder: Path) -> None:
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(4, 1)
    if case != "uneven":  # there DDP's own backward would wait for the rank that is done
        model = nn.parallel.DistributedDataParallel(model)
    fused = case == "protect"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    generator = torch.Generator().manual_seed(rank)
    run = trackbridge.init(dir=folder, id=case, guard={"action": "skip", "timeout": 5.0}, recorder={"enabled": False})
    run.watch(model, optimizer)
    told: dict[str, Any] = {"error": None, "answers": []}
    for step in range(STEPS):
        if case == "uneven" and rank == ODD_RANK and step == STEPS - 1:
            break  # one batch fewer
        x = torch.randn(8, 4, generator=generator)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean() + 5.0
        if step in BAD and rank == ODD_RANK:
            loss = loss * 50.0  # out of band, on one rank only
        loss.backward()
        if fused:
            run.guard.protect(optimizer, loss)
            optimizer.step()
        else:
            try:
                answer = run.guard.ok(loss)
            except GuardError as error:
                told["error"] = str(error)
                break
            told["answers"].append(answer)
            if answer:
                optimizer.step()
        optimizer.zero_grad()
        run.step(loss)
    told |= {"held": run.guard.held, "weights": [p.tolist() for p in model.parameters()]}
    (folder / f"{case}-{rank}.json").write_text(json.dumps(told))
    run.finish(timeout=20.0)


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    for name in sys.argv[2:]:
        main(name, Path(sys.argv[1]))
    distributed.destroy_process_group()
