"""What the replay lab found out about a capsule: plain data, read where a page is made, so without torch.

`ReplayReport` is the verdict of a replay, `CounterfactualReport` the ranked table of replays with one thing changed. They are
kept in the capsule, as ``lab/replay.json`` and ``lab/counterfactuals.json`` (`trackbridge.replay.keep`).
"""

from trackbridge.lab.counterfactuals import CounterfactualReport as CounterfactualReport
from trackbridge.lab.counterfactuals import Trend as Trend
from trackbridge.lab.counterfactuals import Try as Try
from trackbridge.lab.replay import Divergence as Divergence
from trackbridge.lab.replay import EnvironmentDifference as EnvironmentDifference
from trackbridge.lab.replay import ReplayReport as ReplayReport
from trackbridge.lab.replay import StepReport as StepReport
from trackbridge.lab.replay import Verdict as Verdict

FOLDER = "lab"
REPLAY = f"{FOLDER}/replay.json"
COUNTERFACTUALS = f"{FOLDER}/counterfactuals.json"
