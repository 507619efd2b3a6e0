"""The kernels against what torch offers, on one GPU: bytes read per second, and device time of a call.

python benchmarks/kernels.py

Each call is captured in a CUDA graph and its replays are timed: launching from Python takes longer than a small kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trackbridge.probes import (
    attention,
    channel_kernels,
    histogram_kernels,
    hottest_kernels,
    kernels,
    moments,
    observe_kernels,
    router_kernels,
)  # fmt: skip
from trackbridge.probes.samples import Samples

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


def more() -> None:
    """What there is one of in a model, or one of in a layer."""
    table, out = torch.randn(GPT2_SHAPES[0], device="cuda"), torch.zeros(6, dtype=torch.float64, device="cuda")
    print("embedding rows, experts, attention logits")
    report("hottest 3 of 50,304 rows", lambda: hottest_kernels.hottest(table, out, 3), table.nbytes)
    report("vector_norm, topk", lambda: torch.linalg.vector_norm(table, dim=1).topk(3), table.nbytes)
    slab = torch.ones(80, dtype=torch.float64, device="cuda")
    for experts, chosen in ((8, 2), (64, 8)):
        numbers = torch.randint(0, experts, (16_384, chosen), device="cuda")
        name = f"load of {experts} experts, {chosen} for each of 16,384"
        report(name, lambda n=numbers, e=experts: router_kernels.count(n, slab, 0, e, 79), numbers.nbytes)
    q, k = (torch.randn(16, 12, 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for queries in (16, 64, 1024):
        some = q[..., :: 1024 // queries, :]
        call = lambda s=some, n=1024 // queries: attention.largest(s, k, None, 0.125, 0, n, slab, 0, 1, 79)  # noqa: E731
        report(f"logits of {queries} queries, 16 x 12 heads x 1024", call, k.nbytes + some.nbytes)


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    read_two_gigabytes(torch.randn(512 << 20, device="cuda"))

    sites = 12
    slab = torch.zeros(sites * moments.WIDTH + 2, dtype=torch.float64, device="cuda")
    slab[-1] = 1
    cells, gate, shut = observe_kernels.cells_for(sites, slab.device), len(slab) - 1, len(slab) - 2
    observe = observe_kernels.observe
    for dtype in (torch.bfloat16, torch.float32):
        outputs: list[Tensor] = [torch.randn(16, 1024, 768, device="cuda", dtype=dtype) for _ in range(sites)]
        size = sum(y.nbytes for y in outputs)
        print(f"moments of {sites} block outputs, 16 x 1024 x 768, {dtype}")
        report("observe", lambda o=outputs: [observe(y, cells, slab, site, gate) for site, y in enumerate(o)], size)
        channels = channel_kernels.Cells(sites, slab.device)
        report("channels", lambda o=outputs, c=channels: [c.add(y.view(-1, 768), slab, n, gate) for n, y in enumerate(o)], size)
        report("channels, gate closed", lambda o=outputs, c=channels: [c.add(y.view(-1, 768), slab, 0, shut) for y in o], size)
        report("collect channels", lambda c=channels: c.collect(slab, 0), channels.cells.nbytes)
        report("plain torch", lambda o=outputs: [moments.add_on_device(y, slab[: moments.WIDTH]) for y in o], size)
    report("collect", lambda: observe_kernels.collect(cells, slab, 0), cells.nbytes)

    more()

    gradients = [torch.randn(shape, device="cuda") for shape in GPT2_SHAPES]
    size = sum(g.nbytes for g in gradients)
    print(f"{len(gradients)} gradients of GPT-2 124M, float32")
    report("summarise: norm, max, non-finite", lambda: kernels.summarise(gradients), size)
    before = Samples.of(gradients)  # used up by the first call; the work stays the same
    report("size of an update, of samples", lambda: before.distances(gradients), before.flat.nbytes)
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


if __name__ == "__main__":
    main()
