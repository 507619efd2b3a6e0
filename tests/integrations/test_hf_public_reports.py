"""What went wrong for others in a trainer, through `trackbridge.hf`: one test per public report, named by its row.

Rows that another file's test covers: A14 (`test_hf.py`, tied weights: our norm is the Trainer's), B1 (`test_hf_around.py`,
loggers), D5 (`test_hf_replay.py`, a resume in the middle of an epoch, replayed), D8 (`test_hf.py`, watched and unwatched), F6
and F8 (`test_hf_around.py`, two ranks).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import trackbridge
from tests.integrations.hf_kit import Counting, InOrder, contexts, model, series, trainer
from trackbridge.skip import Skip, SkipPlan


def watched(directory: Path, **settings: Any) -> trackbridge.hf.Callback:
    return trackbridge.hf.Callback(dir=directory / "runs", strict=True, **settings)


def exact(**changes: Any) -> Any:
    """A model without dropout: the same data give the same numbers."""
    return model(attention_dropout=0.0, **changes)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_a4_recomputed_activations_count_once(tmp_path: Path) -> None:
    found = []
    for checkpointing in (False, True):
        watching, network = watched(tmp_path, activations={"every": 1}), exact()
        if checkpointing:
            network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        trainer(tmp_path / "out", watching, kind=InOrder, model=network, max_steps=3).train()
        record = trackbridge.load(watching.run.dir)
        names = [name for name in record.names if name.startswith("act/")]
        found.append({name: record.series(name)[1].tolist() for name in names})
    assert found[0] == found[1] and len(found[0]) > 10


def test_a6_c7_norms_are_unscaled_and_a_scale_that_is_tried_is_no_spike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss scaler of fp16, put into a Trainer on a CPU: an overflow, then a scale that fits."""
    plain = watched(tmp_path)
    trainer(tmp_path / "out", plain, kind=InOrder, model=exact(), max_steps=5, learning_rate=0.0).train()

    class Scaled(TrainerCallback):  # after the Trainer has prepared its model, which autocasts only on a GPU
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            made.accelerator.native_amp = True
            monkeypatch.setitem(made.accelerator.state._shared_state, "_mixed_precision", "fp16")

    watching = watched(tmp_path)
    made = trainer(tmp_path / "out", Scaled(), watching, kind=InOrder, model=exact(), max_steps=5, learning_rate=0.0)
    made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-110)
    made.train()
    record = trackbridge.load(watching.run.dir)
    assert record.series("train/loss_scale")[1].tolist()[1:] == [2.0**17] * 4
    assert record.series("optim/skipped")[1].tolist()[-1] == 1 and not watching.run.anomalies
    steps, norms = record.series("grad/norm")
    assert steps.tolist() == [1, 2, 3, 4] and norms.tolist() == pytest.approx(series(plain.run, "grad/norm")[1:], rel=1e-4)


def test_a8_one_record_for_each_optimizer_step_of_the_accumulated_gradient(tmp_path: Path) -> None:
    norms: list[float] = []

    class Looking(InOrder):
        def _get_grad_norm(self, network: Any, grad_norm: Any = None) -> Any:
            norms.append(float(grad_norm))
            return grad_norm

    watching = watched(tmp_path)
    made = trainer(tmp_path / "out", watching, kind=Looking, model=exact(), gradient_accumulation_steps=4, max_steps=3)
    made.train()
    theirs = [entry["grad_norm"] for entry in made.state.log_history if "grad_norm" in entry]
    assert series(watching.run, "grad/norm") == pytest.approx(theirs) and len(theirs) == 3
    assert not norms or norms == pytest.approx(theirs)  # before transformers 5 the loop has no such method
    assert [len(context.micro) for context in contexts(watching.run)] == [4, 4, 4]
    whole = watched(tmp_path)  # the same twelve rows at once
    trainer(
        tmp_path / "out", whole, kind=InOrder, model=exact(), gradient_accumulation_steps=1,
        per_device_train_batch_size=16, max_steps=3,
    ).train()  # fmt: skip
    assert series(whole.run, "grad/norm") == pytest.approx(series(watching.run, "grad/norm"), rel=1e-3)


def test_a10_evaluation_is_not_mixed_into_the_trainings_statistics(tmp_path: Path) -> None:
    found = []
    for strategy in ("no", "steps"):
        watching = watched(tmp_path, activations={"every": 1})
        trainer(
            tmp_path / "out", watching, kind=InOrder, model=exact(), max_steps=4, eval_strategy=strategy, eval_steps=1
        ).train()
        record = trackbridge.load(watching.run.dir)
        names = [name for name in record.names if name.startswith(("act/", "grad/", "layer/", "train/"))]
        found.append({name: record.series(name)[1].tolist() for name in names})
    assert found[0] == found[1]


def test_b2_resumed_from_an_older_checkpoint(tmp_path: Path) -> None:
    """The steps that come again have one value each, the newest; the older attempt stays readable."""
    first = watched(tmp_path)
    saving = {"save_strategy": "steps", "save_steps": 4}
    trainer(tmp_path / "out", first, kind=InOrder, max_steps=10, **saving).train()
    second = watched(tmp_path)
    made = trainer(tmp_path / "out", second, kind=InOrder, max_steps=12, learning_rate=1e-2, **saving)
    made.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    record = trackbridge.load(second.run.dir)
    assert second.run.id == first.run.id and record.series("train/loss")[0].tolist() == list(range(12))
    mine = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert record.series("train/loss")[1].tolist() == pytest.approx(mine, abs=6e-5)
    assert [row.step for row in record.rows() if "train/loss" in row.schema.names] == [*range(10), *range(4, 12)]


class Diverging(InOrder):
    def compute_loss(self, network: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(network, inputs, *args, **kwargs)
        return loss * float("nan") if self.state.global_step == 7 else loss


def test_c1_the_raw_loss_not_the_one_that_is_filtered_when_it_is_nan(tmp_path: Path) -> None:
    watching = watched(tmp_path)
    made = trainer(tmp_path / "out", watching, kind=Diverging, max_steps=8, logging_nan_inf_filter=True)
    made.train()
    logged = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert all(math.isfinite(loss) for loss in logged), "the Trainer's own curve looks clean"
    assert [math.isnan(loss) for loss in series(watching.run, "train/loss")] == [step == 7 for step in range(8)]
    assert {(anomaly.kind, anomaly.onset) for anomaly in watching.run.anomalies} == {("nonfinite", 7)}


def test_clipping_does_not_hide_where_a_gradient_was_not_finite(tmp_path: Path) -> None:
    """With the Trainer's clipping, on by default, one NaN is everywhere by the time its event comes."""

    class Spoiling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * float("nan")

    network = exact(tie_word_embeddings=False)
    head = network.lm_head.forward
    network.lm_head.forward = lambda x: head(x) if made.state.global_step != 2 else head(Spoiling.apply(x))
    watching = watched(tmp_path)
    made = trainer(tmp_path / "out", watching, kind=InOrder, model=network, max_steps=4)
    made.train()
    record = trackbridge.load(watching.run.dir)
    bad = {name: record.series(f"layer/{name}/grad_nonfinite")[1][2] for name, _ in network.named_parameters()}
    assert bad["lm_head.weight"] == 0 and bad["model.embed_tokens.weight"] > 0


def test_c5_a_jump_right_after_a_resume_says_so(tmp_path: Path) -> None:
    """The optimizer's state is lost; the detectors' is not: they have no new warm-up."""
    data = Counting(480)
    same = {"data": data, "kind": InOrder, "max_steps": 46, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    trainer(tmp_path / "out", watched(tmp_path), save_strategy="steps", save_steps=40, **same).train()
    checkpoint = tmp_path / "out" / "checkpoint-40"
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    state["state"] = {}
    for group in state["param_groups"]:
        group["lr"] = 0.3  # what a lost schedule does
    torch.save(state, checkpoint / "optimizer.pt")
    after = watched(tmp_path)
    trainer(tmp_path / "out", after, **same).train(resume_from_checkpoint=str(checkpoint))
    assert after.run.anomalies and all(anomaly.step >= 40 for anomaly in after.run.anomalies)
    assert any("after_resume" in anomaly.notes for anomaly in after.run.anomalies)
    assert any("optimizer-state-lost" in note for anomaly in after.run.anomalies for note in anomaly.notes)


def test_c9_the_loss_does_not_scale_with_accumulation(tmp_path: Path) -> None:
    """Rows of different lengths: the mean over the step's tokens, however they are cut into micro-batches."""

    class Padded(Counting):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            row = super().__getitem__(index)
            row["labels"][2 + index % 7 :] = -100
            return row

    found = []
    for accumulate in (1, 2, 8):
        watching = watched(tmp_path)
        made = trainer(
            tmp_path / "out", watching, kind=InOrder, data=Padded(), model=exact(), max_steps=5,
            gradient_accumulation_steps=accumulate, per_device_train_batch_size=8 // accumulate,
        )  # fmt: skip
        made.train()
        found.append(series(watching.run, "train/loss"))
        assert not watching.run.anomalies
    assert found[0] == pytest.approx(found[1], rel=1e-4) and found[0] == pytest.approx(found[2], rel=1e-4)


def test_d10_a_skip_list_applies_once_and_ids_are_those_consumed(tmp_path: Path) -> None:
    """Two workers that fetch ahead; batch 3 of the first epoch left out; the second epoch is whole."""
    plan = SkipPlan(skips=(Skip(epoch=0, index=3, why="bad"),))
    watching = watched(tmp_path, skip=plan)
    made = trainer(
        tmp_path / "out", watching, kind=InOrder, max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=1,
        dataloader_num_workers=2, dataloader_prefetch_factor=4,
    )  # fmt: skip
    made.train()
    micros = [micro for context in contexts(watching.run) for micro in context.micro]
    assert [(m.epoch, m.index) for m in micros] == [(0, k) for k in range(12) if k != 3] + [(1, k) for k in range(12)]
    for micro in micros:
        assert micro.tensors is not None and micro.index is not None
        assert micro.sample_ids == tuple(range(4 * micro.index, 4 * micro.index + 4))
        assert torch.from_numpy(micro.tensors["input_ids"].copy()).equal(Counting().rows[list(micro.sample_ids)])
    assert not plan.pending


def test_d10_under_accumulation_a_skip_leaves_no_gradient_for_the_next_epoch(tmp_path: Path) -> None:
    plan = SkipPlan(skips=(Skip(epoch=0, index=3),))
    watching = watched(tmp_path, skip=plan)
    trainer(tmp_path / "out", watching, kind=InOrder, max_steps=-1, num_train_epochs=2).train()
    groups = [[(m.epoch, m.index) for m in context.micro] for context in contexts(watching.run)]
    whole = [[(1, k), (1, k + 1)] for k in range(0, 12, 2)]
    assert groups == [[(0, 0), (0, 1)], [(0, 2), (0, 4)], *[[(0, k), (0, k + 1)] for k in (5, 7, 9)], *whole]


def test_e6_tokens_of_all_micro_batches_and_no_time_of_evaluation(tmp_path: Path) -> None:
    found = []
    for accumulate in (1, 4):
        watching = watched(tmp_path)
        trainer(
            tmp_path / "out", watching, kind=InOrder, max_steps=3, gradient_accumulation_steps=accumulate,
            per_device_train_batch_size=8 // accumulate, eval_strategy="steps", eval_steps=1,
        ).train()  # fmt: skip
        record = trackbridge.load(watching.run.dir)
        found.append(record.series("train/tokens")[1].tolist())
        assert record.series("perf/paused_s/eval")[0].tolist() == [1, 2]
    assert found == [[72.0, 144.0, 216.0]] * 2
