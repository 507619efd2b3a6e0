"""`trackbridge.hf` beside what else is in a training: the Trainer's own loggers, other ranks, TRL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import trackbridge
from tests.integrations.hf_kit import SETTINGS, contexts, series, wires
from trackbridge import replay

ROOT = Path(__file__).parents[2]

LOGGERS = """
import json, sys
import trackbridge
from pathlib import Path
from tests.integrations.hf_kit import trainer
watching = trackbridge.hf.Callback(
    backend=[{"kind": "wandb", "mode": "offline"}, "mlflow", "tensorboard"], project="ours", strict=True, join=False
)
made = trainer(Path("out"), watching, report_to=["wandb", "mlflow", "tensorboard"], max_steps=6,
               eval_strategy="steps", eval_steps=3)
made.train()
import wandb
print(json.dumps({
    "ours": watching.run.id, "log": made.state.log_history, "delivered": not watching.run.finish(60).unshipped,
}))
wandb.finish()
"""


def script(folder: Path, text: str, *launcher: str, **more: str) -> str:
    (folder / "script.py").write_text(text)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "MLFLOW"))}
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    done = subprocess.run(
        [sys.executable, *launcher, "script.py"],
        cwd=folder,
        env={**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **more},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_the_trainers_own_loggers_log_what_they_did_and_ours_goes_beside(tmp_path: Path) -> None:
    """W&B's real client (offline), MLflow and TensorBoard, each used by the Trainer and by trackbridge at once."""
    import json

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from trackbridge.backends.wandb_file import load
    from trackbridge.names import SEQ

    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    out = script(
        tmp_path, LOGGERS, WANDB_MODE="offline", WANDB_SILENT="true", WANDB_ERROR_REPORTING="false",
        MLFLOW_TRACKING_URI=store, MLFLOW_DISABLE_TELEMETRY="true", TENSORBOARD_LOGGING_DIR="theirs-tb",
    )  # fmt: skip
    said = json.loads(out.strip().splitlines()[-1])
    losses = [entry["loss"] for entry in said["log"] if "loss" in entry]
    assert said["delivered"] and len(losses) == 6

    theirs, mine = load(tmp_path / "wandb"), load(tmp_path / "runs" / said["ours"] / "wandb")
    assert theirs.config["trackbridge/companion"].endswith(f"/{said['ours']}")
    assert [row["train/loss"] for row in theirs.history if "train/loss" in row] == losses
    assert [row["train/global_step"] for row in theirs.history if "train/loss" in row] == [1, 2, 3, 4, 5, 6]
    assert not any(SEQ in row for row in theirs.history)
    assert [row["train/loss"] for row in mine.history if "train/loss" in row] == pytest.approx(losses, abs=6e-5)
    assert not any("eval/loss" in row for row in mine.history)  # the Trainer's loggers have it

    import mlflow

    mlflow.set_tracking_uri(store)
    client = mlflow.MlflowClient(store)
    runs = [run for e in client.search_experiments() for run in client.search_runs([e.experiment_id])]
    assert len(runs) == 2
    (ours,) = [run for run in runs if "train/loss" in run.data.metrics]
    (others,) = [run for run in runs if run is not ours]
    assert [m.value for m in client.get_metric_history(others.info.run_id, "loss")] == pytest.approx(losses)
    assert not any(name.startswith(("grad/", "trackbridge/")) for name in others.data.metrics)
    assert [m.value for m in client.get_metric_history(ours.info.run_id, "train/loss")] == pytest.approx(losses, abs=6e-5)

    written = [path for path in tmp_path.rglob("events.*") if not path.is_relative_to(tmp_path / "runs")]
    events = EventAccumulator(str(written[0].parent))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert not any(tag.startswith(("trackbridge/", "grad/")) for tag in events.Tags()["scalars"])


RANKS = """
import sys
from pathlib import Path
import torch, torch.distributed as dist, transformers
import trackbridge
from tests.integrations.hf_kit import SETTINGS, Counting, InOrder, trainer

def make(*callbacks, **changes):
    data = Counting(576, bad=range(16 * 30, 16 * 30 + 16))
    settings = {"max_steps": 36, "learning_rate": 1e-2, "ddp_backend": "gloo"}
    return trainer(Path("out"), *callbacks, data=data, kind=InOrder, **settings, **changes)

def build():
    return trackbridge.hf.rebuild(make())

if __name__ == "__main__":
    watching = trackbridge.hf.Callback(id="two", strict=True, **SETTINGS)
    made = make(watching, save_strategy="steps", save_steps=28)
    made.train()
    if transformers.__version__ >= "5":  # before, it cannot load its optimizer on ranks of a CPU
        again = trackbridge.hf.Callback(dir="runs", strict=True, **SETTINGS)
        made = make(again)
        made.train(resume_from_checkpoint="out/checkpoint-28")
        assert again.run.id == "two"
    dist.barrier()  # the first rank has sealed the capsule
    from trackbridge import replay
    report = replay.rerun(trackbridge.pull("runs/two@30"), build)
    sys.stdout.write(f"VERDICT {dist.get_rank()} {report.verdict} {report.reason}\\n")

    class Diverging(InOrder):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * float("nan") if self.state.global_step == 4 and dist.get_rank() == 1 else loss

    stopping = trackbridge.hf.Callback(strict=True, stop_on_anomaly=0.5)
    made = trainer(Path("out"), stopping, data=Counting(576), kind=Diverging, max_steps=36, ddp_backend="gloo")
    made.train()
    sys.stdout.write(f"STOPPED {dist.get_rank()} {made.state.global_step}\\n")
    dist.barrier()
    dist.destroy_process_group()
"""


def test_two_ranks_are_one_run_resumed_and_replayed(tmp_path: Path) -> None:
    """DDP on gloo: each rank has its own batches, and its own state beside the checkpoint."""
    out = script(tmp_path, RANKS, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    record = trackbridge.load(tmp_path / "runs" / "two")
    assert record.series("train/loss")[0].tolist() == list(range(36))
    assert record.anomalies and {anomaly.step for anomaly in record.anomalies} == {30}
    assert sorted(path.name for path in (tmp_path / "out" / "checkpoint-28").glob("trackbridge_*")) == [
        "trackbridge_0.json",
        "trackbridge_1.json",
    ]
    ids = []
    for rank in (0, 1):
        found = contexts(record.path, rank)[-8:]
        assert {c.attempt for c in found} == ({1} if transformers.__version__ >= "5" else {0})
        assert [m.index for c in found for m in c.micro] == list(range(56, 72))
        ids.append([i for c in found for m in c.micro for i in m.sample_ids or ()])
    assert sorted(ids[0] + ids[1]) == list(range(448, 576))
    verdicts = sorted(line for line in out.splitlines() if line.startswith("VERDICT"))
    assert [line.split()[2] for line in verdicts] == ["exact", "exact"], out
    stopped = [int(line.split()[2]) for line in out.splitlines() if line.startswith("STOPPED")]
    assert len(stopped) == 2 and stopped[0] == stopped[1] < 36, "F6: all ranks leave together"


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # TRL's own
def test_trl_supervised_finetuning(tmp_path: Path) -> None:
    """TRL's trainer, its own collator and its own loss, a tokenizer made here; replayed."""
    if transformers.__version__ < "5":
        pytest.skip("the TRL that is here is made for transformers 5")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from tests.integrations.hf_kit import model

    words = ["<pad>", "<eos>", *(f"w{n}" for n in range(30))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    texts = [" ".join(f"w{(row + k) % 30}" for k in range(8)) for row in range(400)]
    for row in range(8 * 30, 8 * 31):
        texts[row] = " ".join(f"w{(row - 7 * k) % 30}" for k in range(8))

    def make(*callbacks: Any) -> SFTTrainer:
        args = SFTConfig(
            output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=36,
            learning_rate=1e-2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, max_length=16, bf16=False,
            shuffle_dataset=False, dataloader_pin_memory=False, logging_steps=1,
        )  # fmt: skip
        data = Dataset.from_dict({"text": texts})
        return _InOrder(model(), args, train_dataset=data, processing_class=fast, callbacks=list(callbacks))

    class _InOrder(SFTTrainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    watching = trackbridge.hf.Callback(dir=tmp_path / "runs", strict=True, **SETTINGS)
    made = make(watching)
    made.train()
    logged = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert series(watching.run, "train/loss") == pytest.approx(logged) and wires(made) == set()
    micros = [m for c in contexts(watching.run) for m in c.micro]
    assert [m.sample_ids for m in micros[:2]] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert {a.step for a in watching.run.anomalies} == {30}
    report = replay.rerun(trackbridge.pull(f"{watching.run.dir}@30"), lambda: trackbridge.hf.rebuild(make()))
    assert report.verdict == "exact", report
