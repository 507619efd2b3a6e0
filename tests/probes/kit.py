"""Instruments as a test uses them: attach, close a step, read the values as a dict."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trackbridge.config import ActivationsConfig, ParametersConfig
from trackbridge.probes import Instruments
from trackbridge.probes.moments import FIRES, WIDTH
from trackbridge.probes.session import Reading


@contextmanager
def no_sync() -> Iterator[None]:
    """Whatever waits for a GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Lab:
    """Instruments on one model and optimizer (or mappings of them). `close` returns what was present in that step."""

    def __init__(self, model: Any, optimizer: Any = None, scaler: Any = None, **config: Any) -> None:
        every = {"weights_every": 1, "moments_every": 1, "elements_every": 1}
        parameters = ParametersConfig(**{**every, **{k: v for k, v in config.items() if k in ParametersConfig.model_fields}})
        given = {k: v for k, v in config.items() if k in ActivationsConfig.model_fields}
        activations = ActivationsConfig(**{"channels_every": 1, **given})
        self.instruments = Instruments(parameters, activations, strict=True)
        self.models = model if isinstance(model, dict) else {"": model}
        self.optimizers = {} if optimizer is None else optimizer if isinstance(optimizer, dict) else {"": optimizer}
        self.instruments.attach(self.models, self.optimizers, scaler)
        self.step = 0

    def close(self) -> dict[str, float]:
        slot = self.instruments.close(self.step)
        assert slot is not None
        self.step += 1
        reading = self.instruments.read(slot)
        self.last = fires(reading, self.instruments.series)
        values, present = reading.values()
        assert len(values) == len(present) == len(self.instruments.series)
        return {name: v for name, v, here in zip(self.instruments.series, values.tolist(), present, strict=True) if here}


def sgd(model: nn.Module, lr: float = 0.1, **more: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, **more)


def fires(reading: Reading, series: tuple[str, ...]) -> dict[str, float]:
    """How often each activation site ran, by name."""
    sites = [name[len("act/") : -len("/mean")] for name in series if name.startswith("act/") and name.endswith("/mean")]
    stats = reading.session.slab.unpack(reading.numbers)
    return dict(zip(sites, stats["activations"].reshape(-1, WIDTH)[:, FIRES].tolist(), strict=True))
