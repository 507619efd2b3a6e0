"""Lightning's own resume goes on with the same run; several ranks make one run; Fabric is a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import trackbridge
from tests.integrations.lightning_kit import Lit, callback, loss_of, trainer
from tests.integrations.test_lightning_ways import contexts
from tests.replays import SETTINGS, data
from tests.test_ranks import torchrun
from tests.training import Model, loader, seed_everything
from trackbridge.history import runs

pytestmark = pytest.mark.filterwarnings("ignore")


class WithoutNoise(Lit):
    """Two epochs that a resume at their boundary can repeat: no random numbers in the steps."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        tokens = batch[0]
        logits = self.model.eval()(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def run(directory: Path, epochs: int, *callbacks: pl.Callback, ckpt_path: Any = None, watch: bool = True) -> Any:
    watching = callback(directory, recorder={"snapshot_every": 4}) if watch else None
    seed_everything()
    module = WithoutNoise()
    given = [one for one in (watching, *callbacks) if one is not None]
    made = trainer(*given, max_steps=-1, max_epochs=epochs, enable_checkpointing=bool(callbacks), default_root_dir=directory)
    made.fit(module, _ordered(), ckpt_path=ckpt_path)
    return watching, made


def _ordered() -> Any:
    return torch.utils.data.DataLoader(loader().dataset, batch_size=4)


def test_b2_c5_d10_a_fit_that_resumes_goes_on_with_the_same_run(tmp_path: Path) -> None:
    """In another Trainer with another callback, as in another process: the state is in Lightning's checkpoint."""
    keep = ModelCheckpoint(tmp_path / "saved", every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    first, _ = run(tmp_path / "runs", 4, keep)
    checkpoint = tmp_path / "saved" / "epoch=2.ckpt"  # after three epochs; a fourth was recorded
    second, made = run(tmp_path / "runs", 6, ckpt_path=checkpoint)
    assert second.run.id == first.run.id and [one.run_id for one in runs(tmp_path / "runs")] == [first.run.id]
    record = trackbridge.load(second.run.dir)
    steps, losses = record.series("train/loss")
    assert steps.tolist() == list(range(36)) and made.global_step == 36
    whole, _ = run(tmp_path / "whole", 6)
    assert losses.tobytes() == trackbridge.load(whole.run.dir).series("train/loss")[1].tobytes()
    assert [a for a in record.anomalies if a.kind == "spike"] == []
    _, bare_made = run(tmp_path / "bare", 6, watch=False)
    for one, other in zip(made.lightning_module.parameters(), bare_made.lightning_module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_without_a_run_begins_one_at_its_step(tmp_path: Path) -> None:
    keep = ModelCheckpoint(tmp_path / "saved", every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    run(tmp_path / "runs", 2, keep, watch=False)
    watching, _ = run(tmp_path / "runs", 3, ckpt_path=tmp_path / "saved" / "epoch=1.ckpt")
    assert trackbridge.load(watching.run.dir).series("train/loss")[0].tolist() == list(range(12, 18))


def test_a_second_fit_of_one_trainer_goes_on_with_its_run(tmp_path: Path) -> None:
    watching = callback(tmp_path)
    made, module = trainer(watching, max_steps=-1, max_epochs=1), Lit()
    made.fit(module, data())
    made.fit_loop.max_epochs = 2
    made.fit(module, data())
    assert trackbridge.load(watching.run.dir).series("train/loss")[0].tolist() == list(range(12))
    assert len(runs(tmp_path)) == 1


RANKS = """
import sys, warnings
warnings.simplefilter("ignore")
import lightning.pytorch as pl, torch
import trackbridge
from tests.integrations.lightning_kit import Lit, QUIET
from tests.integrations.test_lightning_ways import contexts
from tests.replays import SETTINGS
from tests.training import loader, seed_everything

class Spoilt(Lit):
    def training_step(self, batch, batch_idx):
        tokens = batch[0]
        return super().training_step([tokens.flip(1) * 7 % 32] if self.global_step == 52 else batch, batch_idx)

given = {"devices": 2, "strategy": "ddp", "gradient_clip_val": 1.0, **QUIET}
seed_everything()
watching = trackbridge.lightning.Callback(dir=sys.argv[1], strict=True, **SETTINGS)
trainer = pl.Trainer(callbacks=[watching], max_epochs=10, **given)
trainer.fit(Spoilt(), loader())
torch.distributed.barrier()
sys.stdout.write(f"RUN {watching.run.id}\\n")

def build():
    seed_everything(99)
    return trackbridge.lightning.rebuild(Spoilt(), **given)

report = trackbridge.replay.rerun(trackbridge.pull(watching.run.dir), build)
sys.stdout.write(f"VERDICT {report.verdict} {report.reason}\\n")
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


# Fabric


def fabric_loop(directory: Path | None, **fabric: Any) -> Any:
    made = Fabric(accelerator="cpu", devices=1, **fabric)
    seed_everything()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = made.setup(model, optimizer)
    batches = made.setup_dataloaders(data(bad_step=1))
    record = None
    if directory is not None:
        record = trackbridge.init(dir=directory, strict=True, **SETTINGS)
        record.watch(model, optimizer)
        batches = record.batches(batches)
    for batch in batches:
        loss = loss_of(model, batch)
        made.backward(loss)
        norm = made.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if record is not None:
            record.step(loss, grad_norm=norm)
    if record is not None:
        record.finish()
    return model, record


def test_a_fabric_loop_is_a_plain_loop(tmp_path: Path) -> None:
    watched, record = fabric_loop(tmp_path / "fabric")
    bare, _ = fabric_loop(None)
    for one, other in zip(watched.parameters(), bare.parameters(), strict=True):
        assert torch.equal(one, other)
    found = trackbridge.load(record.dir)
    run = trackbridge.init(dir=tmp_path / "plain", strict=True, **SETTINGS)
    seed_everything()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.watch(model, optimizer)
    for batch in run.batches(data(bad_step=1)):
        loss = loss_of(model, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss, grad_norm=norm)
    run.finish()
    plain = trackbridge.load(run.dir)
    assert set(found.names) == set(plain.names)
    for name in found.names:
        if not name.startswith(("perf/", "host/", "trackbridge/")):
            assert found.series(name)[1].tobytes() == plain.series(name)[1].tobytes(), name


def test_auto_step_closes_the_steps_of_a_fabric_optimizer(tmp_path: Path) -> None:
    made = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = made.setup(model, optimizer)
    run = trackbridge.init(dir=tmp_path, strict=True)
    run.watch(model, optimizer, auto_step=True)
    for _ in range(3):
        made.backward(model(torch.ones(2, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    run.finish()
    record = trackbridge.load(run.dir)
    assert record.series("optim/applied")[1].tolist() == [1.0, 2.0, 3.0]
    assert {"layer/0.weight/grad_norm", "layer/1.bias/grad_norm", "perf/forward_s", "perf/backward_s"} <= set(record.names)
