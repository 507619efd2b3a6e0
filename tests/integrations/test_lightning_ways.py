"""Lightning's other ways of training: manual optimization, precision, validation, checkpoints, loggers, exceptions."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import trackbridge
from tests.integrations.lightning_kit import QUIET, Lit, callback, fit, loss_of, state, trainer
from tests.replays import data
from tests.training import Model, loader, seed_everything
from trackbridge import replay
from trackbridge.history import RunRecord
from trackbridge.integrations.ids import SampleIds
from trackbridge.journal import JournalReader
from trackbridge.records import Params, StepContext
from trackbridge.replay import Rebuilt
from trackbridge.rundir import RunDirectory

pytestmark = pytest.mark.filterwarnings("ignore")


def record_of(watching: trackbridge.lightning.Callback) -> RunRecord:
    assert watching.run is not None
    return trackbridge.load(watching.run.dir)


def contexts(record: RunRecord, rank: int = 0) -> list[StepContext]:
    return [one for one in JournalReader(RunDirectory(record.path).contexts(rank)).read() if isinstance(one, StepContext)]


def journal(record: RunRecord) -> list[Any]:
    return list(JournalReader(RunDirectory(record.path).rows(0)).read())


def values(record: RunRecord, name: str) -> list[float]:
    found: list[float] = record.series(name)[1].tolist()
    return found


# accumulation


class Line(pl.LightningModule):
    """One weight of 4, so that norms are known: all-ones input gives a gradient of ones."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.line = nn.Linear(4, 1, bias=False)
        self.scale = scale

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.line(batch[0]).mean() * self.scale

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def ones(items: int = 16) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(items, 4)), batch_size=2)


def of_line(tmp_path: Path, module: pl.LightningModule | None = None, batches: Any = None, **more: Any) -> RunRecord:
    watching = trackbridge.lightning.Callback(dir=tmp_path, strict=True, samples=lambda batch: len(batch[0]))
    given = {"max_epochs": 1, "max_steps": -1, "accumulate_grad_batches": 1, "gradient_clip_val": None, **more}
    trainer(watching, **given).fit(module or Line(), batches or ones())
    return record_of(watching)


@pytest.mark.parametrize("accumulate", [1, 3, 4, 8])
def test_c9_the_loss_of_a_step_does_not_depend_on_accumulation(tmp_path: Path, accumulate: int) -> None:
    """Nor the number of norms (A8): one for each step, of the whole gradient, which is ones here."""
    torch.manual_seed(0)
    module = Line()
    start = float(module.line.weight.sum())
    record = of_line(tmp_path, module, accumulate_grad_batches=accumulate)
    assert len(record.series("grad/norm")[0]) == math.ceil(8 / accumulate)
    assert values(record, "grad/norm")[0] == pytest.approx(2.0)
    assert values(record, "train/loss")[0] == pytest.approx(start, rel=1e-6)
    assert sum(len(context.micro) for context in contexts(record)) == 8


def test_a_step_that_an_epochs_end_closes_early_is_a_step(tmp_path: Path) -> None:
    record = of_line(tmp_path, batches=ones(10), accumulate_grad_batches=4, max_epochs=2)  # 5 batches in an epoch
    assert [len(context.micro) for context in contexts(record)] == [4, 1, 4, 1]
    assert [(m.epoch, m.index) for context in contexts(record)[2:] for m in context.micro] == [(1, n) for n in range(5)]


def test_e6_samples_are_summed_over_micro_batches(tmp_path: Path) -> None:
    record = of_line(tmp_path, accumulate_grad_batches=4, max_epochs=3)
    steps, rates = record.series("perf/samples_per_s")
    seconds = dict(zip(*(found.tolist() for found in record.series("perf/step_s")), strict=True))
    assert len(steps) >= 4
    for step, rate in zip(steps.tolist(), rates.tolist(), strict=True):
        assert rate * seconds[step] == pytest.approx(8)


# what a step's loss and gradient are


def test_c1_the_raw_loss_of_a_step_that_is_not_finite(tmp_path: Path) -> None:
    class Breaks(Line):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", torch.nan_to_num(loss.detach(), 1.0))  # what a logger would be shown
            return loss * float("nan") if batch_idx == 7 else loss

    record = of_line(tmp_path, Breaks(), ones(32))
    assert math.isnan(values(record, "train/loss")[7])
    assert [(a.kind, a.step) for a in record.anomalies][:1] == [("nonfinite", 7)]


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_the_norm_is_that_before_clipping(tmp_path: Path, algorithm: str) -> None:
    record = of_line(tmp_path, gradient_clip_val=0.1, gradient_clip_algorithm=algorithm)
    assert values(record, "grad/norm") == pytest.approx([2.0] * 8)
    assert values(record, "grad/norm_clipped") == pytest.approx([0.1 if algorithm == "norm" else 0.2] * 8, rel=1e-4)


def test_the_norm_before_a_clipping_of_the_modules_own(tmp_path: Path) -> None:
    class Own(Line):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)

    record = of_line(tmp_path, Own())
    assert values(record, "grad/norm") == pytest.approx([2.0] * 8)
    assert values(record, "grad/norm_clipped") == pytest.approx([0.5] * 8, rel=1e-4)


def test_bf16_mixed(tmp_path: Path) -> None:
    record = of_line(tmp_path, precision="bf16-mixed")
    assert values(record, "grad/norm") == pytest.approx([2.0] * 8)


def scaled(**given: Any) -> Any:
    from lightning.pytorch.plugins.precision import MixedPrecision

    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **given))


def test_a6_norms_and_losses_are_unscaled(tmp_path: Path) -> None:
    record = of_line(tmp_path, plugins=[scaled(init_scale=1024.0)], gradient_clip_val=0.5)
    assert values(record, "grad/norm") == pytest.approx([2.0] * 8)
    assert values(record, "grad/norm_clipped") == pytest.approx([0.5] * 8, rel=1e-4)
    assert values(record, "train/loss_scale") == [1024.0] * 8


def test_c7_what_the_scaler_skips_is_no_spike(tmp_path: Path) -> None:
    record = of_line(tmp_path, Line(scale=1e5), ones(64), plugins=[scaled(init_scale=2.0**16)], gradient_clip_val=1e6)
    skipped = int(values(record, "optim/skipped")[-1])
    assert skipped > 0 and values(record, "optim/applied")[-1] == 32 - skipped
    assert all(math.isfinite(value) for value in values(record, "grad/norm"))
    assert [a for a in record.anomalies if a.kind == "spike"] == []


# manual optimization


class Adversarial(pl.LightningModule):
    """Two networks, two optimizers, one batch: the discriminator's loss is back-propagated in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.g = nn.Linear(4, 4)
        self.d = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        g, d = self.optimizers()
        real, made = batch[0], self.g(torch.randn(len(batch[0]), 4))
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        criterion = nn.functional.binary_cross_entropy_with_logits
        self.toggle_optimizer(d)
        d.zero_grad()
        self.manual_backward(criterion(self.d(real), ones))
        self.manual_backward(criterion(self.d(made.detach()), zeros))
        self.clip_gradients(d, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        d.step()
        self.untoggle_optimizer(d)
        self.toggle_optimizer(g)
        g.zero_grad()
        self.manual_backward(criterion(self.d(made), ones))
        g.step()
        self.untoggle_optimizer(g)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.g.parameters(), 1e-3), torch.optim.Adam(self.d.parameters(), 1e-3)


def adversarial(*callbacks: Any) -> pl.Trainer:
    seed_everything()
    fitted = pl.Trainer(callbacks=list(callbacks), max_epochs=2, **QUIET)
    fitted.fit(Adversarial(), DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4, shuffle=True))
    return fitted


def test_several_optimizers_make_one_step_of_a_batch_and_have_a_loss_each(tmp_path: Path) -> None:
    watching = callback(tmp_path)
    watched, bare = adversarial(watching), adversarial()
    for one, other in zip(watched.lightning_module.parameters(), bare.lightning_module.parameters(), strict=True):
        assert torch.equal(one, other)
    record = record_of(watching)
    assert record.series("train/loss")[0].tolist() == list(range(12))
    parts = np.array(values(record, "train/loss/0")) + np.array(values(record, "train/loss/1"))
    assert values(record, "train/loss") == pytest.approx(parts.tolist())
    assert values(record, "train/loss/1")[0] == pytest.approx(2 * math.log(2), rel=0.3)  # two parts of a discriminator
    assert values(record, "optim/applied")[-1] == 24
    assert {"layer/g.weight/grad_norm", "layer/d.0.weight/grad_norm"} <= set(record.names)


class Manual(Lit):
    """`Lit` by hand, every second batch a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(loss_of(self.model, batch) / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            self.lr_schedulers().step()
            optimizer.zero_grad()


def build_manual() -> Rebuilt:
    seed_everything(99)
    return trackbridge.lightning.rebuild(Manual(), accelerator="cpu")


def test_manual_optimization_is_recorded_as_automatic_is_and_its_replay_is_exact(tmp_path: Path) -> None:
    by_hand, automatic = callback(tmp_path / "manual"), callback(tmp_path / "automatic")
    seed_everything()
    trainer(by_hand, accumulate_grad_batches=1, gradient_clip_val=None).fit(Manual(), data())
    fit(automatic)
    ours, theirs = record_of(by_hand), record_of(automatic)
    for name in ("grad/norm", "grad/norm_clipped", "train/lr", "param/norm"):
        assert ours.series(name)[1].tobytes() == theirs.series(name)[1].tobytes(), name
    report = replay.rerun(trackbridge.pull(ours.path), build_manual)
    assert report.verdict == "exact", report


# data


class Stream(IterableDataset[Any]):
    """Draws in the training process while a batch is fetched; its ninth epoch has a bad item."""

    epoch = -1

    def __iter__(self) -> Any:
        self.epoch += 1
        for number in range(10):
            scale = 300.0 if (self.epoch, number) == (8, 4) else 1.0
            yield (torch.linspace(0, 1, 4) + torch.rand(()) / 10) * scale


class Draws(pl.LightningModule):
    """Draws in its steps as well."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.line(batch).square().mean() + 1.0, "seen": batch_idx}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "epoch"}]


def build_stream() -> Rebuilt:
    return trackbridge.lightning.rebuild(Draws(), accumulate_grad_batches=2, accelerator="cpu")


def test_a_stream_whose_fetches_draw_in_the_middle_of_a_step_is_replayed(tmp_path: Path) -> None:
    """Over the ends of epochs of unknown length, with a schedule that goes by epochs. Lightning fetches one batch ahead."""
    watching = callback(tmp_path)
    seed_everything()
    stream = DataLoader(Stream(), batch_size=2)
    trainer(watching, accumulate_grad_batches=2, gradient_clip_val=None, max_epochs=10, max_steps=-1).fit(Draws(), stream)
    record = record_of(watching)
    assert [len(context.micro) for context in contexts(record)] == [2, 2, 1] * 10
    assert [(a.kind, a.step) for a in record.anomalies][:1] == [("spike", 25)]
    report = replay.rerun(trackbridge.pull(record.path), build_stream)
    assert report.verdict == "exact", report


@pytest.mark.parametrize("persistent", [False, True])
def test_sample_ids_come_through_workers_that_fetch_ahead(tmp_path: Path, persistent: bool) -> None:
    watching = callback(tmp_path)
    batches = data(workers=2, bad_step=1, persistent_workers=persistent)
    own = batches.batch_sampler
    fit(watching, loader=batches, steps=14)
    items = batches.dataset[:][0]  # type: ignore[index]
    for context in contexts(record_of(watching)):
        for micro in context.micro:
            (tokens,) = micro.tensors.values()
            assert tokens.tolist() == items[list(micro.sample_ids)].tolist()
    assert batches.batch_sampler is own


# evaluation and checkpoints


class Evaluated(Lit):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("eval/loss", loss_of(self.model, batch))


def test_evaluation_and_saving_are_paused_and_change_nothing(tmp_path: Path) -> None:
    def run(*callbacks: pl.Callback, **more: Any) -> pl.Trainer:
        seed_everything()
        made = Evaluated()
        fitted = trainer(*callbacks, steps=12, **more)
        fitted.fit(made, data(bad_step=1), loader())
        return fitted

    watching = callback(tmp_path / "runs")
    saving = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    keep = lambda place: ModelCheckpoint(tmp_path / place, every_n_train_steps=5, save_top_k=-1)  # noqa: E731
    watched = run(watching, keep("a"), **saving)
    bare = run(keep("b"), **saving)
    for one, other in zip(watched.lightning_module.parameters(), bare.lightning_module.parameters(), strict=True):
        assert torch.equal(one, other)
    record = record_of(watching)
    assert record.series("train/loss")[0].tolist() == list(range(12))
    assert {"perf/paused_s/eval", "perf/paused_s/save"} <= set(record.names)
    assert [len(context.micro) for context in contexts(record)] == [2] * 12
    told = [one.values["checkpoint"] for one in journal(record) if isinstance(one, Params) and "checkpoint" in one.values]
    assert [(Path(one["path"]).parent.name, one["step"]) for one in told] == [("a", 5), ("a", 10)]


# loggers


def test_the_trainers_own_logger_gets_what_it_got_and_nothing_of_ours(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Logged(Lit):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("mine", loss)
            return loss

    def scalars(place: str, *callbacks: pl.Callback) -> dict[str, list[tuple[int, float]]]:
        seed_everything()
        logger = TensorBoardLogger(tmp_path / place, name="", version="")
        trainer(*callbacks, steps=6, logger=logger, log_every_n_steps=1).fit(Logged(), data())
        found = EventAccumulator(str(tmp_path / place)).Reload()
        return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}

    watching = trackbridge.lightning.Callback(dir=tmp_path / "runs", backend="tensorboard", strict=True)
    assert scalars("watched", watching) == scalars("bare")
    assert "mine" not in record_of(watching).names


WANDB = """
import sys
from lightning.pytorch.loggers import WandbLogger
from tests.integrations.lightning_kit import Lit, callback, trainer
from tests.replays import data
from pathlib import Path

class Logged(Lit):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("mine", loss)
        return loss

watching = callback(Path("runs"), backend=[{"kind": "wandb", "mode": "offline"}], id="ours")
logger = WandbLogger(save_dir=".", offline=True, project="theirs")
trainer(watching, steps=6, logger=logger, log_every_n_steps=1).fit(Logged(), data())
"""


def test_b1_a_wandb_logger_keeps_its_own_steps(tmp_path: Path) -> None:
    """Beside a run that goes to W&B as well: two runs, and every row of the Trainer's in its own, at its own step."""
    from trackbridge.backends.wandb_file import load

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(Path(__file__).parents[2]))))
    command = [sys.executable, "-W", "ignore", "-c", WANDB]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = [row for row in load(tmp_path / "wandb").history if "mine" in row]
    assert [row["trainer/global_step"] for row in theirs] == list(range(6))
    assert not any(name.startswith(("train/", "layer/", "act/")) for row in theirs for name in row)
    ours = load(tmp_path / "runs" / "ours" / "wandb").history
    assert sum("train/loss" in row for row in ours) == 6 and not any("mine" in row for row in ours)


# the end


def test_the_training_stops_for_an_anomaly_where_that_is_asked_for(tmp_path: Path) -> None:
    class Breaks(Line):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if batch_idx == 7 else loss

    watching = trackbridge.lightning.Callback(dir=tmp_path, strict=True, stop_on_anomaly=1.0)
    given = {"max_epochs": 1, "max_steps": -1, "accumulate_grad_batches": 1, "gradient_clip_val": None}
    stopped = trainer(watching, **given)
    stopped.fit(Breaks(), ones(20_000))
    assert 8 <= stopped.global_step < 10_000


def test_an_exception_marks_the_run_failed_and_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    class Breaks(Line):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 3:
                raise ValueError("no such thing")
            return super().training_step(batch, batch_idx)

    watching = callback(tmp_path)
    made, module = trainer(watching, max_epochs=1, max_steps=-1), Breaks()
    with pytest.raises(ValueError, match="no such thing"):
        made.fit(module, ones())
    (run,) = trackbridge.history.runs(tmp_path)
    assert (run.status, run.step) == ("failed", 0)
    assert "training_step" not in vars(made.strategy) and "save_checkpoint" not in vars(made) and "forward" not in vars(module)


def test_errors_of_ours_never_stop_a_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    bare = state(fit(ModelCheckpoint(tmp_path / "bare", every_n_train_steps=2), steps=5, **keep))
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    for name in ("step", "micro", "fetched", "state_dict", "checkpoint_saved", "_detach"):
        monkeypatch.setattr(trackbridge.Run, name, lambda *args, **kwargs: 1 / 0)
    monkeypatch.setattr(SampleIds, "remove", lambda *args: 1 / 0)
    watching = trackbridge.lightning.Callback(dir=tmp_path / "runs")
    seen = fit(watching, ModelCheckpoint(tmp_path / "seen", every_n_train_steps=2), steps=5, **keep)
    assert seen.global_step == 5 and state(seen) == bare
    assert "training_step" not in vars(seen.strategy) and "save_checkpoint" not in vars(seen)


def test_a_trial_of_the_script_stays_on_the_disk_and_another_trainer_is_another_run(tmp_path: Path) -> None:
    watching = callback(tmp_path, backend="tensorboard")
    found = []
    for more in ({"fast_dev_run": 2}, {"steps": 2}, {"steps": 3}):
        fit(watching, **more)
        record = record_of(watching)
        found.append((record.series("train/loss")[0].tolist(), (record.path / "tensorboard").exists()))
    assert found == [([0], False), ([0, 1], True), ([0, 1, 2], True)]
    assert len(trackbridge.history.runs(tmp_path)) == 3


def test_pytorch_lightning_is_the_same_code_by_another_name(tmp_path: Path) -> None:
    other = pytest.importorskip("pytorch_lightning", "2.6")  # before, its Trainer took only callbacks of its own class

    class Other(other.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return loss_of(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 3e-3)

    watching = callback(tmp_path)
    given = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "max_steps": 60, "max_epochs": -1}
    seed_everything()
    other.Trainer(callbacks=[watching], **QUIET, **given).fit(Other(), data())
    record = record_of(watching)
    assert {"grad/norm", "perf/forward_s", "perf/backward_s"} <= set(record.names)
    report = replay.rerun(
        trackbridge.pull(record.path), lambda: trackbridge.lightning.rebuild(Other(), **{**QUIET, **given, "max_steps": -1})
    )
    assert report.verdict == "exact", report


def test_a_run_of_the_users_is_the_users_to_end(tmp_path: Path) -> None:
    with trackbridge.init(dir=tmp_path, strict=True) as run:
        fit(trackbridge.lightning.Callback(run), steps=3)
        run.log({"mine": 1.0})
    assert trackbridge.history.runs(tmp_path)[0].status == "finished"
    assert "mine" in trackbridge.load(run.dir).names


def test_hyperparameters_are_the_runs_config_and_wrong_settings_are_said_at_once(tmp_path: Path) -> None:
    watching = callback(tmp_path, config={"data": "mine"})
    fit(watching, steps=2)
    assert record_of(watching).config == {"lr": 3e-3, "data": "mine"}
    with pytest.raises(trackbridge.TrackbridgeError, match="projet"):
        trackbridge.lightning.Callback(projet="x")
    with pytest.raises(trackbridge.TrackbridgeError, match="settings go by name"):
        trackbridge.lightning.Callback("wandb")  # type: ignore[arg-type]
