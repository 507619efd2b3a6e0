"""Which modules are measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trackbridge.config import ActivationsConfig
from trackbridge.errors import ConfigError
from trackbridge.probes.sites import choose


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4)


class Block(nn.Module):
    """As in libraries: composite attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))
        self.experts = nn.ModuleList(Attention() for _ in range(4))


class FlatBlock(nn.Module):
    """As in minimal code: bare layers."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(4)
        self.qkv = nn.Linear(4, 12)
        self.proj = nn.Linear(4, 4)
        self.fc = nn.Linear(4, 16)
        self.out = nn.Linear(16, 4)


class Transformer(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wpe": nn.Embedding(8, 4), "wte": nn.Embedding(100, 4), "h": nn.ModuleList(block() for _ in range(2))}
        )
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))


def sites(model: nn.Module, which: Any = "blocks") -> list[str]:
    return [name for name, _ in choose(model, ActivationsConfig(sites=which))]


def test_blocks_and_the_token_table() -> None:
    assert sites(Transformer()) == ["transformer.wte", "transformer.h.0", "transformer.h.1"]


def test_branches_of_composite_blocks() -> None:
    found = sites(Transformer(), "blocks+branches")
    assert found[:4] == ["transformer.wte", "transformer.h.0", "transformer.h.0.attn", "transformer.h.0.mlp"]


def test_branches_of_flat_blocks() -> None:
    found = sites(Transformer(FlatBlock), "blocks+branches")
    assert found[1:4] == ["transformer.h.0", "transformer.h.0.proj", "transformer.h.0.out"]


def test_a_sequential_of_blocks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Block(), Block()), nn.Linear(4, 1))
    assert sites(model) == ["1.0", "1.1"]


def test_a_model_without_blocks_has_its_children() -> None:
    assert sites(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))) == ["0", "1", "2"]
    model = nn.ModuleDict({"body": nn.Linear(4, 4), "heads": nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 2)])})
    assert sites(model) == ["body", "heads.0", "heads.1"]
    assert sites(nn.ModuleDict({"scales": nn.ParameterList([torch.ones(2)]), "body": nn.Linear(4, 4)})) == ["body"]


def test_a_lone_layer() -> None:
    assert sites(nn.Linear(4, 4)) == []


def test_leaves_and_patterns() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Identity(), nn.Sequential(nn.Linear(8, 1)))
    assert sites(model, "leaf") == ["0", "2.0"]
    assert sites(model, ["2.*"]) == ["2.0"]
    assert sites(model, "none") == []
    with pytest.raises(ConfigError, match=r"no module matches 'h\.9'"):
        sites(model, ["h.9"])


def test_wrappers_do_not_show_in_names() -> None:
    model = Transformer()
    plain = sites(model)
    for number, block in enumerate(model.transformer["h"]):
        model.transformer["h"][number] = torch.compile(block, backend="eager")
    wrapped = torch.compile(model, backend="eager")
    assert sites(wrapped) == plain
