"""The kernels against what torch offers, on one GPU: bytes read per second, and device time of a call.

python benchmarks/kernels.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trackbridge.probes import kernels, moments

GPT2_SHAPES = [(50304, 768), (1024, 768)] + 12 * [
    (768,), (768,), (768,), (768,), (2304, 768), (2304,), (768, 768), (768,), (3072, 768), (3072,), (768, 3072), (768,),
] + [(768,), (768,)]  # fmt: skip


def device_ms(call: Callable[[], object], repeats: int = 40) -> float:
    """Median device time of one call, in milliseconds, after a warm-up."""
    for _ in range(5):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    for begin, end in zip(events[::2], events[1::2], strict=True):
        begin.record()
        call()
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

    slab = torch.zeros(9, dtype=torch.float64, device="cuda")
    slab[8] = 1
    for dtype in (torch.bfloat16, torch.float32):
        outputs: list[Tensor] = [torch.randn(16, 1024, 768, device="cuda", dtype=dtype) for _ in range(12)]
        size = sum(y.nbytes for y in outputs)
        print(f"moments of 12 block outputs, 16 x 1024 x 768, {dtype}")
        report("observe", lambda outputs=outputs: [kernels.observe(y, slab, 0, 8) for y in outputs], size)
        report("plain torch", lambda outputs=outputs: [moments.add_on_device(y, slab[:8]) for y in outputs], size)

    gradients = [torch.randn(shape, device="cuda") for shape in GPT2_SHAPES]
    old = [g.clone() for g in gradients]
    size = sum(g.nbytes for g in gradients)
    print(f"{len(gradients)} gradients of GPT-2 124M, float32")
    report("summarise: norm, max, non-finite", lambda: kernels.summarise(gradients), size)
    report("summarise: norm and difference", lambda: kernels.summarise(gradients, old), 2 * size)
    report("_foreach_norm(2)", lambda: torch._foreach_norm(gradients, 2), size)
    report(
        "_foreach_norm(2) and (inf)",
        lambda: (torch._foreach_norm(gradients, 2), torch._foreach_norm(gradients, float("inf"))),
        2 * size,
    )
    report("clone", lambda: [g.clone() for g in gradients], 2 * size)


if __name__ == "__main__":
    main()
