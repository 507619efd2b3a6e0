"""Activation statistics: of training forwards only, once each, whatever the module returns."""

from __future__ import annotations

import logging
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.probes.kit import Lab, sgd


class Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + x


class Stack(nn.Module):
    """Blocks behind an embedding; keeps what each block gave in the last forward that was recorded."""

    def __init__(self, mode: str = "plain", depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Layer() for _ in range(depth))
        self.head = nn.Linear(8, 1)
        self.mode = mode

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if self.mode == "plain" else checkpoint(block, x, use_reentrant=self.mode == "reentrant")
        return self.head(x)


def batch(seed: int = 0) -> Tensor:
    return torch.randint(0, 16, (4, 5), generator=torch.Generator().manual_seed(seed))


def outputs(model: Stack, tokens: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        found = {"embed": (x := model.embed(tokens))}
        for number, block in enumerate(model.blocks):
            found[f"blocks.{number}"] = x = torch.tanh(block.linear(x)) + x
    return found


def acts(found: dict[str, float], statistic: str) -> dict[str, float]:
    end = f"/{statistic}"
    return {name[len("act/") : -len(end)]: v for name, v in found.items() if name.startswith("act/") and name.endswith(end)}


def test_blocks_and_the_embedding_by_default() -> None:
    model = Stack()
    lab = Lab(model, sgd(model))
    true = outputs(model, batch())
    model(batch()).sum().backward()
    found = lab.close()
    assert acts(found, "mean") == pytest.approx({n: x.double().mean().item() for n, x in true.items()}, abs=1e-6)
    assert acts(found, "std") == pytest.approx({n: x.double().std(correction=0).item() for n, x in true.items()}, rel=1e-5)
    assert acts(found, "max") == {n: x.abs().max().item() for n, x in true.items()}
    assert acts(found, "nonfinite") == dict.fromkeys(true, 0.0)


@pytest.mark.parametrize("mode", ["plain", "reentrant", "non-reentrant"])
def test_checkpointing_counts_each_micro_batch_once(mode: str) -> None:
    model = Stack(mode)
    if mode == "reentrant":  # that mode passes no gradient where no input asks for one
        model.embed.weight.requires_grad = True
    lab = Lab(model, sgd(model), sites=["embed", "blocks.?", "blocks.?.linear"])
    micro = [batch(seed) for seed in range(3)]
    truth = [outputs(model, tokens) for tokens in micro]
    for _ in range(2):
        for tokens in micro:
            model(tokens).sum().backward()
        found = lab.close()
        for name in truth[0]:
            whole = torch.stack([t[name] for t in truth]).double()
            assert found[f"act/{name}/std"] == pytest.approx(whole.std(correction=0).item(), rel=1e-5)
        assert set(lab.last.values()) == {3}  # the layers inside, too, which a recomputation runs again to the end


def fires(lab: Lab, name: str) -> float:
    """How often the site ran in the last closed step."""
    return lab.last[name]


def test_a_doubled_count_would_be_seen() -> None:
    model = Stack()
    lab = Lab(model, sgd(model))
    model(batch())
    model(batch(1)).sum().backward()
    lab.close()
    assert fires(lab, "blocks.0") == 2


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_forwards_without_gradients_are_not_mixed_in(context: Any) -> None:
    model = Stack()
    lab = Lab(model, sgd(model))
    with context():
        model(batch(7))
    model(batch()).sum().backward()
    with context():
        model(batch(8))
    alone = lab.close()
    model(batch()).sum().backward()
    assert {n: v for n, v in alone.items() if n.startswith("act/")} == {
        n: v for n, v in lab.close().items() if n.startswith("act/")
    }


def test_evaluation_and_pauses_are_not_mixed_in() -> None:
    model = Stack()
    lab = Lab(model, sgd(model))
    lab.instruments.pause()
    lab.instruments.pause()
    model(batch(7)).sum().backward()
    lab.instruments.resume()
    model(batch(7)).sum().backward()
    lab.instruments.resume()
    model.eval()
    model(batch(8)).sum()
    model.train()
    assert not acts(lab.close(), "mean")
    model(batch()).sum().backward()
    assert acts(lab.close(), "mean")


def test_a_data_parallel_replica_is_not_measured() -> None:
    """`nn.DataParallel` copies modules with their hooks, and runs the copies on threads (pytorch#128272, #42478)."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    lab = Lab(model, sgd(model), sites=["0"])
    y = model(torch.ones(2, 4))
    replica: Any = model[0]._replicate_for_data_parallel()
    replica.weight, replica.bias = model[0].weight.detach() + 100, model[0].bias.detach()
    assert len(replica._forward_hooks) == len(model[0]._forward_hooks)
    replica(torch.ones(2, 4))
    found = lab.close()
    assert fires(lab, "0") == 1
    assert found["act/0/max"] == pytest.approx(y.atanh().abs().max().item(), rel=1e-4)


def test_cadence() -> None:
    model = Stack()
    lab = Lab(model, sgd(model), every=3)
    seen = []
    for _ in range(7):
        model(batch()).sum().backward()
        seen.append("act/blocks.0/mean" in lab.close())
    assert seen == [True, False, False, True, False, False, True]


@dataclass
class Output:
    hidden: Tensor
    extra: int = 3


Pair = namedtuple("Pair", "first second")


class Gives(nn.Module):
    """Returns its input in some shape of output."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Any:
        return {
            "tensor": x,
            "tuple": (x, None, 7),
            "late": (None, torch.arange(3), x),
            "empty first": (x[:0], x),
            "nested": ((None, (x,)), {"a": 1}),
            "list": [x],
            "dict": {"hidden": x, "loss": x.sum()},
            "loss first": {"loss": x.sum(), "hidden": x},
            "dataclass": Output(x),
            "named tuple": Pair(x, x.sum()),
            "none": None,
            "empty": x[:0],
            "integers": torch.arange(4),
            "int": 3,
        }[self.what]


SEEN = ("tensor", "tuple", "late", "empty first", "nested", "list", "dict", "loss first", "dataclass", "named tuple")


@pytest.mark.parametrize("what", [*SEEN, "none", "empty", "integers", "int"])
def test_every_kind_of_output(what: str) -> None:
    model = nn.ModuleDict({"giver": Gives(what), "linear": nn.Linear(4, 4)})
    lab = Lab(model, sgd(model), sites=["giver"])
    x = torch.tensor([[1.0, -2.0, 3.0, 6.0]])
    returned = model["giver"](model["linear"](x) * 0 + x)
    assert type(returned) is type(Gives(what)(x))
    found = acts(lab.close(), "mean")
    assert found == ({"giver": 2.0} if what in SEEN else {})


def test_an_inplace_activation_behind_a_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(inplace=True), nn.Linear(64, 1))
    lab = Lab(model, optimizer := sgd(model), sites="leaf")
    torch.manual_seed(0)
    x = torch.randn(32, 4)
    with torch.no_grad():
        before = model[0](x)
    model(x).sum().backward()
    optimizer.step()
    found = lab.close()
    assert found["act/0/mean"] == pytest.approx(before.double().mean().item(), abs=1e-6)  # its negative outputs too
    assert found["act/1/mean"] == pytest.approx(before.relu().double().mean().item(), abs=1e-6)


def test_half_precision_outputs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 1))
    lab = Lab(model, sgd(model), sites=["0"])
    with torch.autocast("cpu", torch.bfloat16):
        out = model[0](torch.randn(8, 4))
    assert out.dtype == torch.bfloat16
    assert lab.close()["act/0/mean"] == pytest.approx(out.double().mean().item(), rel=1e-5)


def test_a_site_that_overflows_has_only_its_count() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    lab = Lab(model, sgd(model), sites=["0", "1"])
    with torch.no_grad():
        model[0].bias[1] = float("inf")
    model(torch.ones(3, 4))
    found = lab.close()
    assert found["act/0/nonfinite"] == 3
    assert "act/0/mean" not in found and "act/1/mean" in found


def test_functional_transforms_pass_through() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    lab = Lab(model, sgd(model), sites="leaf")
    parameters = dict(model.named_parameters())
    torch.func.grad(lambda p: torch.func.functional_call(model, p, (torch.ones(2, 4),)).sum())(parameters)
    torch.vmap(model)(torch.ones(3, 2, 4))
    lab.close()


def test_a_module_that_runs_twice_in_a_forward() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    lab = Lab(model, sgd(model), sites=["0"])
    model(torch.ones(2, 4))
    lab.close()
    assert fires(lab, "0") == 2


def test_silence_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
    lab = Lab(model, sgd(model), sites="leaf")
    with caplog.at_level(logging.WARNING, "trackbridge"):
        for _ in range(8):
            model["used"](torch.ones(1, 4))
            lab.close()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1 and "unused" in messages[0] and "run.watch" in messages[0]


def test_statistics_do_not_depend_on_what_came_before() -> None:
    """A replay that starts in the middle gets the same bits."""
    model = Stack()
    lab = Lab(model, sgd(model))
    for seed in (0, 1, 2, 1):
        model(batch(seed)).sum().backward()
        found = {name: v for name, v in lab.close().items() if name.startswith("act/")}
        if seed == 1:
            first = found
            break
    for seed in (5, 1):
        model(batch(seed)).sum().backward()
        found = {name: v for name, v in lab.close().items() if name.startswith("act/")}
    assert found == first
