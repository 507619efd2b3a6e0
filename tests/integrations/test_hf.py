"""`trackbridge.hf.Callback` in a real `Trainer`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import trackbridge
from tests.integrations.hf_kit import (
    Counting,
    InOrder,
    Noisy,
    arguments,
    contexts,
    fingerprint,
    model,
    series,
    status,
    trainer,
    wires,
)
from trackbridge.errors import ConfigError, UsageError
from trackbridge.intake import Later


def callback(directory: Path, **settings: Any) -> trackbridge.hf.Callback:
    return trackbridge.hf.Callback(dir=directory / "runs", strict=True, **settings)


def logged(made: Any, name: str) -> list[float]:
    return [entry[name] for entry in made.state.log_history if name in entry]


def test_one_line_records_what_the_trainer_logs_and_more(tmp_path: Path) -> None:
    watching = callback(tmp_path)
    made = trainer(tmp_path / "out", watching, eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=5)
    made.train()
    record = trackbridge.load(watching.run.dir)
    assert record.status == "finished" and record.config["learning_rate"] == 3e-3
    assert record.config["model"]["model_type"] == "llama" and record.config["gradient_accumulation_steps"] == 2
    assert record.series("train/loss")[0].tolist() == list(range(10))
    for ours, theirs in (("train/loss", "loss"), ("grad/norm", "grad_norm")):
        assert series(watching.run, ours) == pytest.approx(logged(made, theirs), abs=6e-5), (
            ours
        )  # transformers 4 rounds its log
    assert max(series(watching.run, "grad/norm_clipped")) < 1.00001 < max(series(watching.run, "grad/norm"))
    assert series(watching.run, "train/tokens")[-1] == 10 * 2 * 4 * 9
    assert series(watching.run, "eval/loss") == pytest.approx(logged(made, "eval_loss"))
    assert record.series("perf/paused_s/eval")[0].tolist() == [4, 8] and len(record.series("perf/paused_s/save")[0])
    assert "layer/model.layers.0.mlp.up_proj.weight/grad_norm" in record.names
    assert wires(made) == set()


def test_which_samples_a_batch_had_and_when_they_came(tmp_path: Path) -> None:
    watching = callback(tmp_path)
    made = trainer(tmp_path / "out", watching, dataloader_num_workers=2)
    made.train()
    micros = [micro for context in contexts(watching.run) for micro in context.micro]
    assert [(m.loader, m.epoch, m.index) for m in micros] == [(0, k // 12, k % 12) for k in range(20)]
    assert sorted(i for m in micros[:12] for i in m.sample_ids or ()) == list(range(48))
    assert [m.workers for m in micros] == [2] * 20 and len({m.base_seed for m in micros}) == 2
    for micro in micros:
        assert micro.tensors is not None
        assert torch.equal(torch.from_numpy(micro.tensors["input_ids"].copy()), Counting().rows[list(micro.sample_ids or ())])


def test_the_same_numbers_as_a_plain_loop(tmp_path: Path) -> None:
    """Model, data, optimizer and schedule of the Trainer in a loop of one's own: every series that both have is equal to the
    bit, and so are the weights."""
    watching = callback(tmp_path)
    made = trainer(tmp_path / "out", watching, kind=InOrder, model=model(attention_dropout=0.0), max_steps=12)
    made.train()

    run = trackbridge.init(dir=tmp_path / "runs", strict=True)
    network = model(attention_dropout=0.0)
    other = trainer(tmp_path / "out", model=network, max_steps=12)  # only for its optimizer and schedule
    other.create_optimizer_and_scheduler(12)
    optimizer, schedule = other.optimizer, other.lr_scheduler
    run.watch(network, optimizer)
    network.train()
    loader = torch.utils.data.DataLoader(Counting(), 4)
    micros = 0
    for _ in range(2):
        for batch in run.batches(loader):
            loss = network(**batch).loss
            (loss / 2).backward()
            run.micro(loss, samples=4)
            micros += 1
            if micros % 2 == 0:
                run.clip_grad_norm_(1.0)
                optimizer.step()
                run.step(tokens=72)
                schedule.step()
                optimizer.zero_grad()
    run.finish()
    mine, theirs = trackbridge.load(run.dir), trackbridge.load(watching.run.dir)
    timed = ("perf/", "host/", "trackbridge/")
    both = [name for name in mine.names if not name.startswith(timed)]
    assert set(both) == {name for name in theirs.names if not name.startswith(timed)} and len(both) > 100
    for name in both:
        (here, values), (there, others) = mine.series(name), theirs.series(name)
        assert here.tolist() == there.tolist() and values.tolist() == others.tolist(), name
    assert {n: p.tolist() for n, p in network.named_parameters()} == {n: p.tolist() for n, p in made.model.named_parameters()}
    ids = [[m.sample_ids for m in c.micro] for c in contexts(run)]
    assert ids == [[m.sample_ids for m in c.micro] for c in contexts(watching.run)]


@pytest.mark.parametrize("workers", [0, 2])
def test_watched_and_unwatched_train_to_the_same_bits(tmp_path: Path, workers: int) -> None:
    """Weights, moments, schedule and every random state, over evaluations, checkpoints, an epoch's end and a spike."""
    same = {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 5,
        "dataloader_num_workers": workers,
    }
    bare = trainer(tmp_path / "bare", data=Noisy(), **same)
    bare.train()
    expected = fingerprint(bare)
    settings = {
        "recorder": {"snapshot_every": 3},
        "parameters": {"weights_every": 1, "moments_every": 2, "histograms_every": 4},
    }
    seen = trainer(tmp_path / "seen", callback(tmp_path, **settings), data=Noisy(), **same)
    seen.train()
    assert fingerprint(seen) == expected
    assert logged(seen, "loss") == logged(bare, "loss")


def test_added_later_or_given_as_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, added in enumerate((callback(tmp_path), trackbridge.hf.Callback)):
        made = trainer(tmp_path / f"out{number}", max_steps=2)
        made.add_callback(added)
        made.train()
        (found,) = (c for c in made.callback_handler.callbacks if isinstance(c, trackbridge.hf.Callback))
        assert len(series(found.run, "train/loss")) == 2 and wires(made) == set()


def test_two_trainings_one_after_another_are_two_runs(tmp_path: Path) -> None:
    watching = callback(tmp_path)
    made = trainer(tmp_path / "out", watching, max_steps=3)
    made.train()
    first = watching.run
    made.train()
    assert watching.run.id != first.id and status(first) == status(watching.run) == "finished"
    assert trackbridge.load(watching.run.dir).series("train/loss")[0].tolist() == [0, 1, 2]
    other = trainer(tmp_path / "other", watching, max_steps=2, gradient_accumulation_steps=1)
    other.train()
    assert len(series(watching.run, "train/loss")) == 2


def test_a_run_of_the_users_own_is_the_users_to_end(tmp_path: Path) -> None:
    with trackbridge.init(dir=tmp_path / "runs", strict=True) as run:
        for _ in range(2):
            trainer(tmp_path / "out", trackbridge.hf.Callback(run), max_steps=3).train()
        run.log({"after": 1.0})
    record = trackbridge.load(run.dir)
    assert record.series("train/loss")[0].tolist() == list(range(6))  # its steps go on
    assert record.series("after")[1].tolist() == [1.0] and record.status == "finished"


class Broken(Counting):
    def __getitem__(self, index: int) -> Any:
        if index == 30:
            raise ValueError("sample 30 is not there")
        return super().__getitem__(index)


class Raising(TrainerCallback):
    def __init__(self, event: str, error: BaseException) -> None:
        def raises(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if event != "on_step_end" or state.global_step == 2:
                raise error

        setattr(self, event, raises)


@pytest.mark.parametrize(
    ("broken", "error", "ends"),
    [
        ("data", ValueError, "failed"),
        ("loss", RuntimeError, "failed"),
        ("on_step_end", OSError, "failed"),
        ("on_evaluate", OSError, "failed"),
        ("on_step_end", KeyboardInterrupt, "killed"),
    ],
)
def test_an_exception_marks_the_run_and_puts_everything_back(
    tmp_path: Path, broken: str, error: type[BaseException], ends: str
) -> None:
    watching = callback(tmp_path)
    others = [Raising(broken, error("no"))] if broken.startswith("on_") else []
    data = Broken() if broken == "data" else None
    made = trainer(tmp_path / "out", watching, *others, data=data, kind=InOrder, eval_strategy="steps", eval_steps=3)
    if broken == "loss":
        made.model.forward = lambda **inputs: (_ for _ in ()).throw(RuntimeError("no"))
    with pytest.raises(error):
        made.train()
    assert wires(made) == set() and status(watching.run) == ends
    assert ends == "killed" or (trackbridge.load(watching.run.dir).error or "").startswith(error.__name__)
    assert not made.model._forward_pre_hooks and not made.model._forward_hooks


def test_an_exception_that_nobody_sees_ends_the_run_at_the_next_training(tmp_path: Path) -> None:
    """`train` itself may raise where nothing of ours is: before transformers 5 the loop is one function."""
    watching = callback(tmp_path)
    made = trainer(tmp_path / "out", watching, max_steps=2)
    made.lr_scheduler = None
    from trackbridge.integrations.hf import training

    kept, training.INSIDE = training.INSIDE, ()
    try:
        zero_grad, made.model.zero_grad = made.model.zero_grad, lambda: zero_grad()

        class Spoil(TrainerCallback):
            def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
                made.model.zero_grad = None

        made.add_callback(Spoil())
        with pytest.raises(TypeError):
            made.train()
    finally:
        training.INSIDE = kept
    left = watching.run
    assert wires(made)
    made.pop_callback(Spoil)
    del made.model.zero_grad
    made.train()
    assert status(left) == "failed" and status(watching.run) == "finished" and wires(made) == set()


def test_errors_of_ours_never_stop_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 5, "data": Noisy()}
    bare = trainer(tmp_path / "bare", **same)
    bare.train()
    expected = fingerprint(bare)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    for name in ("step", "micro", "log", "state_dict", "_detach"):
        monkeypatch.setattr(trackbridge.Run, name, lambda *args, **kwargs: 1 / 0)
    monkeypatch.setattr(Later, "tell", lambda *args: 1 / 0)
    seen = trainer(tmp_path / "seen", trackbridge.hf.Callback(dir=tmp_path / "runs"), **same)
    assert seen.train().global_step == 10
    assert fingerprint(seen) == expected and wires(seen) == set()


class Patient(TrainerCallback):
    """The scribe is a step or two behind; here it is waited for."""

    def __init__(self, watching: trackbridge.hf.Callback) -> None:
        self.watching = watching

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.watching.run.state_dict()


def test_it_stops_only_if_asked_to(tmp_path: Path) -> None:
    class Diverging(InOrder):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            return loss * float("nan") if self.state.global_step == 4 else loss

    for limit, steps in ((None, 10), (0.5, None)):
        watching = callback(tmp_path, **({} if limit is None else {"stop_on_anomaly": limit}))
        made = trainer(tmp_path / "out", watching, kind=Diverging)
        made.callback_handler.callbacks.insert(0, Patient(watching))
        made.train()
        assert [a.step for a in watching.run.anomalies if a.kind == "nonfinite"]
        assert made.state.global_step == steps if steps else 5 <= made.state.global_step <= 7


@pytest.mark.filterwarnings("ignore:.*autocast:FutureWarning")  # transformers 4's own
def test_bfloat16_under_autocast(tmp_path: Path) -> None:
    watching = callback(tmp_path)
    made = trainer(tmp_path / "out", watching, bf16=True, max_steps=3)
    made.train()
    assert series(watching.run, "train/loss") == pytest.approx(logged(made, "loss"), abs=6e-5)


def test_wrong_use_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"trackbridge\.init"):
        trackbridge.hf.Callback("wandb")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="projekt"):
        trackbridge.hf.Callback(projekt="x")
    with pytest.raises(UsageError, match="SkipPlan"):
        trackbridge.hf.Callback(skip=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="skip"):
        trackbridge.hf.Callback(skip=tmp_path / "none.json")
    run = trackbridge.init(dir=tmp_path)
    with pytest.raises(UsageError, match="project"):
        trackbridge.hf.Callback(run, project="x")
    run.finish()
    with pytest.raises(UsageError, match=r"transformers\.Trainer"):
        callback(tmp_path).on_train_begin(arguments(tmp_path), None, None)


def test_the_log_says_what_was_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "trackbridge")
    bad = Counting(320, bad=range(30 * 8, 31 * 8))
    watching = callback(tmp_path, detection={"warmup": 16})
    trainer(tmp_path / "out", watching, data=bad, kind=InOrder, max_steps=40, learning_rate=1e-2).train()
    assert [a.step for a in watching.run.anomalies] == [30]
    assert any("at step 30" in message for message in caplog.messages)
