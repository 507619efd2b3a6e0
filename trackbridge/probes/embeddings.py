"""The hottest rows of the embedding: the token ids whose rows have the largest gradients, of the gradient the optimizer used.

Read from the table's own gradient when the optimizer steps, so that accumulation, compiled models and checkpointing need no
special case; a head that is tied to the table is in it. A shard gives its own rows, by their numbers in the whole table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trackbridge import names
from trackbridge.config import ActivationsConfig
from trackbridge.probes import cpu
from trackbridge.probes.base import BoolArray, Gate, OfGradients, Stats
from trackbridge.probes.reduce import DTYPES, kernels_for
from trackbridge.probes.sites import embedding
from trackbridge.probes.subject import Subject, prefix
from trackbridge.records import FloatArray
from trackbridge.slab import Field, Slab

STATISTICS = ("norm", "row")


class EmbeddingProbe(OfGradients):
    """The `embedding_rows` rows with the largest gradients of the largest embedding of each model."""

    def __init__(self, subject: Subject, config: ActivationsConfig, gate: Gate) -> None:
        self._subject = subject
        self._gate = gate
        self._every = config.embedding_every
        self._count = count = config.embedding_rows
        self._tables: list[tuple[Tensor, int]] = []  # and its place among the parameters
        self._first: dict[int, int | None] = {}  # row of the whole table with which a shard begins; None: its rows are split
        self.series: tuple[str, ...] = ()
        self._local: dict[str, int] = {}
        for key, model in subject.models.items() if count else ():
            for name, module in embedding(model):
                table: Any = module.weight
                row = subject.row(table)
                if row is not None and all(row != other for _, other in self._tables):
                    self._tables.append((table, row))
                    table_name = prefix(key) + name
                    series = tuple(names.hottest(each, table_name, place) for each in STATISTICS for place in range(count))
                    self.series += series
                    self._local |= dict.fromkeys(series, row)
        self._rows = [row for _, row in self._tables]
        self.fields: tuple[Field, ...] = (
            *(Field(f"hottest_{number}", 2 * count, over_ranks="top") for number in range(len(self._tables))),
            Field("hottest_seen", len(subject.parameters), "host", over_ranks="every"),  # 1 + the place of the optimizer
        )

    def attach(self, slab: Slab) -> None:
        self._views = [slab.device_view(f"hottest_{number}") for number in range(len(self._tables))]
        self._seen = slab.host_view("hottest_seen")

    def detach(self) -> None:
        self._tables.clear()

    def of_parameters(self, rows: Sequence[int]) -> set[str]:
        """The series that are of the parameters `rows`."""
        chosen = set(rows)
        return {name for name, row in self._local.items() if row in chosen}

    @torch.no_grad()
    def _look(self, optimizer: Any) -> None:
        if not self._tables or not self._gate.due(self._every):
            return
        for (table, row), view in zip(self._tables, self._views, strict=True):
            if table.grad is None or not _holds(optimizer, table):
                continue
            gradient, numbers, first = table.grad, None, 0
            if gradient.layout is torch.sparse_coo:
                gradient = gradient.coalesce()
                gradient, numbers = gradient.values(), gradient.indices()[0]
            elif hasattr(gradient, "_local_tensor"):
                if row not in self._first:
                    self._first[row] = _first_row(gradient)
                begin = self._first[row]
                if begin is None:
                    continue
                gradient, first = gradient._local_tensor, begin
            if not gradient.numel():
                continue
            hottest(gradient, view, self._count)
            scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer that unscales inside `step`
            if scale is not None:
                view[: self._count] /= scale
            if numbers is not None:  # the places in a sparse gradient, to token ids
                ids = view[self._count :]
                ids.copy_(numbers[ids.long()])
            elif first:
                view[self._count :] += first
            self._seen[row] = 1.0 + self._subject.place(optimizer)

    def finalize(self, stats: Stats) -> tuple[FloatArray, BoolArray]:
        """An update that GradScaler's overflow check dropped has no norms, but says which rows overflowed. Rows are not named
        where all that were found are non-finite: then more of them may be."""
        overflow = np.concatenate(([False], stats["found_inf"] > 0))
        used = stats["hottest_seen"][self._rows].astype(np.intp)
        dropped = bool(stats["scale_fell"][0] > 0) | overflow[used]
        values: list[FloatArray] = []
        present: list[BoolArray] = []
        for number, (optimizer, lost) in enumerate(zip(used, dropped, strict=True)):
            norm, row = np.split(stats[f"hottest_{number}"], 2)
            there = (norm != 0) & (optimizer > 0)
            values += [norm, row]
            present += [there & ~lost, there & bool(np.isfinite(norm).any())]
        return (np.concatenate(values), np.concatenate(present)) if values else (np.zeros(0), np.zeros(0, bool))


def hottest(gradient: Tensor, out: Tensor, count: int) -> None:
    """The norms of the `count` rows with the largest ones, then the rows' numbers, to `out`, shape (2 * count,). NaN and
    infinity come first. Where there are fewer rows the norm is 0. No sync."""
    kernels = kernels_for(gradient)
    if kernels is not None and gradient.dtype in DTYPES and gradient.is_contiguous():
        from trackbridge.probes import hottest_kernels

        hottest_kernels.hottest(gradient, out, count)
        return
    if gradient.device.type == "cpu":
        norms, rows = out.numpy().reshape(2, count)
        norms[:] = rows[:] = 0.0
        squares = cpu.row_squares(gradient)
        for place in range(min(count, len(squares))):
            row = squares.argmax()  # NaN is the largest
            norms[place], rows[place] = math.sqrt(squares[row]), row
            squares[row] = -1.0
        return
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    most = min(count, len(gradient))
    norm, row = torch.linalg.vector_norm(gradient, dim=1, dtype=dtype).topk(most)
    out.zero_()
    out[:most] = norm
    out[count : count + most] = row.to(out)


def _first_row(gradient: Any) -> int | None:
    """The row of the whole with which this rank's shard of a DTensor begins; None where rows are split or parts of a sum."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(type(each) not in (Replicate, Shard) or each == Shard(1) for each in gradient.placements):
        return None
    _, offset = compute_local_shape_and_global_offset(gradient.shape, gradient.device_mesh, gradient.placements)
    return int(offset[0])


def _holds(optimizer: Any, table: Tensor) -> bool:
    return any(parameter is table for group in optimizer.param_groups for parameter in group["params"])
