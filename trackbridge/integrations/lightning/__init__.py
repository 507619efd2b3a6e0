"""Lightning: ``Trainer(callbacks=[trackbridge.lightning.Callback(...)])``, and its objects rebuilt for a replay.

Fabric needs nothing of this: ``run.watch(model, optimizer)`` after ``fabric.setup`` sees through its wrappers, and the loop is
the user's own.
"""

from trackbridge.integrations.lightning.callback import Callback
from trackbridge.integrations.lightning.replaying import rebuild

__all__ = ["Callback", "rebuild"]
