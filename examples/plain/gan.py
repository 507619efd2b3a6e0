"""Two networks, two optimizers, one step: mappings for `watch`, a mapping of losses for `step`."""

import torch
from torch import nn

import trackbridge

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
real = torch.randn(2048, 2) * 0.5 + torch.tensor([2.0, -1.0])
loader = torch.utils.data.DataLoader(real, batch_size=64, shuffle=True)
judge = nn.functional.binary_cross_entropy_with_logits

with trackbridge.init(project="plain", id="gan") as run:
    run.watch({"g": generator, "d": discriminator}, {"g": of_generator, "d": of_discriminator})
    for _ in range(2):
        for batch in run.batches(loader):
            made = generator(torch.randn(len(batch), 8))
            told_real, told_made = discriminator(batch), discriminator(made.detach())
            d_loss = judge(told_real, torch.ones_like(told_real)) + judge(told_made, torch.zeros_like(told_made))
            of_discriminator.zero_grad()
            d_loss.backward()
            of_discriminator.step()

            told = discriminator(made)
            g_loss = judge(told, torch.ones_like(told))
            of_generator.zero_grad()
            g_loss.backward()
            of_generator.step()

            run.step(loss={"g": g_loss, "d": d_loss}, samples=len(batch))

print(f"{run.dir}: g {g_loss.item():.3f}, d {d_loss.item():.3f}")
