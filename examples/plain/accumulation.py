"""Gradient accumulation: `micro` for each micro-batch, `step` once per update. The step's loss is their mean, by tokens."""

import torch
from torch import nn

import trackbridge

ACCUMULATE = 4

torch.manual_seed(0)
x = torch.randn(2048, 16)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1)), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

with trackbridge.init(project="plain", id="accumulation") as run:
    run.watch(model, optimizer)
    for number, (inputs, targets) in enumerate(run.batches(loader), start=1):
        loss = (model(inputs).squeeze(1) - targets).square().mean()
        (loss / ACCUMULATE).backward()
        run.micro(loss, samples=len(inputs))  # the loss itself, not its share
        if number % ACCUMULATE == 0:
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            run.step()

print(f"{run.dir}: loss {loss.item():.4f}")
