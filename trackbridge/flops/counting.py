"""Count a forward pass while it runs: every torch function it calls passes by, and is called as it would be without us.

Nothing is drawn, copied or waited for. Compiled parts cannot be looked into (and would be compiled again under a mode of ours),
so `count_shapes` runs a copy without values instead: the copy's functions see shapes only.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trackbridge.flops import unsharded
from trackbridge.flops.functions import Flops, cost

_CHECKPOINT = "torch/utils/checkpoint.py"
_PROBES = "trackbridge.probes"


@dataclass
class FlopCount:
    """FLOPs of one forward pass and of the backward pass that belongs to it, by the dtype of the products.

    Attributes:
        forward: products that the model's definition asks for.
        backward: one more product for each input of each that needs a gradient: twice the forward pass where everything
            learns, once for a frozen weight that passes gradients on, none below the first thing that learns.
        recomputed: of the forward products, those that activation checkpointing runs again; None where selective
            checkpointing decides by product.
        attention: the part of `forward` that is attention's own (scores and weighted values).
    """

    forward: dict[torch.dtype, Flops] = field(default_factory=dict)
    backward: dict[torch.dtype, Flops] = field(default_factory=dict)
    recomputed: dict[torch.dtype, Flops] | None = field(default_factory=dict)
    attention: Flops = 0.0

    @property
    def model(self) -> float:
        """Forward and backward, recomputation not counted. FLOPs."""
        return float(sum(self.forward.values())) + float(sum(self.backward.values()))


class Counting(TorchFunctionMode):
    """Sums what passes by into `found`. `full_attention`: (query, key) pairs that a mask hides count as well."""

    def __init__(self, *, full_attention: bool = False) -> None:
        super().__init__()
        self.found = FlopCount()
        self.error: Exception | None = None
        self._full = full_attention

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            products = cost(func, args, kwargs, full_attention=self._full)
        except Exception as error:  # the call itself says better what is wrong with it
            self.error = self.error or error
            products = ()
        if products:
            self._add(products)
        return func(*args, **kwargs)

    def _add(self, products: Sequence[Any]) -> None:
        found = self.found
        caller = _caller()
        if caller is None:
            return
        again, reentrant = caller
        for product in products:
            gradients = product.gradients
            if reentrant:  # this pass has no gradients, the one that runs again has them all
                gradients = 2
            elif not torch.is_grad_enabled():
                gradients = 0
            _raise(found.forward, product.dtype, product.flops)
            _raise(found.backward, product.dtype, product.flops * gradients)
            if again is None:
                found.recomputed = None
            elif again and found.recomputed is not None:
                _raise(found.recomputed, product.dtype, product.flops)
            if product.attention:
                found.attention += product.flops


def _raise(totals: dict[torch.dtype, Flops], dtype: torch.dtype, flops: Flops) -> None:
    totals[dtype] = totals.get(dtype, 0.0) + flops


def _caller() -> tuple[bool | None, bool] | None:
    """Whether this call runs again in the backward pass (None: it depends), and whether inside reentrant checkpointing.

    None if it is a probe's own.
    """
    frame: Any = sys._getframe(2)
    found: tuple[bool | None, bool] = (False, False)
    while frame is not None:
        code = frame.f_code
        if frame.f_globals.get("__name__", "").startswith(_PROBES):
            return None
        if code.co_filename.endswith(_CHECKPOINT) and code.co_name in ("checkpoint", "forward"):
            found = (None if _selective() else True), code.co_name == "forward" or found[1]
        frame = frame.f_back
    return found


def _selective() -> bool:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return any("Caching" in type(mode).__name__ for mode in _get_current_dispatch_mode_stack())


def count(model: nn.Module, *inputs: Any, full_attention: bool = False, **named: Any) -> FlopCount:
    """FLOPs of ``model(*inputs, **named)`` with gradients on. Runs it once; on `meta` tensors it costs nothing.

    Raises what the model raises.
    """
    counting = Counting(full_attention=full_attention)
    with torch.enable_grad(), counting:
        model(*inputs, **named)
    if counting.error is not None:
        raise counting.error
    return counting.found


def count_shapes(model: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any], *, full_attention: bool) -> FlopCount:
    """`count` on a copy of `model` that has shapes and no values. Nothing of the model is touched, no device works.

    Raises what copying or running it raises: a forward pass that looks at values (routing by `nonzero`, `.item()`) cannot.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    original = getattr(model, "_orig_mod", model)
    fake: Any = FakeTensorMode(allow_non_fake_inputs=True)
    with _random_state_kept(), fake, _eager():
        with _WithoutValues(fake):
            shadow = copy.deepcopy(original, unsharded.memo_of(original))
        shapes: Any = torch.utils._pytree.tree_map_only(Tensor, fake.from_tensor, (tuple(inputs), dict(named)))
        found: FlopCount = count(shadow, *shapes[0], full_attention=full_attention, **shapes[1])
    return found


class _WithoutValues(TorchFunctionMode):
    """A deep copy of a tensor is one of its shape only. (Parameters copy that way by themselves.)"""

    def __init__(self, fake: Any) -> None:
        super().__init__()
        self._fake = fake

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            memo[id(tensor)] = self._fake.from_tensor(tensor)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """What a forward pass draws from python's and numpy's generators, in a run that is none of the training's, is put back."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _eager() -> Iterator[None]:
    """Compiled functions inside run as they were written."""
    if hasattr(torch.compiler, "set_stance"):
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield
