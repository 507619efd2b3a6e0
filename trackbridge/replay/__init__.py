"""Replay: run the bad step of a capsule again, and say with evidence whether it is the same computation.

`rerun(capsule, build)` restores the snapshot, then for each step of the window restores the RNG, feeds the recorded batches,
attaches the same probes as the recording and compares what comes out bit for bit. `what_if(capsule, build)` does it again with
one thing changed at a time, and ranks the changes. `keep` writes what was found into the capsule. See docs/replay.md.
"""

from trackbridge.lab.counterfactuals import CounterfactualReport as CounterfactualReport
from trackbridge.lab.counterfactuals import Try as Try
from trackbridge.lab.replay import Divergence as Divergence
from trackbridge.lab.replay import ReplayReport as ReplayReport
from trackbridge.lab.replay import StepReport as StepReport
from trackbridge.replay.counterfactual import what_if as what_if
from trackbridge.replay.engine import rerun as rerun
from trackbridge.replay.guilty import skip_plan as skip_plan
from trackbridge.replay.held import guard as guard
from trackbridge.replay.keep import keep as keep
from trackbridge.replay.rebuilt import Rebuilt as Rebuilt
from trackbridge.replay.trial import NotRunnable as NotRunnable
from trackbridge.replay.trial import Trial as Trial

__all__ = [
    "CounterfactualReport",
    "Divergence",
    "NotRunnable",
    "Rebuilt",
    "ReplayReport",
    "StepReport",
    "Trial",
    "Try",
    "guard",
    "keep",
    "rerun",
    "skip_plan",
    "what_if",
]
