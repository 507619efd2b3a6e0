"""Attach, detach, copy, pickle: nothing is left behind, nothing is kept alive, nothing is changed."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import random
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.probes.kit import Lab, sgd
from tests.probes.test_activations import Stack, acts, batch
from tests.probes.test_gradients import layer
from trackbridge.errors import ConfigError


def hooks(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[int]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks_with_kwargs")
    counts = [len(getattr(module, kind)) for module in model.modules() for kind in kinds]
    counts += [len(p._backward_hooks or ()) for p in model.parameters()]
    return counts + [len(o._optimizer_step_pre_hooks) + len(o._optimizer_step_post_hooks) for o in optimizers]


def train(model: Any, optimizer: Any, lab: Lab | None, steps: int = 3) -> list[dict[str, float]]:
    rows = []
    for step in range(steps):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if lab:
            rows.append(lab.close())
    return rows


def test_fifty_times_on_and_off_leaves_nothing() -> None:
    model = Stack()
    optimizer = sgd(model)
    before = hooks(model, optimizer)
    lab = Lab(model, optimizer)
    attached = hooks(model, optimizer)
    for number in range(50):
        train(model, optimizer, lab, steps=1)
        lab.instruments.detach()
        assert hooks(model, optimizer) == before
        lab.instruments.attach(lab.models, lab.optimizers)
        assert hooks(model, optimizer) == attached
        if number == 10:
            gc.collect()
            alive = len(gc.get_objects())
    lab.instruments.detach()
    gc.collect()
    assert len(gc.get_objects()) < alive + 500


def test_attaching_the_same_again_is_one_attach() -> None:
    model = Stack()
    optimizer = sgd(model)
    lab = Lab(model, optimizer)
    once = hooks(model, optimizer)
    session = lab.instruments._session
    lab.instruments.attach({"": model}, {"": optimizer})
    assert hooks(model, optimizer) == once and lab.instruments._session is session
    lab.instruments.attach({"": model}, {"": optimizer}, torch.amp.GradScaler("cpu"))
    assert hooks(model, optimizer) == once and lab.instruments._session is not session


def test_a_pattern_that_matches_nothing_leaves_no_hook() -> None:
    model = Stack()
    before = hooks(model)
    with pytest.raises(ConfigError, match=r"blocks\.9.*did you mean 'blocks\.[012]'"):
        Lab(model, sites=["blocks.9"])
    assert hooks(model) == before


def test_outputs_are_not_kept_alive() -> None:
    model = Stack()
    lab = Lab(model, sgd(model), sites="leaf")
    seen: list[weakref.ref[Tensor]] = []
    handle = model.blocks[0].register_forward_hook(lambda m, i, o: seen.append(weakref.ref(o)))
    with torch.no_grad():
        for step in range(200):
            model(batch(step))
    for step in range(3):
        model(batch(step)).sum().backward()
    handle.remove()
    gc.collect()
    assert len(seen) == 203 and not any(ref() is not None for ref in seen)
    lab.close()


def test_models_are_let_go_after_detach() -> None:
    model = Stack()
    lab = Lab(model, optimizer := sgd(model))
    train(model, optimizer, lab)
    lab.instruments.detach()
    ref = weakref.ref(model)
    lab.models.clear()
    lab.optimizers.clear()
    del model, optimizer
    gc.collect()
    assert ref() is None


def test_a_slot_in_flight_survives_a_new_attach() -> None:
    model = Stack()
    lab = Lab(model, optimizer := sgd(model))
    model(batch()).sum().backward()
    optimizer.step()
    series = lab.instruments.series
    slot = lab.instruments.close(0)
    lab.instruments.detach()
    values, present = lab.instruments.finalize(slot)
    assert len(values) == len(series) and present.sum() > 10


def test_no_slot_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trackbridge.slab.RING_BYTES", 0)
    model = Stack()
    lab = Lab(model, sgd(model))
    taken = [lab.instruments.close(step) for step in range(64)]
    assert all(taken) and lab.instruments.close(64) is None
    lab.instruments.finalize(taken[0])
    assert lab.instruments.close(65) is taken[0]


def copies(model: Any) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(file, weights_only=False),
    }


def test_copies_work_and_are_not_measured() -> None:
    model = Stack()
    lab = Lab(model, optimizer := sgd(model))
    train(model, optimizer, lab, steps=1)
    for name, twin in copies(model).items():
        assert torch.equal(twin(batch()), model(batch())), name
        lab.close()
        for _ in range(3):
            twin(batch()).sum().backward()
        assert not acts(lab.close(), "mean"), name
    copy.deepcopy(optimizer)
    pickle.dumps(optimizer)
    assert train(model, optimizer, lab, steps=1)[0].keys() >= {"act/blocks.0/mean", "grad/norm"}


def test_a_saved_model_loads_where_trackbridge_is_not_installed(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    Lab(model, sgd(model), sites="leaf")
    torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys, torch; sys.modules['trackbridge'] = None\n"
        f"print(torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)(torch.ones(1, 4)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "[1, 4]" in done.stdout, done.stderr


@pytest.mark.parametrize("sites", ["blocks", "leaf"])
def test_the_weights_and_every_generator_end_the_same(sites: str) -> None:
    def ended(watch: bool) -> list[Any]:
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        lab = Lab(model, optimizer, sites=sites) if watch else None
        for _ in range(20):
            model(torch.randn(4, 8)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if lab:
                lab.close()
        states = [random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()]
        return [*(p.detach().numpy().tobytes() for p in model.parameters()), *states]

    assert ended(True) == ended(False)


def test_the_same_training_gives_the_same_statistics_to_the_bit() -> None:
    def rows() -> list[dict[str, float]]:
        model = Stack()
        lab = Lab(model, optimizer := torch.optim.AdamW(model.parameters()))
        return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in train(model, optimizer, lab)]

    assert rows() == rows()


def test_phases_are_timed_and_accumulate() -> None:
    model = Stack()
    lab = Lab(model, optimizer := sgd(model))
    one = train(model, optimizer, lab, steps=3)[-1]
    assert all(0 < one[f"perf/{phase}_s"] < 5 for phase in ("forward", "backward", "optimizer"))
    with torch.no_grad():
        model(batch())
    found = lab.close()
    assert not {"perf/forward_s", "perf/backward_s", "perf/optimizer_s"} & found.keys()


class Ticks:
    """A clock that goes on by one second each time somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    clock = Ticks()
    monkeypatch.setattr("trackbridge.probes.phases.time", clock)
    return clock


def test_micro_batches_add_up(ticks: Ticks) -> None:
    model = Stack()
    lab = Lab(model, optimizer := sgd(model))
    for seed in range(3):
        model(batch(seed)).sum().backward()
    optimizer.step()
    found = lab.close()
    assert [found[f"perf/{phase}_s"] for phase in ("forward", "backward", "optimizer")] == [3, 3, 1]


def test_two_models_in_one_backward_pass_are_timed_once(ticks: Ticks) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 1)
    lab = Lab({"g": first, "d": second})
    x = second(first(torch.ones(2, 4)))

    def later(*_: Any) -> None:
        ticks.now += 100

    second.weight.register_post_accumulate_grad_hook(later)
    x.sum().backward()
    found = lab.close()
    assert found["perf/forward_s"] == 2 and found["perf/backward_s"] == 101


def test_our_own_work_is_not_in_the_optimizers_time(ticks: Ticks, monkeypatch: pytest.MonkeyPatch) -> None:
    from trackbridge.probes import reduce

    summary = reduce.summary

    def slow(tensors: Any, **how: Any) -> Any:
        ticks.now += 100
        return summary(tensors, **how)

    monkeypatch.setattr(reduce, "summary", slow)
    model = Stack()
    lab = Lab(model, optimizer := sgd(model))
    train(model, optimizer, None, steps=1)
    assert lab.close()["perf/optimizer_s"] == 1


def test_a_bug_of_ours_does_not_stop_training(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from trackbridge.config import ActivationsConfig, ParametersConfig
    from trackbridge.probes import Instruments, moments, reduce

    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("a bug of ours")

    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr(moments, "add_all_on_cpu", broken)
    monkeypatch.setattr(reduce, "summary", broken)
    monkeypatch.setattr(reduce, "extent", broken)
    model = Stack()
    optimizer = sgd(model)
    instruments = Instruments(ParametersConfig(), ActivationsConfig())
    instruments.attach({"": model}, {"": optimizer})
    for step in range(4):
        model(batch(step)).sum().backward()
        optimizer.step()
        slot = instruments.close(step)
        assert slot is not None
        _values, present = instruments.finalize(slot)
        found = [name for name, here in zip(instruments.series, present, strict=True) if here]
        assert "optim/applied" in found and "grad/norm" not in found
    assert sum("a bug of ours" in (record.exc_text or "") for record in caplog.records) == 3  # gradients, weights, activations


def test_a_wrapped_optimizer() -> None:
    class Wrapper:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self) -> None:
            self.optimizer.step()

    model = Stack()
    lab = Lab(model, wrapped := Wrapper(sgd(model)))
    model(batch()).sum().backward()
    wrapped.step()
    assert layer(lab.close())
