"""The stack people really run, as one: FSDP2, selective activation checkpointing, a compiled block at a time, bf16 and gradient
accumulation on two or more GPUs; and whole-model `torch.compile(mode="reduce-overhead")` on one.

    torchrun --nproc-per-node 2 benchmarks/stack.py                     # GPUs over NCCL; without any: CPU over gloo, tiny
    python benchmarks/stack.py --mode reduce-overhead                   # one GPU

Copies of one model take the same steps in one process, in turn: unwatched, unwatched again, watched with the defaults (and in
the second mode, where hooks lie inside the graph, watched without these). The figure is the median over rounds of a copy's time
over that of the first in the same round, with the quartiles. Also told: whether the copies end in the same bits, whether the
statistics of three steps are those that the first copy says itself, graph breaks and recompilations, CUDA graphs given up, what
waits for the device on the training thread, and memory added. Bounded: it measures until --seconds are over, and ends with the
stacks of all threads if it hangs.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overhead import Block, twin
from torch import Tensor, nn
from torch.nn import functional as F

import trackbridge

BEGUN = time.monotonic()
CHECKED = 3  # steps whose statistics are compared, the first of all
TOLERANCE = {"fsdp": 2e-3, "reduce-overhead": 1e-2}  # relative; the second compares with eager bf16, which rounds elsewhere


class GPT2(nn.Module):
    """GPT-2 124M by default. `seen` is a list while somebody wants to see what the embedding and each block give."""

    def __init__(self, block: type[Block], vocabulary: int, context: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(block(width, heads) for _ in range(depth))
        self.lnf = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight
        self.seen: list[Tensor] | None = None
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0, 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
            if self.seen is not None:
                self.seen.append(x.detach())
        return F.cross_entropy(self.head(self.lnf(x)).flatten(0, 1).float(), targets.flatten())


def selective(block: nn.Module) -> nn.Module:
    """`block` with its products and attention kept, the rest computed again in the backward pass."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    aten = torch.ops.aten
    kept = [aten.mm.default, aten.addmm.default] + [
        getattr(aten, name).default
        for name in (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
        )
        if hasattr(aten, name)
    ]
    return checkpoint_wrapper(block, context_fn=functools.partial(create_selective_checkpoint_contexts, kept))


class Case:
    """One copy: its model, optimizer, and for the watched one its run."""

    def __init__(self, name: str, options: argparse.Namespace, device: torch.device, settings: dict[str, Any] | None) -> None:
        self.name, self.options, self.device = name, options, device
        self.sharded = options.mode == "fsdp"
        torch.manual_seed(0)
        shape = options.vocabulary, options.context, options.width, options.depth, options.heads
        self.model: Any = twin(GPT2)(twin(Block), *shape).to(device)
        self.forward: Callable[[Tensor, Tensor], Tensor] = self.model
        backend = "inductor" if device.type == "cuda" else "aot_eager"
        if self.sharded:
            self._shard(backend)
        elif device.type == "cuda":
            self.forward = torch.compile(self.model, mode="reduce-overhead", fullgraph=True)
        else:
            self.forward = torch.compile(self.model, backend=backend, fullgraph=True)
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(parameters, lr=3e-4, fused=device.type == "cuda")
        if (
            not self.sharded
        ):  # gradients that stay where they are: else they lie in the graph's memory, which a replay overwrites
            for p in parameters:
                p.grad = torch.zeros_like(p)
        held = memory(device)
        self.run: Any = None
        if settings is not None:
            self.run = trackbridge.init(**settings)
            self.run.watch(self.model, self.optimizer)
        self.held = memory(device) - held
        numbers = torch.Generator().manual_seed(1 + rank())
        size = options.batch, options.context + 1
        data = torch.randint(0, options.vocabulary, (8, *size), generator=numbers)
        self.data = list(data.to(device))
        self.steps = 0
        self.times: list[float] = []
        self.truth: list[dict[str, tuple[float, float]]] = []  # of each checked step: own part, whole
        self.graphs = self.breaks = self.skips = 0
        self.kept: list[Tensor] = []

    def _shard(self, backend: str) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for number, block in enumerate(self.model.blocks):
            block = selective(block)
            block.compile(backend=backend)  # breaks are counted
            self.model.blocks[number] = fully_shard(block, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)

    def step(self, look: bool = False) -> None:
        """One optimizer step; with `look` its statistics are worked out here, the slow and obvious way."""
        micros = self.options.accumulate
        if look:
            self.model.seen = []
            if not self.sharded:  # a look inside would be another graph
                self._run_eager()
        for micro in range(micros):
            tokens = self.data[(self.steps * micros + micro) % len(self.data)]
            if self.sharded:
                self.model.set_requires_gradient_sync(micro == micros - 1)
            else:
                torch.compiler.cudagraph_mark_step_begin()
            with torch.autocast(self.device.type, torch.bfloat16, enabled=not self.sharded):
                loss = self.forward(tokens[:, :-1], tokens[:, 1:])
            (loss / micros).backward()
            if self.run is not None:
                self.run.micro(loss.detach(), tokens=tokens.numel())
        if self.run is not None:
            self.run.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if look:
            self.truth.append(self._look())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.sharded)
        if self.run is not None:
            self.run.step()
        self.steps += 1

    @torch.no_grad()
    def _run_eager(self) -> None:
        """What the blocks are going to give in this step, from the model as it is without a compiler."""
        self.kept = self.model.seen
        for micro in range(self.options.accumulate):
            tokens = self.data[(self.steps * self.options.accumulate + micro) % len(self.data)]
            with torch.autocast(self.device.type, torch.bfloat16):
                self.model(tokens[:, :-1], tokens[:, 1:])
        self.model.seen = None

    def _look(self) -> dict[str, tuple[float, float]]:
        found = {}
        for name, p in self.model.named_parameters():
            part = getattr(p.grad, "_local_tensor", p.grad).double().square().sum()
            whole = summed(part) if self.sharded else part
            found[f"layer/{trackbridge.names.clean(name)}/grad_norm"] = part.sqrt().item(), whole.sqrt().item()
        depth = self.options.depth
        seen = self.model.seen if self.sharded else self.kept
        for number in range(depth):
            outputs = [x.double() for x in seen[number::depth]]
            sums = torch.stack([torch.stack([x.sum(), x.square().sum(), x.new_tensor(x.numel())]) for x in outputs]).sum(0)
            for own, (total, square, n) in enumerate((sums.tolist(), summed(sums).tolist())):
                for statistic, value in (("mean", total / n), ("rms", math.sqrt(square / n))):
                    name = f"act/blocks.{number}/{statistic}"
                    found[name] = (value, value) if own == 0 else (found[name][0], value)
        self.model.seen = None
        self.kept = []
        return found

    def warm_up(self, checked: int) -> None:
        for number in range(self.options.warmup):
            self.step(look=number < checked)

    def round(self, steps: int) -> None:
        settle(self.device)
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize(self.device)
        self.times.append((time.perf_counter() - begin) / steps)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def summed(x: Tensor) -> Tensor:
    x = x.clone()
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def agreed(value: Any) -> Any:
    """Rank 0's value, on all ranks."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def gathered(value: Any) -> list[Any]:
    """The values of all ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def settle(device: torch.device) -> None:
    synchronize(device)
    if dist.is_initialized():
        dist.barrier()
    synchronize(device)


def memory(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def peak(case: Case) -> int:
    """Bytes of device memory at the worst moment of ten steps, above what is held between steps; and what watching holds."""
    if case.device.type != "cuda":
        return 0
    synchronize(case.device)
    torch.cuda.reset_peak_memory_stats()
    before = memory(case.device)
    for _ in range(10):
        case.step()
    synchronize(case.device)
    return torch.cuda.max_memory_allocated() - before + case.held


def waits(case: Case) -> int:
    """Calls of this thread that made it wait for the device, in one step, as torch's own detector counts them."""
    if case.device.type != "cuda":
        return 0
    synchronize(case.device)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            case.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    synchronize(case.device)
    return sum("synchroniz" in str(warning.message) for warning in told)


def counted(case: Case, what: Callable[[], None]) -> None:
    """Run `what`; graphs made, breaks and CUDA graphs given up meanwhile are the case's."""
    from torch._dynamo.utils import counters

    def now() -> tuple[int, int, int]:
        return (
            counters["stats"]["unique_graphs"],
            sum(counters["graph_break"].values()),
            counters["inductor"]["cudagraph_skips"],
        )

    before = now()
    what()
    after = now()
    case.graphs += after[0] - before[0]
    case.breaks += after[1] - before[1]
    case.skips += after[2] - before[2]


def same_bits(one: Case, other: Case) -> bool:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    mine = all(torch.equal(getattr(a, "_local_tensor", a), getattr(b, "_local_tensor", b)) for a, b in pairs)
    return all(gathered(mine))


def compared(truth: list[dict[str, tuple[float, float]]], folder: Path, tolerance: float) -> dict[str, Any]:
    """This rank's rows against the truth. A series ``_local`` must be this rank's part; another the whole, and an activation's
    either (this rank's data, where rows are not merged)."""
    from trackbridge.names import LOCAL

    rows: dict[int, dict[str, float]] = {}
    for row in trackbridge.load(folder).rows(rank()):
        if row.step < len(truth):
            rows.setdefault(row.step, {}).update(zip(row.schema.names, row.values.tolist(), strict=True))
    wrong: list[str] = []
    kinds = {"own part": 0, "whole": 0}
    for step, values in enumerate(truth):
        found = rows.get(step, {})
        for name, (part, whole) in values.items():
            series = name if name in found else name + LOCAL
            value = found.get(series, math.nan)
            allowed = {"own part": part, "whole": whole}
            if name.startswith("layer/"):
                allowed.pop("own part" if series == name else "whole")
            size = abs(values[name.replace("/mean", "/rms")][1])
            close = [kind for kind, true in allowed.items() if abs(value - true) <= tolerance * size]
            if close:
                kinds[close[-1]] += 1
            else:
                wrong.append(f"{series} at step {step}: {value:.6g}, not {' or '.join(f'{v:.6g}' for v in allowed.values())}")
    return {"compared": sum(kinds.values()) + len(wrong), "wrong": wrong, **kinds}


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    folder = Path(agreed(tempfile.mkdtemp(prefix="stack-")))
    names: dict[str, dict[str, Any] | None] = {
        "unwatched": None,
        "unwatched again": None,
        "watched": {"dir": folder, "strict": True},
    }
    if options.mode == "reduce-overhead":
        names["outside only"] = {"dir": folder, "strict": True, "activations": {"inside_compiled": False}}
    cases = [Case(name, options, device, settings) for name, settings in names.items()]
    base, watched = cases[0], cases[2]
    for case in cases:
        say(f"warming up: {case.name}")
        counted(case, functools.partial(case.warm_up, CHECKED if case is base else 0))
    graphs = {case.name: (case.graphs, case.breaks) for case in cases}
    spent = time.monotonic()
    rounds = 0
    while rounds < 4 or agreed(rounds < options.rounds and time.monotonic() - spent < options.seconds):
        order = cases[rounds % len(cases) :] + cases[: rounds % len(cases)]
        for case in order:
            counted(case, functools.partial(case.round, options.steps))
        rounds += 1
    say(f"{rounds} rounds of {options.steps} steps")
    equal = {case.name: same_bits(base, case) for case in cases[1:]}
    rows: dict[str, Any] = {}
    for case in cases:
        ratios = [mine / theirs - 1 for mine, theirs in zip(case.times, base.times, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows[case.name] = {
            "ms": 1e3 * statistics.median(case.times),
            "overhead": middle,
            "quartiles": [low, high],
            "mean_overhead": sum(case.times) / sum(base.times) - 1,
            "peak_bytes": peak(case),
            "waits": waits(case),
            "graphs": case.graphs,
            "graph_breaks": case.breaks,
            "recompiles_after_warmup": case.graphs - graphs[case.name][0],
            "cudagraph_skips": case.skips,
        }
    if device.type == "cuda" and options.trace:
        from overhead import traced

        for case in (base, watched):  # last: a profiler makes all later launches of its process slower
            settle(device)
            rows[case.name] |= traced(case, 4)
    weights = sum(getattr(p, "_local_tensor", p).nbytes for p in base.model.parameters())
    for case in cases[2:]:
        case.run.finish(30.0)
    settle(device)
    values = compared(base.truth, watched.run.dir, TOLERANCE[options.mode])
    return {
        "mode": options.mode,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "world": dist.get_world_size() if dist.is_initialized() else 1,
        "torch": torch.__version__,
        "model": vars(options),
        "rounds": rounds,
        "weights_bytes": weights,
        "memory_added_bytes": rows["watched"]["peak_bytes"] - min(rows[name]["peak_bytes"] for name in list(names)[:2]),
        "same_bits": equal,
        "values": values,
        "cases": rows,
        "seconds": time.monotonic() - BEGUN,
    }


def say(words: str) -> None:
    if rank() == 0:
        sys.stderr.write(f"[{time.monotonic() - BEGUN:6.1f} s] {words}\n")
        sys.stderr.flush()


def show(result: dict[str, Any]) -> None:
    out = [f"\n{result['mode']} on {result['world']} x {result['device']}, torch {result['torch']}, {result['rounds']} rounds"]
    for name, row in result["cases"].items():
        low, high = row["quartiles"]
        out.append(
            f"  {name:16s} {row['ms']:9.2f} ms {100 * row['overhead']:+7.2f}%  [{100 * low:+.2f}, {100 * high:+.2f}]  "
            f"all rounds {100 * row['mean_overhead']:+.2f}%  graphs {row['graphs']} breaks {row['graph_breaks']} "
            f"recompiles {row['recompiles_after_warmup']} cudagraph skips {row['cudagraph_skips']} waits {row['waits']}"
            + "".join(f"  {key} {row[key]:.4g}" for key in ("busy_ms", "launches", "synchronise_calls") if key in row)
        )
    added, weights = result["memory_added_bytes"], result["weights_bytes"]
    out.append(f"  memory added: {added / 1e6:.2f} MB, {100 * added / weights:.2f}% of this rank's weights")
    out.append("  the same bits as unwatched: " + ", ".join(f"{name} {same}" for name, same in result["same_bits"].items()))
    values = result["values"]
    out.append(f"  values: {values['compared']} compared, {values['own part']} own parts and {values['whole']} wholes right")
    out += [f"    WRONG {line}" for line in values["wrong"][:10]]
    out.append(f"  {result['seconds']:.0f} s in all")
    sys.stdout.write("\n".join(out) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mode", choices=["fsdp", "reduce-overhead"], help="default: fsdp under torchrun, else reduce-overhead"
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="time for the rounds")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round")
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--limit", type=float, default=170.0, help="seconds after which it gives up and says where it hung")
    parser.add_argument("--batch", type=int, help="sequences in a micro-batch")
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--no-trace", dest="trace", action="store_false", help="without the profiler at the end")
    parser.add_argument("--json", type=Path, help="write the result here; default: stack-MODE.json in $OUT, if that is set")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.limit, exit=True)
    on_gpu = torch.cuda.is_available()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    options.mode = options.mode or ("fsdp" if "WORLD_SIZE" in os.environ else "reduce-overhead")
    options.batch = options.batch or (8 if on_gpu else 2)
    sizes = (50304, 1024, 768, 12, 12) if on_gpu else (256, 32, 64, 2, 4)
    options.vocabulary, options.context, options.width, options.depth, options.heads = sizes
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
    if options.mode == "fsdp":
        if "RANK" not in os.environ:
            parser.error("the sharded stack needs ranks: torchrun --nproc-per-node 2 benchmarks/stack.py")
        bound = timedelta(seconds=options.limit)
        if on_gpu:
            dist.init_process_group("nccl", device_id=device, timeout=bound)
        else:
            dist.init_process_group("gloo", timeout=bound)
    elif ranks > 1:
        parser.error("--mode reduce-overhead is for one process")
    result = measure(options, device)
    results = gathered(result)
    if rank() == 0:
        for number, other in enumerate(results[1:], 1):
            result["values"]["wrong"] += [f"rank {number}: {line}" for line in other["values"]["wrong"]]
        show(result)
        out = os.environ.get("OUT")
        target = options.json or (Path(out) / f"stack-{options.mode}.json" if out else None)
        if target is not None:
            target.write_text(json.dumps({**result, "ranks": results[1:]}, indent=1, default=str) + "\n")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
