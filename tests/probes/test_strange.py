"""Calls that are no training, tensors that are no numbers, and what people have switched on around it: with everything that
can be measured on, nothing of ours raises, no part is switched off, and training ends in the same bits."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import trackbridge
from tests.probes.kit import Lab, sgd
from trackbridge.errors import UsageError
from trackbridge.watched import hyperparameters

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")  # of torch 2.15, which still has it

EVERYTHING: dict[str, Any] = {
    "parameters": {"weights_every": 1, "moments_every": 1, "rows_every": 1, "checksums_every": 1, "histograms_every": 1},
    "activations": {"sites": "leaf", "channels_every": 1, "attention_every": 1},
    "recorder": {"snapshot_every": 2},
}


class Attending(nn.Module):
    """One block; `interrupt` is raised once, in the middle of it."""

    interrupt: BaseException | None = None

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        if self.interrupt is not None and type(y) is Tensor:  # not where the FLOPs of a copy are counted
            error, self.interrupt = self.interrupt, None
            raise error
        return x + self.out(y)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Attending() for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOKENS = [torch.from_numpy(np.random.default_rng(number).integers(0, 11, (2, 6))) for number in range(6)]


def made() -> tuple[Small, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Small()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def watched(folder: Path, **settings: Any) -> trackbridge.Run:
    return trackbridge.init(dir=folder, strict=True, **EVERYTHING, **settings)


def trained(train: Callable[[Any, Any, Any], None], folder: Path) -> None:
    """`train(model, optimizer, run)` without a run and with one: the same bits, and a row of every step with activations."""
    ends = []
    for run in (None, watched(folder)):
        model, optimizer = made()
        if run is not None:
            run.watch(model, optimizer)
        train(model, optimizer, run)
        ends.append([tensor.clone() for tensor in model.state_dict().values()])
        if run is not None:
            run.finish()
            rows = list(trackbridge.load(run.dir).rows(0))
            names = {name for row in rows for name in row.schema.names}
            assert rows and {"act/blocks.1.out/rms", "layer/head.weight/grad_norm", "act/blocks.0/sampled_logit_max"} <= names
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def grads(model: nn.Module) -> None:
    """torch.func in all its ways, around the watched model."""
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (tokens[None],)).square().mean()

    torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, TOKENS[0])
    torch.func.jvp(lambda head: loss({**weights, "head.weight": head}, TOKENS[0][0]), *[(weights["head.weight"],)] * 2)


def faked(model: nn.Module) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(TOKENS[0])


def exported(model: nn.Module) -> None:
    """Alone, and inside another: before torch 2.11, strict export takes no module that has hooks, whoever's they are."""
    for strict in (False, True):
        for whole in [nn.Sequential(model)] if strict and torch.__version__ < "2.11" else [model, nn.Sequential(model)]:
            program = torch.export.export(whole, (TOKENS[0],), strict=strict)
            assert not [node for node in program.graph.nodes if "trackbridge" in str(node.target)]
    torch._dynamo.reset()


def jit_traced(model: nn.Module) -> None:
    assert "trackbridge" not in str(torch.jit.trace(model, (TOKENS[0],), check_trace=False).graph)


def made_fx(model: nn.Module) -> None:
    traced = make_fx(lambda tokens: model(tokens))(TOKENS[0])
    assert not [node for node in traced.graph.nodes if "trackbridge" in str(node.target)]


def copied(model: nn.Module) -> None:
    copy.deepcopy(model)(TOKENS[0]).sum().backward()


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore:There is a performance drop"
)
@pytest.mark.parametrize("use", [grads, faked, jit_traced, made_fx, exported, copied])
def test_other_uses_of_a_watched_model_between_steps(use: Callable[[nn.Module], None], tmp_path: Path) -> None:
    def train(model: Small, optimizer: torch.optim.Optimizer, run: Any) -> None:
        for number, tokens in enumerate(TOKENS[:3]):
            loss = step(model, optimizer, tokens)
            if number < 2:
                use(model)
                optimizer.zero_grad()
            if run is not None:
                run.step(loss)

    trained(train, tmp_path)


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def numpy_raises() -> Iterator[None]:
    with np.errstate(all="raise"):
        yield


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "around",
    [
        lambda: default_device("meta"),  # another than the model's: stands for "cuda" on a machine without
        numpy_raises,
        default_dtype,
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.autograd.graph.save_on_cpu(),
    ],
    ids=["default device", "numpy raises", "default dtype", "anomaly mode", "saved on the CPU"],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_switches_around_training(around: Callable[[], AbstractContextManager[Any]], tmp_path: Path) -> None:
    def train(model: Small, optimizer: torch.optim.Optimizer, run: Any) -> None:
        step(model, optimizer, TOKENS[3])  # AdamW of torch 2.6 makes no state where another device is the default
        with around():
            if run is not None:
                run.watch({"again": model}, {"": optimizer})  # what is made here is made under the switch too
                run.watch(model, optimizer)
            for tokens in TOKENS[:3]:
                loss = step(model, optimizer, tokens)
                if run is not None:
                    run.step(loss)

    trained(train, tmp_path)


def test_what_is_made_in_inference_mode_is_written_to_outside(tmp_path: Path) -> None:
    def train(model: Small, optimizer: torch.optim.Optimizer, run: Any) -> None:
        for number, tokens in enumerate(TOKENS):
            with torch.inference_mode() if number == 0 else nullcontext():
                model(tokens)
                if run is not None:
                    run.watch({"again": model}, {"": optimizer})
                    run.watch(model, optimizer)
            loss = step(model, optimizer, tokens)
            with torch.inference_mode() if number % 2 else nullcontext():
                if run is not None:
                    run.step(loss)

    trained(train, tmp_path)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a bug of the user's")], ids=repr)
def test_a_forward_pass_that_ends_early_leaves_no_mode_on(error: BaseException, tmp_path: Path) -> None:
    """A notebook's stop button, and then training goes on. `KeyboardInterrupt` calls no hook at the end of a module."""

    def train(model: Small, optimizer: torch.optim.Optimizer, run: Any) -> None:
        for number, tokens in enumerate(TOKENS):
            if number in (1, 2, 4):
                model.blocks[number % 2].interrupt = error
                with pytest.raises(type(error)):
                    step(model, optimizer, tokens)
                assert model.blocks[number % 2].interrupt is None
            loss = step(model, optimizer, tokens)
            if run is not None:
                run.step(loss)
            assert not _get_current_function_mode_stack() and not _get_current_dispatch_mode_stack()

    trained(train, tmp_path)


class Bare(torch.optim.Optimizer):
    """Without a rate, and with a state that is no mapping."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= 0.1 * p.grad
                    self.state[p] = 3


@pytest.mark.parametrize("defaults", [{}, {"lr": None}, {"lr": "as it comes"}, {"lr": torch.tensor([0.1, 0.2])}], ids=repr)
def test_optimizers_without_a_rate(defaults: dict[str, Any]) -> None:
    model = nn.Linear(3, 2)
    optimizer = Bare(model.parameters(), defaults)
    lab = Lab(model, optimizer)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    assert lab.instruments.lr() == {}
    found = lab.close()
    assert found["optim/applied"] == 1 and found["layer/weight/update_ratio"] > 0


def test_groups_that_share_a_name_are_told_apart_by_their_numbers() -> None:
    a, b, c = (nn.Linear(2, 2) for _ in range(3))
    groups = [
        {"params": m.parameters(), "lr": lr, "name": name} for m, lr, name in ((a, 1.0, "x"), (b, 2.0, "x"), (c, 3.0, "q k%"))
    ]
    lab = Lab(nn.ModuleList([a, b, c]), torch.optim.SGD(groups))
    assert lab.instruments.lr() == {"train/lr": 1.0, "train/lr/1": 2.0, "train/lr/q_k_": 3.0}


def test_jagged_tensors_are_their_values() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    lab = Lab(model, sgd(model), sites="leaf", embedding_rows=0)
    parts = [torch.randn(2, 4), torch.randn(5, 4)]
    y = model(torch.nested.nested_tensor(parts, layout=torch.jagged))
    y.values().sum().backward()
    found = lab.close()
    values = model(torch.cat(parts)).detach().double()
    assert found["act/1/mean"] == pytest.approx(values.mean().item(), rel=1e-5)
    assert found["act/1/std"] == pytest.approx(values.std(correction=0).item(), rel=1e-5)
    rms = values.square().mean(0).sqrt()
    assert found["act/1/channel_kurtosis"] == pytest.approx(((rms**4).mean() / (rms**2).mean() ** 2).item(), rel=1e-4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_the_old_layout_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    lab = Lab(model, sgd(model), sites="leaf")
    y = model(torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(5, 4)]))
    torch.cat([part.reshape(-1) for part in y.unbind()]).sum().backward()
    assert not [name for name in lab.close() if name.startswith("act/")]


def test_a_model_without_memory_is_told_so_and_a_part_without_is_left_out(tmp_path: Path) -> None:
    with watched(tmp_path) as run:
        with pytest.raises(UsageError, match="to_empty"):
            run.watch(nn.Linear(2, 2, device="meta"))
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
        optimizer = sgd(model)
        run.watch(model, optimizer)
        for _ in range(2):
            model[0](torch.randn(3, 2)).sum().backward()
            optimizer.step()
            run.step(1.0)
    rows = list(trackbridge.load(run.dir).rows(0))
    assert len(rows) == 2 and "layer/0.weight/grad_norm" in rows[0].schema.names
    assert "layer/1.weight/weight_norm" not in rows[0].schema.names


@pytest.mark.parametrize(
    "bad",
    [[1.0, 2.0], torch.zeros(2, dtype=torch.long), torch.zeros(2, device="meta"), torch.zeros(2).to_sparse()],
    ids=["list", "integers", "meta", "sparse"],
)
def test_losses_of_samples_that_are_none_are_refused_once_and_left_out_later(bad: Any, tmp_path: Path) -> None:
    with watched(tmp_path) as run:
        with pytest.raises(UsageError, match="sample_loss must be an ordinary floating-point tensor"):
            run.micro(1.0, sample_loss=bad)
        run.micro(2.0, sample_loss=torch.tensor([1.0, 3.0]))
        run.micro(9.0, sample_loss=bad)
        run.step()
    (row,) = trackbridge.load(run.dir).rows(0)
    found = dict(zip(row.schema.names, row.values.tolist(), strict=True))
    assert (found["train/loss"], found["train/sample_loss_max"]) == (2.0, 3.0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_model_is_refused_and_a_scripted_part_is_passed_over(tmp_path: Path) -> None:
    part = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    with watched(tmp_path) as run, pytest.raises(UsageError, match="takes no hooks"):
        run.watch(part)
    model = nn.Sequential(part, nn.Linear(4, 2))
    lab = Lab(model, optimizer := sgd(model), sites="leaf")
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    found = lab.close()
    assert {"act/1/rms", "layer/0.0.weight/grad_norm"} <= found.keys() and "act/0.0/rms" not in found


def test_a_module_that_takes_no_hook_leaves_none_on_the_others() -> None:
    class Refusing(nn.Linear):
        def register_forward_hook(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("no hooks here")

    model = nn.Sequential(nn.Linear(4, 4), Refusing(4, 2))
    optimizer = sgd(model)
    with pytest.raises(RuntimeError, match="no hooks here"):
        Lab(model, optimizer, sites="leaf")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_properties_that_raise_when_they_are_looked_at() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        @property
        def top_k(self) -> int:
            raise ValueError("not yet")

        @property
        def config(self) -> Any:
            raise RuntimeError("not here")

        p = config

        def forward(self, x: Tensor) -> Tensor:
            return sum(expert(x) * weight for expert, weight in zip(self.experts, self.gate(x).split(1, -1), strict=True))

    model = Experts()
    lab = Lab(model, sgd(model), sites="leaf")
    model(torch.randn(3, 4)).sum().backward()
    assert "act/gate/rms" in lab.close()
    assert hyperparameters({"": model}, {})["model"]["model"]["dropout"] == []


def test_threads_that_share_a_model_share_no_mode(tmp_path: Path) -> None:
    """Two forward passes of one block at a time, one in each thread, that end in the order in which they began."""
    model, optimizer = made()
    together = threading.Barrier(2, timeout=10)
    left: list[Any] = []

    def wait(*_: Any) -> None:
        together.wait()

    model.blocks[0].qkv.register_forward_hook(wait)
    model.blocks[0].out.register_forward_hook(wait)

    def forward() -> None:
        for tokens in TOKENS[:3]:
            model(tokens).sum().backward()
            left.extend(_get_current_function_mode_stack())

    # FLOPs are given: counting them on a copy would call the hooks once more in one thread only, and they wait for each other.
    with watched(tmp_path, perf={"flops_per_token": 1.0}) as run:
        run.watch(model, optimizer)
        threads = [threading.Thread(target=forward) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        run.step(1.0)
    assert not left


def test_a_model_without_parameters_is_watched_as_any() -> None:
    model = nn.Sequential(nn.ReLU())
    lab = Lab(model, sites=["0"])
    model(torch.randn(4, 8))
    values = lab.close()
    assert values["act/0/max"] > 0 and "grad/norm" not in values
