"""What the FSDP2 of the torch that is here does on a CPU, where the ranks of the tests run. On GPUs all do everything."""

from __future__ import annotations

import pytest
import torch

SHARDS = hasattr(torch.cpu.Stream, "record_event")  # not in torch 2.6
REPLICATES = torch.__version__ >= "2.11"  # that of torch 2.7 wants gloo to average, which it does not
WITHOUT = {*(() if SHARDS else ("fsdp", "fsdp_clipped_by_the_user", "stack")), *(() if REPLICATES else ("hybrid",))}
needs_shards = pytest.mark.skipif(not SHARDS, reason="FSDP2 of this torch needs a GPU")


def there(case: str) -> str:
    """`case`; skips the test where this torch does not do it."""
    if case in WITHOUT:
        pytest.skip(f"{case} needs a GPU with this torch")
    return case
