"""What the probes look at: the parameters of the watched models, each once and by its own name."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trackbridge import names
from trackbridge.hooks import unwrapped

logger = logging.getLogger("trackbridge")

PLAIN = (Tensor, nn.Parameter)


class Members(NamedTuple):
    """Parameters, or one tensor of each, and their rows, side by side."""

    rows: list[int]
    tensors: list[Tensor]


class Subject:
    """Models and optimizers by key, and their parameters as rows 0 .. P-1 (tied parameters are one row, under the first name).

    Attributes:
        parameters: the tensors, frozen ones included: they may be unfrozen later.
        names: their names, with the model's key as prefix when there are several models.
        owners: the key of each parameter's model.
        device: where the slab belongs.
    """

    def __init__(self, models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], scaler: Any = None) -> None:
        self._given = (dict(models), dict(optimizers), scaler)
        self.models = dict(models)
        self.optimizers = {key: unwrapped(optimizer) for key, optimizer in optimizers.items()}
        self.scaler = scaler if scaler is not None and getattr(scaler, "is_enabled", lambda: True)() else None
        self.parameters: list[Tensor] = []
        self.names: list[str] = []
        self.owners: list[str] = []
        self._rows: dict[int, int] = {}
        self._taken: set[str] = set()
        self._places = {id(optimizer): place for place, optimizer in enumerate(self.optimizers.values())}
        self._warned = False
        self._members: dict[int, tuple[list[Tensor], Members]] = {}  # by optimizer: what it held, and those of them watched
        for key, model in self.models.items():
            for name, parameter in model.named_parameters():
                self._add(prefix(key) + names.legal(names.clean(name)), key, parameter)
        for key, optimizer in self.optimizers.items():
            for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                self._add(f"{prefix(key)}unnamed.{number}", key, parameter)
        self.device = next((p.device for p in self.parameters if p.device.type not in ("cpu", "meta")), torch.device("cpu"))

    def is_of(self, models: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], scaler: Any) -> bool:
        """True if these are the very objects this was made of."""
        old = self._given
        return (
            all(before.keys() == now.keys() for before, now in ((old[0], models), (old[1], optimizers)))
            and all(old[0][key] is models[key] for key in models)
            and all(old[1][key] is optimizers[key] for key in optimizers)
            and old[2] is scaler
        )

    def release(self) -> None:
        """Let go of everything but the names."""
        self._given = ({}, {}, None)
        self.models, self.optimizers, self.scaler = {}, {}, None
        self.parameters = []
        self._rows = {}
        self._members = {}

    def members(self, optimizer: Optimizer) -> Members:
        """What `optimizer` holds now. Asked several times a step, so it is worked out anew only when that is something else."""
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        known = self._members.get(id(optimizer))
        if known is None or len(known[0]) != len(held) or not all(map(is_, known[0], held)):
            rows = [self._rows.get(id(parameter)) for parameter in held]
            watched = Members(
                [row for row in rows if row is not None], [p for p, row in zip(held, rows, strict=True) if row is not None]
            )
            if len(watched.rows) != len(held):
                self._warn()
            known = self._members[id(optimizer)] = held, watched
        return known[1]

    def place(self, optimizer: Optimizer) -> int:
        """The number of an optimizer among those watched."""
        return self._places[id(optimizer)]

    def row(self, parameter: Tensor) -> int | None:
        return self._rows.get(id(parameter))

    def rows(self, parameters: Iterable[Tensor]) -> list[int | None]:
        return list(map(self._rows.get, map(id, parameters)))

    def _add(self, name: str, owner: str, parameter: Tensor) -> None:
        if id(parameter) not in self._rows:
            while name in self._taken:  # two names that differ in a wrapper's part only, or in a character no series may have
                name += "_"
            self._taken.add(name)
            self._rows[id(parameter)] = len(self.parameters)
            self.parameters.append(parameter)
            self.names.append(name)
            self.owners.append(owner)

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "trackbridge: the optimizer holds parameters that were not there at run.watch; they are not measured. "
                "Call run.watch again after sharding the model or adding parameters."
            )


def prefix(key: str) -> str:
    return f"{key}." if key else ""


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, the non-zero rows of a sparse tensor (duplicates summed), else the tensor itself."""
    if tensor.layout is torch.strided and type(tensor) in PLAIN:
        return tensor
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    shard = getattr(tensor, "_local_tensor", None)
    if shard is not None:
        return shard  # type: ignore[no-any-return]
    return tensor
