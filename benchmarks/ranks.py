"""What merging over ranks costs: bytes in the store, and microseconds on the scribe's thread (never the training thread's) of a
rank that sends and of the leader, in worlds of several sizes.

``python -m benchmarks.ranks [--ranks 8 64 512] [--steps 20]``. One process holds the store and plays all ranks over loopback,
so the network is not in it; the shares are those of GPT-2 (148 parameter tensors, 12 blocks) in a step with gradients only, and
in one with weights and Adam's moments.
"""

from __future__ import annotations

import argparse
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed import PrefixStore, TCPStore

from trackbridge.config import ActivationsConfig, ParametersConfig
from trackbridge.exchange import Exchange
from trackbridge.merging import Merger, Sender
from trackbridge.probes import Instruments, session
from trackbridge.rowmaker import RowMaker


class Block(nn.Module):
    """Twelve parameter tensors, as a block of GPT-2 has."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(12))
        self.ends = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.ends[0](x)
        for block in self.h:
            x = block(x)
        return self.ends[1](x)  # type: ignore[no-any-return]


HOST = {f"perf/x{number}": 1.0 + number for number in range(14)} | {"train/loss": 2.0, "train/lr": 1e-3}


def measured(world: int, copies: float, slow: bool, steps: int) -> tuple[int, float, float]:
    """(bytes of a share, microseconds of a sender, microseconds of the leader) a step; medians."""
    session.parameter_copies = lambda subject: np.full(len(subject.parameters), copies)  # type: ignore[assignment]
    session.world_size = lambda: world  # type: ignore[assignment]
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    every = 1 if slow else 0
    parameters = ParametersConfig(weights_every=every, moments_every=every, histograms_every=0)
    instruments = Instruments(parameters, ActivationsConfig())
    instruments.attach({"": model}, {"": optimizer})
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    slot = instruments.close(0)
    assert slot is not None
    reading = instruments.read(slot)
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)

    def connection() -> Any:
        return PrefixStore("x", TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=30), wait_for_workers=False))

    maker = RowMaker(0)
    leader = Merger(Exchange(connection(), "r/0", 0, world), maker, world, 30.0, strict=True)
    one = connection()
    senders = [Sender(Exchange(one, "r/0", rank, world)) for rank in range(1, world)]
    sent, merged = [], []
    for step in range(steps):
        row = maker.own(step, 0.0, HOST, reading)
        for sender in senders:
            began = time.perf_counter()
            sender.send(step, row, reading, 100.0)
            sent.append(time.perf_counter() - began)
        one.check(["all of it is there"])
        began = time.perf_counter()
        leader.add(step, row, reading, 100.0, None)
        (done,) = leader.ready()
        merged.append(time.perf_counter() - began)
        assert done.row.get("ranks/merged") == world
    size = senders[0]._exchange._sent[-1][1]
    return size, 1e6 * float(np.median(sent)), 1e6 * float(np.median(merged))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| ranks | layout | step with | bytes of a rank | a rank, us | the leader, us |")
    print("|---|---|---|---|---|---|")
    for world in given.ranks:
        for layout, copies in (("DDP", float(world)), ("FSDP2", 1.0)):
            for slow in (False, True):
                size, send, lead = measured(world, copies, slow, given.steps)
                what = "weights, moments" if slow else "gradients"
                print(f"| {world} | {layout} | {what} | {size:,} | {send:.0f} | {lead:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
