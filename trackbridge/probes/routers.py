"""Routers of mixtures of experts: how the tokens of a step are spread over the experts.

A router is a module whose output says for each token which experts it goes to: as numbers of experts, as a mask over them, or
as scores of which the largest `k` are chosen. Counts of (token, expert) pairs are added up on the device over a step's forward
passes; shares follow on the host.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trackbridge import names
from trackbridge.config import ActivationsConfig
from trackbridge.errors import ConfigError, nearest
from trackbridge.hooks import attribute
from trackbridge.probes.base import BoolArray, Stats
from trackbridge.probes.gates import ALWAYS, OUTPUTS, Gates
from trackbridge.probes.outputs import in_memory, tensors
from trackbridge.probes.sites import modules_of
from trackbridge.probes.subject import Subject, prefix
from trackbridge.records import FloatArray
from trackbridge.slab import Field, Slab

logger = logging.getLogger("trackbridge")

NAMES = ("gate", "router", "gating", "gate_network", "gating_network")
EXPERTS = ("num_experts", "n_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "moe_num_experts")
CHOSEN = (
    "top_k", "topk", "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "n_activated_experts",
    "num_selected_experts", "k",
)  # fmt: skip
STATISTICS = ("load_max", "load_min", "load_entropy")


class Found(NamedTuple):
    """A router: `chosen` experts for each token, 0 where that is not known."""

    name: str
    module: nn.Module
    experts: int
    chosen: int


def find(model: nn.Module, patterns: list[str] | None) -> list[Found]:
    """The routers of a model: those that match a pattern, else modules with a router's name beside experts, or that call
    themselves routers and say how many experts they have.

    Raises `ConfigError` for a pattern that matches no module, or one whose number of experts cannot be found out.
    """
    modules = list(modules_of(model))
    everything = dict(modules)
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name, _ in modules):
            hint = nearest(pattern, list(everything))
            raise ConfigError(f"activations.routers: no module matches {pattern!r}{hint}")
    found: list[Found] = []
    for name, module in modules:
        above, _, last = name.rpartition(".")
        parent = everything.get(above, model)
        if patterns is not None:
            chosen = any(fnmatchcase(name, pattern) for pattern in patterns)
        else:
            inside = any(name.startswith(f"{router.name}.") for router in found)
            chosen = not inside and _looks_like_one(last, module, parent)
        if chosen:
            experts = _experts(module, parent)
            if experts > 1:
                found.append(Found(name, module, experts, _number((module, parent), CHOSEN)))
            elif patterns is not None:
                raise ConfigError(
                    f"activations.routers: {name} does not say how many experts it has; give it an attribute num_experts"
                )
    return found


def assigned(output: Any, experts: int, chosen: int) -> Tensor | None:
    """The tensor in a router's output that says where tokens go, integers or a mask rather than scores; None without one. A
    vector with a number for each expert says how many tokens came, and is passed over: the same is in the others."""
    scores = None
    for tensor in tensors(output):
        if not tensor.numel() or tensor.dim() < 1:
            continue
        last = tensor.shape[-1]
        if tensor.is_floating_point():
            if scores is None and chosen and last == experts and tensor.dim() > 1:
                scores = tensor
        elif tensor.dim() == 1:
            if chosen <= 1 and last != experts and tensor.dtype != torch.bool:
                return tensor
        elif last == experts or (tensor.dtype != torch.bool and (last == chosen if chosen else last < experts)):
            return tensor
    return scores


def count(values: Tensor, slab: Tensor, offset: int, experts: int, chosen: int, gate: int) -> None:
    """Add the pairs that `values` (see `assigned`) tells of to ``slab[offset : offset + experts]`` if ``slab[gate]`` is set. No
    sync. Numbers that are no expert's (dropped tokens) are passed over."""
    target = slab[offset : offset + experts]
    if not values.is_floating_point() and values.dim() > 1 and values.shape[-1] == experts:
        target += (values.reshape(-1, experts) != 0).sum(0) * slab[gate]
        return
    if values.is_floating_point():
        values = values.topk(min(chosen, experts), dim=-1, sorted=False).indices
    kernels = router_kernels() if slab.is_cuda and values.device == slab.device else None
    if kernels is not None:
        kernels.count(values, slab, offset, experts, gate)
        return
    numbers = values.reshape(-1).long()
    one = ((numbers >= 0) & (numbers < experts)).to(slab) * slab[gate]
    target.scatter_add_(0, numbers.clamp(0, experts - 1), one)


@cache
def router_kernels() -> ModuleType | None:
    """The kernel that counts, where Triton works."""
    try:
        from trackbridge.probes import router_kernels
    except ImportError:
        return None
    return router_kernels


@torch.library.custom_op("trackbridge::route", mutates_args={"slab"})
def count_compiled(values: Tensor, slab: Tensor, offset: int, experts: int, chosen: int, gate: int) -> None:
    with torch.no_grad():
        count(values, slab, offset, experts, chosen, gate)


@count_compiled.register_fake
def _(values: Tensor, slab: Tensor, offset: int, experts: int, chosen: int, gate: int) -> None:
    return None


class Routers:
    """All routers of the watched models. `targets`: (module, its model, the look at it)."""

    def __init__(self, subject: Subject, config: ActivationsConfig) -> None:
        self.targets: list[tuple[nn.Module, nn.Module, Router]] = []
        self._experts: list[int] = []
        self.series: tuple[str, ...] = ()
        shares: list[str] = []
        blind: list[str] = []
        for key, model in subject.models.items():
            patterns = [] if config.routers is None and config.sites == "none" else config.routers
            for name, module, experts, chosen in find(model, patterns):
                self.targets.append((module, model, Router(self, sum(self._experts), experts, chosen)))
                self._experts.append(experts)
                self.series += tuple(names.router(prefix(key) + name, each) for each in STATISTICS)
                shares += [names.expert(prefix(key) + name, number) for number in range(experts)]
                if not chosen:
                    blind.append(name)
        self.series += tuple(shares)
        self.fields: tuple[Field, ...] = (Field("router_load", sum(self._experts), over_ranks="sum"),)
        if blind and config.routers is not None:
            logger.warning(
                "trackbridge: %s %s not say how many experts a token goes to (an attribute top_k); unless it returns their "
                "numbers, it has no load.", ", ".join(blind[:5]), "does" if len(blind) == 1 else "do",
            )  # fmt: skip

    def bind(self, slab: Slab) -> None:
        self.slab = slab.tensor
        self.offset, self.gate = slab.offset("router_load"), slab.offset(Gates.FIELD)

    def collect(self) -> None:
        pass

    def finalize(self, stats: Stats) -> tuple[FloatArray, BoolArray]:
        """Shares of a step's pairs, their extremes, and their entropy over that of an even spread: 1 even, 0 all on one."""
        if not self._experts:
            return np.zeros(0), np.zeros(0, bool)
        values: list[float] = []
        shares: list[FloatArray] = []
        known: list[bool] = []
        for counts in np.split(stats["router_load"], np.cumsum(self._experts)[:-1]):
            total = counts.sum()
            share = counts / total if total > 0 else counts
            spread = share[share > 0]
            values += [share.max(), share.min(), float(-(spread * np.log(spread)).sum()) / math.log(len(share))]
            shares.append(share)
            known.append(bool(total > 0))
        each = np.repeat(known, len(STATISTICS))
        return np.concatenate((values, *shares)), np.concatenate((each, np.repeat(known, self._experts)))


class Router:
    """The look at one router."""

    def __init__(self, routers: Routers, first: int, experts: int, chosen: int) -> None:
        self.routers = routers
        self.first = first
        self.experts = experts
        self.chosen = chosen

    def add(self, module: nn.Module, inputs: Any, output: Any) -> None:
        routers = self.routers
        with torch.no_grad():
            values = assigned(output, self.experts, self.chosen)
            if values is not None and in_memory(values):
                place = routers.offset + self.first
                count(values.detach(), routers.slab, place, self.experts, self.chosen, routers.gate + ALWAYS)

    def trace(self, module: nn.Module, inputs: Any, output: Any) -> None:
        values = assigned(output, self.experts, self.chosen)
        if values is not None and in_memory(values):
            routers = self.routers
            place = routers.offset + self.first
            torch.ops.trackbridge.route(values.detach(), routers.slab, place, self.experts, self.chosen, routers.gate + OUTPUTS)


def _looks_like_one(last: str, module: nn.Module, parent: nn.Module) -> bool:
    if last in NAMES and (attribute(parent, "experts") is not None or _number((module,), EXPERTS)):
        return True
    return "Router" in type(module).__name__ and bool(_number((module,), EXPERTS))


def _experts(module: nn.Module, parent: nn.Module) -> int:
    own = _number((module,), (*EXPERTS, "out_features"))
    weight = attribute(module, "weight")
    if not own and isinstance(weight, Tensor) and weight.dim() == 2:
        own = weight.shape[0]
    if own:
        return own
    experts = attribute(parent, "experts")
    return len(experts) if isinstance(experts, nn.ModuleList) else _number((parent,), EXPERTS)


def _number(owners: tuple[nn.Module, ...], keys: tuple[str, ...]) -> int:
    """The first of the attributes `keys` of the owners or of their configs that is a positive integer; 0 if none is."""
    for value in (attribute(place, key) for place in _places(owners) for key in keys):
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _places(owners: tuple[nn.Module, ...]) -> Iterator[Any]:
    for owner in owners:
        yield owner
        config = attribute(owner, "config")
        if config is not None:
            yield config
