# mypy: disable-error-code="untyped-decorator,no-untyped-def,attr-defined"
# ruff: noqa: N803
"""What a `torch.compile` graph does to observe an output: operations that the compiler knows, so that it keeps one graph.
Imported only where CUDA and Triton are.

The moments of each row are plain operations: the compiler computes them in the kernel that has the row at hand anyway (it wrote
the row, or a normalisation reads it) and writes them into one table. One kernel for each output then merges the table into the
site's cells and, in steps that have it, adds the squares of some tokens' channels. One, because a launch costs the training
thread some 20 us, and every tensor that a graph allocates 5. Only those tokens are asked for, never the whole output: the
residual stream of a transformer is a sum that the compiler adds up anew in each kernel rather than write it to memory, and a
reader of the whole would have it written. Short rows are read once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from trackbridge.probes import channel_kernels
from trackbridge.probes.channel_kernels import CELLS, COLUMNS, add_block, grid_for
from trackbridge.probes.observe_kernels import FIELDS, ROWS, WARPS, merge_rows, observe_all, programs_for

if TYPE_CHECKING:
    from trackbridge.probes.channel_kernels import Cells

STRIDE = 7  # of the tokens whose channels are looked at: odd, so that it meets all positions of a sequence
FEW = 512  # rows whose moments one program merges at once
WIDE = 256  # least length of rows for which their moments are much smaller than the rows


@triton.jit
def _rows(
    table, cells, slab, rows, width, site, gate, FIELDS: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    merge_rows(table, cells, slab, rows, width, site, gate, tl.program_id(0), tl.num_programs(0), FIELDS, PROGRAMS, ROWS)


@triton.jit
def _rows_and_channels(
    table, some, cells, channels, widths, slab, rows, some_rows, width, site, gate, channels_gate, merging, columns, groups,
    FIELDS: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr,
    CELLS: tl.constexpr, COLUMNS: tl.constexpr, CHANNEL_ROWS: tl.constexpr,
):  # fmt: skip
    """The first `merging` programs merge rows, the others add `columns` blocks of columns in `groups` groups of rows."""
    program = tl.program_id(0)
    if program < merging:
        merge_rows(table, cells, slab, rows, width, site, gate, program, merging, FIELDS, PROGRAMS, ROWS)
    else:
        at = program - merging
        add_block(
            some, channels, widths, slab, some_rows, width, site, channels_gate, at % columns, at // columns, groups,
            CELLS, COLUMNS, CHANNEL_ROWS,
        )  # fmt: skip


@triton_op("trackbridge::observe_triton", mutates_args={"cells"})
def observe_graph(y: Tensor, cells: Tensor, slab: Tensor, site: int, gate: int) -> None:
    """Merge the moments of `y`, read once more, into the cells of `site` if ``slab[gate]`` is set."""
    y, vector, programs = y.contiguous(), 16 // y.element_size(), cells.shape[2]
    wrap_triton(observe_all)[(programs_for(y, cells),)](
        y, cells, slab, y.numel(), site, gate, FIELDS=FIELDS, PROGRAMS=programs, ROWS=ROWS, VECTOR=vector, num_warps=WARPS
    )


@triton_op("trackbridge::rows_triton", mutates_args={"cells"})
def rows_graph(table: Tensor, width: int, cells: Tensor, slab: Tensor, site: int, gate: int) -> None:
    """Merge the `table` of rows of `width` elements, shape (6, rows), into the cells of `site`."""
    rows, programs = table.shape[1], cells.shape[2]
    wrap_triton(_rows)[(min(triton.cdiv(rows, FEW), programs),)](
        table, cells, slab, rows, width, site, gate, FIELDS=FIELDS, PROGRAMS=programs, ROWS=FEW, num_warps=WARPS
    )


@triton_op("trackbridge::rows_and_channels_triton", mutates_args={"cells", "channels", "widths"})
def rows_and_channels_graph(
    table: Tensor, some: Tensor, cells: Tensor, channels: Tensor, widths: Tensor, slab: Tensor, site: int, gate: int,
    channels_gate: int,
) -> None:  # fmt: skip
    """`rows_graph`, and `channels_graph` of `some` of the rows."""
    some = some.contiguous()
    rows, (some_rows, width), programs = table.shape[1], some.shape, cells.shape[2]
    merging = min(triton.cdiv(rows, FEW), programs)
    columns, groups, _ = grid_for(some)
    wrap_triton(_rows_and_channels)[(merging + columns * groups,)](
        table, some, cells, channels, widths, slab, rows, some_rows, width, site, gate, channels_gate, merging, columns, groups,
        FIELDS=FIELDS, PROGRAMS=programs, ROWS=FEW, CELLS=CELLS, COLUMNS=COLUMNS, CHANNEL_ROWS=channel_kernels.ROWS,
        num_warps=WARPS,
    )  # fmt: skip


def in_rows(y: Tensor) -> bool:
    """Whether the moments of the rows of `y` are much smaller than `y`."""
    return y.dim() > 0 and y.shape[-1] >= WIDE and y.is_contiguous()


def observe(y: Tensor, cells: Tensor, slab: Tensor, site: int, gate: int) -> None:
    """What a graph does for the moments of an output: nothing unless ``slab[gate]`` is set when it runs."""
    if in_rows(y):
        rows = y.reshape(-1, y.shape[-1])
        torch.ops.trackbridge.rows_triton(row_moments(rows), y.shape[-1], cells, slab, site, gate)
    else:
        torch.ops.trackbridge.observe_triton(y, cells, slab, site, gate)


def observe_with_channels(
    x: Tensor, cells: Tensor, channels: Cells, slab: Tensor, site: int, gate: int, channels_gate: int
) -> None:
    """`observe` of `x`, shape (tokens, channels), and every `STRIDE`-th token's channels if ``slab[channels_gate]`` is set."""
    if in_rows(x) and channels.takes(x):
        torch.ops.trackbridge.rows_and_channels_triton(
            row_moments(x), x[::STRIDE], cells, channels.cells, channels.widths, slab, site, gate, channels_gate
        )
    else:
        observe(x, cells, slab, site, gate)
        channels.trace(x, slab, site, channels_gate)


def row_moments(rows: Tensor) -> Tensor:
    """For each of `rows`, shape (rows, width): mean, largest absolute value, sums of squares, cubes and fourth powers of its
    deviations in units of both together, so that float32 holds them, and the number of elements that are not finite. Shape
    (6, rows), float32."""
    rows = rows.float()
    mean, peak = rows.mean(1, keepdim=True), rows.abs().amax(1, keepdim=True)
    d = (rows - mean) * (1.0 / (peak + mean.abs()).clamp(1e-30, 1e30))
    q = d * d
    bad = (rows.abs() < float("inf")).logical_not().float().sum(1)
    return torch.stack((mean.view(-1), peak.view(-1), q.sum(1), (q * d).sum(1), (q * q).sum(1), bad))
