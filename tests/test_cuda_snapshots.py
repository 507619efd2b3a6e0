"""Snapshots that a GPU copies beside training are of the state before the step, to the bit. Skipped where there is none.

A copy is held up on its stream for `HELD` cycles, so that a whole step is queued, and would be over, before it begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.probes.kit import no_sync
from trackbridge import fence, hostcopy, tree
from trackbridge.config import RecorderConfig
from trackbridge.recorder import Recorder
from trackbridge.rundir import RunDirectory
from trackbridge.snapshots import Snapshot

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

GPU = torch.device("cuda", 0)
HELD = 400_000_000  # a fifth of a second or more

Optimizers = Callable[[nn.Module], Mapping[str, torch.optim.Optimizer]]


class Loop:
    """Steps of a watched model, each of them with a snapshot; the buffers of page-locked memory are there."""

    def __init__(self, folder: Path, optimizers: Optimizers | None = None, *, width: int = 256, depth: int = 4) -> None:
        torch.manual_seed(3)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.BatchNorm1d(width))]
        self.model = nn.Sequential(*layers).to(GPU)
        self.optimizers = optimizers(self.model) if optimizers else {"": torch.optim.AdamW(self.model.parameters(), fused=True)}
        self.batch = torch.randn(16, width, device=GPU)
        config = RecorderConfig(snapshot_every=1, snapshot_bytes=16 << 30)
        self.record = Recorder(config, RunDirectory(folder), 0, attempt=0, strict=True)
        self.record.attach({"": self.model}, self.optimizers)
        self.number = 0
        for _ in range(8):
            self.step()
            if self.record._snapshots._making is not None:
                self.record._snapshots._making.join()
        torch.cuda.synchronize()

    def step(self, between: Callable[[], object] = lambda: None, update: Callable[[], object] | None = None) -> None:
        self.model(self.batch).square().mean().backward()
        between()
        if update is None:
            for optimizer in self.optimizers.values():
                optimizer.step()
        else:
            update()
        self.model.zero_grad(set_to_none=False)
        self.record.close_step(self.number)
        self.number += 1

    def held(
        self, between: Callable[[], object] = lambda: None, update: Callable[[], object] | None = None
    ) -> dict[str, Tensor]:
        """A step while whose copy is held up. Returns the state before it."""
        before = self.state()
        torch.cuda.synchronize()
        with torch.cuda.stream(hostcopy._stream(GPU)):
            torch.cuda._sleep(HELD)
        self.step(between, update)
        return before

    def state(self) -> dict[str, Tensor]:
        """Clones of weights, buffers and moments, by the names of a snapshot's leaves."""
        parts = {
            "models": {"": self.model.state_dict()},
            "optimizers": {key: optimizer.state_dict() for key, optimizer in self.optimizers.items()},
        }
        return {name: leaf.clone() for name, leaf in tree.pack(parts)[1].items() if isinstance(leaf, Tensor)}

    @property
    def newest(self) -> Snapshot:
        return self.record._snapshots._kept[-1]

    def kept(self, before: Mapping[str, Tensor]) -> bool:
        """The newest snapshot is of the newest step, and of the state `before`."""
        self.newest.copy.wait()
        leaves = self.newest.copy.leaves
        wrong = [name for name, value in before.items() if not torch.equal(leaves[name], value.cpu())]  # type: ignore[arg-type]
        return self.newest.step == self.number - 1 and not wrong


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path)
    assert GPU in made.newest.copy.beside
    yield made
    made.record.detach()


def several(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    parameters = list(model.parameters())
    return {"a": torch.optim.SGD(parameters[:5], lr=0.1, momentum=0.9), "b": torch.optim.Adam(parameters[5:])}


def in_backward(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """One for each parameter, which steps as soon as the gradient is there, on autograd's thread."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name.replace(".", "-")] = optimizer = torch.optim.AdamW([parameter])
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())  # type: ignore[misc]
    return found


CASES: dict[str, tuple[Optimizers, Callable[[], object] | None]] = {
    "fused": (lambda model: {"": torch.optim.AdamW(model.parameters(), fused=True)}, None),
    "foreach": (lambda model: {"": torch.optim.Adam(model.parameters(), foreach=True)}, None),
    "one by one": (lambda model: {"": torch.optim.Adam(model.parameters(), foreach=False)}, None),
    "several": (several, None),
    "in backward": (in_backward, lambda: None),
}


@pytest.mark.parametrize("case", CASES)
def test_the_copy_is_of_the_state_before_the_step(tmp_path: Path, case: str) -> None:
    optimizers, update = CASES[case]
    loop = Loop(tmp_path, optimizers)
    assert GPU in loop.newest.copy.beside
    for _ in range(3):
        before = loop.held(update=update)
        assert loop.kept(before)
    loop.record.detach()


def test_without_the_fence_it_would_be_of_the_state_after(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the others would see it."""
    monkeypatch.setattr(hostcopy.HostCopy, "fence", lambda copy: None)
    assert not loop.kept(loop.held())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_waits_for_nothing(loop: Loop) -> None:
    before = loop.state()
    with no_sync():
        with torch.cuda.stream(hostcopy._stream(GPU)):
            torch.cuda._sleep(HELD)
        loop.step()
        under_way = not loop.newest.copy.beside[GPU].query()
    assert under_way and loop.kept(before)


def test_forward_and_backward_pass_do_not_wait_for_the_copy(loop: Loop) -> None:
    """The work between the start of the step and its update is over while the copy is held up."""
    passed = torch.cuda.Event()
    found = []

    def between() -> None:
        passed.record()
        deadline = time.monotonic() + 20
        while not passed.query() and time.monotonic() < deadline:
            pass
        found.append((passed.query(), loop.record._fence._copy.beside[GPU].query()))  # type: ignore[union-attr]

    before = loop.held(between)
    assert found == [(True, False)] and loop.kept(before)


def test_nothing_is_allocated_on_the_device(loop: Loop) -> None:
    loop.record._fence._in_order = True
    peaks = []
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = torch.cuda.memory_allocated()
        loop.step()
        torch.cuda.synchronize()
        peaks.append((torch.cuda.max_memory_allocated() - began, torch.cuda.memory_allocated() - began))
        loop.record._fence._in_order = False
    assert GPU in loop.newest.copy.beside and peaks[0] == peaks[1]


def test_a_rollback_in_the_middle_of_a_step(loop: Loop) -> None:
    model = {name: torch.zeros_like(value) for name, value in loop.model.state_dict().items()}
    (optimizer,) = loop.optimizers.values()
    saved = optimizer.state_dict()
    moments = {**saved, "state": {i: {k: torch.zeros_like(v) for k, v in s.items()} for i, s in saved["state"].items()}}
    assert loop.kept(loop.held(lambda: loop.model.load_state_dict(model)))
    assert loop.kept(loop.held(lambda: loop.model[2].load_state_dict({k[2:]: v for k, v in model.items() if k[:2] == "2."})))
    assert loop.kept(loop.held(lambda: optimizer.load_state_dict(moments)))


def test_a_write_that_nobody_announces(loop: Loop) -> None:
    @torch.no_grad()
    def shaken() -> None:
        for parameter in loop.model.parameters():
            parameter.add_(0.01)

    loop.held(shaken)
    assert loop.record._snapshots.why_not == fence.WRITTEN and loop.newest.step == loop.number - 2
    for _ in range(3):
        before = loop.held(shaken)
        if loop.record._snapshots._making is not None:
            loop.record._snapshots._making.join()
    assert loop.kept(before) and not loop.newest.copy.beside


def test_moments_that_are_replaced_live_until_they_are_read(loop: Loop) -> None:
    (optimizer,) = loop.optimizers.values()

    def replaced() -> None:
        for state in optimizer.state.values():
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])
            state["exp_avg_sq"] = torch.ones_like(state["exp_avg_sq"])

    assert loop.kept(loop.held(replaced))


def test_two_streams_that_update(tmp_path: Path) -> None:
    loop = Loop(tmp_path, several)
    other = torch.cuda.Stream()

    def update() -> None:
        loop.optimizers["a"].step()
        began = torch.cuda.Event()
        loop_stream = torch.cuda.current_stream()
        with torch.cuda.stream(other):
            loop.optimizers["b"].step()
            began.record()
        loop_stream.wait_event(began)

    def between() -> None:
        ready = torch.cuda.Event()
        ready.record()
        other.wait_event(ready)  # for the gradients; the first optimizer's step it knows nothing of

    for _ in range(2):
        assert loop.kept(loop.held(between, update))
    loop.record.detach()


def test_an_update_in_a_cuda_graph(tmp_path: Path) -> None:
    """Captured while a copy is under way, with no event of ours in it; its replays are preceded by copies in order."""
    loop = Loop(tmp_path, lambda model: {"": torch.optim.AdamW(model.parameters(), fused=True, capturable=True)})
    graph = torch.cuda.CUDAGraph()

    def captured() -> None:
        with torch.cuda.graph(graph):
            loop.optimizers[""].step()
        graph.replay()

    loop.held(update=captured)
    assert loop.record._snapshots.why_not == fence.CAPTURED
    for _ in range(4):
        before = loop.held(update=graph.replay)
        if loop.record._snapshots._making is not None:
            loop.record._snapshots._making.join()
    assert loop.kept(before) and not loop.newest.copy.beside
    loop.record.detach()


def test_a_gigabyte_and_an_update_that_follows_at_once(tmp_path: Path) -> None:
    """Nothing is held up: the copy takes longer than the step."""
    loop = Loop(tmp_path, width=4096, depth=6)
    for _ in range(2):
        before = loop.state()
        torch.cuda.synchronize()
        loop.step()
        assert loop.newest.copy.beside and loop.kept(before)
    loop.record.detach()
