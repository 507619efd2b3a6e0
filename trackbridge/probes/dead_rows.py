"""Dead rows: rows of a weight matrix that nothing teaches any more.

A row is a slice of the parameter's first dimension: what one output unit of a linear layer is computed from, a filter of a
convolution, a token's embedding. It counts as dead when its gradient was exactly 0 at each of the last `AFTER` looks; looks are
`parameters.rows_every` steps apart, so by default within a hundred steps. That is a unit whose ReLU never opens or an expert
that is never chosen; of an embedding it is also a token that did not come. Before `AFTER` looks nothing is said.

A row with a gradient shows it in its first elements nearly always, so little more than these is read. What is known of a row
between looks is one number. Shards along another dimension than the first hold no whole rows: those parameters are left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trackbridge import names
from trackbridge.config import ParametersConfig
from trackbridge.probes.base import BoolArray, Gate, OfGradients, Stats
from trackbridge.probes.cpu import PIECE
from trackbridge.probes.reduce import kernels_for
from trackbridge.probes.rows import Rows, alike, parted
from trackbridge.probes.subject import Subject, local
from trackbridge.records import FloatArray
from trackbridge.slab import Field, Slab

AFTER = 10  # looks
TOTAL = "param/dead_rows"
HEAD = 8  # elements of a row that are read first


class DeadRowProbe(OfGradients):
    series: tuple[str, ...]

    def __init__(self, subject: Subject, config: ParametersConfig, gate: Gate) -> None:
        self._subject = subject
        self._every = config.rows_every
        self._gate = gate
        self._quiet: dict[int, Tensor] = {}  # by parameter: for how many looks each row has had no gradient
        self._looks: dict[int, int] = {}
        size = len(subject.parameters)
        self.fields: tuple[Field, ...] = (
            Field("dead_rows", size, over_ranks="count"),
            Field("dead_seen", size, "host"),
            Field("dead_held", size, "host", lasting=True),  # parameters of which something is known by now
        )
        self.series = (TOTAL, *(names.layer(parameter, "dead_rows") for parameter in subject.names))

    def attach(self, slab: Slab) -> None:
        self._rows = Rows(slab, "dead_rows")
        self._seen, self._held = slab.host_view("dead_seen"), slab.host_view("dead_held")

    def detach(self) -> None:
        self._quiet.clear()

    def finalize(self, stats: Stats) -> tuple[FloatArray, BoolArray]:
        dead, seen = stats["dead_rows"], stats["dead_seen"] > 0
        known = bool(seen.any() and not ((stats["dead_held"] > 0) & ~seen).any())
        return np.concatenate(([dead[seen].sum()], dead)), np.concatenate((np.array([known]), seen))

    @torch.no_grad()
    def _look(self, optimizer: Any) -> None:
        if not self._gate.due(self._every):
            return
        dense: list[tuple[int, Tensor]] = []
        found = []
        for row, parameter in zip(*self._subject.members(optimizer), strict=True):
            grad = parameter.grad
            if grad is None or parameter.dim() < 2 or not _has_rows(parameter):
                continue
            if grad.layout is torch.sparse_coo:
                found.append((row, self._sparse(row, grad)))
            else:
                dense.append((row, grad))
        for rows, gradients in alike(*parted(dense)):
            self._note(rows, dead_rows(gradients, [self._counts(row, g) for row, g in zip(rows, gradients, strict=True)]))
        for row, dead in found:
            self._note([row], dead.reshape(1))

    def _counts(self, row: int, gradient: Tensor) -> Tensor:
        """Looks without a gradient, int32, one for each row of `gradient`."""
        known = self._quiet.get(row)
        if known is None or len(known) != gradient.shape[0] or known.device != gradient.device:
            known = self._quiet[row] = torch.zeros(gradient.shape[0], dtype=torch.int32, device=gradient.device)
            self._looks[row] = 0
        return known

    def _sparse(self, row: int, grad: Tensor) -> Tensor:
        grad = grad.coalesce()
        quiet, touched = self._counts(row, grad), grad.indices()[0]
        alive = grad.values().flatten(1).ne(0).any(1)
        quiet += 1
        quiet[touched] = torch.where(alive, 0, quiet[touched])
        return (quiet >= AFTER).sum()

    def _note(self, rows: list[int], dead: Tensor) -> None:
        self._rows.write(rows, dead)
        for row in rows:
            self._looks[row] += 1
        told = [row for row in rows if self._looks[row] >= AFTER]
        self._seen[told] = self._held[told] = 1.0


def dead_rows(gradients: list[Tensor], quiet: list[Tensor]) -> Tensor:
    """One look at `gradients`, of one device and dtype, each of two dimensions or more. Adds it to the counts in `quiet`, and
    returns how many rows of each are dead, (k,) on that device. No sync."""
    kernels = kernels_for(gradients[0])
    if kernels is not None:
        return kernels.dead_rows(gradients, quiet, AFTER)  # type: ignore[no-any-return]
    return torch.stack([_look_at(gradient.flatten(1), counts) for gradient, counts in zip(gradients, quiet, strict=True)])


def _look_at(x: Tensor, counts: Tensor) -> Tensor:
    """One look at `x`, shape (rows, width): how many rows are dead, a float32."""
    if x.device.type == "cpu" and x[:, 0].ne(0).all():
        counts.zero_()
        return torch.zeros((), device="cpu")
    counts += 1
    counts.masked_fill_(_alive(x), 0)
    return (counts >= AFTER).sum(dtype=torch.float32)


def _alive(x: Tensor) -> Tensor:
    """Which rows of `x`, shape (rows, width), are not 0 throughout."""
    if x.device.type != "cpu":
        return x.ne(0).any(1)
    alive = x[:, :HEAD].ne(0).any(1)
    if x.shape[1] > HEAD:
        for part in torch.split(torch.nonzero(~alive).flatten(), max(1, PIECE // x.shape[1])):
            alive[part] = x[part].ne(0).any(1)
    return alive


def _has_rows(parameter: Tensor) -> bool:
    """False for a shard of another dimension than the first."""
    placements = getattr(parameter, "placements", ())
    return all(placement.is_replicate() or placement.is_shard(0) for placement in placements) and local(parameter).dim() > 1
