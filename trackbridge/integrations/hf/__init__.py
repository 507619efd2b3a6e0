"""trackbridge in Hugging Face's `Trainer`, TRL's trainers included: `Callback` records a training, `rebuild` replays it.

    Trainer(..., callbacks=[trackbridge.hf.Callback(backend="wandb", project="finetune")])

| file | what is in it |
|---|---|
| `callback.py` | the events of a training, from begin to end or exception |
| `training.py` | what is told to the run: batches, losses, clipping, pauses |
| `finding.py` | which `Trainer` calls us, and how it was called |
| `replaying.py` | the Trainer's objects and its step, for a replay |
"""

from trackbridge.integrations.hf.callback import Callback
from trackbridge.integrations.hf.replaying import rebuild

__all__ = ["Callback", "rebuild"]
