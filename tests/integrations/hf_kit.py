"""A tiny language model in Hugging Face's `Trainer`: random weights, no hub, with dropout."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import trackbridge
from trackbridge.journal import JournalReader
from trackbridge.records import StepContext
from trackbridge.rundir import RunDirectory

WORDS = 32
LENGTH = 9
SETTINGS: dict[str, Any] = {
    "recorder": {"snapshot_every": 16, "before": 3, "after": 4},
    "parameters": {"weights_every": 4, "moments_every": 4},
    "detection": {"warmup": 16},
}


class Counting(Dataset[dict[str, Tensor]]):
    """Rows that count upwards; those in `bad` downwards in sevens, a spike for who has learnt to count. Eight labels each,
    so that a mean over any number of rows that is a power of two divides exactly."""

    def __init__(self, items: int = 48, *, bad: Iterable[int] = ()) -> None:
        generator = torch.Generator().manual_seed(1234)
        start = torch.randint(0, WORDS, (items, 1), generator=generator)
        self.rows = (start + torch.arange(LENGTH)) % WORDS
        for row in bad:
            self.rows[row] = (start[row] - 7 * torch.arange(LENGTH)) % WORDS

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.rows[index].clone()
        labels[0] = -100
        return {"input_ids": self.rows[index], "labels": labels}


class Noisy(Counting):
    """A transform in the training process that draws from every generator."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        shift = int(torch.randint(0, 2, ())) + random.randrange(2) + int(np.random.randint(2))
        return {"input_ids": (row["input_ids"] + shift) % WORDS, "labels": row["labels"]}


class InOrder(Trainer):
    """Takes its data in the dataset's order."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def model(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 2, "max_position_embeddings": 16, "attention_dropout": 0.1, "tie_word_embeddings": True}
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **more, **none, **changes}))


def arguments(output: Path, **changes: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "output_dir": str(output),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 10,
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**given, **changes})


def trainer(output: Path, *callbacks: Any, data: Any = None, kind: type[Trainer] = Trainer, **changes: Any) -> Trainer:
    more = {name: changes.pop(name) for name in ("data_collator", "compute_loss_func", "optimizers") if name in changes}
    made = changes.pop("model", None)
    return kind(
        model() if made is None else made,
        arguments(output, **changes),
        train_dataset=Counting() if data is None else data,
        eval_dataset=Counting(8),
        callbacks=list(callbacks),
        **more,
    )


def fingerprint(made: Trainer) -> dict[str, bytes]:
    """Weights, optimizer state and every random state, to the bit."""
    found = {name: value.numpy().tobytes() for name, value in made.model.state_dict().items()}
    for index, state in made.optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{index}.{k}": v.numpy().tobytes() for k, v in state.items() if isinstance(v, Tensor)}
    found["schedule"] = repr(made.lr_scheduler.state_dict()["_last_lr"]).encode()
    found["python"] = repr(random.getstate()).encode()
    found["numpy"] = repr(np.random.get_state(legacy=False)).encode() + np.random.get_state()[1].tobytes()
    found["torch"] = torch.get_rng_state().numpy().tobytes()
    return found


def series(run: Any, name: str) -> list[float]:
    return trackbridge.load(run.dir).series(name)[1].tolist()


def contexts(run: Any, rank: int = 0) -> list[StepContext]:
    """Of a run, or of its directory."""
    found = JournalReader(RunDirectory(Path(getattr(run, "dir", run))).contexts(rank)).read()
    return [record for record in found if isinstance(record, StepContext)]


def status(run: Any) -> str:
    return trackbridge.load(run.dir).status


def wires(made: Trainer) -> set[str]:
    """The methods that are replaced on this Trainer and on what it owns."""
    owners = {"trainer": made, "accelerator": made.accelerator, "handler": made.callback_handler}
    return {
        f"{where}.{name}"
        for where, owner in owners.items()
        for name in vars(owner)
        if callable(getattr(type(owner), name, None))
    }
