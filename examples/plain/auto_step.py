"""A loop that is not to be changed: two lines before it, none in it.

auto_step closes a step whenever the last watched optimizer steps. The inputs come from the model's forward, the loss from its
output: the output itself, its ``loss``, or the first of a tuple. What that cannot know is in docs/integrations/plain.md.
"""

import torch
from torch import nn

import trackbridge


class Regression(nn.Module):
    """Returns its loss, as most language models' wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        predicted = self.body(x).squeeze(1)
        return {"loss": (predicted - y).square().mean(), "predicted": predicted}


torch.manual_seed(0)
x = torch.randn(1024, 16)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1)), batch_size=32, shuffle=True)
model = Regression()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

run = trackbridge.init(project="plain", id="auto-step")
run.watch(model, optimizer, auto_step=True)

for _ in range(2):
    for inputs, targets in loader:
        loss = model(inputs, targets)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

run.finish()
print(f"{run.dir}: loss {loss.item():.4f}")
