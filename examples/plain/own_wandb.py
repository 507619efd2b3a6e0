"""A training that has its own `wandb.init`: it stays as it is. Ours is a companion in the same group, linked both ways, shipped
by a process of its own; what you log with your own steps is not touched."""

import torch
import wandb
from torch import nn

import trackbridge

torch.manual_seed(0)
x = torch.randn(1024, 16)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1)), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

mine = wandb.init(project="plain", mode="offline", config={"lr": 1e-2})
run = trackbridge.init(backend={"kind": "wandb", "mode": "offline"}, project="plain", id="own-wandb")
run.watch(model, optimizer)

for number, (inputs, targets) in enumerate(run.batches(loader)):
    loss = (model(inputs).squeeze(1) - targets).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mine.log({"my/loss": loss.item()}, step=number)
    run.step(loss=loss)

report = run.finish()
mine.finish()
print(f"{run.dir}: {report}")
print(f"mine knows it: {mine.config['trackbridge/companion']}")
