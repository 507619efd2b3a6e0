"""Kurtosis over channels of the RMS that each channel has over tokens: one number that grows when a few channels outgrow the
others (He et al., "Understanding and Minimising Outlier Features in Neural Network Training", NeurIPS 2024,
arXiv:2405.19279, eq. 1):

    s_j = sqrt(mean over tokens of x_j^2)        K = mean_j(s_j^4) / mean_j(s_j^2)^2

1 when all channels are alike, the number of channels when one has everything. Squares of each channel are added up over a
step's forward passes on the device, and become one number for each site at its end. All terms are positive, so nothing cancels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

NAME = "channel_kurtosis"
CHANNELS_SECOND = (_ConvNd, _BatchNorm, nn.GroupNorm)
CHUNK = 1 << 18  # elements squared at once: their squares stay in the cache
WIDEST = 1 << 14  # channels; wider outputs are logits over a vocabulary
LEAST = 1e-30  # mean square below which float32 has lost digits


def by_channel(y: Tensor, module: nn.Module) -> Tensor | None:
    """`y` as (tokens, channels), see `channels_last`."""
    y_last = channels_last(y, module)
    return None if y_last is None else y_last.reshape(-1, y_last.shape[-1])


def channels_last(y: Tensor, module: nn.Module) -> Tensor | None:
    """`y` seen with its channels as the last dimension, where they are already, but after a convolution the second. None where
    that is not known (images from a composite module) or there are fewer than two of them."""
    if y.dim() > 2 and isinstance(module, CHANNELS_SECOND):
        y = y.movedim(1, -1)
    elif not 2 <= y.dim() <= 3:
        return None
    return y if 2 <= y.shape[-1] <= WIDEST else None


def every(y: Tensor, stride: int) -> Tensor:
    """Every `stride`-th token of `y`, whose last dimension is a token; shape (tokens, that dimension). Of an image that a
    convolution has put out nothing else is copied; in a graph that is the compiler's business."""
    if y.dim() < 3 or y.is_contiguous() or torch.compiler.is_compiling():
        return y.reshape(-1, y.shape[-1])[::stride]
    y = y.flatten(1, -2)
    places = torch.arange(0, y.shape[0] * y.shape[1], stride, device=y.device)
    return y[places // y.shape[1], places % y.shape[1]]


def widest(modules: Iterable[nn.Module]) -> int:
    """As many channels as any output of `modules` can have, by the shapes of their parameters."""
    sizes = [0]
    for module in modules:
        for part in module.modules():
            shapes = [parameter.shape for parameter in part.parameters(recurse=False)]
            rows = isinstance(part, (nn.Embedding, nn.EmbeddingBag))  # as many as the vocabulary has words
            sizes += [size for shape in shapes for size in (shape[1:] if rows else shape) if size <= WIDEST]
    return max(sizes)


class Channels:
    """Sums of squares by channel, shape (sites, width + 1) in float64; the last column says how many channels a site has."""

    def __init__(self, sites: int, width: int, device: torch.device) -> None:
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.sums = torch.zeros(sites, width + 1, dtype=dtype, device=device)
        torch._dynamo.mark_static_address(self.sums)

    def add(self, x: Tensor, slab: Tensor, site: int, gate: int) -> None:
        """Add `x`, shape (tokens, channels), to a site if ``slab[gate]`` is set. No sync."""
        add(x, self.sums, slab, site, gate)

    def trace(self, x: Tensor, slab: Tensor, site: int, gate: int) -> None:
        """`add` as an operation of a graph."""
        torch.ops.trackbridge.channels(x, self.sums, slab, site, gate)

    def collect(self, slab: Tensor, offset: int) -> None:
        """The end of a step: the kurtosis of each site to ``slab[offset + site]``, 0 where there is none; sums are emptied."""
        squares, width = self.sums[:, :-1], self.sums[:, -1]
        total = squares.sum(1)
        kurtosis = width * (squares * squares).sum(1) / (total * total)
        known = (total > LEAST * width) & torch.isfinite(kurtosis)
        slab[offset : offset + len(kurtosis)] = torch.where(known, kurtosis, 0.0)
        self.sums.zero_()


def channels_of(sites: int, width: int, device: torch.device, kernels: Any) -> Any:
    """Where the channels of `sites` sites are added up; `kernels` are those of `observe_kernels`, where they are."""
    if kernels is None:
        return Channels(sites, width, device)
    from trackbridge.probes import channel_kernels

    return channel_kernels.Cells(sites, device)


def add(x: Tensor, sums: Tensor, slab: Tensor, site: int, gate: int) -> None:
    count = x.shape[1]
    if count >= sums.shape[1]:
        return
    row = sums[site]
    if sums.device.type == "cpu":
        if slab[gate] > 0 and x.device.type == "cpu":
            row[:count] += _squares(x)
            row[-1] = count
        return
    row[:count] += torch.where(slab[gate] > 0, squares_on_device(x).to(row), 0.0)
    row[-1] = torch.where(slab[gate] > 0, float(count), row[-1])


def squares_on_device(x: Tensor) -> Tensor:
    """Sums over tokens of squares, shape (channels,), for any device; without a sync. Squared are elements scaled to [-1, 1] by
    a power of two, so that float32 holds them."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    exponent = torch.frexp(x.abs().max()).exponent
    squares = torch.ldexp(x, -exponent).square().sum(0)
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    return torch.ldexp(squares.to(wide), 2 * exponent)


def _squares(x: Tensor) -> Tensor:
    """Sums over tokens of squares, float64, shape (channels,); in float32 chunk by chunk where its range is enough."""
    if x.dtype != torch.float64:
        sums = _sums(x, torch.float32)
        if LEAST < float(sums.sum()) < math.inf and float(sums.max()) < 1e37:
            return sums
    return _sums(x, torch.float64)


def _sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    total = torch.zeros(x.shape[1], dtype=torch.float64, device="cpu")
    for chunk in torch.split(x, max(1, CHUNK // x.shape[1])):
        part = chunk.to(dtype)
        total += torch.mul(part, part, out=torch.empty_like(part)).sum(0)
    return total


@torch.library.custom_op("trackbridge::channels", mutates_args={"sums"})
def channels_compiled(x: Tensor, sums: Tensor, slab: Tensor, site: int, gate: int) -> None:
    with torch.no_grad():
        add(x, sums, slab, site, gate)


@channels_compiled.register_fake
def _(x: Tensor, sums: Tensor, slab: Tensor, site: int, gate: int) -> None:
    return None
