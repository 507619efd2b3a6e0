"""Under torch.compile: values, one graph, no recompilation; and never silence."""

from __future__ import annotations

import logging
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import trackbridge
from tests.probes.kit import Lab, sgd
from tests.probes.test_activations import Stack, acts, batch, fires, outputs

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it while tracing
NAMES = {"embed", "blocks.0", "blocks.1", "blocks.2"}


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def whole_module(model: Stack) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def whole_in_place(model: Stack) -> Any:
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def each_block_in_place(model: Stack) -> Any:
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def each_block_replaced(model: Stack) -> Any:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend="aot_eager", fullgraph=True)
    return model


WAYS = [whole_module, whole_in_place, each_block_in_place, each_block_replaced]


def check(lab: Lab, run: Any, model: Stack, *, steps: int = 3) -> None:
    optimizer = next(iter(lab.optimizers.values()))
    for step in range(steps):
        truth = outputs(plain(model), batch(step))
        run(batch(step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found = lab.close()
        assert acts(found, "mean") == pytest.approx({n: x.double().mean().item() for n, x in truth.items()}, abs=1e-6)
        assert {fires(lab, name) for name in NAMES} == {1}


def plain(model: Stack) -> Stack:
    """The same weights in an uncompiled model."""
    copy = Stack(depth=len(model.blocks))
    copy.load_state_dict({name.replace("_orig_mod.", ""): v for name, v in model.state_dict().items()})
    return copy


@pytest.mark.parametrize("way", WAYS)
def test_attached_before_the_first_call(way: Any) -> None:
    model = Stack()
    run = way(model)
    lab = Lab(run, sgd(model))
    check(lab, run, model)
    assert not counters["graph_break"]
    graphs = counters["stats"]["unique_graphs"]
    check(lab, run, model)
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("way", WAYS)
def test_compiled_after_watch(way: Any) -> None:
    model = Stack()
    lab = Lab(model, sgd(model))
    run = way(model)
    if way is each_block_replaced:
        pytest.skip("the hook is on the block inside; same as in place")
    check(lab, run, model)
    assert not counters["graph_break"]


@pytest.mark.parametrize("way", [each_block_in_place, each_block_replaced])
def test_blocks_compiled_and_run_before_watch_are_measured(way: Any) -> None:
    model = Stack()
    run = way(model)
    run(batch()).sum().backward()
    lab = Lab(run, sgd(model))
    check(lab, run, model)


def test_hooks_stay_outside_of_blocks_that_are_compiled_in_place() -> None:
    model = Stack()
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph

    for block in model.blocks:
        block.compile(backend=backend)
    compiled = [block._compiled_call_impl for block in model.blocks]
    lab = Lab(model, sgd(model))
    check(lab, model, model)
    assert graphs and not any("observe" in code for code in graphs)
    lab.instruments.detach()
    assert [block._compiled_call_impl for block in model.blocks] == compiled


@pytest.mark.parametrize("way", [whole_module, whole_in_place])
def test_a_model_compiled_and_run_before_watch_is_absent_and_said_so(way: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = Stack()
    run = way(model)
    run(batch()).sum().backward()
    with caplog.at_level(logging.WARNING, "trackbridge"):
        lab = Lab(run, optimizer := sgd(model))
        for step in range(5):
            run(batch(step)).sum().backward()
            optimizer.step()
            found = lab.close()
            assert not acts(found, "mean")
            assert "grad/norm" in found
    assert sum("compiled" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("way", [whole_module, each_block_in_place])
def test_opening_and_closing_the_gate_compiles_nothing(way: Any) -> None:
    model = Stack()
    run = way(model)
    lab = Lab(run, sgd(model), every=2)
    seen = []
    for step in range(6):
        run(batch(step)).sum().backward()
        seen.append("act/blocks.0/mean" in lab.close())
        if step == 0:
            graphs = counters["stats"]["unique_graphs"]
        if step == 3:
            lab.instruments.pause()
    assert seen == [True, False, True, False, False, False]
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("mode", ["non-reentrant"])
def test_checkpointing_inside_a_compiled_model(mode: str) -> None:
    model = Stack(mode)
    run = whole_module(model)
    check(Lab(run, sgd(model)), run, model)
    assert not counters["graph_break"]


@pytest.mark.parametrize("way", WAYS)
def test_the_arithmetic_is_untouched(way: Any) -> None:
    def train(watch: bool) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model = Stack()
        run = way(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        lab = Lab(run, optimizer) if watch else None
        for step in range(5):
            run(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if lab:
                lab.close()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False), strict=True))


def test_nothing_inside_a_compiled_model_when_it_is_asked_for() -> None:
    model = Stack()
    run = whole_module(model)
    lab = Lab(run, sgd(model), inside_compiled=False)
    run(batch()).sum().backward()
    assert not acts(lab.close(), "mean")


def test_a_compiled_optimizer_step() -> None:
    def breaks(watch: bool) -> int:
        torch._dynamo.reset()
        counters.clear()
        model = Stack()
        optimizer = torch.optim.AdamW(model.parameters())
        lab = Lab(model, optimizer) if watch else None

        @torch.compile(backend="aot_eager")
        def step() -> None:
            optimizer.step()

        for number in range(3):
            model(batch(number)).sum().backward()
            step()
            if lab:
                found = lab.close()
                assert found["grad/norm"] > 0 and found["optim/applied"] == number + 1
        return sum(counters["graph_break"].values())

    assert breaks(True) <= breaks(False) + 2


def test_a_checkpoint_around_blocks_with_the_hook_inside() -> None:
    """The recomputation runs the block's graph again, the measuring operation included."""
    model = Stack("non-reentrant")
    lab = Lab(model, sgd(model), sites=["embed", "blocks.?", "blocks.?.linear"])
    each_block_in_place(model)
    for step in range(3):
        model(batch(step)).sum().backward()
        lab.close()
        assert set(lab.last.values()) == {1}


def test_a_second_instance_of_a_compiled_class_has_values_or_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    whole_module(Stack())(batch()).sum().backward()
    model = Stack()
    run = whole_module(model)
    with caplog.at_level(logging.WARNING, "trackbridge"):
        lab = Lab(run, sgd(model))
        for step in range(4):
            run(batch(step)).sum().backward()
            found = lab.close()
    assert acts(found, "mean") or any("compiled" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("inside", [True, False])
def test_every_watched_model_of_a_process_makes_one_graph(inside: bool, tmp_path: Path) -> None:
    """A hook that torch calls whatever happens is compiled for itself, and guarded on what it reads of itself: the address of
    its model, say, would be a recompilation for every further model."""
    for _ in range(3):
        forward = FunctionType(Stack.forward.__code__.replace(), Stack.forward.__globals__)  # compiled for itself
        model = type("Own", (Stack,), {"forward": forward})()
        before = counters["stats"]["unique_graphs"]
        with trackbridge.init(dir=tmp_path, strict=True, activations={"inside_compiled": inside}) as run:
            run.watch(model, optimizer := sgd(model))
            compiled = whole_module(model)
            for step in range(3):
                loss = compiled(batch(step)).sum()
                loss.backward()
                optimizer.step()
                run.step(loss.detach())
        assert counters["stats"]["unique_graphs"] == before + 1
    assert not counters["graph_break"]


def test_regions_look_again_after_a_backward_pass_that_raised() -> None:
    """Out of memory, caught, tried again: nobody told of the end of the first backward pass."""
    model = Stack()
    lab = Lab(model, sgd(model))
    run = each_block_in_place(model)

    def fail(*_: Any) -> None:
        raise MemoryError

    handle = model.embed.weight.register_hook(fail)
    with pytest.raises(MemoryError):
        run(batch(0)).sum().backward()
    handle.remove()
    run(batch(1)).sum().backward()
    lab.close()
    assert set(lab.last.values()) == {2.0}
