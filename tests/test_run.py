"""The public path, from `init` to `load`, on a real small training."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trackbridge
from tests.training import Setup, loader, setup, train
from trackbridge import names


def noise(step: int, batch: list[torch.Tensor]) -> list[torch.Tensor]:
    """From step 60 to 61 the batch is random tokens: a bad batch."""
    return [torch.randint(0, 32, batch[0].shape)] if step in (60, 61) else batch


def recorded(tmp_path: Path, **more: Any) -> tuple[trackbridge.RunRecord, Setup]:
    run = trackbridge.init(dir=tmp_path, strict=True, config={"lr": 3e-3, "api_key": "not-to-be-seen"}, **more)
    made = train(setup(run=run), run.batches(loader()), steps=80, spoil=noise)
    run.log({"eval/loss": torch.tensor(0.5)}, step=79)
    assert run.finish()
    return trackbridge.load(run.dir), made


def test_every_series_is_in_the_catalogue_and_the_losses_are_right(tmp_path: Path) -> None:
    record, made = recorded(tmp_path)
    steps, losses = record.series("train/loss")
    assert steps.tolist() == list(range(80))
    assert losses.tolist() == pytest.approx(made.losses, abs=1e-6)
    unknown = [name for name in record.names if names.describe(name) is None and name != "eval/loss"]
    assert unknown == []
    assert record.series("eval/loss")[1].tolist() == [0.5]
    assert record.config["lr"] == 3e-3 and record.config["api_key"] == "[redacted]"
    assert record.provenance["torch"]["version"] == torch.__version__
    assert record.status == "finished"
    run_level = {"grad/norm", "grad/norm_clipped", "param/norm", "optim/exp_avg_sq_norm", "optim/update_ratio"}
    timed = {"perf/forward_s", "perf/backward_s", "perf/optimizer_s", "perf/fetch_s", "perf/tokens_per_s"}
    wide = {"layer/blocks.1.up.weight/grad_norm", "act/blocks.0/kurtosis", "act/embed/rms"}
    assert run_level | timed | wide <= set(record.names)


def test_the_spike_is_found_and_sealed(tmp_path: Path) -> None:
    record, _ = recorded(tmp_path, recorder={"snapshot_every": 10})
    spike = next(a for a in record.anomalies if a.kind == "spike" and a.step in (60, 61))
    assert spike.onset == 60 and spike.value > 3 * spike.expected and spike.score > 5
    assert spike.first_mover is not None and spike.first_mover[1] == 60
    assert spike.capsule is not None
    capsule = trackbridge.pull(record.path / spike.capsule)
    assert capsule.tier == "re-execute" and capsule.restart_step == 50
    assert capsule.window.set_index("step")["train/loss"].loc[60:61].min() > 1.0


def test_the_anomaly_reaches_the_loop(tmp_path: Path) -> None:
    with trackbridge.init(dir=tmp_path, strict=True) as run:
        seen = []
        for step in range(200):
            seen += run.step(loss=100.0 if step == 150 else 2.0 + 0.01 * random.random())
        run.state_dict()  # waits for the scribe: this loop is faster than it
        seen += run.step(loss=2.0)
    assert [anomaly.step for anomaly in seen] == [150] == [anomaly.step for anomaly in run.anomalies]


def test_accumulation_weights_by_tokens(tmp_path: Path) -> None:
    with trackbridge.init(dir=tmp_path) as run:
        run.micro(torch.tensor(9.0), tokens=1)
        run.micro(torch.tensor(1.0), tokens=99)
        run.step()
        for loss in (1.0, 1.0, 1.0, 9.0):
            run.micro(loss)
        run.step()
    record = trackbridge.load(run.dir)
    assert record.series("train/loss")[1].tolist() == pytest.approx([1.08, 3.0])
    assert record.series("train/tokens")[1].tolist() == [100.0]


def test_a_loss_in_parts(tmp_path: Path) -> None:
    with trackbridge.init(dir=tmp_path) as run:
        run.step(loss={"policy": torch.tensor(1.0), "value": 2.0})
        run.step(loss={"loss": 5.0, "aux": 1.0})
    record = trackbridge.load(run.dir)
    assert record.series("train/loss")[1].tolist() == [3.0, 5.0]
    assert record.series("train/loss/policy")[1].tolist() == [1.0]
    assert record.series("train/loss/aux")[1].tolist() == [1.0]


def test_pause_takes_evaluation_out(tmp_path: Path) -> None:
    run = trackbridge.init(dir=tmp_path, strict=True)
    made = setup(run=run)
    before = made.model.blocks[0].register_forward_hook(lambda *_: None)
    tokens = torch.randint(0, 32, (2, 8))
    for _ in range(3):
        with run.pause("eval"):
            made.model(tokens * 0)
        nn.functional.cross_entropy(made.model(tokens).flatten(0, 1), tokens.flatten()).backward()
        made.optimizer.step()
        run.step(loss=1.0)
    run.finish()
    before.remove()
    record = trackbridge.load(run.dir)
    assert len(record.series("act/blocks.0/rms")[0]) == 3
    assert len(record.series("perf/paused_s/eval")[0]) == 3


def test_resume_goes_on_and_a_repeated_step_is_the_newest(tmp_path: Path) -> None:
    with trackbridge.init(dir=tmp_path, id="r") as run:
        for step in range(10):
            run.step(loss=float(step))
            if step == 5:
                state = run.state_dict()
    with trackbridge.init(dir=tmp_path, id="r", resume="must") as run:
        run.load_state_dict(state)
        for step in range(6, 12):
            run.step(loss=100.0 + step)
    record = trackbridge.load(tmp_path)
    assert record.series("train/loss")[0].tolist() == list(range(12))
    assert record.series("train/loss")[1].tolist() == [*range(6), *(100.0 + s for s in range(6, 12))]
    assert record.info.attempt == 1
    with trackbridge.init(dir=tmp_path, id="r", resume="auto") as run:
        run.step(loss=0.0)
    assert trackbridge.load(tmp_path).series("train/loss")[0].tolist() == list(range(13))


def test_auto_step_needs_no_change_to_the_loop(tmp_path: Path) -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            out = self.linear(x)
            return {"loss": out.square().mean(), "out": out}

    with trackbridge.init(dir=tmp_path, strict=True) as run:
        model = WithLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.watch(model, optimizer, auto_step=True)
        losses = []
        for _ in range(5):
            loss = model(torch.ones(3, 4))["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    record = trackbridge.load(run.dir)
    assert record.series("train/loss")[1].tolist() == losses
    optimizer.step()  # after finish nothing is left on the objects
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_artifacts_are_copied(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("kept")
    with trackbridge.init(dir=tmp_path / "runs") as run:
        with pytest.raises(trackbridge.TrackbridgeError, match="cannot log artifact"):
            run.log_artifact(tmp_path / "nowhere")
        run.log_artifact(tmp_path / "notes.txt", kind="notes")
        (tmp_path / "notes.txt").write_text("changed")
        run.log_artifact(tmp_path / "nowhere")  # not the first call: training goes on
    (artifact,) = trackbridge.load(run.dir).artifacts
    assert (run.dir / artifact.path / "notes.txt").read_text() == "kept"


FORGOTTEN = """
import sys, trackbridge
run = trackbridge.init(dir=sys.argv[1], id=sys.argv[2])
run.step(loss=1.0)
if sys.argv[2] == "raises":
    raise RuntimeError("by hand")
"""


@pytest.mark.parametrize(("how", "status"), [("returns", "finished"), ("raises", "failed")])
def test_forgetting_finish_loses_nothing(tmp_path: Path, how: str, status: str) -> None:
    subprocess.run([sys.executable, "-c", FORGOTTEN, str(tmp_path), how], capture_output=True, timeout=60)
    record = trackbridge.load(tmp_path / how)
    assert record.series("train/loss")[1].tolist() == [1.0]
    assert record.status == status


def test_two_runs_in_one_process(tmp_path: Path) -> None:
    a, b = trackbridge.init(dir=tmp_path, id="a"), trackbridge.init(dir=tmp_path, id="b")
    for step in range(5):
        a.step(loss=float(step))
        b.step(loss=-float(step))
    a.finish(), b.finish()
    assert trackbridge.load(tmp_path / "a").series("train/loss")[1].tolist() == [0, 1, 2, 3, 4]
    assert trackbridge.load(tmp_path / "b").series("train/loss")[1].tolist() == [0, -1, -2, -3, -4]


@pytest.mark.parametrize("as_tensor", [True, False], ids=["tensor", "float"])
def test_what_the_user_gives_wins_over_what_a_probe_measures(tmp_path: Path, as_tensor: bool) -> None:
    """A gradient norm of the user's own, and a loss beside micro-batches: one value each, and detection goes on."""
    give = torch.tensor if as_tensor else float
    with trackbridge.init(dir=tmp_path, strict=True) as run:
        made = setup(run=run)
        tokens = torch.randint(0, 32, (2, 8))
        for step in range(60):
            loss = nn.functional.cross_entropy(made.model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            made.optimizer.step()
            made.optimizer.zero_grad()
            run.micro(1.0)
            run.step(loss=give(100.0 if step == 50 else 2.0 + 0.01 * (step % 3)), grad_norm=give(5.5))
    record = trackbridge.load(run.dir)
    assert set(record.series("grad/norm")[1].tolist()) == {5.5}
    assert record.series("train/loss")[1][49:52].tolist() == pytest.approx([2.01, 100.0, 2.0])
    assert [a.step for a in record.anomalies] == [50]


def test_a_spike_on_the_very_last_step_keeps_its_snapshot(tmp_path: Path) -> None:
    run = trackbridge.init(dir=tmp_path, strict=True, recorder={"snapshot_every": 10})
    train(setup(run=run), run.batches(loader()), steps=61, spoil=noise)
    assert run.finish()
    (anomaly,) = [a for a in trackbridge.load(run.dir).anomalies if a.step == 60]
    assert anomaly.capsule and anomaly.hypotheses
    assert trackbridge.pull(run.dir / anomaly.capsule).tier == "re-execute"


def test_finish_in_no_time_still_ends_the_run(tmp_path: Path) -> None:
    """A scribe that is late writes the end when it gets there."""
    run = trackbridge.init(dir=tmp_path, strict=True)
    train(setup(run=run), run.batches(loader()), steps=40)
    report = run.finish(timeout=0.0)
    run._scribe._thread.join(60)
    assert trackbridge.load(run.dir).status == "finished"
    assert trackbridge.load(run.dir).series("train/loss")[0].tolist() == list(range(40))
    assert isinstance(str(report), str)


def test_auto_stepped_models_can_be_copied_and_saved(tmp_path: Path) -> None:
    import copy

    with trackbridge.init(dir=tmp_path, strict=True) as run:
        model = nn.Linear(4, 1)
        run.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), auto_step=True)
        twin = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        twin(torch.ones(1, 4)).sum().backward()
        again = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
        run.watch(again, optimizer, auto_step=True)
        again(torch.ones(1, 4)).mean().backward()
        optimizer.step()
    assert len(trackbridge.load(run.dir).series("train/loss")[0]) == 1


def test_logged_tensors_are_copied_at_once(tmp_path: Path) -> None:
    total = torch.zeros(())
    with trackbridge.init(dir=tmp_path) as run:
        for step in range(50):
            total += 1.0
            run.log({"total": total}, step=step)
            total.zero_()
            total += step + 1.0
    assert trackbridge.load(run.dir).series("total")[1].tolist() == [1.0] + [s + 1.0 for s in range(1, 50)]


def test_values_at_a_step_that_cannot_be_are_left_out(tmp_path: Path) -> None:
    with trackbridge.init(dir=tmp_path) as run:
        run.log({"a": 1.0}, step=3)
        for step in (-1, 2.5, 2**60, "10"):
            run.log({"a": 99.0}, step=step)  # type: ignore[arg-type]
    steps, values = trackbridge.load(run.dir).series("a")
    assert (steps.tolist(), values.tolist()) == ([3], [1.0])


def test_no_misuse_switches_recording_off(tmp_path: Path) -> None:
    with trackbridge.init(dir=tmp_path) as run:
        run.step(loss=1.0)
        run.log({"a": 1.0})
        run.step(loss=1.0, tokens="many")  # type: ignore[arg-type]
        run.step(loss=1.0, step="x")  # type: ignore[arg-type]
        run.log({"a": "text"})  # type: ignore[dict-item]
        run.log({"a": torch.ones(3)})
        with pytest.raises(trackbridge.TrackbridgeError):  # the first call of its kind
            run.micro("no")  # type: ignore[arg-type]
        run.step(loss=2.0)
        state = run.state_dict()
    assert trackbridge.load(run.dir).series("train/loss")[1].tolist() == [1.0, 1.0, 1.0, 2.0]
    assert trackbridge.load(run.dir).series("a")[1].tolist() == [1.0]
    assert run.state_dict()["step"] == state["step"] == 4  # after finish, at once


def test_a_state_of_another_version_is_learned_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with trackbridge.init(dir=tmp_path) as run:
        run.load_state_dict({"step": 7, "watch": {"version": 0, "strange": []}})
        run.step(loss=1.0)
        with pytest.raises(trackbridge.TrackbridgeError, match="no 'step'"):
            run.load_state_dict({"epoch": 3})
    assert trackbridge.load(run.dir).series("train/loss")[0].tolist() == [7]
    assert "does not fit" in caplog.text


def test_a_run_that_is_being_recorded_cannot_be_resumed(tmp_path: Path) -> None:
    run = trackbridge.init(dir=tmp_path, id="busy")
    run.step(loss=1.0)
    with pytest.raises(trackbridge.TrackbridgeError, match="is being recorded by process"):
        trackbridge.init(dir=tmp_path, id="busy", resume="auto")
    run.finish()
    trackbridge.init(dir=tmp_path, id="busy", resume="auto").finish()


def test_rolling_back_tells_the_second_spike_too(tmp_path: Path) -> None:
    with trackbridge.init(dir=tmp_path, strict=True) as run:
        for step in range(60):
            run.step(loss=90.0 if step == 50 else 2.0 + 0.01 * (step % 3))
            if step == 40:
                state = run.state_dict()
        run.load_state_dict(state)
        for step in range(41, 60):
            run.step(loss=90.0 if step == 50 else 2.0 + 0.01 * (step % 3))
    assert [a.step for a in run.anomalies] == [50, 50]


def test_sections_given_twice_are_merged(tmp_path: Path) -> None:
    settings = trackbridge.TrackbridgeConfig(recorder={"before": 4})
    with trackbridge.init(settings, dir=tmp_path, recorder={"after": 3}) as run:
        pass
    kept = trackbridge.load(run.dir).settings["recorder"]
    assert (kept["before"], kept["after"]) == (4, 3)


class Strange:
    def __float__(self) -> float:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "loss",
    [
        10**400,
        Strange(),
        torch.tensor([1.0]).to_sparse(),
        torch.empty((), device="meta"),
        torch.tensor(1 + 2j),
        "x",
        [1.0, 2.0],
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_loss_however_strange_reaches_the_loop(tmp_path: Path, loss: Any) -> None:
    with trackbridge.init(dir=tmp_path) as run:
        run.step(loss=1.0)
        run.step(loss=loss, tokens=5)
        run.step(loss=3.0)
    record = trackbridge.load(run.dir)
    assert record.series("train/loss")[0].tolist() == [0, 2]
    assert record.series("train/tokens")[0].tolist() == [1]


def test_a_loss_in_many_parts_keeps_its_total(tmp_path: Path) -> None:
    with trackbridge.init(dir=tmp_path, strict=True) as run:
        run.step(loss={f"p{j}": torch.tensor(1.0) for j in range(400)})
    assert trackbridge.load(run.dir).series("train/loss")[1].tolist() == [400.0]


def test_steps_out_of_range_are_left_out(tmp_path: Path) -> None:
    with trackbridge.init(dir=tmp_path) as run:
        run.step(loss=1.0)
        run.step(loss=2.0, step=2**63)
        run.step(loss=3.0, step=-1)
    assert trackbridge.load(run.dir).series("train/loss")[0].tolist() == [0, 1, 2]


def test_a_users_series_never_hides_one_of_ours(tmp_path: Path) -> None:
    with trackbridge.init(dir=tmp_path) as run:
        run.step(loss=1.0)
        with pytest.raises(trackbridge.TrackbridgeError, match="of trackbridge's own"):
            run.log({"train/loss": 777.0})
        run.log({"good": 1.0})
        run.log({"good": 2.0, "bad": "text", "a b": 3.0, "a?b": 4.0})
    record = trackbridge.load(run.dir)
    assert record.series("train/loss")[1].tolist() == [1.0]
    assert record.series("good")[1].tolist() == [2.0] and record.series("a_b")[1].tolist() == [3.0]


def test_finish_can_be_asked_again_after_a_bad_call(tmp_path: Path) -> None:
    run = trackbridge.init(dir=tmp_path)
    run.step(loss=1.0)
    with pytest.raises(ValueError):
        run.finish("soon")  # type: ignore[arg-type]
    assert run.finish(None)  # type: ignore[arg-type]
    assert trackbridge.load(run.dir).status == "finished"


def test_leaving_with_exit_code_zero_is_a_finish(tmp_path: Path) -> None:
    with pytest.raises(SystemExit), trackbridge.init(dir=tmp_path) as run:
        run.step(loss=1.0)
        sys.exit(0)
    assert trackbridge.load(run.dir).status == "finished"


def test_resuming_without_a_tracker_still_owes_it_the_rest(tmp_path: Path) -> None:
    from trackbridge import shipper

    with trackbridge.init(dir=tmp_path, id="r", backend="tensorboard") as run:
        run.step(loss=1.0)
    with trackbridge.init(dir=tmp_path, id="r", resume="must") as run:
        run.step(loss=2.0)
    assert [(s.kind, s.lag) for s in shipper.status(run.dir)] == [("tensorboard", 0)]
    assert list(run.urls) == ["tensorboard"]


def test_watch_refuses_what_would_break_later(tmp_path: Path) -> None:
    with trackbridge.init(dir=tmp_path) as run:
        linear = nn.Linear(1, 1)
        for wrong in ({"model": []}, {"model": nn.LazyLinear(3)}, {"scaler": 5}, {"state": [1]}):
            with pytest.raises(trackbridge.TrackbridgeError):
                run.watch(**{"model": linear, **wrong})  # type: ignore[arg-type]


def test_one_damaged_run_does_not_hide_the_others(tmp_path: Path) -> None:
    from trackbridge.history import runs

    trackbridge.init(dir=tmp_path, id="good").finish()
    trackbridge.init(dir=tmp_path, id="bad").finish()
    (tmp_path / "bad" / "run.json").write_bytes(b"\xff\xfe{")
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert [summary.run_id for summary in runs(tmp_path)] == ["good"]
    with pytest.raises(trackbridge.TrackbridgeError, match="damaged"):
        trackbridge.load(tmp_path / "bad")


def test_a_steps_context_is_on_disk_before_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer killed between the two must not leave a row that cannot be run again."""
    from trackbridge.journal import JournalReader, JournalWriter
    from trackbridge.records import Row, StepContext

    behind: list[int] = []
    append = JournalWriter.append

    def checked(journal: JournalWriter, record: Any) -> int:
        if isinstance(record, Row) and record.kind == "step":
            there = JournalReader(journal.directory.parent / "contexts", kinds={StepContext}).read()
            if not any(isinstance(context, StepContext) and context.step == record.step for context in there):
                behind.append(record.step)
        return append(journal, record)

    monkeypatch.setattr(JournalWriter, "append", checked)
    run = trackbridge.init(dir=tmp_path, strict=True)
    train(setup(run=run), run.batches(loader()), steps=6)
    assert run.finish() and behind == []


def test_checkpoints_are_in_the_record(tmp_path: Path) -> None:
    with trackbridge.init(dir=tmp_path, strict=True) as run:
        run.step(loss=1.0)
        with pytest.raises(trackbridge.errors.UsageError, match="takes a path and a number of steps"):
            run.checkpoint_saved("ckpt/1.pt", "latest")  # type: ignore[arg-type]
        with pytest.raises(trackbridge.errors.UsageError, match="0 steps or more"):
            run.checkpoint_saved("ckpt/1.pt", -1)
        run.checkpoint_saved("ckpt/1.pt", 1)
    saved = [p.values["checkpoint"] for p in trackbridge.load(run.dir).params if "checkpoint" in p.values]
    assert saved == [{"path": str(Path("ckpt/1.pt").absolute()), "step": 1}]


def test_a_step_number_that_comes_again_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trackbridge.init(dir=tmp_path, strict=True)
    with caplog.at_level(logging.WARNING, "trackbridge"):
        for step in (0, 1, 2, 2, 1, 5):
            run.step(loss=float(step) + len(caplog.records), step=step)
        run.load_state_dict({"step": 3})
        run.step(loss=9.0)
        run.finish()
    said = [record.message for record in caplog.records if "came after" in record.message]
    assert len(said) == 1 and "step 2 came after step 2" in said[0] and "the later row is shown" in said[0]
    steps, losses = trackbridge.load(run.dir).series("train/loss")
    assert steps.tolist() == [0, 1, 2, 3, 5] and losses[2] == 2.0 and losses[1] == 2.0


def _second_watch(case: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What `watch` is called with first, and then."""

    def sgd(*models: nn.Module) -> torch.optim.SGD:
        return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)

    model, other = nn.Linear(4, 1), nn.Linear(4, 2)
    optimizer = sgd(model)
    match case:
        case "another model":
            return (model, optimizer), (other, sgd(other))
        case "an optimizer for the rest":
            whole, part = nn.Sequential(model, other), torch.optim.Adam(other.parameters())
            return (whole, optimizer), (whole, part)
        case "the same again":
            return (model, optimizer), (model, optimizer)
        case "one more":
            return (model, optimizer), ({"g": model, "d": other}, {"g": optimizer, "d": sgd(other)})
        case "in a wrapper":
            return (model, optimizer), (nn.Sequential(model), optimizer)
        case "another optimizer of the same":
            return (model, optimizer), (model, sgd(model))
        case "new parameters":
            return (model, optimizer), (model,)
    raise AssertionError(case)


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("another model", "so Linear is no longer measured"),
        ("an optimizer for the rest", "so SGD is no longer measured"),
        ("the same again", ""),
        ("one more", ""),
        ("in a wrapper", ""),
        ("another optimizer of the same", ""),
        ("new parameters", ""),
    ],
)
def test_a_second_watch_that_drops_something_says_so(
    case: str, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A GAN's two networks watched in two calls: the first one's series would be missing without a word."""
    first, second = _second_watch(case)
    with trackbridge.init(dir=tmp_path, strict=True) as run, caplog.at_level(logging.WARNING, "trackbridge"):
        run.watch(*first)
        if case == "new parameters":  # as after sharding
            for name, parameter in list(first[0].named_parameters()):
                setattr(first[0], name, nn.Parameter(parameter.detach().clone()))
            second = first[0], torch.optim.SGD(first[0].parameters(), lr=0.1)
        run.watch(*second)
    assert told in caplog.text if told else "no longer measured" not in caplog.text
    assert not told or 'run.watch({"g": g, "d": d}' in caplog.text
