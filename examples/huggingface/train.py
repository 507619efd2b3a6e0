"""A Hugging Face `Trainer`, recorded by one line. A tiny language model with random weights: no hub, seconds on a CPU.

    python train.py
    trackbridge replay RUN@STEP --build train:build        # the commands that it prints

Eight rows of the data are nonsense: the loss spikes where they come.
"""

import argparse
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import trackbridge

WORDS, LENGTH, STEPS, BAD = 64, 16, 60, 45


def dataset() -> list[dict[str, torch.Tensor]]:
    """Rows that count upwards from anywhere; those of one step count downwards in sevens."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, WORDS, (8 * STEPS, 1), generator=generator)
    rows = (start + torch.arange(LENGTH)) % WORDS
    rows[8 * BAD : 8 * BAD + 8] = (start[8 * BAD : 8 * BAD + 8] - 7 * torch.arange(LENGTH)) % WORDS
    return [{"input_ids": row, "labels": row} for row in rows]


class InOrder(Trainer):
    """Takes the rows as they lie, so that the bad ones come at one step. A Trainer of yours shuffles; that works as well."""

    def _get_train_sampler(self, *args: object) -> torch.utils.data.Sampler[int]:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def make_trainer(*callbacks: TrainerCallback, output: str = "out") -> Trainer:
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=LENGTH, attention_dropout=0.1))
    arguments = TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=1e-2,
        warmup_steps=5,
        logging_steps=20,
        save_strategy="steps",
        save_steps=20,
        report_to=[],
        use_cpu=True,
    )
    return InOrder(model, arguments, train_dataset=dataset(), callbacks=list(callbacks))


def build() -> trackbridge.replay.Rebuilt:
    """What a replay runs: the same Trainer, made again."""
    return trackbridge.hf.rebuild(make_trainer())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default="out", help="the Trainer's checkpoints")
    parser.add_argument("--resume", help="a checkpoint to go on from: the same run goes on")
    options = parser.parse_args()

    watching = trackbridge.hf.Callback(project="huggingface", backend="tensorboard", recorder={"snapshot_every": 20})
    make_trainer(watching, output=options.output).train(resume_from_checkpoint=options.resume)

    run = watching.run
    for anomaly in run.anomalies:
        sys.stdout.write(f"{anomaly.kind} of {anomaly.series} at step {anomaly.step}: {anomaly.value:.3g}\n")
        sys.stdout.write(f"trackbridge replay {run.dir}@{anomaly.step} --build train:build\n")
