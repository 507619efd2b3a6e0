"""The load of experts: of every kind of router's output, in every kind of training, against a plain count."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.probes.kit import Lab, sgd
from trackbridge.errors import ConfigError
from trackbridge.probes.routers import assigned, count, find

EXPERTS, CHOSEN = 6, 2


class TopK(nn.Module):
    """As in libraries: returns scores, weights and numbers of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.num_experts = CHOSEN, EXPERTS
        self.weight = nn.Parameter(torch.randn(EXPERTS, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x.reshape(-1, 8) @ self.weight.t()
        scores, numbers = logits.softmax(-1).topk(self.top_k, dim=-1)
        return logits, scores, numbers


class Mixture(nn.Module):
    """`linear`: the router is a bare layer, and the choice is made outside of it."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.top_k = CHOSEN
        self.gate: nn.Module = nn.Linear(8, EXPERTS) if linear else TopK()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(EXPERTS))
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        if self.linear:
            logits = self.gate(x)
            numbers = logits.topk(CHOSEN, dim=-1).indices.reshape(-1, CHOSEN)
        else:
            logits, _, numbers = self.gate(x)
        weights = logits.new_zeros(len(numbers), EXPERTS).scatter(1, numbers, logits.reshape(-1, EXPERTS).gather(1, numbers))
        every = torch.stack([expert(x.reshape(-1, 8)) for expert in self.experts], 1)
        return (every * weights[..., None]).sum(1).view_as(x) + x


class Model(nn.Module):
    def __init__(self, linear: bool = False, mode: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Mixture(linear) for _ in range(2))
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.mode == "plain" else checkpoint(layer, x, use_reentrant=self.mode == "reentrant")
        return x


def data(seed: int = 0) -> Tensor:
    return torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def plain_counts(model: Model, *micro: Tensor) -> dict[str, np.ndarray]:
    found = {f"layers.{number}.gate": np.zeros(EXPERTS) for number in range(2)}
    for x in micro:
        for number, layer in enumerate(model.layers):
            with torch.no_grad():
                logits = layer.gate(x) if layer.linear else layer.gate(x)[0]
                chosen = logits.reshape(-1, EXPERTS).topk(CHOSEN).indices
                found[f"layers.{number}.gate"] += np.bincount(chosen.reshape(-1).cpu().numpy(), minlength=EXPERTS)
                x = layer(x)
    return found


def check(found: dict[str, float], counts: dict[str, np.ndarray]) -> None:
    for router, each in counts.items():
        share = each / each.sum()
        assert [found[f"expert/{router}.{e}/load_share"] for e in range(EXPERTS)] == pytest.approx(share.tolist())
        assert found[f"router/{router}/load_max"] == pytest.approx(share.max())
        assert found[f"router/{router}/load_min"] == pytest.approx(share.min())
        entropy = -sum(p * np.log(p) for p in share if p) / np.log(EXPERTS)
        assert found[f"router/{router}/load_entropy"] == pytest.approx(entropy)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("linear", [False, True], ids=["returns numbers", "returns scores"])
@pytest.mark.parametrize("way", ["plain", "reentrant", "non-reentrant", "compiled", "layers compiled"])
def test_load_of_a_step(way: str, linear: bool) -> None:
    torch._dynamo.reset()
    model = Model(linear, way if "compiled" not in way else "plain")
    run: Any = model
    if way == "compiled":
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
    lab = Lab(run, sgd(model))
    if way == "layers compiled":
        for layer in model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    for step in range(3):
        micro = [data(2 * step), data(2 * step + 1)]
        counts = plain_counts(model, *micro)
        for x in micro:
            run(x).square().mean().backward()
        check(lab.close(), counts)


def test_evaluation_is_not_counted_and_silence_is_absent() -> None:
    model = Model()
    lab = Lab(model, sgd(model))
    with torch.no_grad():
        model(data())
    assert not any(name.startswith(("router/", "expert/")) for name in lab.close())


def test_one_expert_takes_all() -> None:
    model = Model(linear=True)
    with torch.no_grad():
        for layer in model.layers:
            layer.gate.weight.zero_()
            layer.gate.bias.copy_(torch.tensor([9.0, 8, 0, 0, 0, 0]))
    lab = Lab(model, sgd(model))
    model(data()).sum().backward()
    found = lab.close()
    assert found["router/layers.0.gate/load_max"] == 0.5 and found["router/layers.0.gate/load_min"] == 0
    assert found["router/layers.0.gate/load_entropy"] == pytest.approx(np.log(2) / np.log(EXPERTS))


def counted(values: Tensor, experts: int = 4, chosen: int = 2, gate: float = 1.0) -> list[float]:
    slab = torch.tensor([7.0, *[0.0] * experts, 7.0, gate], dtype=torch.float64)
    for _ in range(2):
        count(values, slab, 1, experts, chosen, experts + 2)
    assert slab[0] == slab[experts + 1] == 7
    return [number / 2 for number in slab[1 : 1 + experts].tolist()]


def test_kinds_of_output() -> None:
    numbers = torch.tensor([[0, 3], [3, 1], [3, 3]])
    assert counted(numbers) == [1, 1, 0, 4]
    assert counted(numbers, gate=0.0) == [0, 0, 0, 0]
    assert counted(torch.tensor([[0, -1], [4, 1]])) == [1, 1, 0, 0]  # dropped tokens
    assert counted(torch.tensor([[[True, False, False, True]]])) == [1, 0, 0, 1]
    assert counted(torch.tensor([[0.1, 0.9, 0.2, 0.0], [float("nan"), 1, 0, 0]])) == [1, 2, 1, 0]


def test_what_of_an_output_is_taken() -> None:
    scores, numbers = torch.rand(5, 4), torch.zeros(5, 2, dtype=torch.long)
    per_expert, mask = torch.zeros(4, dtype=torch.long), torch.zeros(5, 4, dtype=torch.bool)
    for output, wanted in [
        ((scores, torch.rand(5, 2), numbers), numbers),
        ((scores, scores), scores),
        (scores, scores),
        ((per_expert, scores), scores),
        ((torch.rand(5, 2), numbers, per_expert), numbers),
        ({"mask": mask, "scores": scores}, mask),
        ((torch.zeros(5, 3, dtype=torch.long), scores), scores),
        ((torch.rand(5, 2), None), None),
    ]:
        assert assigned(output, 4, 2) is wanted
    assert assigned(scores, 4, 0) is None and assigned(numbers, 4, 0) is numbers
    assert assigned(top := torch.zeros(5, dtype=torch.long), 4, 1) is top


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(-2, 9), min_size=2, max_size=2), min_size=1, max_size=40))
def test_counts_against_numpy(pairs: list[list[int]]) -> None:
    numbers = np.array(pairs)
    inside = numbers[(numbers >= 0) & (numbers < 8)]
    assert counted(torch.tensor(pairs), 8) == np.bincount(inside, minlength=8).tolist()


def names_of(model: nn.Module, patterns: Any = None) -> list[tuple[str, int, int]]:
    return [(name, experts, chosen) for name, _, experts, chosen in find(model, patterns)]


def test_which_modules_are_routers() -> None:
    assert names_of(Model()) == [("layers.0.gate", EXPERTS, CHOSEN), ("layers.1.gate", EXPERTS, CHOSEN)]
    gated = nn.ModuleDict({"gate": nn.Linear(4, 8), "up": nn.Linear(4, 8)})  # a gated MLP has no experts
    assert names_of(nn.ModuleDict({"mlp": gated})) == []
    assert names_of(Model(), ["layers.1.gate"]) == [("layers.1.gate", EXPERTS, CHOSEN)]
    assert names_of(Model(), []) == []


def test_patterns_that_cannot_be_met() -> None:
    with pytest.raises(ConfigError, match=r"activations\.routers: no module matches 'layers\.0\.gat'"):
        find(Model(), ["layers.0.gat"])
    with pytest.raises(ConfigError, match=r"layers\.0 does not say how many experts.*num_experts"):
        find(nn.ModuleDict({"layers": nn.ModuleList([nn.Identity()])}), ["layers.0"])


def test_a_router_that_does_not_say_how_many_it_chooses(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh())
    with caplog.at_level(logging.WARNING, "trackbridge"):
        lab = Lab(model, sgd(model), routers=["0"])
    assert "0 does not say how many experts a token goes to" in caplog.text
    model(data()).sum().backward()
    assert not any(name.startswith("router/") for name in lab.close())


def test_none_where_no_activations_are_wanted() -> None:
    assert not any("load" in name for name in Lab(Model(), sites="none").instruments.series)


def small(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    config, model = {
        "mixtral": (transformers.MixtralConfig(**sizes, num_local_experts=5), transformers.MixtralForCausalLM),
        "qwen3": (transformers.Qwen3MoeConfig(**sizes, num_experts=5), transformers.Qwen3MoeForCausalLM),
        "olmoe": (transformers.OlmoeConfig(**sizes, num_experts=5), transformers.OlmoeForCausalLM),
    }[kind]
    return model(config)


@pytest.mark.filterwarnings("ignore")  # the library's own
@pytest.mark.parametrize("kind", ["mixtral", "qwen3", "olmoe"])
def test_models_of_a_library(kind: str) -> None:
    torch.manual_seed(0)
    model = small(kind).train()
    lab = Lab(model, sgd(model))
    seen: dict[str, np.ndarray] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            chosen = next(tensor for tensor in output if not tensor.is_floating_point())
            seen[name] = np.bincount(chosen.reshape(-1).numpy(), minlength=5) / chosen.numel()

        return hook

    routers = [(name, module) for name, module, _, _ in find(model, None)]
    assert [name for name, _ in routers] == [f"model.layers.{number}.mlp.gate" for number in range(2)]
    for name, module in routers:
        module.register_forward_hook(note(name))
    tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(0))
    model(input_ids=tokens, labels=tokens).loss.backward()
    found = lab.close()
    for name, share in seen.items():
        assert [found[f"expert/{name}.{expert}/load_share"] for expert in range(5)] == pytest.approx(share.tolist())
