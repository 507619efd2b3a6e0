"""Replays on a CUDA device, each in a process of its own: with deterministic algorithms and without, with atomics, with a
flipped bit.

Run: ``python benchmarks/replay_cuda.py``. Two minutes on an H100; prints the verdict of each case. What was seen is in
docs/replay.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

BAD, STEPS, BATCH, EPOCH = 150, 170, 16, 400
TOKENS, LENGTH, WIDTH, DEPTH = 512, 128, 512, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, time, 3, 8, width // 8).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, time, width)))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm2(x)))))


class Model(nn.Module):
    """A GPT of 19 million parameters. With `atomics` the order of some additions is the hardware's."""

    def __init__(self, atomics: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, TOKENS)
        self.atomics = atomics

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if self.atomics:
            place = (tokens.flatten() % 4)[:, None].expand(-1, WIDTH)
            pool = torch.zeros(4, WIDTH, device=x.device).scatter_add(0, place, x.flatten(0, 1).float())
            x = x + 0.001 * pool[tokens % 4].to(x.dtype)
        out: Tensor = self.head(x)
        return out


class Order(Sampler[int]):
    """Shuffled, but for the samples of one batch of noise."""

    def __len__(self) -> int:
        return BATCH * EPOCH

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        order = torch.randperm(len(self), generator=generator).tolist()
        order[BAD * BATCH : BAD * BATCH + BATCH] = range(len(self), len(self) + BATCH)
        yield from order


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    good = (torch.randint(0, TOKENS, (BATCH * EPOCH, 1), generator=generator) + torch.arange(LENGTH + 1)) % TOKENS
    bad = torch.randint(0, TOKENS, (BATCH, LENGTH + 1), generator=generator)
    return DataLoader(TensorDataset(torch.cat((good, bad))), BATCH, sampler=Order(), num_workers=2)


def objects() -> tuple[Model, torch.optim.AdamW]:
    torch.use_deterministic_algorithms("deterministic" in sys.argv)
    model = Model("atomics" in sys.argv).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def step(model: Model, optimizer: torch.optim.AdamW, batches: list[Any], index: int) -> Tensor:
    tokens = batches[0][0].cuda(non_blocking=True)
    if "flip" in sys.argv and index == BAD - 10:
        model.blocks[2].up.weight.data.view(torch.int32)[7, 9] ^= 1 << 29  # type: ignore[union-attr, operator, index]
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def record(where: Path) -> None:
    import trackbridge

    torch.manual_seed(0)
    run = trackbridge.init(dir=where, id="run", strict=True, recorder={"snapshot_every": 50})
    model, optimizer = objects()
    run.watch(model, optimizer)
    for index, batch in enumerate(run.batches(data())):
        run.step(loss=step(model, optimizer, [batch], index))
        if index + 1 == STEPS:
            break
    run.finish()


def replay(where: Path) -> None:
    import trackbridge

    report = trackbridge.replay.rerun(trackbridge.pull(where / "run"), lambda: (*objects(), step))
    floor = f"floor {report.noise_ulp or 0:.3g} ULP, at most {report.noise_max_ulp or 0:.3g}"
    print(f"{report.verdict}: {report.reason}; {floor}; first divergence: {report.first_divergence}; {report.seconds:.1f} s")


def main() -> None:
    fixed = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    for kind in ((), ("deterministic",), ("atomics",), ("atomics", "deterministic")):
        with tempfile.TemporaryDirectory() as where:
            for verb in (("record",), ("replay",), ("replay", "flip")):
                command = [sys.executable, __file__, where, *verb, *kind]
                print(*verb, *kind, "->", end=" ", flush=True)
                done = subprocess.run(command, env=fixed, capture_output=True, text=True, check=False)
                print(done.stdout.strip() or done.stderr.strip()[-300:] or "done", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        (record if "record" in sys.argv else replay)(Path(sys.argv[1]))
