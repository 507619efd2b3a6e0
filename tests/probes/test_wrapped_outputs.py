"""Outputs that are no plain tensors: statistics of what of them is here, or none; never an error, and never others' numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.masked import masked_tensor
from torch.nn import functional as F

from tests.probes.kit import Lab


class Wrapper(Tensor):
    """Around another tensor, with no memory of its own: as quantized and asynchronous ones are."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Any = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*[each.inner if isinstance(each, Wrapper) else each for each in args], **(kwargs or {}))
        return Wrapper(result) if isinstance(result, Tensor) else result


class Named(Tensor):
    """With memory of its own."""


class Gives(nn.Module):
    top_k = 2
    num_experts = 4

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(3, 4)


def masked() -> Tensor:
    return masked_tensor(torch.ones(3, 4), torch.ones(3, 4, dtype=torch.bool))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize(
    "make",
    [lambda: Wrapper(torch.ones(3, 4)), masked, fake, lambda: torch.ones(3, 4, device="meta")],
    ids=["wrapper", "masked", "fake", "meta"],
)
def test_what_has_no_memory_of_its_own_has_no_statistics_and_takes_none_from_others(make: Any) -> None:
    model = nn.ModuleDict({"strange": Gives(make()), "plain": Gives(torch.full((3, 4), 2.0)), "router": Gives(make())})
    lab = Lab(model, None, sites=["strange", "plain"], routers=["router"])
    for module in model.values():
        module(torch.ones(1))
    found = lab.close()
    assert {name.split("/")[1] for name in found if name.startswith("act/")} == {"plain"}
    assert found["act/plain/mean"] == 2.0
    assert not any(name.startswith("router/") for name in found)


def test_a_subclass_with_memory_is_as_any_other() -> None:
    model = nn.ModuleDict({"named": Gives(torch.full((3, 4), 2.0).as_subclass(Named))})
    lab = Lab(model, None, sites=["named"])
    model["named"](torch.ones(1))
    assert lab.close()["act/named/mean"] == 2.0


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh

    store = torch.distributed.HashStore()
    init_process_group("gloo", rank=0, world_size=1, store=store)
    yield init_device_mesh("cpu", (1,))
    destroy_process_group()


@pytest.mark.skipif(os.name == "nt", reason="needs gloo")
def test_of_a_dtensor_this_ranks_tokens_count_and_channels_or_parts_of_sums_do_not(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    whole = torch.arange(24.0).view(2, 3, 4)
    places = {"tokens": Shard(1), "all": Replicate(), "channels": Shard(2), "sums": Partial()}
    model = nn.ModuleDict({name: Gives(DTensor.from_local(whole, mesh, [place])) for name, place in places.items()})
    lab = Lab(model, None, sites=list(places))
    for module in model.values():
        module(torch.ones(1))
    found = lab.close()
    assert {name.split("/")[1] for name in found if name.startswith("act/")} == {"tokens", "all"}
    assert found["act/tokens/mean"] == found["act/all/mean"] == pytest.approx(11.5)
    assert found["act/tokens/std"] == pytest.approx(whole.double().std(correction=0).item())


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(F.scaled_dot_product_attention(x, x, x))  # type: ignore[no-any-return]


class Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attends(), Attends()])
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def jagged() -> Tensor:
    texts = [torch.randn(3, 2, 8), torch.randn(5, 2, 8)]
    return torch.nested.nested_tensor(texts, layout=torch.jagged).transpose(1, 2)  # type: ignore[no-any-return]


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.randn(2, 3, 8), torch.randn(2, 5, 8)])  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("texts", [jagged, nested])
def test_attention_over_texts_of_several_lengths_has_no_logits_and_does_not_break_the_others(texts: Any) -> None:
    model = Texts()
    lab = Lab(model, None, attention_every=1)
    model(texts())
    assert not any("logit" in name for name in lab.close())
    x = torch.randn(1, 2, 3, 8)
    model(x)
    wanted = (x @ x.transpose(-1, -2)).amax().item() / 8**0.5
    assert lab.close()["act/blocks.0/sampled_logit_max"] == pytest.approx(wanted, rel=1e-6)
