# mypy: disable-error-code="no-untyped-call"
"""Launching Triton kernels. Imported only where CUDA and Triton are.

To find out anew what a call is specialised on takes Triton several times longer than to launch the kernel, and the training
thread waits meanwhile.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)
"""A compiled kernel takes all arguments, constants among them."""
MOST = 4096
_known: dict[tuple[Any, ...], Any] = {}
"""Compiled kernels by all that they are specialised on."""


def launch(
    kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: tuple[Any, ...], *, warps: int
) -> None:
    """Run `kernel` on the device of the first of its `arguments`: tensors and whole numbers. `constants` are the values of its
    constants, which come last in its signature, in their order."""
    device = arguments[0].device
    key = (
        id(kernel), grid, warps, device, constants,
        *[(a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, Tensor) else a for a in arguments],
    )  # fmt: skip
    with nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device):
        known = _known.get(key)
        if known is not None:
            known(*arguments, *constants)
            return
        compiled = kernel[grid](*arguments, *constants, num_warps=warps)
        if DIRECT:
            if len(_known) >= MOST:
                _known.clear()
            _known[key] = compiled[grid]
