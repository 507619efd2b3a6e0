"""Copies beside training: complete, whatever happens to the weights before the fence falls, or dropped.

The copies here are as late as a device could make them: what is copied beside training is read when the fence falls.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.fsdp2_here import needs_shards
from tests.wrapped_optimizers import WRAPPERS
from trackbridge import fence, hostcopy, tree
from trackbridge.batches import Fetch
from trackbridge.config import RecorderConfig
from trackbridge.hostcopy import HostCopy, HostMemory, Leaf
from trackbridge.recorder import Recorder
from trackbridge.rundir import RunDirectory
from trackbridge.snapshots import Snapshot


@dataclass(frozen=True, slots=True, eq=False)
class Late(HostCopy):
    """Reads what is `queued` when the fence falls. `begun`: once for each time that the copies were begun."""

    queued: dict[str, Tensor] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    begun: list[bool] = field(default_factory=list)

    def begin(self) -> None:
        if self.later:
            self.begun.append(True)
            self.later.clear()

    def fence(self) -> None:
        self.begin()
        for name, leaf in self.queued.items():
            place = self.leaves[name]
            assert isinstance(place, Tensor)
            place.copy_(leaf)
        self.read.extend(self.queued)
        self.queued.clear()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    """Those made so far."""
    made: list[Late] = []
    at_once = hostcopy.copy

    def late(leaves: Mapping[str, Leaf], memory: HostMemory | None = None, *, beside: Collection[str] = ()) -> HostCopy:
        done = at_once(leaves, memory)
        for name in beside:
            done.leaves[name].zero_()  # type: ignore[union-attr]
        queued = {name: leaf for name, leaf in leaves.items() if name in beside}
        made.append(Late(done.leaves, later={torch.device("cpu"): []} if queued else {}, queued=queued))
        return made[-1]

    monkeypatch.setattr(hostcopy, "copy", late)
    monkeypatch.setattr(fence, "movable", lambda leaf: True)
    return made


class Noisy(nn.Module):
    """A part that nobody trains, and a buffer that each forward pass writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.frozen(x))


class Loop:
    """A recorder, and a model that it watches."""

    def __init__(self, folder: Path, optimizers: Callable[[Noisy], Mapping[str, Any]] | None = None, **config: Any) -> None:
        torch.manual_seed(1)
        self.model = Noisy()
        self.optimizers = dict(optimizers(self.model) if optimizers else {"": torch.optim.AdamW(self.model.body.parameters())})
        self.record = Recorder(
            RecorderConfig(**({"snapshot_every": 2} | config)), RunDirectory(folder), 0, attempt=0, strict=True
        )
        self.record.attach({"": self.model}, self.optimizers)
        self.number = 0

    def step(
        self, before: Callable[[], object] = lambda: None, update: Callable[[], object] | None = None
    ) -> dict[str, Tensor]:
        """A step, with what happens between backward pass and update. Returns the weights and moments that it began with."""
        state = self.state()
        self.model(torch.randn(8, 4)).square().mean().backward()
        before()
        if update is not None:
            update()
        else:
            for optimizer in self.optimizers.values():
                optimizer.step()
        self.model.zero_grad()
        self.record.close_step(self.number)
        self.number += 1
        return state

    def state(self) -> dict[str, Tensor]:
        found = {f"models//{name}": value.clone() for name, value in self.model.state_dict().items()}
        for key, optimizer in self.optimizers.items():
            for index, state in optimizer.state_dict()["state"].items():
                found |= {f"optimizers/{key}/state/{index}/{name}": value.clone() for name, value in state.items()}
        return found

    @property
    def kept(self) -> list[Snapshot]:
        return self.record._snapshots._kept


def same(snapshot: Snapshot, state: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(snapshot.copy.leaves[name], value) for name, value in state.items())  # type: ignore[arg-type]


@pytest.fixture
def loop(tmp_path: Path, copies: list[Late]) -> Iterator[Loop]:
    """About to begin the first step that is copied beside training."""
    made = Loop(tmp_path)
    for _ in range(2):
        made.step()
    assert len(copies) == 1 and not copies[0].read, "an update was not known to announce itself"
    yield made
    made.record.detach()


def test_only_what_an_update_alone_writes_is_copied_beside_training(loop: Loop, copies: list[Late]) -> None:
    before = loop.step()
    weights = {f"models//body.{name}" for name, _ in loop.model.body.named_parameters()}
    moments = {name for name in before if name.startswith("optimizers/")}
    assert set(copies[1].read) == weights | moments
    assert same(loop.kept[-1], before) and loop.kept[-1].step == 2


def test_the_large_copy_begins_behind_the_batch(loop: Loop, copies: list[Late]) -> None:
    """A device makes one copy to the host after the other."""
    loop.record.before_fetch()
    large = copies[-1]
    assert large.later and not large.begun
    loop.record.fetched(torch.ones(8, 4), Fetch(0, 0, 0, None, 0.0))
    assert large.begun == [True] and copies[-1] is not large  # but the batch's
    loop.step()
    loop.step()
    loop.step(before=lambda: copies[-1].begun.append(False))
    assert copies[-1].begun == [True, False]  # with the forward pass, where no batch is handed out


def test_a_snapshot_that_is_given_up_before_is_not_copied(loop: Loop, copies: list[Late]) -> None:
    loop.record.before_fetch()
    loop.record.exhausted()
    assert not copies[-1].later and not copies[-1].begun
    before = loop.step()
    assert copies[-1].begun == [True] and same(loop.kept[-1], before)


def test_a_part_that_is_watched_as_state_stays_in_order(tmp_path: Path, copies: list[Late]) -> None:
    """Who else writes to it is not known: loading it has no hook."""
    part = nn.Linear(4, 4)
    loop = Loop(tmp_path, lambda model: {"": torch.optim.SGD([*model.body.parameters(), *part.parameters()], lr=0.1)})
    loop.record.attach({"": loop.model}, loop.optimizers, state={"part": part})
    for _ in range(3):
        loop.step()
    assert set(copies[-1].read) == {f"models//body.{name}" for name, _ in loop.model.body.named_parameters()}
    loop.record.detach()


def two(model: Noisy) -> dict[str, Any]:
    return {
        "a": torch.optim.SGD(model.body[0].parameters(), lr=0.1, momentum=0.9),
        "b": torch.optim.Adam(model.body[1].parameters()),
    }


class Nested(torch.optim.AdamW):
    """Calls its base's `step`: torch calls the hooks for each of them."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[Noisy], Mapping[str, Any]]] = {
    "several": two,
    "nested": lambda model: {"": Nested(model.body.parameters())},
    "without foreach": lambda model: {"": torch.optim.Adam(model.body.parameters(), foreach=False)},
    "fused": lambda model: {"": torch.optim.AdamW(model.body.parameters(), fused=True)},
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_fence_falls_before_the_first_update(tmp_path: Path, copies: list[Late], kind: str) -> None:
    loop = Loop(tmp_path, OPTIMIZERS[kind])
    for number in range(7):
        before = loop.step()
        if number % 2 == 0:
            assert bool(copies[-1].read) == (number > 0)
            assert same(loop.kept[-1], before)
    loop.record.detach()


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_an_optimizer_in_a_wrapper(tmp_path: Path, copies: list[Late], wrap: Callable[[torch.optim.Optimizer], Any]) -> None:
    """It is the one inside that steps, and that has hooks."""
    loop = Loop(tmp_path, lambda model: {"": wrap(torch.optim.AdamW(model.body.parameters()))})
    for number in range(4):
        before = loop.step()
        if number % 2 == 0:
            assert bool(copies[-1].read) == (number > 0)
            assert same(loop.kept[-1], before)
    loop.record.detach()


def test_an_optimizer_for_each_parameter_in_the_backward_pass(tmp_path: Path, copies: list[Late]) -> None:
    loop = Loop(tmp_path, lambda model: {name: torch.optim.Adam([p]) for name, p in model.body.named_parameters()})
    for name, parameter in loop.model.body.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: loop.optimizers[name].step())  # type: ignore[misc]
    for number in range(4):
        before = loop.step(update=lambda: None)
        if number % 2 == 0:
            assert bool(copies[-1].read) == (number > 0)
            assert same(loop.kept[-1], before)
    loop.record.detach()


def test_each_stream_that_updates_waits(loop: Loop, copies: list[Late], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two optimizers may step on two streams, and neither knows of the other."""
    waits: list[int] = []
    fall = Late.fence
    monkeypatch.setattr(Late, "fence", lambda copy: (waits.append(1), fall(copy)))
    loop.step(update=lambda: [loop.optimizers[""].step() for _ in range(2)])
    assert len(waits) == 3, "before both, and at the close"


def loaded(loop: Loop, what: str) -> None:
    if what == "model":
        loop.model.load_state_dict(Noisy().state_dict())
    elif what == "submodule":
        loop.model.body.load_state_dict(Noisy().body.state_dict())
    elif what == "assigned":
        loop.model.body.load_state_dict(Noisy().body.state_dict(), assign=True)
    else:
        optimizer = loop.optimizers[""]
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})


@pytest.mark.parametrize("what", ["model", "submodule", "assigned", "optimizer"])
def test_a_rollback_in_the_middle_of_a_step(loop: Loop, copies: list[Late], what: str) -> None:
    def between() -> None:
        loaded(loop, what)
        assert copies[-1].read and not copies[-1].queued

    before = loop.step(between)
    assert same(loop.kept[-1], before)


def test_a_step_without_an_update_ends_with_the_fence(loop: Loop, copies: list[Late]) -> None:
    before = loop.step(update=lambda: None)
    with torch.no_grad():
        next(loop.model.body.parameters()).mul_(2)
    assert copies[-1].read and same(loop.kept[-1], before)


def elsewhere(loop: Loop) -> None:
    loop.record.attach({"": nn.Linear(1, 1)}, {})
    next(loop.model.body.parameters()).data.zero_()


def evaluated(loop: Loop) -> None:
    loop.record.pause()
    next(loop.model.body.parameters()).data.zero_()
    loop.record.resume()


@pytest.mark.parametrize("what", [elsewhere, evaluated])
def test_watching_something_else_and_evaluating_are_fences(
    loop: Loop, copies: list[Late], what: Callable[[Loop], None]
) -> None:
    before = loop.step(lambda: what(loop))
    assert copies[-1].read and same(loop.kept[-1], before)


@torch.no_grad()
def shaken(loop: Loop) -> None:
    next(loop.model.body.parameters()).mul_(2)


@torch.no_grad()
def moment(loop: Loop) -> None:
    next(iter(loop.optimizers[""].state.values()))["exp_avg"].zero_()


def other_memory(loop: Loop) -> None:
    parameter = next(loop.model.body.parameters())
    parameter.data = torch.zeros_like(parameter)


@pytest.mark.parametrize("write", [shaken, moment, other_memory])
def test_a_write_that_nobody_announces_is_noticed(loop: Loop, copies: list[Late], write: Callable[[Loop], None]) -> None:
    loop.step(lambda: write(loop))
    assert [snapshot.step for snapshot in loop.kept] == [0] or loop.kept == []
    loop.kept.clear()
    assert loop.record.pin(9) == fence.WRITTEN
    for number in range(3, 8):
        before = loop.step(lambda: write(loop))
        if number in (3, 4, 6):
            assert same(loop.kept[-1], before) and loop.kept[-1].step == number
    assert not any(copy.read for copy in copies[2:]), "in order from then on"


def test_moments_that_are_replaced_live_until_they_are_read(loop: Loop, copies: list[Late]) -> None:
    def replaced() -> None:
        for state in loop.optimizers[""].state.values():
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])

    before = loop.step(replaced)
    assert same(loop.kept[-1], before)


def test_an_update_in_the_capture_of_a_graph(loop: Loop, copies: list[Late], monkeypatch: pytest.MonkeyPatch) -> None:
    """No event of another stream gets into the graph, and what its replays write is not announced."""

    def captured() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(hostcopy, "capturing", lambda: True)
            loop.optimizers[""].step()
            assert not copies[-1].read

    loop.step(captured)
    loop.kept.clear()
    assert loop.record.pin(9) == fence.CAPTURED
    for _ in range(4):
        loop.step()
    assert not any(copy.read for copy in copies[2:]) and loop.kept


@pytest.mark.parametrize("fetches", [False, True])
def test_a_forward_pass_inside_of_the_update(loop: Loop, copies: list[Late], fetches: bool) -> None:
    """With a closure nothing announces the write after it."""
    (optimizer,) = loop.optimizers.values()

    def closure() -> Tensor:
        loss = loop.model(torch.randn(8, 4)).square().mean()
        loss.backward()
        return loss

    for number in range(2, 7):
        before = loop.state()
        if fetches:
            loop.record.before_fetch()
        optimizer.step(closure)
        loop.record.close_step(number)
        if number % 2 == 0:
            assert loop.kept[-1].step == number and same(loop.kept[-1], before)
    assert not any(copy.read for copy in copies[2:])


def test_an_update_that_was_captured_before_watch_is_never_announced(tmp_path: Path, copies: list[Late]) -> None:
    loop = Loop(tmp_path)
    for _ in range(5):
        loop.step(update=lambda: shaken(loop))
    assert len(copies) == 3 and not any(copy.read for copy in copies)
    loop.record.detach()


def test_before_a_step_is_known_to_begin_all_is_in_order(tmp_path: Path, copies: list[Late]) -> None:
    """No forward pass is seen and no fetch: an evaluation may come next, with averaged weights in the same memory."""
    loop = Loop(tmp_path)
    for number in range(6):
        for parameter in loop.model.body.parameters():
            parameter.grad = torch.ones_like(parameter)
        loop.optimizers[""].step()
        loop.record.close_step(number)
    assert len(copies) > 2 and not any(copy.read for copy in copies)
    loop.record.detach()


def test_parameters_of_an_optimizer_that_is_not_watched(tmp_path: Path, copies: list[Late]) -> None:
    loop = Loop(tmp_path)
    loop.record.attach({"": loop.model}, {})
    for _ in range(5):
        loop.step()
    assert len(copies) == 3 and not any(copy.read for copy in copies)
    loop.record.detach()


def test_a_fence_that_breaks_leaves_no_torn_snapshot(loop: Loop, copies: list[Late], monkeypatch: pytest.MonkeyPatch) -> None:
    part = loop.record._fence._part
    part.strict = False
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr(Late, "fence", lambda copy: 1 / 0)
    loop.step()
    assert not part.alive and [snapshot.step for snapshot in loop.kept] == [0]
    loop.kept.clear()
    assert loop.record.pin(9) == fence.BROKEN
    before = loop.step()
    assert same(loop.kept[-1], before) and not copies[-1].queued


def test_a_fence_that_breaks_in_a_pause(loop: Loop, copies: list[Late], monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause begins and ends all the same."""
    part = loop.record._fence._part
    part.strict = False

    def between() -> None:
        with monkeypatch.context() as patch:
            patch.delenv("PYTEST_CURRENT_TEST")
            patch.setattr(Late, "fence", lambda copy: 1 / 0)
            loop.record.pause()
        assert loop.record._paused == 1 and not part.alive
        loop.record.resume()

    loop.step(between)
    assert [snapshot.step for snapshot in loop.kept] == [0]


def test_where_the_look_for_sources_breaks_all_is_in_order(
    loop: Loop, copies: list[Late], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = loop.record._fence._part
    part.strict = False
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr(fence, "_place", lambda tensor: 1 / 0)
    before = loop.step()
    assert not part.alive and not copies[-1].read and same(loop.kept[-1], before)


def test_an_interrupt_before_the_wait_does_not_lose_the_look(
    loop: Loop, copies: list[Late], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(copy: Late) -> None:
        raise KeyboardInterrupt

    def between() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Late, "fence", interrupted)
            with pytest.raises(KeyboardInterrupt):
                loop.optimizers[""].step()
        shaken(loop)

    loop.step(between, update=lambda: None)
    assert [snapshot.step for snapshot in loop.kept] == [0]
    loop.kept.clear()
    assert loop.record.pin(9) == fence.WRITTEN


def test_what_an_interrupt_has_cut_short_is_queued_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook the loop goes on, and the step is closed."""
    pairs, event, queued = [(torch.zeros(2), torch.ones(2))], object(), []

    def queue(device: torch.device, given: Any, stream: Any) -> Any:
        queued.append(given)
        if len(queued) == 1:
            raise KeyboardInterrupt
        return event

    monkeypatch.setattr(hostcopy, "_queue", queue)
    monkeypatch.setattr(hostcopy, "_stream", lambda device: None)
    made = HostCopy({}, later={torch.device("cuda", 0): pairs})
    with pytest.raises(KeyboardInterrupt):
        made.begin()
    assert not made.events
    made.begin()
    assert [id(given) for given in queued] == [id(pairs)] * 2 and made.events == [event] and not made.later


def test_copies_of_a_watched_model_have_no_fence(loop: Loop) -> None:
    loop.model(torch.ones(8, 4)).mean().backward()
    assert loop.record._fence._copy is not None
    for twin in (copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))):
        twin.load_state_dict(Noisy().state_dict())
    assert loop.record._fence._sources, "the original's has not fallen"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
def test_a_forked_process_leaves_the_device_alone(loop: Loop, copies: list[Late]) -> None:
    loop.model(torch.ones(8, 4)).mean().backward()
    child = os.fork()
    if child == 0:
        loop.optimizers[""].step()
        os._exit(len(copies[-1].read))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and copies[-1].queued


def test_nothing_is_left_on_what_was_watched(loop: Loop) -> None:
    loop.record.detach()
    (optimizer,) = loop.optimizers.values()
    assert not any(module._load_state_dict_pre_hooks for module in loop.model.modules())
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_load_state_dict_pre_hooks
    assert not loop.record._fence._handles


def test_an_optimizer_that_is_watched_no_more_is_let_go_of(loop: Loop) -> None:
    loop.record.detach()
    optimizer = weakref.ref(loop.optimizers.pop(""))
    gc.collect()
    assert optimizer() is None


@needs_shards
def test_shards_have_versions_too(tmp_path: Path, copies: list[Late]) -> None:
    """A write to a DTensor moves its own version, not that of the shard in it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def sharded(model: Noisy) -> dict[str, Any]:
            fully_shard(model.body[0], mesh=mesh)
            return {"": torch.optim.AdamW(model.body[0].parameters())}

        loop = Loop(tmp_path, sharded)
        loop.step(), loop.step()
        expected = {name: value.to_local().clone() for name, value in loop.model.body[0].state_dict().items()}
        loop.step()
        assert {f"models//body.0.{name}" for name in expected} <= set(copies[-1].read)
        assert same(loop.kept[-1], {f"models//body.0.{name}": value for name, value in expected.items()})
        weight = loop.model.body[0].weight
        for write in (lambda: weight.mul_(2), lambda: weight.to_local().mul_(2)):
            (source,) = loop.record._fence.sources(tree.pack(weight)[1]).values()
            with torch.no_grad():
                assert not source.moved
                write()
                assert source.moved
        loop.record.detach()
    finally:
        dist.destroy_process_group()
