"""Group A of the field's own failures: collectors and hooks. One test a row, with its tiny input (docs/public_reports.md)."""

from __future__ import annotations

import copy
import gc
import io
import logging
import math
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trackbridge
from tests.probes.kit import Lab, sgd

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def started(folder: Path, model: Any, optimizer: Any = None, *, scaler: Any = None, **settings: Any) -> trackbridge.Run:
    run = trackbridge.init(dir=folder, recorder={"enabled": False}, detection={"enabled": False}, **settings)
    run.watch(model, optimizer, scaler=scaler)
    return run


def record_of(run: trackbridge.Run) -> trackbridge.RunRecord:
    run.finish()
    return trackbridge.load(run.dir)


def values(record: trackbridge.RunRecord, name: str) -> list[float]:
    return [float(value) for value in record.series(name)[1]] if name in record.names else []


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it while tracing
@pytest.mark.parametrize("when", ["before the first forward", "after it"])
@pytest.mark.parametrize("how", ["in place", "wrapped", "children"])
def test_a1_a_compiled_model_has_values_or_says_why_not(
    tmp_path: Path, how: str, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """pytorch#117758, #115750, #173452."""
    torch._dynamo.reset()
    model = net()
    run_model: Any = model
    if how == "in place":
        model.compile(backend="eager")
    elif how == "wrapped":
        run_model = torch.compile(model, backend="eager")
    else:
        for child in model:
            child.compile(backend="eager")
    if when == "after it":
        run_model(X)
    with caplog.at_level(logging.WARNING, "trackbridge"):
        run = started(tmp_path, run_model, optimizer := sgd(model), activations={"sites": ["0", "2"]})
        for _ in range(4):
            run_model(X).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
        record = record_of(run)
    told = [r.getMessage() for r in caplog.records if "activation statistics" in r.getMessage()]
    found = {name: values(record, f"act/{name}/mean") for name in ("0", "2")}
    if told:  # absent, never 0 or an old value; and said once, by name
        assert when == "after it" and how != "children"
        assert found == {"0": [], "2": []} and len(told) == 1 and "0, 2" in told[0]
    else:
        assert [len(seen) for seen in found.values()] == [4, 4] and len(set(found["2"])) == 4
    assert all(value > 0 for value in values(record, "grad/norm")) and len(values(record, "grad/norm")) == 4
    torch._dynamo.reset()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a4_a_recomputed_forward_is_counted_once(reentrant: bool) -> None:
    """Megatron-LM#6309."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            self.runs = 0
            self.block[0].register_forward_hook(self.count)

        def count(self, *_: Any) -> None:
            self.runs += 1

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, self.first(x), use_reentrant=reentrant)  # type: ignore[no-any-return]

    model = Checkpointed()
    lab = Lab(model, sgd(model), sites=["block", "block.0", "block.1"])
    for micro in (1, 3):
        model.runs = 0
        for _ in range(micro):
            model(X).sum().backward()
        found = lab.close()
        assert model.runs == 2 * micro  # it did run twice
        assert set(lab.last.values()) == {micro}
        assert math.isfinite(found["act/block/kurtosis"])


@dataclass
class Output:
    hidden: Tensor
    extra: int = 3


class Gives(nn.Module):
    def __init__(self, shape: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Any:
        return self.shape(x)


SHAPES: dict[str, Callable[[Tensor], Any]] = {
    "dict": lambda x: {"hidden": x},
    "none": lambda x: None,
    "nested": lambda x: ((None, (x, 7)), [x]),
    "dataclass": Output,
    "empty": lambda x: x[:0],
}


class Odd(nn.Module):
    """A layer, and beside it modules that return all kinds of things."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.odd = nn.ModuleDict({name: Gives(shape) for name, shape in SHAPES.items()})

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        for name, module in self.odd.items():
            found = module(x)
            if name == "dict":
                x = found["hidden"]
            elif name == "nested":
                x = found[0][1][0]
            elif name == "dataclass":
                x = found.hidden
        return x


def test_a5_outputs_of_every_kind_and_a_bug_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """wandb#1122."""

    def trained(watch: bool, folder: Path) -> tuple[list[Tensor], trackbridge.RunRecord | None]:
        model = Odd()
        optimizer = sgd(model)
        run = started(folder, model, optimizer, activations={"sites": "leaf"}) if watch else None
        for _ in range(3):
            model(X).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if run is not None:
                run.step()
        return [p.detach().clone() for p in model.parameters()], record_of(run) if run is not None else None

    plain, _ = trained(False, tmp_path)
    watched, record = trained(True, tmp_path / "whole")
    assert record is not None and all(map(torch.equal, plain, watched))
    seen = {name for name in SHAPES if values(record, f"act/odd.{name}/mean")}
    assert seen == {"dict", "nested", "dataclass"}
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr("trackbridge.probes.moments.add_all_on_cpu", lambda *_: 1 / 0)
    with caplog.at_level(logging.ERROR, "trackbridge"):
        broken, record = trained(True, tmp_path / "broken")
    assert record is not None and all(map(torch.equal, plain, broken))  # the step went on as if we were not there
    assert sum("activation" in r.getMessage() and "switched off" in r.getMessage() for r in caplog.records) == 1
    assert len(values(record, "grad/norm")) == 3 and not values(record, "act/layer/mean")


def test_a6_gradients_are_unscaled_and_the_scale_is_beside_them(tmp_path: Path) -> None:
    """wandb#9092, wandb#4369, lightning#11407."""
    model = nn.Linear(4, 1)
    optimizer = sgd(model, lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    run = started(tmp_path, model, optimizer, scaler=scaler)
    for _ in range(6):
        scaler.scale(model(torch.ones(8, 4)).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.step()
    record = record_of(run)
    assert values(record, "layer/weight/grad_norm") == pytest.approx([2.0] * 6)  # not 2048, and no jump where the scale grows
    assert values(record, "train/loss_scale") == [1024, 2048, 2048, 4096, 4096, 8192]


def test_a8_one_norm_per_optimizer_step_of_the_accumulated_gradient(tmp_path: Path) -> None:
    """nrdk#38, wandb#10100."""
    model = net()
    optimizer = sgd(model)
    run = started(tmp_path, model, optimizer)
    parts, true = [], []
    for _ in range(2):
        for micro in range(4):
            before = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
            loss = model(X[2 * micro : 2 * micro + 2]).square().mean()
            (loss / 4).backward()
            run.micro(loss.detach())
            deltas = [p.grad - b for p, b in zip(model.parameters(), before, strict=True)]  # type: ignore[operator]
            parts.append(float(torch.stack([d.square().sum() for d in deltas]).sum().sqrt()))
        true.append(float(torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()))  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        run.step()
    record = record_of(run)
    assert values(record, "grad/norm") == pytest.approx(true, rel=1e-5)
    assert not any(math.isclose(value, part, rel_tol=1e-3) for value in values(record, "grad/norm") for part in parts)
    assert len(values(record, "train/loss")) == 2


def test_a9_in_place_activations(tmp_path: Path) -> None:
    """pytorch#61519, singd#56, pytorch#95617."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(inplace=True), nn.Linear(16, 1))
    run = started(tmp_path, model, optimizer := sgd(model), activations={"sites": "leaf"})
    true = model[0](X).detach()
    model(X).sum().backward()
    optimizer.step()
    run.step()
    record = record_of(run)
    assert true.min() < 0 and values(record, "act/0/mean") == pytest.approx([true.double().mean().item()], abs=1e-6)
    assert values(record, "act/1/mean") == pytest.approx([true.relu().double().mean().item()], abs=1e-6)
    assert not any(len(module._backward_hooks) for module in model.modules())


def test_a10_nothing_is_kept_alive_and_nothing_is_left_behind() -> None:
    """pytorch#74831, pytorch#82528, opacus#176, NeuroBench#184."""

    def hooks(model: nn.Module) -> int:
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)

    model = net()
    optimizer = sgd(model)
    at_first = hooks(model), len(optimizer._optimizer_step_pre_hooks)
    lab = Lab(model, optimizer, sites="leaf")
    attached = hooks(model)
    lab.instruments.attach(lab.models, lab.optimizers)
    assert hooks(model) == attached  # twice is once
    outputs: list[weakref.ref[Tensor]] = []
    for _ in range(1000):
        with torch.no_grad():
            outputs.append(weakref.ref(model(X)))
    gc.collect()
    assert not any(ref() is not None for ref in outputs)
    assert not [name for name in lab.close() if name.startswith("act/")]  # nor mixed into training statistics
    for _ in range(50):
        lab.instruments.detach()
        assert (hooks(model), len(optimizer._optimizer_step_pre_hooks)) == at_first
        lab.instruments.attach(lab.models, lab.optimizers)
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 3))
    lab.instruments.detach()
    assert (hooks(model), len(optimizer._optimizer_step_pre_hooks)) == at_first


def kurtosis(x: Tensor) -> float:
    y = x.double().numpy().ravel()
    d = y - y.mean()
    return float((d**4).mean() / (d**2).mean() ** 2 - 3)


GAUSS = torch.from_numpy(np.random.default_rng(0).standard_normal(2048)).float()
OUTLIER = torch.cat((GAUSS, torch.tensor([3000.0])))


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(OUTLIER.half(), id="fp16 with an outlier of 3000"),
        pytest.param((1000 + 8 * GAUSS).bfloat16(), id="bf16 near 1000"),
        pytest.param(1000 + GAUSS, id="mean 1000, std 1"),
    ],
)
def test_a11_kurtosis_that_half_precision_would_spoil(x: Tensor) -> None:
    """wandb#3332, transformers#16689, pytorch#44350, wandb#800."""
    model = nn.ModuleDict({"it": nn.Identity()})
    lab = Lab(model, sites=["it"])
    model["it"](x)
    assert lab.close()["act/it/kurtosis"] == pytest.approx(kurtosis(x), rel=1e-3)


@pytest.mark.parametrize("x", [torch.ones(8), torch.tensor([3.0]), torch.tensor([1.0, 2.0, float("nan"), 4.0])])
def test_a11_no_kurtosis_where_there_is_none(x: Tensor) -> None:
    model = nn.ModuleDict({"it": nn.Identity()})
    lab = Lab(model, sites=["it"])
    model["it"](x)
    found = lab.close()
    assert "act/it/kurtosis" not in found
    assert found["act/it/nonfinite"] == float(x.isnan().sum())


def test_a11_gradients_in_bf16_and_not_finite() -> None:
    model = nn.Linear(4, 4).bfloat16()
    lab = Lab(model, optimizer := sgd(model), histograms_every=1)
    model.weight.grad = torch.full((4, 4), 0.25).bfloat16()
    model.weight.grad[0, 0], model.weight.grad[1, 1] = float("nan"), float("inf")
    model.bias.grad = torch.ones(4).bfloat16()
    optimizer.step()
    found = lab.close()
    assert found["layer/weight/grad_nonfinite"] == 2 and found["layer/bias/grad_norm"] == 2.0
    assert "layer/weight/grad_norm" not in found or not math.isfinite(found["layer/weight/grad_norm"])


def test_a12_sparse_gradients_with_repeated_rows(tmp_path: Path) -> None:
    """allennlp#651, pytorch#7257, pytorch#4829."""
    model = nn.Embedding(10, 3, sparse=True)
    run = started(tmp_path, model, optimizer := sgd(model))
    model(torch.tensor([1, 1, 1, 2])).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.is_sparse
    optimizer.step()
    run.step()
    assert values(record_of(run), "layer/weight/grad_norm") == pytest.approx([math.sqrt(30)])


def test_a13_zero_grad_right_after_the_step(tmp_path: Path) -> None:
    """lightning#272, pytorch#124523, torchtune#1833."""
    model = net()
    run = started(tmp_path, model, optimizer := sgd(model))
    for _ in range(3):
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()
    run.step()  # no update: missing, not 0
    assert len(found := values(record_of(run), "grad/norm")) == 3 and min(found) > 0


def test_a13_an_optimizer_inside_the_backward_pass(tmp_path: Path) -> None:
    model = net()
    optimizers = {p: sgd_of(p) for p in model.parameters()}

    def apply(parameter: Tensor) -> None:
        true.append(float(parameter.grad.square().sum()))  # type: ignore[union-attr]
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(apply)
    run = started(tmp_path, model, {str(n): one for n, one in enumerate(optimizers.values())})
    true: list[float] = []
    model(X).sum().backward()
    run.step()
    assert values(record_of(run), "grad/norm") == pytest.approx([math.sqrt(sum(true))], rel=1e-5)


def sgd_of(parameter: Tensor) -> torch.optim.SGD:
    return torch.optim.SGD([parameter], lr=0.1)


def test_a13_a_frozen_layer_is_missing_until_it_is_not(tmp_path: Path) -> None:
    model = net()
    model[0].requires_grad_(False)
    run = started(tmp_path, model, optimizer := sgd(model))
    for step in range(6):
        if step == 3:
            model[0].requires_grad_(True)
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()
    record = record_of(run)
    assert record.series("layer/0.weight/grad_norm")[0].tolist() == [3, 4, 5]
    assert record.series("layer/2.weight/grad_norm")[0].tolist() == list(range(6))


def test_a14_tied_weights_count_once(tmp_path: Path) -> None:
    """Megatron-LM#7228, Megatron-DeepSpeed#99."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embedding(ids))  # type: ignore[no-any-return]

    model = Tied()
    run = started(tmp_path, model, optimizer := sgd(model))
    model(torch.tensor([0, 1, 4])).square().sum().backward()
    true = float(model.head.weight.grad.norm())  # type: ignore[union-attr]
    optimizer.step()
    run.step()
    record = record_of(run)
    assert values(record, "grad/norm") == pytest.approx([true])
    assert [name for name in record.names if name.endswith("weight/grad_norm")] == ["layer/embedding.weight/grad_norm"]


# also seen


def test_a_watched_model_can_be_saved_and_copied_and_the_copies_are_not_measured(tmp_path: Path) -> None:
    """wandb#2588, wandb#5573."""
    model = net()
    run = started(tmp_path, model, optimizer := sgd(model), activations={"sites": "leaf"})
    file = io.BytesIO()
    torch.save(model, file)
    ema, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for copied in (ema, pickled):
        copied(100 * X).sum().backward()
    true = model[0](X).double().mean().item()
    model(X).sum().backward()
    optimizer.step()
    run.step()
    assert values(record_of(run), "act/0/mean") == pytest.approx([true], abs=1e-6)


def test_watching_alone_takes_no_step(tmp_path: Path) -> None:
    """wandb#2258."""
    model = net()
    run = started(tmp_path, model, sgd(model))
    model(X).sum().backward()
    run.watch(model)
    run.step(loss=1.0)
    assert record_of(run).series("train/loss")[0].tolist() == [0]


def test_several_models_and_optimizers_each_have_gradients(tmp_path: Path) -> None:
    """wandb#1639."""
    models, optimizers = {"g": net(), "d": net()}, {}
    for name, model in models.items():
        optimizers[name] = sgd(model)
    run = started(tmp_path, models, optimizers)
    for name in ("g", "d"):
        models[name](X).sum().backward()
        optimizers[name].step()
    run.step()
    record = record_of(run)
    assert values(record, "layer/g.0.weight/grad_norm") and values(record, "layer/d.0.weight/grad_norm")
