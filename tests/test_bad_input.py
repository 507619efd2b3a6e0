"""Bad input gets one line that names the fix, and loses nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

import trackbridge
from tests.disk import full_disk
from tests.training import setup
from trackbridge.cli.replay import function
from trackbridge.config import TrackbridgeConfig
from trackbridge.errors import ConfigError, MissingExtraError, ReferenceNotFoundError, TrackbridgeError, UsageError
from trackbridge.rundir import RunDirectory


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    words = str(error.value)
    assert "\n" not in words and len(words) < 400
    return words


def test_unknown_backend_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        trackbridge.init(backend="tensorbord", dir=tmp_path)
    assert "did you mean 'tensorboard'" in one_line(error)
    assert list(tmp_path.iterdir()) == []


def test_missing_extra_gives_the_pip_command() -> None:
    from trackbridge import plugins

    with pytest.raises(MissingExtraError) as error:
        plugins.require("wandb_that_is_not_there", "wandb")
    assert "pip install 'trackbridge[wandb]'" in one_line(error)


def test_unknown_setting_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        trackbridge.init(dir=tmp_path, recorder={"snapshot_evry": 3})
    assert "did you mean 'snapshot_every'" in one_line(error)
    with pytest.raises(ConfigError) as error:
        trackbridge.init(dir=tmp_path, projct="x")
    assert "did you mean 'project'" in one_line(error)


def test_unknown_setting_of_a_backend(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        trackbridge.init(dir=tmp_path, backend={"kind": "tensorboard", "logdirr": "x"})
    assert "did you mean 'logdir'" in one_line(error)


def test_wrong_type_says_what_was_given(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        trackbridge.init(dir=tmp_path, recorder={"snapshot_every": "often"})
    assert "recorder.snapshot_every" in one_line(error) and "often" in one_line(error)


def test_a_section_that_is_switched_off_like_an_option_names_what_is_in_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        trackbridge.init(dir=tmp_path, recorder=False)
    assert "is a section" in one_line(error) and "in it: enabled, " in one_line(error)
    with pytest.raises(ConfigError) as error:
        trackbridge.init(dir=tmp_path, detection={"stall": False})
    assert "'detection.stall' is a section" in one_line(error) and "in it: enabled, factor" in one_line(error)


def test_a_choice_or_a_list_is_told_without_types(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        trackbridge.init(dir=tmp_path, activations={"sites": "blocks.*"})
    words = one_line(error)
    assert words.startswith("setting 'activations.sites': ") and "'blocks.*'" in words and "a list such as ['" in words


def test_settings_from_yaml_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackbridge.yaml").write_text(f"project: from-yaml\ndir: {tmp_path}\nrecorder: {{snapshot_every: 7}}\n")
    monkeypatch.setenv("TRACKBRIDGE_RECORDER__AFTER", "3")
    with trackbridge.init(str(tmp_path / "trackbridge.yaml"), name="x") as run:
        settings = trackbridge.load(run.dir).settings
    assert settings["project"] == "from-yaml"
    assert (settings["recorder"]["snapshot_every"], settings["recorder"]["after"]) == (7, 3)
    (tmp_path / "broken.yaml").write_text("a: [1")
    with pytest.raises(ConfigError) as error:
        trackbridge.init(str(tmp_path / "broken.yaml"))
    one_line(error)
    with pytest.raises(ConfigError) as error:
        trackbridge.init("nowhere.yaml")
    assert "nowhere.yaml" in one_line(error)


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("TRACKBRIDGE_NOPE", "1", "unknown setting 'nope'"),
        ("TRACKBRIDGE_RECODER__AFTER", "1", "did you mean 'recorder'"),
        ("TRACKBRIDGE_RECORDER__AFTR", "1", "did you mean 'after'"),
        ("TRACKBRIDGE_RECORDER", "notjson", "write it as JSON"),
        ("TRACKBRIDGE_SLOTS", "many", "slots"),
    ],
)
def test_bad_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError) as error:
        trackbridge.init(dir=tmp_path)
    assert says in one_line(error)


def test_config_that_is_no_mapping(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        trackbridge.init(dir=tmp_path, config=[("lr", 1)])  # type: ignore[arg-type]
    assert "vars(config)" in one_line(error)


def test_loss_that_is_not_a_scalar_raises_on_the_first_call(tmp_path: Path) -> None:
    with trackbridge.init(dir=tmp_path) as run:
        with pytest.raises(UsageError) as error:
            run.step(loss=torch.ones(4, 10))
        assert "(4, 10)" in one_line(error) and "loss.mean()" in one_line(error)
        with pytest.raises(UsageError) as error:
            run.step(loss="high")  # type: ignore[arg-type]
        one_line(error)


def test_misuse_after_the_first_call_never_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with trackbridge.init(dir=tmp_path) as run:
        run.step(loss=1.0)
        run.step(loss=torch.ones(3))
        run.step(loss=2.0)
    steps, values = trackbridge.load(run.dir).series("train/loss")
    assert steps.tolist() == [0, 2] and values.tolist() == [1.0, 2.0]
    assert len([r for r in caplog.records if "must be a scalar" in r.getMessage()]) == 1


def test_step_before_watch_records_the_loss_only(tmp_path: Path) -> None:
    with trackbridge.init(dir=tmp_path) as run:
        for k in range(5):
            run.step(loss=torch.tensor(float(k)))
    record = trackbridge.load(run.dir)
    assert record.series("train/loss")[1].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert not [name for name in record.names if name.startswith("layer/")]


def test_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError) as error:
        trackbridge.init(dir=tmp_path / "file")
    assert "pass dir=" in one_line(error)


def test_existing_id_and_resume(tmp_path: Path) -> None:
    trackbridge.init(dir=tmp_path, id="a").finish()
    with pytest.raises(ConfigError) as error:
        trackbridge.init(dir=tmp_path, id="a")
    assert "resume='auto'" in one_line(error)
    with pytest.raises(ConfigError) as error:
        trackbridge.init(dir=tmp_path, id="b", resume="must")
    assert "no run 'b'" in one_line(error)
    with pytest.raises(ConfigError) as error:
        trackbridge.init(dir=tmp_path, id="../escape")
    one_line(error)


def test_watch_wants_modules_and_optimizers(tmp_path: Path) -> None:
    with trackbridge.init(dir=tmp_path) as run:
        with pytest.raises(UsageError) as error:
            run.watch("model")  # type: ignore[arg-type]
        one_line(error)
        with pytest.raises(UsageError) as error:
            run.watch(torch.nn.Linear(1, 1), state={"epoch": 3})
        assert "state_dict" in one_line(error)
        with pytest.raises(UsageError) as error:
            run.clip_grad_norm_(1.0)
        one_line(error)


@pytest.mark.parametrize("ref", ["nowhere", "mlflow:", "tensorboard:/nowhere@3", "wandb:just-one-part", "ftp:x"])
def test_capsule_reference_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ref: str) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/m.db")
    with pytest.raises((ReferenceNotFoundError, UsageError)) as error:
        trackbridge.pull(ref, tmp_path / "out")
    one_line(error)
    assert not (tmp_path / "out").exists()


def test_damaged_journal_loads_what_is_good(tmp_path: Path) -> None:
    with trackbridge.init(dir=tmp_path) as run:
        for k in range(200):
            run.step(loss=float(k))
    segment = max((run.dir / "rank-0000" / "rows").iterdir(), key=lambda p: p.stat().st_size)
    data = bytearray(segment.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 500] = bytes(500)
    segment.write_bytes(data)
    with pytest.warns(RuntimeWarning, match="lost"):
        record = trackbridge.load(run.dir)
    steps, values = record.series("train/loss")
    assert 190 <= len(steps) < 200 and (values == steps).all()
    assert record.damage


@pytest.mark.parametrize("how", ["cut", "emptied", "deleted"])
def test_a_journal_whose_end_is_gone_is_not_called_whole(tmp_path: Path, how: str) -> None:
    """The trackers' cursors know how far it went."""
    with trackbridge.init(dir=tmp_path, backend="tensorboard") as run:
        for k in range(50):
            run.step(loss=float(k))
    (segment,) = (run.dir / "rank-0000" / "rows").iterdir()
    if how == "deleted":
        segment.unlink()
    else:
        segment.write_bytes(segment.read_bytes()[: segment.stat().st_size // 2] if how == "cut" else b"")
    with pytest.warns(RuntimeWarning, match=r"\d+ records lost"):
        record = trackbridge.load(run.dir)
    assert record.damage.records_lost >= 20


@pytest.mark.parametrize("folder", ["a\0b", "x" * 300])
def test_folders_that_cannot_be(tmp_path: Path, folder: str) -> None:
    with pytest.raises(ConfigError) as error:
        trackbridge.init(dir=tmp_path / folder)
    one_line(error)


def test_a_full_disk_at_init(tmp_path: Path) -> None:
    with full_disk(0), pytest.raises(ConfigError) as error:
        trackbridge.init(dir=tmp_path, id="x")
    assert "pass dir= a folder you can write to" in one_line(error)
    assert list((tmp_path / "x").iterdir()) == [], "half a file would be in the way of the next try"


NO_TORCH = """
import sys
sys.modules["torch"] = None
import trackbridge
try:
    trackbridge.init
except trackbridge.TrackbridgeError as error:
    print(error)
"""


def test_without_torch_init_gives_the_pip_command() -> None:
    done = subprocess.run([sys.executable, "-c", NO_TORCH], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "'torch' is not installed; run: pip install 'trackbridge[torch]'"


def test_a_run_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ReferenceNotFoundError) as error:
        trackbridge.load(tmp_path / "nowhere")
    one_line(error)


def test_an_exception_marks_the_run_failed_and_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), trackbridge.init(dir=tmp_path) as run:
        run.step(loss=1.0)
        raise ZeroDivisionError("by hand")
    assert trackbridge.load(run.dir).status == "failed"


def test_a_forked_child_is_inert(tmp_path: Path) -> None:
    run = trackbridge.init(dir=tmp_path)
    run.step(loss=1.0)
    child = os.fork()
    if child == 0:
        run.step(loss=2.0)
        run.log({"x": 1.0})
        run.finish()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    run.step(loss=3.0)
    run.finish()
    assert trackbridge.load(run.dir).series("train/loss")[1].tolist() == [1.0, 3.0]


def test_detect_wants_numbers() -> None:
    for steps, loss in (
        ([float("nan")], [1.0]),
        (None, [1.0]),
        (["a"], [1.0]),
        ([0], ["x"]),
        ([1e300], [1.0]),
        ([0, 1], [1.0]),
    ):
        with pytest.raises(UsageError) as error:
            trackbridge.detect(steps, loss)  # type: ignore[arg-type]
        one_line(error)
    with pytest.raises(ConfigError):
        trackbridge.detect([0], [1.0], settings=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("ref", [5, None, ""])
def test_pull_wants_a_reference(ref: object) -> None:
    with pytest.raises(UsageError) as error:
        trackbridge.pull(ref)  # type: ignore[arg-type]
    one_line(error)


def test_every_error_is_a_trackbridge_error() -> None:
    for kind in (ConfigError, MissingExtraError, UsageError, ReferenceNotFoundError):
        assert issubclass(kind, TrackbridgeError)


def test_finish_twice_and_after(tmp_path: Path) -> None:
    run = trackbridge.init(dir=tmp_path)
    made = setup(run=run)
    first, second = run.finish(), run.finish()
    assert first and second
    assert run.step(loss=1.0) == []
    made.clip()


@pytest.mark.parametrize("text", ["", "[]", '{"project": "p", "run_id": "r", "name": "n", "created": 0.0}'])
def test_a_damaged_run_json_is_told_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(TrackbridgeError) as error:
        RunDirectory(tmp_path).info()
    assert "run.json is damaged: " in one_line(error)


def test_half_a_surrogate_pair_is_spelled_out(tmp_path: Path) -> None:
    """Python has it for bytes of a file name that are no text, as in ``sys.argv``; JSON files and trackers cannot hold it."""
    odd = os.fsdecode(b"data-\xff")
    with trackbridge.init(dir=tmp_path, name=odd, tags=[odd], config={odd: [odd, Path(odd)]}, backend="tensorboard") as run:
        run.step(loss=1.0)
    loaded = trackbridge.load(run.dir)
    assert loaded.config == {"data-\\udcff": ["data-\\udcff"] * 2}
    assert loaded.series("train/loss")[1].tolist() == [1.0] and run.finish()


SECRET = "slack://TOKSECRET/B/C"


@pytest.mark.parametrize(
    "alerts", [[SECRET], SECRET, {"urls": {"first": SECRET}}, {"severity": SECRET}, {"urls": 3, "to": SECRET}], ids=range(5)
)
def test_an_address_in_the_wrong_place_is_not_shown(tmp_path: Path, alerts: Any) -> None:
    with pytest.raises(ConfigError) as error:
        trackbridge.init(dir=tmp_path, alerts=alerts)
    text = "".join(traceback.format_exception(error.value))
    assert "TOKSECRET" not in text and "alerts" in one_line(error)


def test_the_fix_that_is_named_is_that_of_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match="write alerts="):
        TrackbridgeConfig.load(alerts=[SECRET])
    with pytest.raises(ConfigError, match=r"'alerts\.severity': .* valid number.*, got a str$"):
        TrackbridgeConfig.load(alerts={"severity": SECRET})


def test_one_address_needs_no_list() -> None:
    (url,) = TrackbridgeConfig.load(alerts={"urls": SECRET}).alerts.urls
    assert url.get_secret_value() == SECRET


def test_a_training_script_that_a_replay_imports_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on with the very run that is to be replayed, and write into its record."""
    (tmp_path / "unguarded.py").write_text(
        f"import trackbridge\nrun = trackbridge.init(dir={str(tmp_path)!r}, id='mine', resume='auto')\ndef build(): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="'unguarded' for --build starts a training; put what trains under `if __name__"):
        function("unguarded:build")
    assert not (tmp_path / "mine").exists()
    trackbridge.init(dir=tmp_path, id="mine").finish()
