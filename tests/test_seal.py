"""Sealing from a run directory: the window, the tier, what is missing, and that doing it twice changes nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.capsules import an_anomaly
from trackbridge import checkpoints, coverage, fetch, tree
from trackbridge.capsule import load
from trackbridge.checkpoints import Saved
from trackbridge.errors import CapsuleError, ReferenceNotFoundError
from trackbridge.journal import JournalWriter
from trackbridge.records import Anomaly, MicroBatch, Row, Schema, StepContext
from trackbridge.reports import post_mortem
from trackbridge.reports.post_mortem import BLANK, SECTIONS
from trackbridge.rundir import Attempt, RunDirectory, RunFile
from trackbridge.seal import artifact_for, seal

NAMES = ("train/loss", "grad/norm", "train/lr", "layer/head.weight/grad_norm", "layer/body.weight/grad_norm", "act/body/rms")


def writer(folder: Path) -> JournalWriter:
    return JournalWriter(folder, segment_bytes=1 << 20, fsync_seconds=60.0)


def a_run(
    path: Path,
    *,
    steps: Iterable[int] = range(40),
    contexts: Iterable[int] | None = None,
    snapshots: Iterable[int] = (),
    ranks: Iterable[int] = (0,),
    world_size: int = 1,
    anomaly: Anomaly | None = None,
    attempt: int = 0,
    micro: MicroBatch | None = None,
    **recorder: Any,
) -> RunDirectory:
    """A run of 40 steps whose loss jumps at step 20 for three steps; written by the real journal."""
    directory = RunDirectory(path)
    steps = list(steps)
    life = Attempt(number=attempt, start_step=0, time=1.75e9, pid=1, host="h", world_size=world_size)
    settings = {"recorder": {"before": 4, "after": 5, **recorder}, "parameters": {"weights_every": 1}}
    directory.write(
        RunFile(project="p", run_id="run-1", name="a run", created=1.75e9, attempts=[life], settings=settings, config={"lr": 1})
    )
    directory.provenance.write_text(json.dumps({"torch": {"version": "2.13.0", "default_dtype": "torch.float32"}}))
    anomaly = anomaly or an_anomaly(id="a-20", step=21, onset=20, first_mover=("grad/norm", 20))
    for rank in ranks:
        rows = writer(directory.rows(rank))
        ring = writer(directory.contexts(rank))
        for step in steps:
            loss = 9.0 if 20 <= step < 23 else 2.0 + 0.01 * np.sin(step)
            values = np.array([loss + rank, loss, 1e-3, loss / 2, loss / 3, 1.0])
            rows.append(Row(-1, step, 1.75e9 + step, attempt, Schema(NAMES), values))
            if contexts is None or step in set(contexts):
                ring.append(a_context(step, attempt, micro))
        rows.append(anomaly)
        rows.close()
        ring.close()
        for step in snapshots:
            skeleton, leaves = tree.pack({"models": {"": {"w": np.full(3, step, np.float32)}}, "optimizers": {}})
            folder = directory.snapshots(rank) / f"step-{step}"
            tree.save(folder, skeleton, tree.to_numpy(leaves), metadata={"step": step, "attempt": attempt})
    return directory


def a_context(step: int, attempt: int = 0, micro: MicroBatch | None = None) -> StepContext:
    skeleton, leaves = tree.pack([np.full((2, 3), step, np.int64)])
    kept = MicroBatch(
        loader=0,
        epoch=0,
        index=step,
        sample_ids=(step, step + 1),
        fingerprint=f"{step:032x}",
        tokens={"0": {"length": 6, "entropy": 0.0}},
        skeleton=skeleton,
        tensors=tree.to_numpy(leaves),
    )
    return StepContext(-1, step, attempt, {"python": np.arange(3), "torch": np.zeros(4, np.uint8)}, (micro or kept,))


def test_a_whole_capsule(tmp_path: Path) -> None:
    directory = a_run(tmp_path / "run-1", snapshots=(5, 15, 30), upload_batches=True)
    path = seal(directory.path, "a-20")
    assert path == directory.capsules / "spike-21"
    capsule = load(path)
    assert capsule.tier == "re-execute" and capsule.missing == [] and capsule.local is None
    assert capsule.restart_step == 15 and capsule.span == (15, 26), "the newest snapshot with 4 steps before the onset"
    assert capsule.window["step"].tolist() == list(range(15, 27))
    assert sorted(capsule.batches) == list(range(15, 27))
    assert capsule.rng_states().steps == list(range(15, 27))
    assert tree.unpack(capsule.batches[20][0].skeleton, capsule.batches[20][0].tensors or {})[0].tolist() == [[20] * 3] * 2
    assert capsule.state()["models"][""]["w"].tolist() == [15.0] * 3
    assert capsule.settings["parameters"] == {"weights_every": 1} and capsule.config == {"lr": 1}
    assert capsule.anomaly.capsule == "capsules/spike-21"
    assert [p.name for p in directory.capsules.iterdir()] == ["spike-21"]


def test_sealing_again_changes_nothing(tmp_path: Path) -> None:
    directory = a_run(tmp_path / "run-1", snapshots=(15,))
    first = seal(directory.path, "a-20")
    before = {p: p.read_bytes() for p in directory.capsules.rglob("*") if p.is_file()}
    assert seal(directory.path, "a-20") == first
    assert {p: p.read_bytes() for p in directory.capsules.rglob("*") if p.is_file()} == before


def test_batches_stay_by_default(tmp_path: Path) -> None:
    directory = a_run(tmp_path / "run-1", snapshots=(15,))
    path = seal(directory.path, "a-20")
    here = load(path)
    assert here.tier == "re-execute" and here.missing == [] and here.batches[20][0].tensors is not None
    there = load(shutil.copytree(path, tmp_path / "spike-21"))
    assert there.tier == "re-execute", "the sample ids can make the batches again"
    assert len(there.missing) == 1 and "spike-21.local" in there.missing[0] and "fetch" in there.missing[0]


@pytest.mark.parametrize(
    ("made", "tier", "restart", "words"),
    [
        ({"snapshots": ()}, "re-feed", 16, "parameter snapshot: none was kept at or before step 20"),
        ({"snapshots": (), "snapshot_every": 0}, "re-feed", 16, "parameter snapshot: recorder.snapshot_every is 0"),
        ({"snapshots": (21,)}, "re-feed", 16, "parameter snapshot: none was kept at or before step 20"),
        ({"snapshots": (5,), "contexts": range(10, 40)}, "re-feed", 16, "no longer all in the context ring"),
        ({"snapshots": (18,)}, "re-execute", 18, None),
        ({"snapshots": (5, 18), "contexts": range(10, 40)}, "re-execute", 18, None),
        ({"snapshots": (), "contexts": [18, 19]}, "explain", 16, "random state before steps 16-17, 20-26"),
        ({"snapshots": (15,), "contexts": []}, "explain", 16, "random state before steps 16-26"),
        ({"snapshots": (15,), "micro": MicroBatch(why_no_tensors="too large")}, "explain", 15, "of steps 15-26: too large"),
        ({"snapshots": (15,), "micro": MicroBatch(sample_ids=(1,), why_no_tensors="too large")}, "re-execute", 15, "fetch"),
        ({"snapshots": (15,), "steps": [*range(18), *range(20, 40)]}, "explain", 16, "rows of steps 18-19"),
        ({"snapshots": (15,), "world_size": 4}, "re-feed", 15, "ranks 1-3: nothing of them is on this disk"),
    ],
)  # fmt: skip
def test_tier_and_missing(tmp_path: Path, made: dict[str, Any], tier: str, restart: int, words: str | None) -> None:
    capsule = load(seal(a_run(tmp_path / "run-1", upload_batches=True, **made).path, "a-20"))
    assert (capsule.tier, capsule.restart_step) == (tier, restart)
    assert capsule.has_state() == (tier == "re-execute" or restart == 15)
    assert any(words in text for text in capsule.missing) if words else capsule.missing == []


@pytest.mark.parametrize(
    ("snapshots", "contexts", "first", "restart"),
    [((5, 290), range(310), 290, 290), ((5,), range(280, 310), 296, 296), ((5, 298), range(280, 310), 296, 298)],
)
def test_only_what_a_window_can_hold_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshots: Any, contexts: range, first: int, restart: int
) -> None:
    """An old snapshot, pinned for an earlier capsule, does not make a later one read the whole run."""
    anomaly = an_anomaly(id="a-300", step=300, onset=300, first_mover=None)
    directory = a_run(tmp_path / "run-1", steps=range(310), contexts=contexts, snapshots=snapshots, anomaly=anomaly)
    read: list[range] = []
    rows = coverage.read_rows
    monkeypatch.setattr(coverage, "read_rows", lambda *what: (read.append(what[-1]), rows(*what))[1])
    assert load(seal(directory.path, "a-300")).restart_step == restart
    assert read == [range(first, 306)]


def test_a_checkpoint_of_a_training_that_was_left_behind_is_no_restart_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempt 1 went on from step 10; what attempt 0 saved at step 14 is another model than the one of step 14 now."""
    directory = a_run(
        tmp_path / "run-1", attempt=1, steps=range(10, 40), anomaly=an_anomaly(id="a", step=21, onset=20, attempt=1)
    )
    file = directory.read()
    lives = [file.attempts[0].model_copy(update={"number": 0}), file.attempts[0].model_copy(update={"start_step": 10})]
    directory.write(file.model_copy(update={"attempts": lives}))
    for name in ("10.pt", "14.pt"):
        (tmp_path / name).write_bytes(b"x")
    saved = [Saved(tmp_path / "10.pt", 10, 0), Saved(tmp_path / "14.pt", 14, 0)]
    monkeypatch.setattr(checkpoints, "saved_checkpoints", lambda directory: saved)
    capsule = load(seal(directory.path, "a"))
    assert (capsule.restart_step, capsule.checkpoint) == (10, str(tmp_path / "10.pt"))


def test_a_training_that_went_back_is_two_ways(tmp_path: Path) -> None:
    """The spike of step 20 was told, and the process went back to step 10: its capsule holds what led to it and ends where
    that way ended; one of the way after it holds nothing of the first."""
    directory = RunDirectory(tmp_path / "run-1")
    life = Attempt(number=0, start_step=0, time=1.75e9, pid=1, host="h")
    settings = {"recorder": {"before": 4, "after": 5, "upload_batches": True}}
    directory.write(RunFile(project="p", run_id="r", name="r", created=1.75e9, attempts=[life], settings=settings))
    rows, ring = writer(directory.rows()), writer(directory.contexts())

    def run(first: int, last: int, way: int) -> None:
        for step in range(first, last):
            rows.append(Row(-1, step, 0.0, 0, Schema(("train/loss",)), np.array([way * 100.0 + step])))
            ring.append(replace(a_context(step), rng={"python": np.array([way, step])}))

    run(0, 23, 1)
    rows.append(an_anomaly(id="one", step=21, onset=20))
    run(23, 24, 1)
    run(10, 17, 2)
    rows.append(an_anomaly(id="two", step=16, onset=16))
    run(17, 19, 2)
    rows.append(an_anomaly(id="one", step=21, onset=20, severity=0.9))  # told anew later, as when it was diagnosed
    rows.close()
    ring.close()
    one, two = load(seal(directory.path, "one")), load(seal(directory.path, "two"))
    assert (one.span, two.span) == ((16, 23), (12, 18))
    assert one.window["train/loss"].tolist() == [100.0 + step for step in range(16, 24)]
    assert two.window["train/loss"].tolist() == [200.0 + step for step in range(12, 19)]
    assert [one.rng(step)["python"].tolist() for step in one.steps] == [[1, step] for step in range(16, 24)]
    assert [two.rng(step)["python"].tolist() for step in two.steps] == [[2, step] for step in range(12, 19)]


def test_a_damaged_snapshot_is_passed_over(tmp_path: Path) -> None:
    directory = a_run(tmp_path / "run-1", snapshots=(5, 15))
    (directory.snapshots(0) / "step-15" / "state.json").write_text("{")
    assert load(seal(directory.path, "a-20")).restart_step == 5
    directory = a_run(tmp_path / "run-2", snapshots=(15,))
    (directory.snapshots(0) / "step-15" / "state.json").write_text("{")
    assert "step-15 is damaged" in load(seal(directory.path, "a-20")).missing[0]


def test_no_batches_seen(tmp_path: Path) -> None:
    directory = a_run(tmp_path / "run-1", contexts=[], snapshots=(15,))
    ring = writer(directory.contexts(0))
    for step in range(40):
        ring.append(replace(a_context(step), micro=()))
    ring.close()
    capsule = load(seal(directory.path, "a-20"))
    assert capsule.tier == "explain" and any("neither run.batches nor" in text for text in capsule.missing)


def test_every_rank_is_in_it(tmp_path: Path) -> None:
    directory = a_run(tmp_path / "run-1", ranks=(0, 1), world_size=2, snapshots=(15,), upload_batches=True)
    capsule = load(seal(directory.path, "a-20"))
    assert capsule.ranks == (0, 1) and capsule.tier == "re-execute" and capsule.missing == []
    assert capsule.series(1)[20]["train/loss"] == capsule.series(0)[20]["train/loss"] + 1
    assert capsule.has_state(1) and sorted(capsule.micro_batches(1)) == sorted(capsule.batches)
    with pytest.raises(CapsuleError, match="nothing of rank 2"):
        capsule.series(2)


def test_an_older_attempt_is_left_out(tmp_path: Path) -> None:
    """A snapshot and contexts of the attempt before do not belong to the steps that were run again."""
    directory = a_run(
        tmp_path / "run-1", attempt=1, snapshots=(15,), anomaly=an_anomaly(id="a-20", step=21, onset=20, attempt=0)
    )
    with pytest.raises(CapsuleError, match="no rows around step 21"):
        seal(directory.path, "a-20")


def test_the_run_ended_early(tmp_path: Path) -> None:
    capsule = load(seal(a_run(tmp_path / "run-1", steps=range(23), snapshots=(15,)).path, "a-20"))
    assert capsule.span == (15, 22)


def test_the_sealer_names_the_place(tmp_path: Path) -> None:
    named = an_anomaly(id="a-20", step=21, onset=20, capsule="capsules/spike-21-3")
    assert seal(a_run(tmp_path / "a", anomaly=named).path, "a-20").name == "spike-21-3"
    with pytest.raises(CapsuleError, match="which is not in"):
        seal(a_run(tmp_path / "b", anomaly=replace(named, capsule="../../spike-1")).path, "a-20")


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ReferenceNotFoundError, match=r"no run.json"):
        seal(tmp_path, "a-20")
    directory = a_run(tmp_path / "run-1")
    with pytest.raises(ReferenceNotFoundError, match=r"no anomaly 'x' in .*; there: a-20"):
        seal(directory.path, "x")


def test_the_artifact(tmp_path: Path) -> None:
    directory = a_run(tmp_path / "run-1", snapshots=(15,))
    anomaly = an_anomaly(id="a-20", step=21, onset=20)
    artifact = artifact_for(directory.path, anomaly, seal(directory.path, "a-20"))
    assert (artifact.name, artifact.kind, artifact.path) == ("spike-run-1-21", "spike-capsule", "capsules/spike-21")
    assert artifact.seq == -1 and artifact.step == 21
    assert artifact.metadata == {"step": 21, "anomaly_id": "a-20", "kind": "spike", "severity": 0.8, "tier": "re-execute"}


def test_hypotheses_are_added(tmp_path: Path) -> None:
    directory = a_run(tmp_path / "run-1", anomaly=an_anomaly(id="a-20", step=21, onset=20, hypotheses=()))
    assert load(seal(directory.path, "a-20")).anomaly.hypotheses


def test_the_post_mortem_says_what_the_record_knows(tmp_path: Path) -> None:
    text = (seal(a_run(tmp_path / "run-1", snapshots=(15,)).path, "a-20") / "post-mortem.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        f"## {number}. {title}" for number, title in enumerate(SECTIONS, 1)
    ]
    symptoms = text.split("## 2.")[0]
    for said in (
        "| Onset | step 20 |", "step 21, in train/loss", "(from 20 recorded steps)", "| Peak | 9 at step 20 |",
        "did not recover",
        "Gradient norm (before clipping where that is recorded) at the onset | 9; median before ",
        "rate at the onset | 0.001",
        "epoch 0; index 20; samples 20, 21", "torch.float32", "Unusual in it | ",
    ):  # fmt: skip
        assert said in symptoms
    assert "corrupt" not in symptoms, "numbers, no theory"
    assert "(panels: Loss, The batch at the onset)" in text and "Not known yet." in text.split("## 4.")[1].split("## 5.")[0]
    verification = text.split("## 6.")[1]
    found = re.search(r"stays below ([\d.]+) \(expected ([\d.]+) plus ([\d.]+) sigmas of ([\d.]+)\)", verification)
    assert "Seed: " in verification and found is not None
    limit, expected, sigmas, sigma = map(float, found.groups())
    assert expected == 2.25 and limit == pytest.approx(expected + sigmas * sigma, rel=1e-4)
    assert "from 15 to 76" in verification
    assert "1. **corrupt-batch**" in text and "entropy 7.9 bits" in text and "--try skip-batch" in text
    for section in text.split("## ")[3:]:
        assert BLANK in section


def test_the_page_says_how_to_replay_here_and_anywhere(tmp_path: Path) -> None:
    directory = a_run(tmp_path / "run-1", snapshots=(15,))
    said = (seal(directory.path, "a-20") / "report.html").read_text()
    assert f"trackbridge replay {directory.path}@21 --build my_module:build" in said
    assert fetch.pull(f"{directory.path}@21").step == 21, "what the page tells to type finds the capsule"
    assert "trackbridge replay PATH/OF/THIS/FOLDER --build my_module:build" in said


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    page = (seal(a_run(tmp_path / "run-1", snapshots=(15,)).path, "a-20") / "report.html").read_text()
    assert (
        "Spike in train/loss at step 20" in page and "head.weight" in page and 'src="http' not in page and "re-execute" in page
    )


def test_the_command(tmp_path: Path) -> None:
    directory = a_run(tmp_path / "run-1", snapshots=(15,))

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = "import runpy, sys; runpy.run_module('trackbridge.seal', run_name='__main__')"
        check = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); "
        return subprocess.run(
            [sys.executable, "-c", check + f"sys.argv[1:] = {list(arguments)!r}; " + code],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    done = command(str(directory.path), "a-20")
    assert (done.returncode, done.stdout) == (0, f"a-20\t{directory.capsules / 'spike-21'}\n")
    assert done.stderr.splitlines() == ["False"], "sealing needs no torch and says nothing when all is well"
    done = command(str(directory.path), "nothing", "a-20")
    assert done.returncode == 1 and done.stderr.startswith("nothing: no anomaly 'nothing'")
    assert done.stdout.startswith("a-20\t"), "the others are sealed all the same"
    assert command(str(directory.path)).returncode == 2


@pytest.mark.parametrize("upload", [False, True])
def test_a_piece_of_the_batch_travels_only_with_leave(tmp_path: Path, upload: bool) -> None:
    """The tokens of a repeated run are the batch's own text; its count is not."""
    from trackbridge import capsule_parts
    from trackbridge.records import MicroBatch, StepContext

    ngram = {"tokens": [7, 8, 9], "count": 4}
    written = MicroBatch(tokens={"length": 10, "0": {"ngram": ngram, "unique": 5}})
    skeleton, leaves = tree.pack({"ids": np.tile(np.arange(11, 19), 4)})
    kept = MicroBatch(skeleton=skeleton, tensors=tree.to_numpy(leaves))
    capsule_parts.write_batches(tmp_path, [StepContext(-1, 3, 0, {}, (written, kept))], runs=upload)
    first, second = map(json.loads, pd.read_parquet(tmp_path / "batches.parquet")["tokens"])
    assert first == {"length": 10, "0": {"ngram": ngram if upload else {"count": 4}, "unique": 5}}
    assert second["ids"]["unique"] == 8
    assert second["ids"]["ngram"] == ({"tokens": list(range(11, 19)), "count": 4} if upload else {"count": 4})


def test_batches_kept_beside_are_found_when_the_tracker_renamed_the_capsule(tmp_path: Path) -> None:
    sealed = seal(a_run(tmp_path / "run-1", snapshots=(15,)).path, "a-20")
    pulled = tmp_path / "pulled" / "spike-run-1-20"
    shutil.copytree(sealed, pulled)
    assert not load(pulled).joined
    shutil.copytree(sealed.with_name(sealed.name + ".local"), pulled.with_name(sealed.name + ".local"))
    assert load(pulled).joined


def test_token_statistics_are_words_in_the_post_mortem() -> None:
    seen = {"length": 512, "unique": 90, "min": 0, "max": 255, "top": [32, 0.125], "rarest": [[255, 1]], "entropy": 6.41}
    said = post_mortem._describe(MicroBatch(0, 0, 20, None, None, {"input": seen}))
    assert "input: 512 values, 90 different, from 0 to 255, entropy 6.41 bits, most frequent 32 (12.5%), rarest 255" in said
    skeleton, leaves = tree.pack({"ids": np.array([3, 3, 5])})
    of_the_batch = post_mortem._describe(MicroBatch(skeleton=skeleton, tensors=tree.to_numpy(leaves)))
    assert of_the_batch.startswith("ids: 3 values, 2 different, from 3 to 5")
    assert "{" not in said


def test_damage_in_the_step_contexts_is_said(tmp_path: Path) -> None:
    """By the capsule that lacks a step for it, and by the record when it is asked."""
    from trackbridge.history import load as load_run

    directory = a_run(tmp_path / "run-1", snapshots=(15,), upload_batches=True)
    assert not load_run(directory.path).contexts_damage
    (segment,) = directory.contexts().glob("*.tbj")
    data = bytearray(segment.read_bytes())
    at = data.index(bytes.fromhex(f"{18:032x}".encode().hex()))  # the fingerprint of step 18
    data[at] ^= 1
    segment.write_bytes(data)
    capsule = load(seal(directory.path, "a-20"))
    assert capsule.tier == "explain" and any(text.startswith("step contexts: the journal") for text in capsule.missing)
    damage = load_run(directory.path).contexts_damage
    assert damage.records_lost == 1 and "contexts" in str(damage)
