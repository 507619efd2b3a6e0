"""The counterfactual that removes a planted cause ranks first; changes act where they say, and say why when they cannot."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from tests.replay import causes
from tests.replay.causes import BAD, EARLY, Cause
from trackbridge import capsule as capsules
from trackbridge import plugins
from trackbridge.capsule import SpikeCapsule
from trackbridge.cli import app
from trackbridge.diagnosis.registry import RULES
from trackbridge.errors import ConfigError, UsageError
from trackbridge.fetch import pull
from trackbridge.records import Hypothesis
from trackbridge.replay import Rebuilt, Trial, keep, rerun, skip_plan, what_if
from trackbridge.replay.counterfactual import DEFAULT, GROUP, TOLD_APART, Asked, expand
from trackbridge.replay.guilty import guilty_steps
from trackbridge.replay.trial import LEAD
from trackbridge.reports.spike import actions
from trackbridge.skip import SkipPlan


def nonsense(step: int, batch: list[Tensor]) -> list[Tensor]:
    """Labels that belong to other samples, and far too large inputs."""
    x, y = batch
    return [-3 * x, y] if step == BAD else [x, y]


def loud(step: int, batch: list[Tensor]) -> list[Tensor]:
    """Inputs as large as float16 can just hold them: what a layer makes of them is too much for it. The normalisation after
    that layer takes the size out again, so in float32 nothing happens."""
    x, y = batch
    return [x * 3e4 if step >= BAD else x, y]


@dataclass(frozen=True)
class Planted:
    cause: Cause
    cure: str
    record: Callable[[Path, Cause], Path] = causes.record


CAUSES: dict[str, Planted] = {
    "bad-batch": Planted(Cause(spoil=nonsense), "skip-batch"),
    "lr-jump": Planted(Cause(rate=lambda step: 100.0 if BAD <= step < BAD + 3 else 1.0), "hold-lr"),
    "stale-second-moment": Planted(
        Cause(bad=200, loud=20.0, gate=lambda step: 1e-3 if step <= EARLY else 1.0),
        "reset-momentum",
        partial(causes.resumed, stale=True),
    ),
    "fp16-overflow": Planted(Cause(spoil=loud, half=True, gate=lambda step: 0.0), "full-precision"),
    "optimizer-state-lost": Planted(Cause(lr=1e-2, width=512), "restore-optimizer", partial(causes.resumed, lost=True)),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a bad batch in it."""
    torch.set_num_threads(1)
    return causes.record(tmp_path_factory.mktemp("runs"), CAUSES["bad-batch"].cause)


@pytest.fixture
def spike(recorded: Path, tmp_path: Path) -> SpikeCapsule:
    """Its capsule, in a copy of the run that may be changed."""
    return pull(shutil.copytree(recorded, tmp_path / "run"))


build = causes.builder(CAUSES["bad-batch"].cause)


@pytest.mark.parametrize("seed", range(int(os.environ.get("PLANTED_SEEDS", "1"))))
@pytest.mark.parametrize("name", CAUSES)
def test_the_change_that_removes_the_cause_ranks_first(name: str, seed: int, tmp_path: Path) -> None:
    planted = CAUSES[name]
    cause = replace(planted.cause, seed=seed)
    capsule = pull(planted.record(tmp_path, cause))
    found = what_if(capsule, causes.builder(cause))
    table = found.to_markdown()
    assert found.verdict == "exact" and found.caution is None, table
    assert found.rerun.outcome == "remains", table
    first = found.tries[0]
    assert (first.name, first.outcome, first.rank) == (planted.cure, "prevented", 1), table
    assert found.best == first
    for other in found.tries[1:]:
        assert not other.ran or other.outcome == "remains" or (first.score or 0.0) < (other.score or 0.0) + TOLD_APART, table
    named = {hypothesis.intervention for hypothesis in capsule.anomaly.hypotheses} - {"rerun"}
    assert named <= {tried.name for tried in found.tries}, "what the diagnosis would test is in the table"


def test_a_change_begins_where_it_acts_and_ends_with_the_try(spike: SpikeCapsule) -> None:
    """Before it acts every loss is the recorded one, bit for bit; this process is left as it was."""
    torch.manual_seed(3)
    random_state, threads = torch.get_rng_state(), torch.get_num_threads()
    recorded = spike.series()
    found = what_if(spike, build, ["lower-lr=0.5@66", "clip=0.01@68-69", "reset-momentum"])
    assert torch.equal(random_state, torch.get_rng_state()) and threads == torch.get_num_threads()
    assert dict(zip(found.rerun.steps, found.rerun.losses, strict=True)) == {s: recorded[s]["train/loss"] for s in spike.steps}
    acts = {"lower-lr=0.5@66": 66, "clip=0.01@68-69": 68, "reset-momentum": BAD - LEAD}
    for tried in found.tries:
        losses = dict(zip(tried.steps, tried.losses, strict=True))
        same = [step for step in spike.steps if losses[step] == recorded[step]["train/loss"]]
        assert same[-1] == acts[tried.name], tried  # the step's own loss is computed before its update
    given = {tried.name: tried.given_up for tried in found.tries}
    assert given["lower-lr=0.5@66"] == pytest.approx(0.5) and 0 < given["clip=0.01@68-69"] <= 2 / (spike.span[1] - 68 + 1)


def test_a_skipped_step_is_not_trained_on(spike: SpikeCapsule) -> None:
    found = what_if(spike, build, ["skip-batch=3", "skip-batch@72"])
    three, other = sorted(found.tries, key=lambda tried: len(tried.skipped), reverse=True)
    assert three.skipped == (BAD, BAD + 1, BAD + 2) and other.skipped == (72,)
    assert not set(three.steps) & set(three.skipped) and three.outcome == "prevented" and other.outcome == "remains"
    assert three.given_up == pytest.approx(3 / (spike.span[1] - (BAD - LEAD) + 1))


def test_all_is_the_usual_changes_and_those_of_the_hypotheses(spike: SpikeCapsule) -> None:
    hypotheses = (Hypothesis("mine", intervention="clip=0.3"), Hypothesis("prose", intervention="look at the data"))
    anomaly = spike.anomaly.updated(hypotheses=hypotheses, recovered_after=4)
    assert expand(["all"], anomaly) == ["clip=0.3", *DEFAULT, "skip-batch=4"]
    assert expand(["rerun", "clip=0.3", "all", "clip=0.3"], anomaly)[0] == "clip=0.3"
    asked = {text.partition("=")[0] for text in DEFAULT}
    # the test of docs/extending.md installs a package beside
    own = {name for name, point in plugins.available(GROUP).items() if point.value.startswith("trackbridge.")}
    assert asked | {"rerun"} == own, "every change that comes with trackbridge is in the usual set"


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_every_hypothesis_names_a_change_that_exists(rule: Any) -> None:
    asked = Asked.parse(rule.intervention)
    assert callable(asked.intervene)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lower-lr@@5", "is no change to try"),
        ("", "is no change to try"),
        ("lower-rl=0.5", "unknown intervention 'lower-rl' .did you mean 'lower-lr'"),
        ("lower-lr=two", "not a number"),
        ("lower-lr=2", "the factor must be"),
        ("clip=0", "must be above 0"),
        ("skip-batch=0.5", "not a whole number"),
        ("warmup=-1", "not a whole number"),
        ("spam=0", "must be above 0"),
        ("reset-momentum=7", "takes no value"),
        ("hold-lr=1e-3", "takes no value"),
        ("full-precision=16", "takes no value"),
        ("clip@9-8", "step 8 comes before step 9"),
        ("skip-batch@0", "the window is steps"),
        ("clip@99999", "the window is steps"),
    ],
)
def test_a_change_that_makes_no_sense_is_said_in_one_line(spike: SpikeCapsule, text: str, message: str) -> None:
    with pytest.raises((UsageError, ConfigError), match=message) as caught:
        what_if(spike, build, [text])
    assert "\n" not in str(caught.value)


def test_changes_may_come_as_one_text(spike: SpikeCapsule) -> None:
    assert expand("clip=0.5, spam", spike.anomaly) == ["clip=0.5", "spam"]
    with pytest.raises(UsageError, match="not a int"):
        what_if(spike, build, [3])  # type: ignore[list-item]


def test_to_leave_out_all_that_is_left_cannot_be_judged(spike: SpikeCapsule) -> None:
    first, last = spike.restart_step, spike.span[1]
    (tried,) = what_if(spike, build, [f"skip-batch@{first}-{last}"]).tries
    assert tried.outcome == "not-runnable" and "leaves out all steps" in tried.reason


def test_what_cannot_be_tried_says_why(spike: SpikeCapsule, tmp_path: Path) -> None:
    broken = tmp_path / "broken.pt"
    broken.write_bytes(b"no checkpoint")
    other = tmp_path / "other.pt"
    torch.save({"optimizer": torch.optim.Adam([torch.zeros(1)]).state_dict()}, other)
    tries = ["hold-lr", "full-precision", "restore-optimizer", f"restore-optimizer={broken}", f"restore-optimizer={other}"]
    found = {tried.name: tried for tried in what_if(spike, build, tries).tries}
    assert all(tried.outcome == "not-runnable" and tried.rank is None and not tried.losses for tried in found.values())
    assert "no jump" in found["hold-lr"].reason
    assert "reduced precision" in found["full-precision"].reason
    assert "run.checkpoint_saved" in found["restore-optimizer"].reason
    assert "cannot be read" in found[f"restore-optimizer={broken}"].reason
    assert "groups of" in found[f"restore-optimizer={other}"].reason


def test_a_third_partys_change_comes_through_the_same_door(spike: SpikeCapsule, monkeypatch: pytest.MonkeyPatch) -> None:
    known = plugins.available(GROUP)
    theirs = EntryPoint("freeze-side", f"{__name__}:freeze_side", GROUP)
    monkeypatch.setattr(plugins, "available", lambda group: known | {"freeze-side": theirs})
    tried = what_if(spike, build, ["freeze-side=now"]).tries[0]
    assert tried.ran and tried.what == "the side branch frozen (now)"
    assert tried.losses != what_if(spike, build, ["skip-batch"]).rerun.losses


def freeze_side(trial: Trial, value: str | None) -> str:
    def forget(optimizer: torch.optim.Optimizer) -> None:
        for parameter in trial.rebuilt.models[""].side.parameters():
            parameter.grad = None

    trial.before_update(forget)
    return f"the side branch frozen ({value})"


def test_a_step_that_raises_fails_its_own_try_only(spike: SpikeCapsule) -> None:
    def fragile() -> Rebuilt:
        made = build()
        inner = made.step

        def step(model: Any, optimizer: Any, batches: list[Any], index: int) -> Any:
            if optimizer.state and index > BAD and not next(iter(optimizer.state.values()))["step"] > BAD - 10:
                raise RuntimeError("moments too young")
            return inner(model, optimizer, batches, index)

        made.step = step
        return made

    found = {tried.name: tried for tried in what_if(spike, fragile, ["skip-batch", "reset-momentum"]).tries}
    assert found["skip-batch"].outcome == "prevented"
    assert found["reset-momentum"].outcome == "failed" and "moments too young" in found["reset-momentum"].reason


def test_a_spike_that_does_not_come_back_proves_nothing(spike: SpikeCapsule) -> None:
    """The data of the replay are those of the record; here the code was to blame, and is mended."""

    def mended() -> Rebuilt:
        made = build()
        inner = made.step

        def step(model: Any, optimizer: Any, batches: list[Any], index: int) -> Any:
            x, y = batches[0]
            return inner(model, optimizer, [[x / -3 if index == BAD else x, y]], index)

        made.step = step
        return made

    found = what_if(spike, mended, ["skip-batch"])
    assert found.verdict == "not-reproduced"
    assert found.caution is not None and "did not come back" in found.caution
    assert found.caution in found.to_markdown()


def test_a_kept_verdict_is_not_taken_for_todays(spike: SpikeCapsule) -> None:
    """The capsule says "exact"; the code has changed since, the spike comes back all the same."""

    def changed() -> Rebuilt:
        made = build()
        inner = made.step

        def step(model: Any, optimizer: Any, batches: list[Any], index: int) -> Any:
            x, y = batches[0]
            return inner(model, optimizer, [[x * 1.001 if index == BAD - 3 else x, y]], index)

        made.step = step
        return made

    kept = keep(spike, replay=rerun(spike, build))
    assert what_if(kept, build, ["skip-batch"]).caution is None
    found = what_if(kept, changed, ["skip-batch"])
    assert found.verdict == "exact" and found.rerun.outcome == "remains"
    assert found.caution is not None and f"leaves the record at step {BAD - 3}" in found.caution


def test_what_was_found_is_kept_in_the_capsule(spike: SpikeCapsule) -> None:
    found = what_if(spike, build, ["skip-batch", "lower-lr=0.5"])
    report = rerun(spike, build)
    kept = keep(keep(spike, replay=report), counterfactuals=found)
    again = pull(kept.path)
    assert again.counterfactuals == found and again.replay == report
    assert again.verify() == len(again.files) + len(again.local.files if again.local else ())
    page = (again.path / "report.html").read_text(encoding="utf-8")
    assert "skip-batch" in page and "exact" in page
    assert rerun(again, build).verdict == "exact", "the record itself is untouched"


def test_what_a_person_wrote_into_the_post_mortem_stays(spike: SpikeCapsule) -> None:
    report = rerun(spike, build)
    path = spike.path / "post-mortem.md"
    ours = path.read_text(encoding="utf-8")
    path.write_text(ours + "Root cause: the sixth shard was corrupt.\n", encoding="utf-8")
    for _ in range(2):
        kept = keep(pull(spike.path), replay=report)
        assert path.read_text(encoding="utf-8").endswith("the sixth shard was corrupt.\n")
        assert report.verdict in (kept.path / "lab" / "post-mortem.md").read_text(encoding="utf-8")


def test_a_crash_while_it_is_kept_leaves_a_whole_capsule(spike: SpikeCapsule, monkeypatch: pytest.MonkeyPatch) -> None:
    report = rerun(spike, build)
    monkeypatch.setattr(capsules, "_exchange", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        keep(spike, replay=report)
    assert pull(spike.path).replay is None
    monkeypatch.undo()
    monkeypatch.setattr(capsules.ctypes, "CDLL", lambda *_, **__: object())  # a system without renameat2
    assert keep(spike, replay=report).replay == report
    assert sorted(path.name for path in spike.path.parent.iterdir()) == [spike.path.name, f"{spike.path.name}.local"]


def test_the_plan_names_the_suspected_batches(spike: SpikeCapsule) -> None:
    plan = skip_plan(spike)
    micro = spike.batches[BAD][0]
    assert [(skip.loader, skip.epoch, skip.index) for skip in plan.skips] == [(micro.loader, micro.epoch, micro.index)]
    assert "step 70" in plan.skips[0].why


@pytest.mark.parametrize(
    ("mover", "guilty"), [(None, (70,)), (69, (69, 70)), (68, (68, 69, 70)), (60, (70,)), (72, (70,))], ids=str
)
def test_which_batches_are_suspected(spike: SpikeCapsule, mover: int | None, guilty: tuple[int, ...]) -> None:
    first = None if mover is None else ("grad/norm", mover)
    assert guilty_steps(spike.anomaly.updated(onset=70, first_mover=first)) == guilty


def test_the_command_line(spike: SpikeCapsule, tmp_path: Path) -> None:
    run = spike.path.parent.parent
    target = "tests.replay.test_counterfactual:build"
    plan = tmp_path / "plan.json"
    command = ["replay", str(run), "--build", target, "--try", "skip-batch,lower-lr=0.5", "--plan", str(plan)]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert "verdict: exact" in shown.stdout and "what would have prevented it: skip-batch" in shown.stdout
    assert SkipPlan.load(plan) == skip_plan(spike)
    assert pull(run).counterfactuals is not None and pull(run).replay is not None
    commands = [command for _, command in actions(pull(run), run)]
    assert commands[1:3] == [
        f"trackbridge rollback {run} --step {spike.step}",
        f"trackbridge replay {run}@{spike.step} --plan skip.json",
    ]

    told = json.loads(CliRunner().invoke(app, [*command[:-2], "--json", "--no-keep"]).stdout)
    assert told["verdict"] == "exact" and told["counterfactuals"]["tries"][0]["name"] == "skip-batch"
    nowhere = str(tmp_path / "no-folder" / "plan.json")
    for wrong, message in (
        (["--try", "nonsense", "--build", target], "unknown intervention"),
        (["--plan", nowhere], "choose another file"),
        ([], "--build"),
    ):
        refused = CliRunner().invoke(app, ["replay", str(run), *wrong])
        assert refused.exit_code == 3 and message in refused.stderr and refused.stderr.count("\n") == 1

    late = CliRunner().invoke(app, ["replay", str(run), "--build", target, "--try", "clip=two", "--no-keep"])
    assert late.exit_code == 3 and late.stderr.endswith("clip=two: not a number\n")
    assert "verdict: exact" in late.stdout, "a replay that is done is not lost with the change that could not be tried"
