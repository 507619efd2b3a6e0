"""The kernels against what torch offers, on one GPU: bytes read per second, and device time of a call.

python benchmarks/kernels.py

Each call is captured in a CUDA graph and its replays are timed: launching from Python takes longer than a small kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trackbridge.probes import histogram_kernels, kernels, moments, observe_kernels

GPT2_SHAPES = [(50304, 768), (1024, 768)] + 12 * [
    (768,), (768,), (768,), (768,), (2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,),
] + [(768,), (768,)]  # fmt: skip


def device_ms(call: Callable[[], object], repeats: int = 40) -> float:
    """Median device time of one call, in milliseconds, after a warm-up."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    for begin, end in zip(events[::2], events[1::2], strict=True):
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) for begin, end in zip(events[::2], events[1::2], strict=True))
    return times[repeats // 2]


def report(name: str, call: Callable[[], object], size: int) -> None:
    ms = device_ms(call)
    print(f"  {name:44s} {1e3 * ms:9.1f} us   {size / ms / 1e9:6.2f} TB/s")


def read_two_gigabytes(big: Tensor) -> None:
    print("reading 2 GB")
    report("torch sum", lambda: big.sum(), big.nbytes)
    report("torch vector_norm", lambda: torch.linalg.vector_norm(big), big.nbytes)
    report("summarise", lambda: kernels.summarise([big]), big.nbytes)


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    read_two_gigabytes(torch.randn(512 << 20, device="cuda"))

    sites = 12
    slab = torch.zeros(sites * moments.WIDTH + 1, dtype=torch.float64, device="cuda")
    slab[-1] = 1
    cells, gate = observe_kernels.cells_for(sites, slab.device), len(slab) - 1
    observe = observe_kernels.observe
    for dtype in (torch.bfloat16, torch.float32):
        outputs: list[Tensor] = [torch.randn(16, 1024, 768, device="cuda", dtype=dtype) for _ in range(sites)]
        size = sum(y.nbytes for y in outputs)
        print(f"moments of {sites} block outputs, 16 x 1024 x 768, {dtype}")
        report("observe", lambda o=outputs: [observe(y, cells, slab, site, gate) for site, y in enumerate(o)], size)
        report("plain torch", lambda o=outputs: [moments.add_on_device(y, slab[: moments.WIDTH]) for y in o], size)
    report("collect", lambda: observe_kernels.collect(cells, slab, 0), cells.nbytes)

    gradients = [torch.randn(shape, device="cuda") for shape in GPT2_SHAPES]
    old = [g.clone() for g in gradients]
    size = sum(g.nbytes for g in gradients)
    print(f"{len(gradients)} gradients of GPT-2 124M, float32")
    report("summarise: norm, max, non-finite", lambda: kernels.summarise(gradients), size)
    report("summarise: norm and difference", lambda: kernels.summarise(gradients, old), 2 * size)
    report("histograms", lambda: histogram_kernels.count(gradients), size)
    factor, total = torch.full((), 0.9999, device="cuda"), torch.ones((), device="cuda")
    report("scale and summarise", lambda: kernels.combine(kernels.scale(gradients, factor, total)), 2 * size)
    report("summarise, scale by 1", lambda: kernels.combine(kernels.scale(gradients, total, total)), size)
    report("_foreach_mul_", lambda: torch._foreach_mul_(gradients, factor), 2 * size)
    report("_foreach_norm(2)", lambda: torch._foreach_norm(gradients, 2), size)
    report(
        "_foreach_norm(2) and (inf)",
        lambda: (torch._foreach_norm(gradients, 2), torch._foreach_norm(gradients, float("inf"))),
        2 * size,
    )
    report("_foreach_copy_", lambda: torch._foreach_copy_(old, gradients), 2 * size)


if __name__ == "__main__":
    main()
