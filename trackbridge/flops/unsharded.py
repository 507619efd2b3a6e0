"""A copy of a model that FSDP2 (`fully_shard`) has sharded, as its forward pass sees it: whole parameters, in the dtype of the
products.

`fully_shard` refuses to be copied, and its hooks would gather parameters from the other ranks.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

_SHARDED = "_get_fsdp_state"
_STATE = "__composable_api"
"""Attributes of a sharded module in which torch keeps what belongs to the ranks."""


def memo_of(model: nn.Module) -> dict[int, Any]:
    """What `copy.deepcopy(model, memo)` needs in its memo so that each sharded part becomes a module of its original class.
    Call where a copied tensor has no values. Without sharded parts: empty.

    Raises `NotImplementedError` where parameters are sharded by tensor parallelism as well: a rank computes a part then.
    """
    memo: dict[int, Any] = {}
    for module in reversed(list(model.modules())):  # what is inside first
        if hasattr(module, _SHARDED):
            _copy(module, memo)
    return memo


def _copy(module: Any, memo: dict[int, Any]) -> None:
    state = module._get_fsdp_state()
    policy = state._mp_policy
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # an older torch: one at most
        groups = [state._fsdp_param_group]
    for sharded in [parameter for group in groups if group is not None for parameter in group.fsdp_params]:
        if sharded.is_dtensor:
            raise NotImplementedError("FSDP2 over tensor parallelism")
        whole = sharded.sharded_param
        dtype = policy.param_dtype if whole.is_floating_point() and policy.param_dtype is not None else whole.dtype
        memo[id(whole)] = nn.Parameter(
            torch.empty(whole.shape, dtype=dtype, device=whole.device), requires_grad=whole.requires_grad
        )
    original: Any = next(kind for kind in type(module).__mro__[1:] if not hasattr(kind, _SHARDED))
    plain = memo[id(module)] = original.__new__(original)
    plain.__dict__ = {
        name: OrderedDict() if name.startswith("_") and "_hooks" in name else copy.deepcopy(value, memo)
        for name, value in module.__dict__.items()
        if not name.startswith(_STATE)
    }
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        plain.register_forward_pre_hook(lambda _, args, kwargs: _cast((args, kwargs), policy.param_dtype), with_kwargs=True)
    if policy.output_dtype is not None:
        plain.register_forward_hook(lambda _, args, output: _cast(output, policy.output_dtype))


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, values)
