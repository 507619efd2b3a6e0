"""An iterable dataset: no length, no sampler, its own order. A batch is known by its number and its content."""

from collections.abc import Iterator

import torch
from torch import nn

import trackbridge


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Numbers that come from somewhere else; each worker reads every n-th."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        source = torch.Generator().manual_seed(7)
        for number in range(2048):
            row = torch.randn(16, generator=source)
            if number % every == first:
                yield row


torch.manual_seed(0)
loader = torch.utils.data.DataLoader(Stream(), batch_size=32, num_workers=2)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

with trackbridge.init(project="plain", id="iterable") as run:
    run.watch(model, optimizer)
    for batch in run.batches(loader):
        loss = (model(batch).squeeze(1) - batch.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss, samples=len(batch))

print(f"{run.dir}: loss {loss.item():.4f}")
