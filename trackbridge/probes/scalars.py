"""Scalars that the user hands over as tensors: the loss of the step, of its micro-batches and of its samples. Never a sync."""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from trackbridge.probes.base import BoolArray, Stats
from trackbridge.records import FloatArray
from trackbridge.slab import Field, Slab

logger = logging.getLogger("trackbridge")

CAPACITY = 256
SAMPLES = 1024  # whose losses are kept for quantiles and for the worst rows; with more in a step there is the worst one only
WORST = 4
SAMPLE_MAX, SAMPLE_ROW = "train/sample_loss_max", "train/sample_loss_argmax"
QUANTILES = {"train/sample_loss_p50": 0.5, "train/sample_loss_p90": 0.9}
FIXED = (
    "train/loss", SAMPLE_MAX, SAMPLE_ROW, *QUANTILES,
    *(f"{name}/{place}" for name in (SAMPLE_MAX, SAMPLE_ROW) for place in range(2, WORST + 1)),
)  # fmt: skip


class ScalarProbe:
    """`series` grows at its end when a new name is set: positions never change."""

    fields: tuple[Field, ...] = (
        Field("scalars", CAPACITY, over_ranks="mean"),
        Field("scalars_seen", CAPACITY, "host"),
        Field("loss_sum", 1, over_ranks="sum"),
        Field("loss_tokens", 1, over_ranks="sum"),
        Field("loss_seen", 1, "host"),
        Field("sample_worst", 2, over_ranks="worst"),  # loss, row
        Field("sample_rows", 1, "host"),
        Field("sample_losses", SAMPLES),
    )

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self.series: tuple[str, ...] = FIXED
        self._full = False

    def attach(self, slab: Slab) -> None:
        self._slab = slab
        values = slab.device_view("scalars")
        self._cells, self._seen = list(values), slab.host_view("scalars_seen")
        self._array = values.numpy() if slab.device.type == "cpu" else None
        self._sum, self._tokens = slab.device_view("loss_sum"), slab.device_view("loss_tokens")
        self._sums = (self._sum.numpy(), self._tokens.numpy()) if slab.device.type == "cpu" else None
        self._loss_seen = slab.host_view("loss_seen")
        self._worst, self._rows = slab.device_view("sample_worst"), slab.host_view("sample_rows")
        self._losses = slab.device_view("sample_losses")

    def go_on_from(self, slab: Slab) -> None:
        """Take over what the step under way has told an earlier session."""
        for field in self.fields:
            if field.where == "host":
                self._slab.host_view(field.name)[:] = slab.host_view(field.name)
            else:
                self._slab.device_view(field.name).copy_(slab.device_view(field.name))

    def set(self, name: str, value: Tensor) -> None:
        """Copy a tensor of one element into the slab; the last value of a step counts."""
        place = self._places.get(name)
        if place is None:
            if len(self._places) == CAPACITY:
                if not self._full:
                    self._full = True
                    logger.warning("trackbridge: more than %d scalar series; %s and later ones are left out", CAPACITY, name)
                return
            place = self._places[name] = len(self._places)
            if name not in FIXED:
                self.series = (*self.series, name)
        value = value.detach() if value.requires_grad else value
        if self._array is not None and value.is_cpu:
            self._array[place] = value.item()
        else:
            self._cells[place].copy_(value.reshape(()), non_blocking=True)
        self._seen[place] = 1.0

    def micro(self, loss: Tensor | float, tokens: Tensor | float | None, sample_loss: Tensor | None) -> None:
        """Add one micro-batch to the step's mean loss, weighted by `tokens` (1 each when None).

        `sample_loss`, any shape, gives the quantiles of the step and its worst rows, counted over the micro-batches.
        """
        weight = 1.0 if tokens is None else tokens
        if self._sums is not None and not isinstance(weight, Tensor) and (not isinstance(loss, Tensor) or loss.is_cpu):
            losses, weights = self._sums
            # Python's numbers: numpy's own warn where a sum is not finite
            losses[0] = losses.item() + (loss.item() if isinstance(loss, Tensor) else loss) * weight
            weights[0] = weights.item() + weight
        else:
            self._add(loss, weight)
        self._loss_seen[0] = 1.0
        if sample_loss is not None and sample_loss.numel():
            self._sample(sample_loss.detach().reshape(-1))

    @torch.no_grad()
    def _add(self, loss: Tensor | float, weight: Tensor | float) -> None:
        product = (
            (loss.detach().double() if self._sum.dtype == torch.float64 else loss.detach()) * weight
            if isinstance(loss, Tensor)
            else loss * weight
        )
        self._sum += product if not isinstance(product, Tensor) else product.reshape(()).to(self._sum.device, non_blocking=True)
        self._tokens += weight if not isinstance(weight, Tensor) else weight.to(self._sum.device, non_blocking=True)

    @torch.no_grad()
    def _sample(self, losses: Tensor) -> None:
        value, row = losses.max(0)
        found = torch.stack((value.to(self._worst), row.to(self._worst) + self._rows[0]))
        if self._rows[0]:
            found = torch.where(found[0] <= self._worst[0], self._worst, found)  # a NaN is the worst there is
            found = torch.where(self._worst[0].isnan(), self._worst, found)
        self._worst.copy_(found, non_blocking=True)
        place = self._losses[int(self._rows[0]) :][: losses.numel()]
        place.copy_(losses[: place.numel()], non_blocking=True)
        self._rows += losses.numel()

    def detach(self) -> None:
        pass

    def finalize(self, stats: Stats) -> tuple[FloatArray, BoolArray]:
        series = self.series
        values, present = np.zeros(len(series)), np.zeros(len(series), dtype=bool)
        if stats["loss_seen"][0]:
            tokens = stats["loss_tokens"][0]
            values[0], present[0] = (stats["loss_sum"][0] / tokens, True) if tokens else (0.0, False)
        samples = int(stats["sample_rows"][0])
        values[1:3], present[1:3] = stats["sample_worst"], samples > 0
        if 0 < samples <= SAMPLES:
            fixed = slice(3, len(FIXED))
            values[fixed], present[fixed] = _of_samples(stats["sample_losses"][:samples])
        for name, place in list(self._places.items()):
            if stats["scalars_seen"][place]:
                at = series.index(name)
                values[at], present[at] = stats["scalars"][place], True
        return values, present


def _of_samples(losses: FloatArray) -> tuple[FloatArray, BoolArray]:
    """Quantiles, then losses and rows of the worst but one and so on; a NaN is the worst there is."""
    order = np.argsort(-np.where(np.isnan(losses), np.inf, losses), kind="stable")[1:WORST]
    values, rows = np.zeros(WORST - 1), np.zeros(WORST - 1)
    values[: len(order)], rows[: len(order)] = losses[order], order
    here = np.arange(WORST - 1) < len(order)
    with np.errstate(invalid="ignore"):  # between two infinities
        quantiles = np.quantile(losses, list(QUANTILES.values()))
    return np.concatenate((quantiles, values, rows)), np.concatenate((np.ones(len(QUANTILES), bool), here, here))
