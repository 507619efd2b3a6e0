"""The metric catalogue: every series trackbridge writes, with unit, meaning, formula and source.

Dashboards and docs are generated from this file; every series of ours is described here (a test holds them to it). Names use
``[A-Za-z0-9_./-]``; a backend that allows less maps them, injectively, inside itself. Module and parameter names are the
model's own: wrapper prefixes (`WRAPPERS`) are removed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "_original_module")
LAYER = "layer/"
ACT = "act/"
ROUTER = "router/"
EXPERT = "expert/"
WIDE = (LAYER, ACT, ROUTER, EXPERT)
STEP = "trackbridge/step"
SEQ = "trackbridge/seq"
LOCAL = "_local"
"""Suffix of a series that is of this rank's shards only: what one rank cannot know is never shown as global."""
ATTEMPT = "trackbridge/attempt"
NONFINITE = "nonfinite/"
LAYERS = "layers/"
COALESCED_ROWS = "coalesced/rows"
COALESCED_MIN = "coalesced/min/"
COALESCED_MAX = "coalesced/max/"


@dataclass(frozen=True, slots=True)
class Metric:
    """One series, or one family of series when `name` has a ``<...>`` part. `better` says which way is good, if any."""

    name: str
    unit: str
    meaning: str
    formula: str = ""
    source: str = ""
    better: str = ""


CATALOGUE: tuple[Metric, ...] = (
    Metric("train/loss", "", "training loss of the optimizer step", "mean over micro-batches, weighted by tokens", "", "lower"),
    Metric("train/loss/<part>", "", "one term of a loss given as a dict"),
    Metric("train/sample_loss_max", "", "largest loss of one sample in the step"),
    Metric("train/sample_loss_argmax", "", "its row, counted over the step's micro-batches"),
    Metric("train/sample_loss_max/<place>", "", "the next largest ones, from /2 on; of one rank"),
    Metric("train/sample_loss_argmax/<place>", "", "their rows"),
    Metric("train/sample_loss_p50", "", "median over the step's samples; several ranks: the mean of theirs"),
    Metric("train/sample_loss_p90", "", "a tenth of the samples have a larger loss; several ranks: the mean of theirs"),
    Metric("train/lr", "", "learning rate of the first parameter group"),
    Metric("train/lr/<group>", "", "learning rate of each further parameter group"),
    Metric("train/loss_scale", "", "GradScaler's scale"),
    Metric("train/tokens", "tokens", "tokens consumed so far in this run"),
    Metric(
        "grad/norm", "",
        "global L2 norm of the gradient, before clipping where that is known (run.clip_grad_norm_ or grad_norm=); of several "
        "optimizers where all stepped",
        "sqrt(sum g^2)",
    ),
    Metric("grad/norm_clipped", "", "global L2 norm of the gradient the optimizer used", "sqrt(sum g^2)"),
    Metric("grad/nonfinite", "elements", "NaN or Inf elements over all gradients"),
    Metric("grad/unlocated", "", "1 where these counts cannot say where it began: all gradients are non-finite throughout"),
    Metric("grad/zero", "parameters", "parameters whose gradient is 0 in every element"),
    Metric(
        "grad/vanishing", "parameters", "parameters whose gradient is tiny, but not 0, compared to the others",
        "RMS(g) < 1e-6 median over parameters of RMS(g)",
    ),
    Metric("grad/missing", "parameters", "trainable parameters that an optimizer stepped without a gradient"),
    Metric("param/norm", "", "global L2 norm of the trainable parameters", "sqrt(sum w^2)"),
    Metric("param/nonfinite", "elements", "NaN or Inf elements over all trainable parameters"),
    Metric("param/dead_rows", "rows", "dead rows over all weight matrices", "sum over layer/*/dead_rows"),
    Metric(
        "param/replicas_differ", "parameters", "parameters whose bits differ between ranks that hold the same (merged rows)",
        "count of layer/*/checksum that are not equal on all ranks",
    ),
    Metric("optim/applied", "updates", "updates really applied so far"),
    Metric("optim/skipped", "updates", "updates skipped so far (GradScaler overflow, guard)"),
    Metric("guard/held", "", "1 in a step whose update run.guard left out"),
    Metric("guard/dropped", "", "1 in a step whose update run.guard had a fused optimizer drop"),
    Metric("guard/flagged", "steps", "steps that run.guard found out of band so far"),
    Metric("optim/exp_avg_norm", "", "global L2 norm of Adam's first moment", "", "arXiv:1412.6980"),
    Metric("optim/exp_avg_sq_norm", "", "global L2 norm of Adam's second moment", "", "arXiv:1412.6980"),
    Metric("optim/update_ratio", "", "size of the update relative to the weights", "|dw| / |w|, dw of samples"),
    Metric("perf/step_s", "s", "wall time of the step, pauses excluded", "", "", "lower"),
    Metric("perf/fetch_s", "s", "waiting for the data loader", "", "", "lower"),
    Metric("perf/forward_s", "s", "forward passes", "", "", "lower"),
    Metric("perf/backward_s", "s", "backward passes", "", "", "lower"),
    Metric("perf/optimizer_s", "s", "optimizer step", "", "", "lower"),
    Metric("perf/other_s", "s", "the rest of the step", "max(step - fetch - forward - backward - optimizer, 0)"),
    Metric("perf/overlap_s", "s", "counted twice: data fetched while the device works", "max(fetch + ... - step, 0)"),
    Metric("perf/paused_s/<what>", "s", "time in `run.pause(what)` during the step, not part of it"),
    Metric("perf/tokens_per_s", "tokens/s", "tokens of the whole step over its wall time", "", "", "higher"),
    Metric("perf/padded_tokens_per_s", "tokens/s", "the same with the padding counted in: what the device worked on"),
    Metric("data/padding_share", "", "share of the step's tokens that is padding", "1 - tokens / padded", "", "lower"),
    Metric("perf/samples_per_s", "samples/s", "samples of the whole step over its wall time", "", "", "higher"),
    Metric("perf/eta_s", "s", "until the last step, at the pace of the last fifty", "steps left * typical step"),
    Metric("perf/flops_per_s", "FLOP/s", "model FLOPs of the step over its wall time, of one device", "", "", "higher"),
    Metric("perf/mfu", "", "model FLOPs utilisation, recomputation not counted", "", "arXiv:2204.02311", "higher"),
    Metric("perf/hfu", "", "hardware FLOPs utilisation, recomputation counted", "", "arXiv:2205.05198", "higher"),
    Metric("mem/allocated_bytes", "B", "device memory held by tensors at the end of the step"),
    Metric("mem/reserved_bytes", "B", "device memory held by the allocator"),
    Metric("mem/sampled_max_bytes", "B", "largest allocated value we sampled: a lower bound of the peak"),
    Metric("mem/device_used_bytes", "B", "device memory in use by whomever, as the driver says, up to ten steps ago"),
    Metric("mem/alloc_retries", "", "times that the allocator gave memory back before it got any, so far", "", "", "lower"),
    Metric("mem/fragmentation", "", "share of reserved memory that is not allocated", "1 - allocated / reserved"),
    Metric("host/rss_bytes", "B", "resident memory of the training process"),
    Metric("layer/<parameter>/grad_norm", "", "L2 norm of this parameter's gradient, as the optimizer used it unless noted"),
    Metric("layer/<parameter>/grad_max", "", "largest absolute gradient element"),
    Metric("layer/<parameter>/grad_nonfinite", "elements", "NaN or Inf elements of this gradient"),
    Metric("layer/<parameter>/grad_mean", "", "mean of this gradient's elements"),
    Metric("layer/<parameter>/grad_zeros", "", "share of this gradient's elements that are exactly 0"),
    Metric("layer/<parameter>/weight_norm", "", "L2 norm of this parameter"),
    Metric("layer/<parameter>/weight_rms", "", "root mean square of this parameter's elements"),
    Metric("layer/<parameter>/weight_max", "", "largest absolute element of this parameter"),
    Metric("layer/<parameter>/weight_nonfinite", "elements", "NaN or Inf elements of this parameter"),
    Metric(
        "layer/<parameter>/dead_rows", "rows",
        "rows of this weight matrix (slices of its first dimension) whose gradient was exactly 0 at the last ten looks",
    ),
    Metric(
        "layer/<parameter>/checksum", "", "of this parameter's bits: equal on ranks that hold the same",
        "sum over i of (2i + 1) word_i mod 2^53",
    ),
    Metric("layer/<parameter>/exp_avg_norm", "", "L2 norm of Adam's first moment", "", "arXiv:1412.6980"),
    Metric("layer/<parameter>/exp_avg_sq_norm", "", "L2 norm of Adam's second moment", "", "arXiv:1412.6980"),
    Metric("layer/<parameter>/update_ratio", "", "size of the update relative to the weight", "|dw| / |w|, dw of a sample"),
    Metric("act/<module>/mean", "", "mean of the module's output"),
    Metric("act/<module>/std", "", "standard deviation of the module's output"),
    Metric("act/<module>/rms", "", "root mean square of the module's output"),
    Metric("act/<module>/max", "", "largest absolute output"),
    Metric("act/<module>/kurtosis", "", "excess kurtosis of the output over all elements", "m4 / m2^2 - 3", "arXiv:2402.17762"),
    Metric(
        "act/<module>/channel_kurtosis", "",
        "kurtosis over channels of the RMS of each over tokens: 1 when all are alike; several ranks: the mean of theirs",
        "mean_j(s_j^4) / mean_j(s_j^2)^2, s_j = sqrt(mean over tokens of x_j^2)", "arXiv:2405.19279, eq. 1",
    ),
    Metric(
        "act/<module>/sampled_logit_max", "",
        "largest attention logit in the block, of evenly spaced queries only: a lower bound", "max(q k^T * scale + mask)",
        "arXiv:2302.05442",
    ),
    Metric("act/<module>/nonfinite", "elements", "NaN or Inf elements of the output"),
    Metric("router/<module>/load_max", "", "largest share of a step's (token, expert) pairs that one expert of a router has"),
    Metric("router/<module>/load_min", "", "smallest share that one of them has"),
    Metric(
        "router/<module>/load_entropy", "", "how even the load is: 1 on all experts alike, 0 all on one",
        "-sum(p ln p) / ln(experts)", "", "higher",
    ),
    Metric("expert/<module>/load_share", "", "share of one expert, <router>.<number>, of its router's (token, expert) pairs"),
    Metric(
        "embedding/hottest_norm/<module>", "",
        "largest gradient norm of any row of the token embedding, as the optimizer used it; /2, /3: of the next rows",
        "|g_row|",
    ),
    Metric("embedding/hottest_row/<module>", "", "the token id whose row that is; /2, /3: those of the next rows"),
    Metric("layers/grad_norm_max", "", "largest gradient norm of any parameter", "max over layer/*/grad_norm"),
    Metric("layers/grad_max", "", "largest absolute gradient element of any parameter", "max over layer/*/grad_max"),
    Metric("layers/grad_nonfinite", "elements", "NaN or Inf gradient elements over all parameters", "sum"),
    Metric("layers/weight_norm_max", "", "largest weight norm of any parameter", "max over layer/*/weight_norm"),
    Metric("layers/weight_max", "", "largest absolute element of any parameter", "max over layer/*/weight_max"),
    Metric("layers/update_ratio_max", "", "largest relative update of any parameter", "max over layer/*/update_ratio"),
    Metric("layers/act_max", "", "largest absolute activation of any module", "max over act/*/max"),
    Metric("layers/act_rms_max", "", "largest activation RMS of any module", "max over act/*/rms"),
    Metric("layers/kurtosis_max", "", "largest activation kurtosis of any module", "max over act/*/kurtosis"),
    Metric(
        "layers/channel_kurtosis_max", "", "largest kurtosis over channels of any module", "max over act/*/channel_kurtosis"
    ),
    Metric("layers/load_max", "", "largest share that one expert of any router has", "max over router/*/load_max", "", "lower"),
    Metric("layers/act_nonfinite", "elements", "NaN or Inf activations over all modules", "sum"),
    Metric("data/repeated", "steps", "how many steps ago this very batch was used, told only where that is a fault"),
    Metric("ranks/merged", "ranks", "ranks whose numbers are in this row; 1 where the others' did not come in time"),
    Metric("ranks/nonfinite", "ranks", "ranks whose own loss or activations were not finite"),
    Metric("ranks/nonfinite_rank", "", "the lowest of them"),
    Metric("ranks/loss_min", "", "smallest loss of any rank"),
    Metric("ranks/loss_max", "", "largest loss of any rank; NaN if one is"),
    Metric("ranks/loss_max_rank", "", "the rank that has it"),
    Metric(
        "ranks/busy_s_max", "s", "longest time of any rank outside of the passes in which ranks wait for each other",
        "max over ranks of step - backward - optimizer", "", "lower",
    ),
    Metric("ranks/slowest", "", "the rank that took it: a straggler is always the same one"),
    Metric(
        "anomaly/score", "", "score of the anomaly detected at this step (sparse): robust sigmas, or a fault's own ratio"
    ),
    Metric("anomaly/count", "", "anomalies detected so far (sparse)"),
    Metric("nonfinite/<series>", "steps", "1 at each step where this series was NaN or Inf; a coalesced row counts its steps"),
    Metric("coalesced/rows", "rows", "how many steps this row stands for, where a tracker's budget coalesced them"),
    Metric("coalesced/min/<series>", "", "smallest finite value over the steps that this row stands for"),
    Metric("coalesced/max/<series>", "", "largest finite value over the steps that this row stands for"),
    Metric("trackbridge/step", "", "the optimizer step: the x axis of every chart"),
    Metric("trackbridge/seq", "", "number of the journal record this row came from"),
    Metric("trackbridge/attempt", "", "0 at first, one more with each resume"),
    Metric("trackbridge/rows_dropped", "rows", "rows lost because the scribe could not keep up"),
    Metric("trackbridge/rows_lost", "rows", "rows that the disk did not take"),
    Metric("trackbridge/rows_thinned", "rows", "rows thinned by the journal's budget before every tracker had them"),
    Metric("trackbridge/rows_unmerged", "rows", "rows that are rank 0's own because other ranks' numbers did not come in time"),
    Metric("trackbridge/capsules_given_up", "capsules", "spike capsules not made or not kept: others are more severe"),
    Metric("trackbridge/contexts_dropped", "steps", "step contexts (RNG states, batches) lost because the scribe fell behind"),
    Metric(
        "trackbridge/overhead_share", "", "our measured share of the step's time", "max(host time, device time) / step", "",
        "lower",
    ),
    Metric("trackbridge/thinning", "", "how many times more rarely than set statistics are taken, to keep to max_overhead"),
    Metric("trackbridge/lag_rows", "rows", "records this tracker is behind the journal"),
)  # fmt: skip

_ILLEGAL = re.compile(r"[^A-Za-z0-9_./-]")


def clean(dotted: str) -> str:
    """A module or parameter name without wrapper prefixes: ``module._orig_mod.head.weight`` -> ``head.weight``."""
    return ".".join(part for part in dotted.split(".") if part not in WRAPPERS)


def legal(name: str) -> str:
    """`name` with every character outside ``[A-Za-z0-9_./-]`` replaced by ``_``."""
    return _ILLEGAL.sub("_", name)


def layer(parameter: str, statistic: str) -> str:
    return f"{LAYER}{parameter}/{statistic}"


def act(module: str, statistic: str) -> str:
    return f"{ACT}{module}/{statistic}"


def router(module: str, statistic: str) -> str:
    return f"{ROUTER}{module}/{statistic}"


def expert(module: str, number: int) -> str:
    """The load of one expert of the router `module`."""
    return f"{EXPERT}{module}.{number}/load_share"


def hottest(what: str, module: str, place: int) -> str:
    """``embedding/hottest_<what>/<module>`` of the hottest row, with a ``/2`` and so on of those behind it (`place` from 0)."""
    return f"embedding/hottest_{what}/{module}{f'/{place + 1}' if place else ''}"


def is_wide(name: str) -> bool:
    """True for series of layers, routers and experts, of which a large model has thousands."""
    return name.startswith(WIDE)


def is_measured_wide(name: str) -> bool:
    """`is_wide`, of ours: not a series of the user's that is only called like one."""
    return is_wide(name) and describe(name) is not None


def describe(name: str) -> Metric | None:
    """The catalogue entry of a series, families included; None for a user's own series."""
    name = name.removesuffix(LOCAL)
    singles, families = _index()
    return singles.get(name) or next((metric for pattern, metric in families if pattern.fullmatch(name)), None)


@cache
def _index() -> tuple[dict[str, Metric], list[tuple[re.Pattern[str], Metric]]]:
    """The catalogue's single series by name, and its families by what their names look like."""
    singles = {metric.name: metric for metric in CATALOGUE if "<" not in metric.name}
    return singles, [(_pattern(metric.name), metric) for metric in CATALOGUE if "<" in metric.name]


def regex(family: str) -> str:
    """A regular expression that matches the series of a family of the catalogue, for charts. Raises `KeyError` if the
    catalogue has no such family, so that a chart cannot outlive its series."""
    if "<" not in family or all(metric.name != family for metric in CATALOGUE):
        raise KeyError(f"{family!r} is no family of series in the catalogue")
    return _pattern(family).pattern


def _pattern(family: str) -> re.Pattern[str]:
    head, rest = family.split("<", 1)
    return re.compile(re.escape(head) + ".+" + re.escape(rest.split(">", 1)[1]))
