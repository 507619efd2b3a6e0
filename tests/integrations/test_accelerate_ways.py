"""Accelerate's other ways: accumulation, several optimizers, checkpoints, trackers, two ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, tracking
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trackbridge
from tests.integrations.accelerate_kit import Training, fresh
from tests.replays import SETTINGS
from tests.test_ranks import torchrun
from tests.training import loader
from trackbridge.history import RunRecord, runs
from trackbridge.intake import Intake
from trackbridge.journal import JournalReader
from trackbridge.records import Params, StepContext
from trackbridge.rundir import RunDirectory


def contexts(record: RunRecord, rank: int = 0) -> list[StepContext]:
    return [one for one in JournalReader(RunDirectory(record.path).contexts(rank)).read() if isinstance(one, StepContext)]


def values(record: RunRecord, name: str) -> list[float]:
    found: list[float] = record.series(name)[1].tolist()
    return found


class Line:
    """One weight of 4 and all-ones input, so that norms are known: the gradient is ones."""

    def __init__(self, directory: Path, *, items: int = 16, **accelerator: Any) -> None:
        fresh()
        self.accelerator = Accelerator(cpu=True, **accelerator)
        torch.manual_seed(0)
        line = nn.Linear(4, 1, bias=False)
        batches = DataLoader(TensorDataset(torch.ones(items, 4)), batch_size=2)
        optimizer = torch.optim.SGD(line.parameters(), lr=1e-3)
        self.line, self.optimizer, self.loader = self.accelerator.prepare(line, optimizer, batches)
        self.run = trackbridge.init(dir=directory, strict=True)
        count = lambda batch: len(batch[0])  # noqa: E731
        self.loader = trackbridge.accelerate.watch(
            self.run, self.accelerator, self.line, self.optimizer, self.loader, samples=count
        )

    def train(self, *, epochs: int = 1, clip: str = "", scale: Any = lambda number: 1.0) -> RunRecord:
        for _ in range(epochs):
            for number, (batch,) in enumerate(self.loader):
                with self.accelerator.accumulate(self.line):
                    self.accelerator.backward(self.line(batch).mean() * scale(number))
                    if clip and self.accelerator.sync_gradients:
                        getattr(self.accelerator, clip)(self.line.parameters(), 0.1)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
        self.run.finish()
        return trackbridge.load(self.run.dir)


@pytest.mark.parametrize("accumulate", [1, 3, 8])
def test_c9_the_loss_of_a_step_does_not_depend_on_accumulation(tmp_path: Path, accumulate: int) -> None:
    """Nor the number of norms (A8); the epoch's end closes a step that is not full, as accelerate does."""
    line = Line(tmp_path, gradient_accumulation_steps=accumulate)
    start = float(line.line.weight.detach().sum())
    record = line.train()
    assert len(record.series("grad/norm")[0]) == math.ceil(8 / accumulate)
    assert values(record, "grad/norm")[0] == pytest.approx(2.0)
    assert values(record, "train/loss")[0] == pytest.approx(start, rel=1e-6)
    assert [len(context.micro) for context in contexts(record)] == {1: [1] * 8, 3: [3, 3, 2], 8: [8]}[accumulate]


def test_auto_step_closes_the_steps_of_an_optimizer_of_accelerates(tmp_path: Path) -> None:
    fresh()
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run = trackbridge.init(dir=tmp_path, strict=True)
    run.watch(model, optimizer, auto_step=True)
    for _ in range(3):
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    run.finish()
    assert values(trackbridge.load(run.dir), "optim/applied") == [1.0, 2.0, 3.0]


def test_e6_samples_are_summed_over_micro_batches(tmp_path: Path) -> None:
    record = Line(tmp_path, gradient_accumulation_steps=4).train(epochs=3)
    steps, rates = record.series("perf/samples_per_s")
    seconds = dict(zip(*(found.tolist() for found in record.series("perf/step_s")), strict=True))
    assert len(steps) >= 4
    for step, rate in zip(steps.tolist(), rates.tolist(), strict=True):
        assert rate * seconds[step] == pytest.approx(8)


def test_c1_the_raw_loss_of_a_step_that_is_not_finite(tmp_path: Path) -> None:
    record = Line(tmp_path, items=32).train(scale=lambda number: math.nan if number == 7 else 1.0)
    assert math.isnan(values(record, "train/loss")[7])
    assert [(a.kind, a.step) for a in record.anomalies][:1] == [("nonfinite", 7)]


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_the_norm_is_that_before_clipping(tmp_path: Path, clip: str) -> None:
    record = Line(tmp_path).train(clip=clip)
    assert values(record, "grad/norm") == pytest.approx([2.0] * 8)
    assert values(record, "grad/norm_clipped") == pytest.approx([0.1 if clip == "clip_grad_norm_" else 0.2] * 8, rel=1e-4)


def test_a6_c7_a_loss_scaler(tmp_path: Path) -> None:
    """Norms are unscaled; a step whose update the scaler dropped has none, and is no spike."""
    line = Line(tmp_path, items=64)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    line.accelerator.scaler = line.optimizer.scaler = scaler  # what fp16 on a GPU makes of it
    line.optimizer.__setstate__(vars(line.optimizer))
    trackbridge.accelerate.watch(line.run, line.accelerator, line.line, line.optimizer)
    record = line.train(scale=lambda number: 1e38 if number in (3, 4) else 1.0)
    assert values(record, "optim/skipped")[-1] == 2 and values(record, "optim/applied")[-1] == 30
    steps, norms = record.series("grad/norm")
    assert norms.tolist() == pytest.approx([2.0] * 30) and not {3, 4} & set(steps.tolist())
    assert values(record, "train/loss_scale")[4] == 2.0**14


def test_clipping_by_value_under_a_loss_scaler_unscales_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses to unscale a gradient twice."""
    line = Line(tmp_path)
    line.accelerator.scaler = line.optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    line.optimizer.__setstate__(vars(line.optimizer))
    line.accelerator.native_amp = True
    monkeypatch.setitem(line.accelerator.state._shared_state, "_mixed_precision", "fp16")
    record = line.train(clip="clip_grad_value_")
    assert values(record, "grad/norm") == pytest.approx([2.0] * 8)
    assert values(record, "grad/norm_clipped") == pytest.approx([0.2] * 8, rel=1e-4)


def test_several_optimizers_make_one_step_and_have_a_loss_each(tmp_path: Path) -> None:
    fresh()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    g, d = nn.Linear(4, 4), nn.Linear(4, 1)
    both = torch.optim.Adam(g.parameters(), 1e-3), torch.optim.Adam(d.parameters(), 1e-3)
    batches = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4)
    g, d, of_g, of_d, batches = accelerator.prepare(g, d, *both, batches)
    run = trackbridge.init(dir=tmp_path, strict=True)
    batches = trackbridge.accelerate.watch(run, accelerator, {"g": g, "d": d}, {"g": of_g, "d": of_d}, batches)
    sent: list[tuple[float, float]] = []
    for (real,) in batches:
        made = g(torch.randn(4, 4))
        g_loss = (d(made) - 1).square().mean()
        of_g.zero_grad()
        accelerator.backward(g_loss)
        of_g.step()
        parts = (d(real) - 1).square().mean(), d(made.detach()).square().mean()
        of_d.zero_grad()
        for part in parts:
            accelerator.backward(part)
        of_d.step()
        sent.append((float(g_loss.detach()), float(sum(parts).detach())))
    run.finish()
    record = trackbridge.load(run.dir)
    assert values(record, "train/loss/g") == pytest.approx([g_loss for g_loss, _ in sent])
    assert values(record, "train/loss/d") == pytest.approx([d_loss for _, d_loss in sent])
    assert values(record, "optim/applied")[-1] == 12
    assert {"layer/g.weight/grad_norm", "layer/d.weight/grad_norm"} <= set(record.names)


def test_without_the_loader_a_batch_is_what_the_model_is_called_with(tmp_path: Path) -> None:
    fresh()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(4, 1)
    model, optimizer, batches = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 1e-3), DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=2)
    )
    run = trackbridge.init(dir=tmp_path, strict=True)
    assert trackbridge.accelerate.watch(run, accelerator, model, optimizer) is None
    seen = []
    for (batch,) in batches:
        with accelerator.accumulate(model):
            seen.append(batch.tolist())
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(batch)  # no training
    run.finish()
    found = contexts(trackbridge.load(run.dir))
    assert [len(context.micro) for context in found] == [2] * 4
    assert [next(iter(micro.tensors.values())).tolist() for context in found for micro in context.micro] == seen


def test_a_schedule_made_after_watch_and_a_second_watch(tmp_path: Path) -> None:
    """torch wraps ``optimizer.step`` when a schedule is made; watching again replaces what was there."""
    line = Line(tmp_path)
    torch.optim.lr_scheduler.ExponentialLR(line.optimizer, 0.9)
    line.loader = trackbridge.accelerate.watch(line.run, line.accelerator, line.line, line.optimizer, line.loader)
    assert values(line.train(), "optim/applied") == [1.0 + step for step in range(8)]


def test_what_was_not_prepared_is_said(tmp_path: Path) -> None:
    line = Line(tmp_path)
    with pytest.raises(trackbridge.TrackbridgeError, match=r"accelerator\.prepare"):
        trackbridge.accelerate.watch(line.run, line.accelerator, line.line, torch.optim.SGD(line.line.parameters()))
    line.run.finish()


# resume


def resumed(directory: Path, *, watch: bool) -> tuple[Training, Any]:
    """One epoch of twelve batches, saved after eight; then another process' eight to twenty-four, by accelerate's own means."""

    def begin() -> tuple[Training, Any, Any]:
        training = Training(loader=DataLoader(loader().dataset, batch_size=4), gradient_accumulation_steps=1)
        if not watch:
            return training, None, training.loader
        run = trackbridge.init(dir=directory / "runs", id="it", resume="auto", strict=True, **SETTINGS)
        return (
            training,
            run,
            trackbridge.accelerate.watch(run, training.accelerator, training.model, training.optimizer, training.loader),
        )

    first, run, batches = begin()
    for number, batch in enumerate(batches):
        first.body(batch)
        if number == 7:
            first.accelerator.save_state(str(directory / "saved"))
    if run is not None:
        run.finish()
    second, run, batches = begin()
    second.accelerator.load_state(str(directory / "saved"))
    for rest in (second.accelerator.skip_first_batches(batches, 8), batches):
        for batch in rest:
            second.body(batch)
    if run is not None:
        run.finish()
    return second, run


def test_b2_c5_d10_a_resume_goes_on_with_the_same_run(tmp_path: Path) -> None:
    """From the middle of an epoch."""
    second, run = resumed(tmp_path / "watched", watch=True)
    bare, _ = resumed(tmp_path / "bare", watch=False)
    assert second.state() == bare.state()
    saved = {path.name for path in (tmp_path / "watched" / "saved").iterdir()}
    assert saved - {path.name for path in (tmp_path / "bare" / "saved").iterdir()} == {"trackbridge_0.json"}
    record = trackbridge.load(run.dir)
    assert record.series("train/loss")[0].tolist() == list(range(24)) and len(runs(tmp_path / "watched" / "runs")) == 1
    assert record.anomalies == []
    later = [micro for context in contexts(record)[-16:] for micro in context.micro]
    assert [micro.sample_ids[0] // 4 for micro in later] == [8, 9, 10, 11, *range(12)]
    assert [(micro.epoch, micro.index) for micro in later] == [(0, n) for n in range(8, 12)] + [(1, n) for n in range(12)]


def test_the_newest_checkpoint_is_accelerates_to_find(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    project = {"project_dir": str(tmp_path / "project"), "automatic_checkpoint_naming": True}
    first = Line(tmp_path, project_config=ProjectConfiguration(**project))
    first.train()
    first.accelerator.save_state()
    second = Line(tmp_path, project_config=ProjectConfiguration(**project))
    second.accelerator.load_state()
    assert f"this checkpoint is of run {first.run.id}" in caplog.text
    assert second.train().series("train/loss")[0].tolist() == list(range(8, 16))


def test_errors_of_ours_never_stop_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Training().train(steps=3)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    for name in ("step", "micro", "state_dict", "load_state_dict"):
        monkeypatch.setattr(trackbridge.Run, name, lambda *args, **kwargs: 1 / 0)
    monkeypatch.setattr(Intake, "fetched", lambda *args: 1 / 0)
    training = Training()
    run = trackbridge.init(dir=tmp_path / "runs", id="broken")
    batches = trackbridge.accelerate.watch(run, training.accelerator, training.model, training.optimizer, training.loader)
    training.train(batches, steps=3)
    assert training.state() == bare.state()
    training.accelerator.save_state(str(tmp_path / "saved"))
    training.accelerator.load_state(str(tmp_path / "saved"))
    run.finish()


# trackers


def test_the_tracker_maps_onto_a_run_beside_the_scripts_own_trackers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def script(place: str, *trackers: Any) -> dict[str, list[tuple[int, float]]]:
        fresh()
        accelerator = Accelerator(cpu=True, log_with=["tensorboard", *trackers], project_dir=tmp_path / place)
        accelerator.init_trackers("project", config={"lr": 0.1})
        for step in range(3):
            accelerator.log({"mine": float(step), "train/loss": 2.0, "word": "text"}, step=step)
        accelerator.end_training()
        found = EventAccumulator(str(tmp_path / place / "project")).Reload()
        return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}

    ours = trackbridge.accelerate.Tracker("project", dir=tmp_path / "runs", backend="tensorboard", strict=True)
    assert script("with", ours) == script("without")
    record = trackbridge.load(ours.tracker.dir)
    assert record.config == {"lr": 0.1} and record.info.project == "project" and record.status == "finished"
    assert values(record, "mine") == [0.0, 1.0, 2.0] and values(record, "accelerate/train/loss") == [2.0] * 3
    assert "train/loss" not in record.names


def test_the_tracker_takes_a_run_of_the_users_and_leaves_it_open(tmp_path: Path) -> None:
    fresh()
    with trackbridge.init(dir=tmp_path, strict=True) as run:
        accelerator = Accelerator(cpu=True, log_with=trackbridge.accelerate.Tracker(run))
        accelerator.init_trackers("project", config={"lr": 0.1, "api_key": "not for a journal"})
        accelerator.end_training()
        run.log({"mine": 1.0})
        assert accelerator.get_tracker("trackbridge", unwrap=True) is run
    journal = JournalReader(RunDirectory(run.dir).rows(0)).read()
    assert {"accelerate": {"lr": 0.1, "api_key": "[redacted]"}} in [one.values for one in journal if isinstance(one, Params)]
    assert "mine" in trackbridge.load(run.dir).names


@pytest.mark.skipif(not hasattr(tracking, "register_tracker_class"), reason="this accelerate knows its own trackers only")
def test_the_tracker_by_its_name(tmp_path: Path) -> None:
    fresh()
    accelerator = Accelerator(cpu=True, log_with="trackbridge")
    accelerator.init_trackers("by-name", init_kwargs={"trackbridge": {"dir": tmp_path}})
    accelerator.log({"mine": 1.0})
    accelerator.end_training()
    (run,) = runs(tmp_path)
    assert trackbridge.load(run.path).info.project == "by-name"


# ranks

RANKS = """
import sys, torch
import trackbridge
from tests.integrations.accelerate_kit import Training, loss_of
from tests.replays import SETTINGS
from tests.training import loader

class Spoilt(Training):
    seen = 0
    def body(self, batch):
        super().body([batch[0].flip(1) * 7 % 32] if self.seen == 52 else batch)
        self.seen += 1

training = Spoilt(loader=loader(), gradient_accumulation_steps=1)
run = trackbridge.init(dir=sys.argv[1], strict=True, **SETTINGS)
batches = trackbridge.accelerate.watch(run, training.accelerator, training.model, training.optimizer, training.loader)
training.train(batches)
run.finish()
training.accelerator.wait_for_everyone()
sys.stdout.write(f"RUN {run.id}\\n")
capsule = trackbridge.pull(run.dir)

def build():
    again = Spoilt(seed=99, loader=loader(), gradient_accumulation_steps=1)
    again.seen = capsule.restart_step
    return trackbridge.accelerate.rebuild(again.accelerator, again.model, again.optimizer, again.body)

report = trackbridge.replay.rerun(capsule, build)
sys.stdout.write(f"VERDICT {report.verdict} {report.reason}\\n")
torch.distributed.destroy_process_group()
"""


def test_f4_f8_two_ranks_make_one_run_and_replay_it_together(tmp_path: Path) -> None:
    output = torchrun(tmp_path, RANKS, str(tmp_path / "runs"))
    ids = {line.split()[1] for line in output.splitlines() if line.startswith("RUN")}
    assert len(ids) == 1
    record = trackbridge.load(tmp_path / "runs" / ids.pop())
    assert record.series("train/loss")[0].tolist() == list(range(60))
    assert sorted(path.name for path in record.path.glob("rank-*")) == ["rank-0000", "rank-0001"]
    seen = [micro.sample_ids for rank in (0, 1) for context in contexts(record, rank)[:6] for micro in context.micro]
    assert sorted(sample for ids_of in seen for sample in ids_of) == list(range(48))  # each rank's own, of the first epoch
    assert [(a.kind, a.step) for a in record.anomalies][:1] == [("spike", 52)]
    assert [line.split()[1] for line in output.splitlines() if line.startswith("VERDICT")] == ["exact", "exact"], output
