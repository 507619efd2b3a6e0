"""Loops of other shapes than the shared one: recorded, sealed, and exact again."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import trackbridge
from tests import replays
from tests.training import Setup, setup, train
from tests.wrapped_optimizers import WRAPPERS
from trackbridge.replay import Rebuilt, rerun

BAD = 45
STEPS = 52


@pytest.fixture(autouse=True)
def one_thread(run_dir: Path) -> None:
    """Set where the shared recording is made."""


class Points(Dataset[tuple[Tensor, Tensor]]):
    """A line to be learned. Sample `i` of step `BAD` is nonsense; `noise` makes each sample anew."""

    def __init__(self, batch: int = 4, noise: Callable[[], float] = lambda: 0.0) -> None:
        self.batch = batch
        self.noise = noise

    def __len__(self) -> int:
        return STEPS * self.batch

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.linspace(-1, 1, 8) * (1 + index % 7) / 7
        y = 1.0 + x.sum() + (40.0 if index // self.batch == BAD else 0.0)
        return x + self.noise(), y.reshape(1)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1))


def settings(directory: Path, **more: Any) -> dict[str, Any]:
    recorder = {"snapshot_every": 8, "before": 4, "after": 4}
    return {"dir": directory, "strict": True, "recorder": recorder, "detection": {"warmup": 16}, **more}


def update(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
    x, y = batch
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def plain_build(optimizer: Callable[..., Any] = torch.optim.Adam) -> tuple[Any, ...]:
    model = net()
    return (
        model,
        optimizer(model.parameters(), lr=0.01),
        lambda model, optimizer, batches, index: update(model, optimizer, batches[0]),
    )


def verdict(run: Any, build: Callable[[], Any]) -> str:
    run.finish()
    capsule = trackbridge.pull(f"{run.dir}@{run.anomalies[0].step}")  # a net may stumble again over what the first did to it
    assert capsule.step in (BAD, BAD + 1) and capsule.tier == "re-execute", (capsule.step, capsule.missing)
    report = rerun(capsule, build)
    assert all(step.compared > 5 for step in report.steps)
    return report.verdict if report.verdict == "exact" else report.to_markdown()


def test_without_run_batches(tmp_path: Path) -> None:
    torch.manual_seed(1)
    with trackbridge.init(**settings(tmp_path)) as run:
        model, optimizer, _ = plain_build()
        run.watch(model, optimizer)
        for batch in DataLoader(Points(), 4):
            run.step(loss=update(model, optimizer, batch), batch=batch)
    assert verdict(run, plain_build) == "exact"


def in_a_wrapper(wrap: Callable[[torch.optim.Optimizer], Any]) -> Callable[..., Any]:
    def wrapped(parameters: Any, lr: float) -> Any:
        return wrap(torch.optim.Adam(parameters, lr=lr))

    wrapped.__name__ = f"in {wrap.__name__}"
    return wrapped


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.SGD, torch.optim.RMSprop, torch.optim.NAdam, *map(in_a_wrapper, WRAPPERS)],
    ids=lambda kind: kind.__name__,
)
def test_other_optimizers(tmp_path: Path, optimizer: Any) -> None:
    torch.manual_seed(1)
    run = trackbridge.init(**settings(tmp_path))
    model, made, _ = plain_build(optimizer)
    run.watch(model, made)
    for batch in run.batches(DataLoader(Points(), 4)):
        run.step(loss=update(model, made, batch))
    assert verdict(run, lambda: plain_build(optimizer)) == "exact"


@pytest.mark.parametrize(
    "source", [random.random, np.random.rand, lambda: float(torch.rand(()))], ids=["python", "numpy", "torch"]
)
def test_transforms_in_the_training_process(tmp_path: Path, source: Callable[[], float]) -> None:
    """Every fetch moves the random state that dropout draws from; two fetches per step."""

    def step(model: nn.Module, optimizer: Any, batches: Any, index: int) -> Tensor:
        losses = []
        for x, y in batches:
            loss = nn.functional.mse_loss(model(x), y) * (1 + 1e-3 * random.random() + 1e-3 * float(np.random.rand()))
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    torch.manual_seed(1)
    run = trackbridge.init(**settings(tmp_path))
    model, optimizer, _ = plain_build()
    run.watch(model, optimizer)
    batches = iter(run.batches(DataLoader(Points(8, lambda: 0.1 * source()), 4)))
    for index in range(STEPS):
        taken = (next(batches) for _ in range(2))
        run.step(loss=step(model, optimizer, taken, index))
    assert verdict(run, lambda: (*plain_build()[:2], step)) == "exact"


def test_evaluation_between_steps(tmp_path: Path) -> None:
    """An evaluation that nobody announced moves the random state between two steps of the window."""
    torch.manual_seed(1)
    run = trackbridge.init(**settings(tmp_path))
    model, optimizer, _ = plain_build()
    run.watch(model, optimizer)
    for index, batch in enumerate(run.batches(DataLoader(Points(), 4, shuffle=False))):
        run.step(loss=update(model, optimizer, batch))
        if index % 3 == 0:
            with torch.no_grad():
                for x, _ in DataLoader(Points(), 4, shuffle=True):
                    model(x)
                    break
    assert verdict(run, plain_build) == "exact"


def test_a_loss_scaler(tmp_path: Path) -> None:
    def step(scaler: Any, model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
        x, y = batch
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    def make() -> tuple[Any, ...]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=7)
        return *plain_build()[:2], scaler

    def build() -> Rebuilt:
        model, optimizer, scaler = make()
        return Rebuilt(model, optimizer, lambda m, o, batches, i: step(scaler, m, o, batches[0]), scaler=scaler)

    torch.manual_seed(1)
    run = trackbridge.init(**settings(tmp_path))
    model, optimizer, scaler = make()
    run.watch(model, optimizer, scaler=scaler)
    for batch in run.batches(DataLoader(Points(), 4)):
        run.step(loss=step(scaler, model, optimizer, batch))
    assert verdict(run, build) == "exact"
    report = rerun(trackbridge.pull(run.dir), lambda: build_without_scaler(build()))
    assert report.verdict == "incomplete" and "loss scaler" in report.reason


def build_without_scaler(rebuilt: Rebuilt) -> Rebuilt:
    rebuilt.scaler = None
    return rebuilt


def test_two_models(tmp_path: Path) -> None:
    def make() -> tuple[dict[str, nn.Module], dict[str, Any]]:
        models = {"g": net(), "d": net()}
        return models, {key: torch.optim.Adam(model.parameters(), lr=0.01) for key, model in models.items()}

    def step(models: Any, optimizers: Any, batches: list[Any], index: int) -> Tensor:
        return sum((update(models[key], optimizers[key], batches[0]) for key in models), torch.zeros(()))

    torch.manual_seed(1)
    run = trackbridge.init(**settings(tmp_path))
    models, optimizers = make()
    run.watch(models, optimizers)
    for batch in run.batches(DataLoader(Points(), 4)):
        run.step(loss=step(models, optimizers, [batch], 0))
    assert verdict(run, lambda: (*make(), step)) == "exact"


def test_a_resumed_run(tmp_path: Path) -> None:
    """The spike is in the second life of the run; its steps go on from the first one's."""
    torch.manual_seed(1)
    model, optimizer, _ = plain_build()
    data = list(DataLoader(Points(), 4))
    first = trackbridge.init(**settings(tmp_path, id="r"))
    first.watch(model, optimizer)
    for batch in data[:20]:
        first.step(loss=update(model, optimizer, batch), batch=batch)
    first.finish()
    run = trackbridge.init(**settings(tmp_path, id="r", resume="must"))
    run.watch(model, optimizer)
    for batch in data[20:]:
        run.step(loss=update(model, optimizer, batch), batch=batch)
    assert verdict(run, plain_build) == "exact"
    assert trackbridge.pull(run.dir).attempt == 1


def test_a_run_that_went_back_after_its_spike(tmp_path: Path) -> None:
    """What the guard asks for, in the same process and before the capsule's window is full: the capsule holds the spike and
    ends where the training left; the rollback takes the checkpoint that was saved on the way after it."""
    torch.manual_seed(1)
    run = trackbridge.init(**settings(tmp_path))
    model, optimizer, _ = plain_build()
    run.watch(model, optimizer)
    data = list(DataLoader(Points(), 4))
    saved: Any = None
    for index, batch in enumerate(data[: BAD + 3]):
        if index == BAD - 10:
            saved = [copy.deepcopy(part.state_dict()) for part in (model, optimizer, run)]
        run.step(loss=update(model, optimizer, batch), batch=batch)
    for part, state in zip((model, optimizer, run), saved, strict=True):
        part.load_state_dict(state)
    for index in range(BAD - 10, len(data)):
        if index != BAD:
            run.step(loss=update(model, optimizer, data[index]), batch=data[index], step=index)
    later = tmp_path / "later.pt"
    later.write_bytes(b"x")
    run.checkpoint_saved(later, len(data))
    assert verdict(run, plain_build) == "exact"
    capsule = trackbridge.pull(run.dir)
    assert capsule.span[1] == BAD + 2 and capsule.series()[BAD]["train/loss"] > 100, "the way that was left"
    found = trackbridge.rollback(run.dir)
    assert found.checkpoint is not None and found.checkpoint.path == later and found.rejected == ()


@pytest.mark.parametrize("place", ["first", "last"])
def test_at_the_edge_of_an_epoch(tmp_path: Path, place: str) -> None:
    bad = {"first": 54, "last": 53}[place]
    run = trackbridge.init(dir=tmp_path, strict=True, **replays.SETTINGS)
    made: Setup = setup(run=run)
    train(made, run.batches(replays.data(bad_step=bad, workers=2, prefetch_factor=4)), steps=62)
    run.finish()
    capsule = trackbridge.pull(run.dir)
    assert capsule.step == bad
    assert {i for micro in capsule.batches[bad] for i in micro.sample_ids or ()} == set(range(48, 56)), (
        "those that were consumed"
    )
    assert rerun(capsule, replays.build).verdict == "exact"


class OwnGenerator(Points):
    """Augmentation from a generator that each worker has a copy of: it is in no record, the batches are."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(7)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x + 0.1 * float(self.generator.standard_normal()), y


def test_generators_in_workers(tmp_path: Path) -> None:
    """D9: a generator that the dataset owns, copied to each worker: exact through the kept batches, never claimed without."""
    torch.manual_seed(1)
    run = trackbridge.init(**settings(tmp_path))
    model, optimizer, _ = plain_build()
    run.watch(model, optimizer)
    for batch in run.batches(DataLoader(OwnGenerator(), 4, num_workers=2)):
        run.step(loss=update(model, optimizer, batch))
    assert verdict(run, plain_build) == "exact", "through the saved batches"
    dataset = OwnGenerator()

    def build() -> Rebuilt:
        rebuilt = Rebuilt(*plain_build())
        rebuilt.fetch = lambda micro: torch.utils.data.default_collate([dataset[int(i)] for i in micro.sample_ids or ()])
        return rebuilt

    (run.dir / "capsules" / f"spike-{BAD}").rename(tmp_path / "moved")
    report = rerun(trackbridge.pull(tmp_path / "moved"), build)
    assert report.verdict == "incomplete", "made again from the ids they are other batches"


def test_a_source_that_nothing_captures(tmp_path: Path) -> None:
    source = random.SystemRandom()

    def step(model: nn.Module, optimizer: Any, batches: list[Any], index: int) -> Tensor:
        x, y = batches[0]
        return update(model, optimizer, (x + 0.01 * source.random(), y))

    torch.manual_seed(1)
    run = trackbridge.init(**settings(tmp_path))
    model, optimizer, _ = plain_build()
    run.watch(model, optimizer)
    for batch in run.batches(DataLoader(Points(), 4)):
        run.step(loss=step(model, optimizer, [batch], 0))
    run.finish()
    assert rerun(trackbridge.pull(run.dir), lambda: (*plain_build()[:2], step)).verdict != "exact"


class Pooling(nn.Module):
    """Rows of a batch are added into four pools by `index_add`, whose order a GPU does not fix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        place = torch.arange(len(x)) % 4
        return self.last(h + torch.zeros(4, 16).index_add(0, place, h)[place])


def test_index_add_on_the_cpu(tmp_path: Path) -> None:
    """D11: bit-equal on the CPU, with default algorithms and with deterministic ones."""

    def build() -> tuple[Any, ...]:
        model = Pooling()
        return model, torch.optim.Adam(model.parameters(), lr=0.01), lambda m, o, batches, i: update(m, o, batches[0])

    torch.manual_seed(1)
    run = trackbridge.init(**settings(tmp_path))
    model, optimizer, _ = build()
    run.watch(model, optimizer)
    for batch in run.batches(DataLoader(Points(), 4)):
        run.step(loss=update(model, optimizer, batch))
    assert verdict(run, build) == "exact"
    first = trackbridge.pull(f"{run.dir}@{run.anomalies[0].step}")
    assert rerun(first, build, deterministic=True).verdict == "exact"


def test_from_the_users_own_checkpoint(tmp_path: Path) -> None:
    """Without snapshots the newest checkpoint before the onset is where the window begins; the user's code loads it."""

    def load(model: nn.Module, optimizer: Any) -> Callable[[Path], None]:
        def into(path: Path) -> None:
            for part, state in zip((model, optimizer), torch.load(path, weights_only=True), strict=True):
                part.load_state_dict(state)

        return into

    def build() -> Rebuilt:
        rebuilt = Rebuilt(*plain_build())
        rebuilt.checkpoint = load(rebuilt.model, rebuilt.optimizer)  # type: ignore[arg-type]
        return rebuilt

    torch.manual_seed(1)
    run = trackbridge.init(**settings(tmp_path, recorder={"snapshot_every": 0, "before": 4, "after": 4}))
    model, optimizer, _ = plain_build()
    run.watch(model, optimizer)
    for index, batch in enumerate(run.batches(DataLoader(Points(), 4))):
        run.step(loss=update(model, optimizer, batch))
        if index in (19, 35, 47):  # too far, right, and after the spike
            torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / f"{index + 1}.pt")
            run.checkpoint_saved(tmp_path / f"{index + 1}.pt", index + 1)
    assert verdict(run, build) == "exact"
    capsule = trackbridge.pull(run.dir)
    assert capsule.restart_step == 36 and capsule.checkpoint == str(tmp_path / "36.pt")
    assert any("a replay begins at your checkpoint" in text for text in capsule.missing)
    report = rerun(capsule, plain_build)
    assert report.verdict == "incomplete" and "Rebuilt(..., checkpoint=load)" in report.reason
    (tmp_path / "36.pt").unlink()
    report = rerun(capsule, build)
    assert report.verdict == "incomplete" and "36.pt, from which the replay begins, is not here" in report.reason
