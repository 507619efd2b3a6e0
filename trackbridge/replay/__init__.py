"""Replay: run the bad step of a capsule again, and say with evidence whether it is the same computation.

`rerun(capsule, build)` restores the snapshot, then for each step of the window restores the RNG, feeds the recorded batches,
attaches the same probes as the recording and compares what comes out bit for bit. See docs/replay.md.
"""

from trackbridge.lab.replay import Divergence as Divergence
from trackbridge.lab.replay import ReplayReport as ReplayReport
from trackbridge.lab.replay import StepReport as StepReport
from trackbridge.replay.engine import rerun as rerun
from trackbridge.replay.rebuilt import Rebuilt as Rebuilt

__all__ = ["Divergence", "Rebuilt", "ReplayReport", "StepReport", "rerun"]
