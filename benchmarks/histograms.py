"""What histograms of weights and gradients cost a step: ``python benchmarks/histograms.py [--device cuda] [--parameters 124]``.

Counts the gradients and weights of a GPT-2 shaped list of tensors (`--parameters` millions) as the probe does, and prints the
milliseconds that the training thread spends launching, the milliseconds until the device is done, both per histogram and as
microseconds a step at the default cadence, and the bytes of one journal record.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from trackbridge import histograms
from trackbridge.config import ParametersConfig
from trackbridge.journal import codec
from trackbridge.probes.histograms import count_on_cpu, count_on_device
from trackbridge.records import Histograms


def shapes(millions: float) -> list[tuple[int, ...]]:
    """Embeddings and twelve blocks, scaled to about so many parameters."""
    width = int(768 * (millions / 124) ** 0.5) // 64 * 64
    block = [(3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width), (4 * width,), (width, 4 * width)]
    return [(50257, width), (1024, width), *([*block, (width,), (width,), (width,), (width,)] * 12)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--parameters", type=float, default=124.0, help="millions")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    device = torch.device(options.device)
    tensors = [torch.randn(shape, device=device) * 0.02 for shape in shapes(options.parameters)]
    every = ParametersConfig().histograms_every

    def once() -> object:
        if device.type == "cpu":
            return [count_on_cpu(tensor) for tensor in tensors * 2]
        return [count_on_device(tensors), count_on_device(tensors)]

    once()
    launch, whole = [], []
    for _ in range(options.rounds):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        once()
        launch.append(time.perf_counter() - start)
        if device.type == "cuda":
            torch.cuda.synchronize()
        whole.append(time.perf_counter() - start)
    total = sum(tensor.numel() for tensor in tensors) / 1e6
    for name, seconds in (("training thread", launch), ("until done", whole)):
        middle = statistics.median(seconds)
        print(f"{name}: {middle * 1e3:.2f} ms for {total:.0f}M weights and gradients, {middle * 1e6 / every:.0f} us a step")
    counts = torch.stack([torch.from_numpy(count_on_cpu(tensor.cpu())) for tensor in tensors] * 2).numpy()
    folded = histograms.fold(counts)
    names = tuple(f"layer/{number}/weight" for number in range(len(folded)))
    record = Histograms(-1, 0, 0.0, 0, names, folded, folded[:, 0].astype(float))
    print(f"one journal record: {len(codec.encode(record)[1]) / 1e3:.1f} kB for {len(names)} tensors")


if __name__ == "__main__":
    main()
