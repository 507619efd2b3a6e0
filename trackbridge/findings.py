"""What an engineer should know of a run, ranked: its anomalies, and what in the record or the setup deserves a look.

Each rule reads the record and says what it found, how much it matters (0 to 1, on the anomalies' own scale) and what to do
about it. A rule that has nothing to say says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from trackbridge.advice import what_to_do
from trackbridge.backends.words import anomaly_line
from trackbridge.config import RAREST
from trackbridge.history import RunRecord
from trackbridge.journal import JournalReader
from trackbridge.names import ACT
from trackbridge.records import FloatArray, StepContext
from trackbridge.rundir import RunDirectory
from trackbridge.shipping.status import status


@dataclass(frozen=True, slots=True)
class Finding:
    """`about` is one of anomaly, record, replay, speed, setup, delivery. `what` is one line; `advice` what to do, empty where
    there is nothing to do; `step` where it was, None for the whole run."""

    severity: float
    about: str
    what: str
    advice: str = ""
    step: int | None = None


Rule = Callable[[RunRecord], Iterator[Finding]]
_RULES: list[Rule] = []
_DEAR = 0.03  # of a step, from which our own part is worth a line


def findings(record: RunRecord) -> list[Finding]:
    """Everything the rules have to say about a run, the most severe first."""
    found = [finding for rule in _RULES for finding in rule(record)]
    return sorted(found, key=lambda finding: -finding.severity)


def _rule(rule: Rule) -> Rule:
    _RULES.append(rule)
    return rule


def _values(record: RunRecord, name: str) -> FloatArray:
    """Finite values of a series, oldest first; empty when the record does not have it."""
    if name not in record.names:
        return np.zeros(0)
    values = record.series(name)[1]
    return values[np.isfinite(values)]


def _last(record: RunRecord, name: str) -> float:
    values = _values(record, name)
    return float(values[-1]) if len(values) else 0.0


# -- anomalies


@_rule
def anomalies(record: RunRecord) -> Iterator[Finding]:
    for anomaly in record.anomalies:
        yield Finding(anomaly.severity, "anomaly", anomaly_line(anomaly), what_to_do(record.path, anomaly), anomaly.onset)


# -- how the run ended, and whether it learns


@_rule
def end(record: RunRecord) -> Iterator[Finding]:
    if record.status == "failed":
        yield Finding(0.95, "setup", f"the run failed: {record.error}")
    elif record.status == "killed":
        yield Finding(0.9, "setup", "the run was killed: its trainer ended without a word")


@_rule
def loss(record: RunRecord) -> Iterator[Finding]:
    if "train/loss" not in record.names:
        yield Finding(0.8, "record", "no loss is recorded, so nothing watches it", "pass it: run.step(loss=loss)")
    if "grad/norm" not in record.names and "grad/norm_clipped" not in record.names:
        what = "no gradient norm is recorded"
        if any(name.endswith("/grad_norm") for name in record.names):  # of parameters, so several optimizers take turns
            advice = "it is there in steps in which every watched optimizer stepped: call run.step once after all of them"
            yield Finding(0.3, "record", f"{what} but of parameters", advice)
        else:
            yield Finding(0.5, "record", what, "call run.watch(model, optimizer) before the first step")


@_rule
def idle(record: RunRecord) -> Iterator[Finding]:
    """Closed steps without an update of any optimizer, as their hooks counted them (which see none in a CUDA graph)."""
    if not {"optim/applied", "optim/skipped"} <= set(record.names):
        return
    (_, applied), (_, left_out) = record.series("optim/applied"), record.series("optim/skipped")
    still = (np.diff(applied) == 0) & (np.diff(left_out) == 0)
    if len(still) < 10 or still.mean() <= 0.3 or still[3 * len(still) // 4 :].all():
        return
    advice = (
        "call run.step once for each optimizer.step, and run.micro for each micro-batch of it; updates that a GradScaler drops "
        "are known with run.watch(model, optimizer, scaler=scaler)"
    )
    yield Finding(0.5, "setup", f"in {still.mean():.0%} of the steps no watched optimizer stepped", advice)


@_rule
def skipped(record: RunRecord) -> Iterator[Finding]:
    updates, left_out = _last(record, "optim/applied"), _last(record, "optim/skipped")
    if left_out > 0.05 * (updates + left_out) and left_out > 20:
        what = f"{left_out:.0f} of {updates + left_out:.0f} updates were skipped"
        yield Finding(0.6, "setup", what, "look at train/loss_scale: half precision may not hold these gradients")


@_rule
def clipping(record: RunRecord) -> Iterator[Finding]:
    if not {"grad/norm", "grad/norm_clipped"} <= set(record.names):
        return
    (at, whole), (there, used) = record.series("grad/norm"), record.series("grad/norm_clipped")
    _, mine, theirs = np.intersect1d(at, there, assume_unique=True, return_indices=True)
    cut = used[theirs] < 0.999 * whole[mine]
    if len(cut) >= 50 and cut.mean() > 0.95:
        share = float(np.median(used[theirs][cut] / whole[mine][cut]))
        what = f"gradients were clipped in {cut.mean():.0%} of the steps, to {share:.2g} of their norm in the middle"
        yield Finding(0.2, "setup", what, "it is the clip that sets their size; raise it if that is not meant")


# -- what is lacking in the record


@_rule
def lost(record: RunRecord) -> Iterator[Finding]:
    words = {
        "trackbridge/rows_dropped": ("rows were dropped because the recording thread could not keep up", "record fewer layers"),
        "trackbridge/rows_unmerged": ("rows are rank 0's own: other ranks' numbers came late", "see ranks/slowest"),
        "trackbridge/rows_lost": ("rows did not reach the disk", "is the disk full?"),
        "trackbridge/contexts_dropped": ("steps have no context, so they cannot be replayed", "lower recorder.batch_bytes"),
    }
    for name, (what, advice) in words.items():
        count = _last(record, name)
        if count:
            yield Finding(0.7, "record", f"{count:.0f} {what}", advice)


@_rule
def damage(record: RunRecord) -> Iterator[Finding]:
    if record.damage:
        yield Finding(0.75, "record", str(record.damage))


@_rule
def silent(record: RunRecord) -> Iterator[Finding]:
    """Modules whose activations stopped coming, or never came."""
    wanted = record.settings.get("activations", {}).get("sites", "blocks")
    sites = [name for name in record.names if name.startswith(ACT) and name.endswith("/rms")]
    weights = [name.split("/")[1] for name in record.names if name.startswith("layer/")]
    one_module = bool(weights) and not any("." in name for name in weights)  # a bare `nn.Linear` has nothing inside to look at
    if not sites and not one_module and wanted not in ("none", []) and "optim/applied" in record.names:
        advice = "name modules in activations.sites; a model that is compiled is watched before it first runs"
        yield Finding(0.3, "record", "no activation was seen", advice)
    last = max((int(record.series(name)[0][-1]) for name in ("perf/step_s", "train/loss") if name in record.names), default=0)
    gone = [name for name in sites if last - _seen(record, name) > 100]
    if gone:
        shown = ", ".join(name.split("/", 1)[1].rsplit("/", 1)[0] for name in gone[:5])
        at = _seen(record, gone[0])
        more = f" and {len(gone) - 5} more" if len(gone) > 5 else ""
        yield Finding(0.4, "record", f"modules not seen any more after step {at}: {shown}{more}", step=at)


def _seen(record: RunRecord, name: str) -> int:
    """The last step at which the module of the series `name` ran. One with a NaN has its count of them and nothing else."""
    beside = f"{name.rpartition('/')[0]}/nonfinite"
    return max(int(record.series(each)[0][-1]) for each in (name, beside) if each in record.names)


@_rule
def replayable(record: RunRecord) -> Iterator[Finding]:
    """State that a replay would miss."""
    if not record.settings.get("recorder", {}).get("enabled", True):
        yield Finding(0.3, "replay", "the recorder is off: no step of this run can be replayed", "recorder={'enabled': True}")
        return
    directory = RunDirectory(record.path)
    notes: dict[str, list[int]] = {}
    reader = JournalReader(directory.contexts(min(directory.ranks(), default=0)), kinds={StepContext})
    while records := reader.read(limit=512):
        for context in records:
            if isinstance(context, StepContext):
                for note in dict.fromkeys((*context.notes, *(m.why_no_tensors or "" for m in context.micro))):
                    if note:
                        notes.setdefault(note, []).append(context.step)
    for note, steps in notes.items():
        yield Finding(0.25, "replay", f"{note} ({len(steps)} of the steps kept)", step=steps[0])


# -- whether it can be repeated


@_rule
def repeatable(record: RunRecord) -> Iterator[Finding]:
    torch = record.provenance.get("torch", {})
    if not torch:
        return
    gpu = bool(record.provenance.get("hardware", {}).get("gpus"))
    if gpu and torch.get("cudnn_benchmark"):
        yield Finding(0.15, "setup", "cudnn.benchmark is on: which kernel runs depends on a race", "off for bit-exact replays")
    if gpu and not torch.get("deterministic_algorithms"):
        advice = "torch.use_deterministic_algorithms(True), where the slowdown is bearable"
        yield Finding(0.1, "setup", "deterministic algorithms are off: a replay on the GPU may differ in the last bits", advice)
    if gpu and (torch.get("matmul_allow_tf32") or torch.get("float32_matmul_precision") in ("high", "medium")):
        yield Finding(0.1, "setup", "float32 products use TF32: ten bits of mantissa", "off where float32 accuracy matters")


@_rule
def code(record: RunRecord) -> Iterator[Finding]:
    if not record.provenance:
        yield Finding(0.2, "setup", "the run's provenance is not recorded: code and packages are unknown")
        return
    git = record.provenance.get("git", {})
    if not git:
        yield Finding(0.15, "setup", "the code is in no git repository: nobody can say later what ran")
    elif git.get("diff_cut"):
        yield Finding(0.2, "setup", "uncommitted changes were too large to keep whole", "commit before a long run")


@_rule
def changed(record: RunRecord) -> Iterator[Finding]:
    """What differed between attempts."""
    from trackbridge.provenance import differences

    known = [params.values["provenance"] for params in record.params if isinstance(params.values.get("provenance"), dict)]
    for before, after in pairwise(known):
        found = differences(before, after)
        if found:
            shown = ", ".join(f"{name}: {a} -> {b}" for name, a, b in found[:4])
            more = f" and {len(found) - 4} more" if len(found) > 4 else ""
            yield Finding(0.5, "setup", f"between two attempts changed: {shown}{more}")


# -- speed


@_rule
def waiting(record: RunRecord) -> Iterator[Finding]:
    total, fetch = _values(record, "perf/step_s").sum(), _values(record, "perf/fetch_s").sum()
    if total > 0 and fetch > 0.1 * total:
        what = f"{fetch / total:.0%} of the time went into waiting for data"
        yield Finding(min(0.6, 0.2 + fetch / total), "speed", what, "more workers, a longer prefetch, or a faster disk")


@_rule
def overhead(record: RunRecord) -> Iterator[Finding]:
    share, thinned = _values(record, "trackbridge/overhead_share"), _last(record, "trackbridge/thinning") >= RAREST
    if thinned:  # how much is left
        share = share[-int((_values(record, "trackbridge/thinning") >= RAREST).sum()) :]
    allowed, took = record.settings.get("max_overhead"), float(share.mean()) if len(share) else 0.0
    if took <= (allowed or _DEAR):
        return
    what = f"trackbridge itself took {took:.1%} of a step on average"
    if allowed is None and _weights_alone(record) > took / 2:
        advice = "most of it to measure weights: raise parameters.weights_every, moments_every and rows_every"
        yield Finding(0.3, "speed", what, advice)
    elif allowed is None:
        advice = f"init(max_overhead={_DEAR}) takes activations and weights more rarely, and shows what is left"
        yield Finding(0.3, "speed", what, advice)
    elif thinned:
        left = f"with activations and weights taken {RAREST} times more rarely: the rest counts less in a longer step"
        yield Finding(0.2, "speed", f"{what}, {left}")


def _weights_alone(record: RunRecord) -> float:
    """Of the mean share of a step, what the steps that measure weights took beyond the others'; 0 where that is not known."""
    if "param/norm" not in record.names:
        return 0.0
    steps, share = record.series("trackbridge/overhead_share")
    measured = np.isin(steps, record.series("param/norm")[0])
    if measured.all() or not measured.any():
        return 0.0
    return float((share[measured].mean() - share[~measured].mean()) * measured.mean())


@_rule
def memory(record: RunRecord) -> Iterator[Finding]:
    gpus = record.provenance.get("hardware", {}).get("gpus") or []
    reserved = _values(record, "mem/reserved_bytes")
    if gpus and len(reserved):
        share = float(reserved.max()) / float(gpus[0]["memory_bytes"])
        if 0.95 < share <= 1:
            advice = "a longer batch may not fit; look at mem/fragmentation"
            yield Finding(0.4, "speed", f"device memory was {share:.0%} full", advice)
    fragmented, retries = _values(record, "mem/fragmentation"), _last(record, "mem/alloc_retries")
    if len(fragmented) and float(np.median(fragmented)) > 0.3 and retries:  # without, it is where activations go
        unused = f"{float(np.median(fragmented)):.0%} of the allocator's memory was not in use at the end of a step"
        what = f"{unused}, and it gave memory back {retries:.0f} times to get some"
        yield Finding(0.2, "speed", what, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")


# -- delivery


@_rule
def delivery(record: RunRecord) -> Iterator[Finding]:
    for backend in status(record.path):
        if backend.dead_letters:
            what = f"{backend.kind} refused {backend.dead_letters} records for good"
            yield Finding(0.5, "delivery", what, "see shipper/dead-letters.jsonl")
        if backend.lag and record.status != "running":
            yield Finding(0.45, "delivery", f"{backend.kind} lacks {backend.lag} records", f"trackbridge sync {record.path}")
