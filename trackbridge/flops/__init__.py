"""Model FLOPs of a step, counted on the functions that a forward pass really calls, and what a device could do at most.

`functions` knows the cost of one call, `counting` sums over a forward pass, `peaks` is the table of devices, `meter` turns both
into ``perf/mfu`` and ``perf/hfu``. The convention is in docs/mfu.md.
"""

from trackbridge.flops.counting import FlopCount as FlopCount
from trackbridge.flops.counting import count as count
from trackbridge.flops.peaks import peak_of as peak_of

__all__ = ["FlopCount", "count", "peak_of"]
