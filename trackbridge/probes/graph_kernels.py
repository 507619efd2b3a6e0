# mypy: disable-error-code="untyped-decorator,no-untyped-def,attr-defined"
# ruff: noqa: N803
"""What a `torch.compile` graph does to observe an output: operations that the compiler knows, so that it keeps one graph.
Imported only where CUDA and Triton are.

Of many tokens they get some, see `site_statistics`: the compiler adds up the residual stream of a transformer anew in
each kernel rather than write it to memory, and to read it all would have it written.
No number of programs depends on how long an output is: where its length is not fixed, the compiler would guard it.
Moments and channels are one kernel, though most steps have no channels: a launch costs the training thread some 20 us.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from trackbridge.probes.channel_kernels import CELLS, COLUMNS, add_block, grid_for
from trackbridge.probes.observe_kernels import FIELDS, ROWS, WARPS, observe_all, observe_part

FEW = 32  # tokens whose channels a program squares at once: few, or the moments' programs have no registers


@triton.jit
def _observe_with_channels(
    x, cells, channels, widths, slab, n, rows, width, site, gate, channels_gate, reading, columns, groups,
    FIELDS: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr, VECTOR: tl.constexpr,
    CELLS: tl.constexpr, COLUMNS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The first `reading` programs read for the moments, the others add `columns` blocks of columns in `groups` groups."""
    program = tl.program_id(0)
    if program < reading:
        observe_part(x, cells, slab, n, site, gate, program, reading, FIELDS, PROGRAMS, ROWS, VECTOR)
    else:
        at = program - reading
        add_block(
            x, channels, widths, slab, rows, width, site, channels_gate, at % columns, at // columns, groups,
            CELLS, COLUMNS, FEW,
        )  # fmt: skip


@triton_op("trackbridge::observe_triton", mutates_args={"cells"})
def observe_graph(y: Tensor, cells: Tensor, slab: Tensor, site: int, gate: int) -> None:
    """Merge the moments of `y` into the cells of `site` if ``slab[gate]`` is set."""
    y, vector, programs = y.contiguous(), 16 // y.element_size(), cells.shape[2]
    wrap_triton(observe_all)[(programs,)](
        y, cells, slab, y.numel(), site, gate, FIELDS=FIELDS, PROGRAMS=programs, ROWS=ROWS, VECTOR=vector, num_warps=WARPS
    )


@triton_op("trackbridge::observe_with_channels_triton", mutates_args={"cells", "channels", "widths"})
def observe_with_channels_graph(
    x: Tensor, cells: Tensor, channels: Tensor, widths: Tensor, slab: Tensor, site: int, gate: int, channels_gate: int
) -> None:
    """`observe_graph`, and the squares of the channels of `x`, shape (tokens, channels), if ``slab[channels_gate]`` is set."""
    x, vector, programs = x.contiguous(), 16 // x.element_size(), cells.shape[2]
    columns, groups, _ = grid_for(x)
    wrap_triton(_observe_with_channels)[(programs + columns * groups,)](
        x, cells, channels, widths, slab, x.numel(), *x.shape, site, gate, channels_gate, programs, columns, groups,
        FIELDS=FIELDS, PROGRAMS=programs, ROWS=ROWS, VECTOR=vector, CELLS=CELLS, COLUMNS=COLUMNS, FEW=FEW, num_warps=WARPS,
    )  # fmt: skip
