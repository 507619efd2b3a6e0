"""What watching costs: base and instrumented steps interleaved in one process.

    python benchmarks/overhead.py --demo --peers          # the demo's own step, and the field's other tools
    python benchmarks/overhead.py                         # the demo's model, one batch a step, torch on every core
    python benchmarks/overhead.py --device cuda           # GPT-2 124M, bf16 autocast, batch 16 x 1024, eager and compiled
    python benchmarks/overhead.py --device cuda --activations   # hottest rows, channels, logits, fewer tokens: each by itself
    python benchmarks/overhead.py --scaling               # cost against the number of parameter tensors and of steps

Each case owns a model, an optimizer and, unless it is a base, a run. Rounds of a few steps go round the cases, so that a drift
of the machine's clock meets all of them; the figure is the median over rounds of a case's time over that of the base in the
same round, with the quartiles. The mean is over all rounds together, so that it holds the rare steps (a snapshot) as well. On
a GPU a round is as long as the cadence of the default configuration. Eager and compiled each get a process of their own: a
profiler that has run in a process makes later launches in it slower.

Device time is compared at one clock: a device that works less draws less power and goes faster, by 1 to 3%, so each is scaled
by the time that the model's own matrix products took in the same trace.

`host_ms` is how long the training thread takes to launch one step, from an idle device on. Where it comes near the step's time,
the host is what the device waits for, and so is in every loop that waits for the device (`--reads`).

The floor is the time to read, at this device's measured bandwidth, every byte that the statistics are a function of, averaged
over the cadence.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trackbridge
from trackbridge.config import ActivationsConfig
from trackbridge.demo.model import ByteGPT
from trackbridge.demo.train import ACCUMULATE, Plan, leave_a_core
from trackbridge.probes.outputs import first_tensor
from trackbridge.probes.site_statistics import spacing
from trackbridge.probes.sites import choose
from trackbridge.probes.strides import odd_prime

EVERYTHING: dict[str, Any] = {
    "parameters": {"gradients_every": 1, "elements_every": 1, "weights_every": 1, "moments_every": 1},
    "activations": {"sites": "blocks+branches"},
}
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "no rows, no channels": {"embedding_rows": 0, "channels_every": 0},
    "rows, no channels": {"channels_every": 0},
    "channels every step": {"channels_every": 1},
    "logits every 10th step": {"attention_every": 10},
    "logits every step": {"attention_every": 1},
    "every token": {"tokens": 1},
    "every 7th token": {"tokens": 7},
    "no activations": {"sites": "none", "embedding_rows": 0},
}
"""What `--activations` compares with the default, one thing at a time."""
MODES = ("eager", "compiled", "reduce-overhead")
SHOWN = (
    "mean_overhead", "cost_ms", "floor_ms", "host_ms", "busy_ms", "busy_overhead", "launches", "memory_bytes",
    "synchronise_calls",
)  # fmt: skip
PRODUCTS = ("nvjet", "gemm", "cutlass", "flash", "fmha")
"""Parts of the names of kernels that multiply matrices."""
QUIET: dict[str, Any] = {"recorder": {"enabled": False}, "detection": {"enabled": False}}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(y)
        return x + self.out(F.gelu(self.fc(self.ln2(x))))


class GPT2(nn.Module):
    """GPT-2 124M."""

    def __init__(
        self, vocabulary: int = 50304, context: int = 1024, width: int = 768, depth: int = 12, heads: int = 12
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.lnf = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0, 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.lnf(x)).flatten(0, 1).float(), targets.flatten())


class Demo(ByteGPT):
    """The demo's model, with the loss inside as well."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(tokens).flatten(0, 1), targets.flatten())


def twin(kind: type[nn.Module]) -> type[nn.Module]:
    """The same class with a code object of its own. torch.compile keeps what it made under the code object and does not look
    at hooks: two instances of one class would share the graph of the first, with or without our hooks."""
    forward = kind.forward
    code = forward.__code__.replace(co_name=f"forward_{next(_numbers)}")
    again = types.FunctionType(code, forward.__globals__, None, forward.__defaults__, forward.__closure__)
    return type(kind.__name__, (kind,), {"forward": again})


_numbers = itertools.count()


@dataclass
class Case:
    """One way to train. `before_step` is called once per step with the loss, between clipping and the optimizer. Batches come
    from the host, through `run.batches` where there is a run."""

    name: str
    model: nn.Module
    forward: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    data: list[Tensor]
    feed: Iterator[Tensor]
    autocast: bool
    run: Any = None
    held: int = 0  # bytes of device memory that watching took at once
    before_step: Callable[[Tensor], None] = lambda loss: None
    reads: bool = False  # the loss, at every step: the training thread waits for the device before it goes on
    micros: int = 1  # micro-batches of a step
    times: list[float] = field(default_factory=list)
    hosts: list[float] = field(default_factory=list)  # seconds in which a step was launched, nothing else being under way
    steps: int = 0

    def step(self) -> None:
        for _ in range(self.micros):
            tokens = self.batch()
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.autocast):
                loss = self.forward(tokens[:, :-1], tokens[:, 1:])
            (loss if self.micros == 1 else loss / self.micros).backward()
            if self.run is not None and self.micros > 1:
                self.run.micro(loss=loss.detach(), tokens=tokens.numel())
        if self.run is not None:
            self.run.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.before_step(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.reads:
            wait(tokens)
        if self.run is not None:
            if self.micros > 1:
                self.run.step()
            else:
                self.run.step(loss=loss.detach(), tokens=tokens.numel())
        self.steps += 1

    def batch(self) -> Tensor:
        return next(self.feed).to(self.data[0].device, non_blocking=True)

    def round(self, steps: int) -> float:
        """Seconds per step, device work included."""
        wait(self.data[0])
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        wait(self.data[0])
        return (time.perf_counter() - begin) / steps


def wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def make(name: str, device: str, mode: str, data: list[Tensor], settings: dict[str, Any] | None, folder: Path) -> Case:
    torch.manual_seed(0)
    model = twin(GPT2 if device == "cuda" else Demo)().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device == "cuda")
    run = None
    held = torch.cuda.memory_allocated()
    if settings is not None:
        run = trackbridge.init(dir=folder, strict=True, **settings)
        run.watch(model, optimizer)
    held = torch.cuda.memory_allocated() - held
    forward: Any = model if mode == "eager" else torch.compile(model, mode=None if mode == "compiled" else mode)
    loader = Endless([tokens.cpu().pin_memory() if tokens.is_cuda else tokens for tokens in data])
    feed = iter(loader if run is None else run.batches(loader))
    return Case(name, model, forward, optimizer, data, feed, device == "cuda", run, held)


class Endless:
    """A loader of the same batches again and again."""

    def __init__(self, batches: list[Tensor]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return itertools.cycle(self._batches)


def naive(case: Case) -> None:
    """What people write first: one `.item()` per parameter."""

    def norms(loss: Tensor) -> None:
        [p.grad.norm().item() for p in case.model.parameters() if p.grad is not None]

    case.before_step = norms


def wandb_watch(case: Case, folder: Path) -> Callable[[], None]:
    import wandb

    run = wandb.init(project="overhead", mode="offline", dir=str(folder), settings=wandb.Settings(silent=True))
    run.watch(case.model, log="all", log_freq=1)
    case.before_step = lambda loss: run.log({"loss": loss.item()})
    return run.finish


def trainscope(case: Case, folder: Path) -> None:
    import trainscope as ts
    from trainscope.core.config import TrainScopeConfig

    config = TrainScopeConfig(
        run_dir=str(folder), run_name="overhead", integrations={"wandb": False}
    )  # that run is another case's
    scope = ts.TrainScope(case.model, case.optimizer, config).attach()
    case.before_step = lambda loss: scope.step(loss.item())


@contextmanager
def no_sync(device: str) -> Iterator[None]:
    """Any synchronising CUDA operation raises."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def bandwidth(device: str) -> float:
    """Bytes per second of reading, measured."""
    x = torch.randn((256 << 20) if device == "cuda" else (32 << 20), device=device)
    times = []
    for _ in range(12):
        wait(x)
        begin = time.perf_counter()
        x.sum()
        wait(x)
        times.append(time.perf_counter() - begin)
    return x.nbytes / statistics.median(times)


def floor_bytes(case: Case, settings: dict[str, Any]) -> float:
    """Bytes of one step that default or full statistics are a function of, each read once, averaged over the cadence: of
    gradients, outputs, weights and Adam's two moments. The sample of the weights before the update is not counted."""
    outputs: list[float] = []
    config = ActivationsConfig(**settings.get("activations", {}))
    dear = case.forward is not case.model or not case.data[0].is_cuda

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is not None:
            usual = None if dear else 1
            outputs.append(tensor.nbytes / spacing(tensor, module, odd_prime(config.tokens) if config.tokens else usual))

    sites = choose(case.model, config)
    hooks = [module.register_forward_hook(note) for _, module in sites]
    tokens = case.data[0]
    with torch.no_grad(), torch.autocast(tokens.device.type, torch.bfloat16, enabled=case.autocast):
        case.model(tokens[:, :-1], tokens[:, 1:])
    for hook in hooks:
        hook.remove()
    weights = sum(p.numel() * p.element_size() for p in case.model.parameters())
    parameters = {"weights_every": 10, "moments_every": 10, **settings.get("parameters", {})}
    return (
        weights + weights / parameters["weights_every"] + 2 * weights / parameters["moments_every"] + case.micros * sum(outputs)
    )


def traced(case: Case, steps: int) -> dict[str, Any]:
    """What a trace of some steps says: milliseconds of each step that the device worked, on matrix products and in all, kernels
    launched in it, and the synchronise calls that this thread made (not those of the scribe, whose waiting hurts nobody)."""
    from torch.profiler import ProfilerActivity, profile

    wait(case.data[0])
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            case.step()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        trace.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    last = max(event["ts"] for event in calls if "aunch" in event["name"])  # the profiler's own waiting comes after it
    mine = [e["name"] for e in calls if "ynchronize" in e["name"] and e["tid"] == threading.get_native_id() and e["ts"] < last]
    return {
        "busy_ms": sum(event["dur"] for event in work) / 1e3 / steps,
        "products_ms": sum(e["dur"] for e in work if any(part in e["name"].lower() for part in PRODUCTS)) / 1e3 / steps,
        "launches": len(work) / steps,
        "synchronise_calls": len(mine),
    }


def compare(arguments: argparse.Namespace, mode: str) -> dict[str, Any]:
    device = arguments.device
    folder = Path(tempfile.mkdtemp(prefix="overhead-"))
    shape = tuple(arguments.shape)
    vocabulary = 50257 if device == "cuda" else 256
    data = [torch.randint(0, vocabulary, shape, device=device) for _ in range(8)]
    closing: list[Callable[[], Any]] = []
    configurations: dict[str, dict[str, Any] | None] = {
        "base": None,
        "base again": None,
        "probes, default": dict(QUIET),
        "probes, everything": {**QUIET, **EVERYTHING},
        "trackbridge, default": {},
    }
    if arguments.activations:
        named = {f"probes, {name}": {**QUIET, "activations": changed} for name, changed in ACTIVATIONS.items()}
        configurations = {key: configurations[key] for key in ("base", "base again", "probes, default")} | named
    cases = {}
    for name, settings in configurations.items():
        if arguments.only and name not in ("base", *arguments.only):
            continue
        cases[name] = make(name, device, mode, data, settings, folder / name.replace(", ", "-"))
    if arguments.peers:
        cases["naive .item()"] = make("naive", device, mode, data, None, folder)
        naive(cases["naive .item()"])
        cases["wandb.watch, all"] = make("wandb", device, mode, data, None, folder)
        closing.append(wandb_watch(cases["wandb.watch, all"], folder))
        cases["trainscope, default"] = make("trainscope", device, mode, data, None, folder)
        trainscope(cases["trainscope, default"], folder / "trainscope")
    for case in cases.values():
        case.reads = arguments.reads
        case.micros = ACCUMULATE if arguments.demo else 1
        for _ in range(arguments.warmup):
            case.step()
    memory = {}
    if device == "cuda":
        for name, case in cases.items():
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
            for _ in range(11):
                case.step()
            wait(data[0])
            memory[name] = case.held + torch.cuda.max_memory_allocated() - base
        from torch._dynamo.utils import counters

        graphs = counters["stats"]["unique_graphs"]
    for number in range(arguments.rounds):
        order = list(cases.values())
        order = order[number % len(order) :] + order[: number % len(order)]
        for case in order:
            with no_sync(device if case.run is not None else "cpu"):
                case.times.append(case.round(arguments.steps) if device == "cpu" else timed(case, arguments.steps))
    read = bandwidth(device)
    result: dict[str, Any] = {
        "device": device_name(device),
        "mode": mode,
        "read_bytes_per_s": read,
        "torch": torch.__version__,
    }
    base = cases["base"]
    rows = result["cases"] = {}
    for name, case in cases.items():
        ratios = [mine / theirs - 1 for mine, theirs in zip(case.times, base.times, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows[name] = {
            "ms": 1e3 * statistics.median(case.times),
            "overhead": middle,
            "quartiles": [low, high],
            "mean_overhead": sum(case.times) / sum(base.times) - 1,
            "rounds_ms": [round(1e3 * seconds, 3) for seconds in case.times],
        }
        if case.hosts:
            rows[name]["host_ms"] = 1e3 * statistics.median(case.hosts)
        if name in memory:
            rows[name]["memory_bytes"] = memory[name] - memory["base"]
        settings = configurations.get(name)
        if settings is not None:
            rows[name]["floor_ms"] = 1e3 * floor_bytes(base, settings) / read
            rows[name]["cost_ms"] = 1e3 * statistics.median(a - b for a, b in zip(case.times, base.times, strict=True))
    if device == "cuda":
        result["recompiles_after_warmup"] = counters["stats"]["unique_graphs"] - graphs
        result["graph_breaks"] = sum(counters["graph_break"].values())
        for name, case in cases.items():
            rows[name] |= traced(case, arguments.steps)
            clock = rows[name]["products_ms"] / rows["base"]["products_ms"]
            rows[name]["busy_overhead"] = rows[name]["busy_ms"] / rows["base"]["busy_ms"] / clock - 1
    for case in cases.values():
        if case.run is not None:
            case.run.finish()
    for close in closing:
        close()
    return result


def timed(case: Case, steps: int) -> float:
    """As `Case.round`, with the waiting outside of the region in which waiting is an error."""
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    if case.run is not None:
        torch.cuda.set_sync_debug_mode("error")
    begin = time.perf_counter()
    for number in range(steps):
        case.step()
        if number == 0 and not case.reads:
            case.hosts.append(time.perf_counter() - begin)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps


class Many(nn.Module):
    """`tensors` small parameters in a chain."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.full((64,), 1.0 + 1e-3 * i / tensors) for i in range(tensors))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(list(self.scales)).mean(0) * x


def scaling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds that watching adds to a step, against the number of parameter tensors; and early and late in a run. The time
    that the training thread itself spends on it (`cpu_us_per_tensor`) stays readable on a machine that others use too."""
    rows = {}
    for tensors in (10, 50, 250, 1000, 5000):
        times: dict[bool, list[float]] = {True: [], False: []}
        worked: dict[bool, list[float]] = {True: [], False: []}
        cases = {}
        for watched in (False, True):
            model = Many(tensors).to(arguments.device)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            run = None
            if watched:
                run = trackbridge.init(dir=tempfile.mkdtemp(), strict=True, **QUIET)
                run.watch(model, optimizer)
            cases[watched] = (model, optimizer, run)
        x = torch.randn(8, 64, device=arguments.device)
        steps = 60 if tensors < 1000 else 24
        for _step in range(steps):
            for watched, (model, optimizer, run) in cases.items():
                wait(x)
                begin, mine = time.perf_counter(), time.thread_time()
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if run:
                    run.step()
                worked[watched].append(time.thread_time() - mine)
                wait(x)
                times[watched].append(time.perf_counter() - begin)
        cases[True][2].finish()
        added = [1e3 * (on - off) for on, off in zip(times[True], times[False], strict=True)][4:]
        own = [1e6 * (on - off) for on, off in zip(worked[True], worked[False], strict=True)][4:]
        half = len(added) // 2
        rows[tensors] = {
            "added_ms": statistics.median(added),
            "per_tensor_us": 1e3 * statistics.median(added) / tensors,
            "cpu_us_per_tensor": statistics.median(own) / tensors,
            "first_half_ms": statistics.median(added[:half]),
            "second_half_ms": statistics.median(added[half:]),
        }
    return {"device": device_name(arguments.device), "scaling": rows, "lasting": lasting(arguments)}


def lasting(arguments: argparse.Namespace, steps: int = 10_000) -> dict[str, float]:
    """Microseconds of the training thread for a whole watched step, in each tenth of a long run with all defaults: medians."""
    model = Many(20).to(arguments.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(8, 64, device=arguments.device)
    run = trackbridge.init(dir=tempfile.mkdtemp(), strict=True)
    run.watch(model, optimizer)
    spent = []
    for _step in range(steps):
        begin = time.thread_time()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()
        spent.append(1e6 * (time.thread_time() - begin))
    run.finish()
    tenth = steps // 10
    return {f"{place + tenth}": statistics.median(spent[place : place + tenth]) for place in range(0, steps, tenth)}


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads"


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['device']}, torch {result.get('torch', torch.__version__)}, {result.get('mode', 'eager')}")
    if "read_bytes_per_s" in result:
        print(f"reads {result['read_bytes_per_s'] / 1e9:.0f} GB/s")
    for name, row in result.get("cases", {}).items():
        low, high = row["quartiles"]
        extra = "".join(f"  {key} {row[key]:.3g}" for key in SHOWN if key in row)
        print(f"  {name:24s} {row['ms']:8.2f} ms  {100 * row['overhead']:+7.2f}%  [{100 * low:+.2f}, {100 * high:+.2f}]{extra}")
        print(f"    rounds: {' '.join(map(str, row['rounds_ms']))}")
    for key in ("recompiles_after_warmup", "graph_breaks"):
        if key in result:
            print(f"  {key}: {result[key]}")
    for tensors, row in result.get("scaling", {}).items():
        print(f"  {tensors:5d} tensors: " + ", ".join(f"{key} {value:.3g}" for key, value in row.items()))
    if "lasting" in result:
        print("  µs a whole step, up to step " + ", ".join(f"{step}: {value:.0f}" for step, value in result["lasting"].items()))
    sys.stdout.flush()


def apart(mode: str) -> dict[str, Any]:
    """The result of one mode, from a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--mode", mode, "--json", file.name], check=True)
        result: dict[str, Any] = json.loads(Path(file.name).read_text())[0]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--mode", choices=[*MODES, "both"], help="default: eager on cpu, both on cuda (eager and compiled)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, help="steps per round; default: 5 on the CPU, 10 on a GPU")
    parser.add_argument(
        "--shape", type=int, nargs=2, help="sequences, and tokens of each with the target; a small one is launch-bound"
    )
    parser.add_argument("--reads", action="store_true", help="a loop that reads its loss at every step, and waits for it")
    parser.add_argument("--warmup", type=int, default=12)
    parser.add_argument("--only", nargs="*", help="names of the cases besides the base")
    parser.add_argument("--demo", action="store_true", help="the demo's own step: its batches, accumulated, and its threads")
    parser.add_argument("--peers", action="store_true", help="also wandb.watch, trainscope and a naive loop")
    parser.add_argument("--activations", action="store_true", help="what each of the activation statistics costs, by name")
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    on_gpu = arguments.device == "cuda"
    mode = arguments.mode or ("both" if on_gpu else "eager")
    arguments.steps = arguments.steps or (10 if on_gpu else 5)
    if arguments.demo:
        if on_gpu or arguments.shape:
            parser.error("--demo is the demo's own step on the CPU: leave out --device cuda and --shape")
        leave_a_core()
        arguments.shape = Plan.batch, Plan.context + 1
    arguments.shape = arguments.shape or ((16, 1025) if on_gpu else (8, 129))
    if arguments.scaling:
        results = [scaling(arguments)]
    elif mode == "both":
        results = [apart(one) for one in ("eager", "compiled")]
    else:
        results = [compare(arguments, mode)]
    for result in results:
        if mode != "both":  # else each process has shown its own
            show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
