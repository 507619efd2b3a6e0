"""What is drawn, as data: the one description that W&B, TensorBoard, MLflow and the local page render.

A panel names series of the catalogue (`names.CATALOGUE`), or a family of them such as ``act/<module>/kurtosis``, and how they
are to be seen. It belongs to a section. A renderer goes through `PANELS` by section, so a new entry appears wherever its view
can be shown; a `Template` says which sections a report has and in which order. A series that some runs lack says why in
`CONDITIONAL`; every other one is in every run (tests hold both to the demo's run), so no chart stays empty without a reason.

Turned down: descriptions in each renderer (they drift apart), a Vega grammar (three of the four renderers cannot draw it).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

from trackbridge import names

View: TypeAlias = Literal["line", "heatmap", "text", "table", "scalar"]
Scale: TypeAlias = Literal["linear", "log"]


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `id` is stable and unique.

    `series`: names or families of the catalogue, drawn over `axis`. `scale` is that of the values (for a heatmap: of the
    colours). `marked`: anomalies are marked in it. `content`: for a text or table, which one (`CONTENTS`); it has no series.
    `width`: share of a row, in 24ths.
    """

    id: str
    section: str
    title: str
    series: tuple[str, ...] = ()
    view: View = "line"
    scale: Scale = "linear"
    axis: str = names.STEP
    marked: bool = True
    content: str = ""
    width: int = 12

    @property
    def families(self) -> tuple[str, ...]:
        """The families among `series`: those with a ``<...>`` part."""
        return tuple(series for series in self.series if "<" in series)

    @property
    def regex(self) -> str:
        """What the series match, families included, and nothing else: for charts that choose their series by an expression."""
        each = "|".join(names.regex(series) if "<" in series else re.escape(series) for series in self.series)
        return f"^({each})({names.LOCAL})?$"

    @property
    def unit(self) -> str:
        """The unit that all series have in common, "" otherwise."""
        units = {metric.unit for series in self.series if (metric := known(series))}
        return units.pop() if len(units) == 1 else ""

    def draws(self, series: str) -> bool:
        """Whether `series`, as a run calls it, is in this panel. A rank's own share of it (``_local``) is."""
        return bool(self.series) and _pattern(self).fullmatch(series) is not None

    def members(self, present: Iterable[str]) -> list[str]:
        """Those of `present` that it draws: the panel's own order, then that of `present`."""
        order = {series: place for place, series in enumerate(self.series)}
        drawn = [series for series in present if self.draws(series)]
        return sorted(drawn, key=lambda series: order.get(series.removesuffix(names.LOCAL), len(order)))


@cache
def _pattern(panel: Panel) -> re.Pattern[str]:
    return re.compile(panel.regex)


@dataclass(frozen=True, slots=True)
class Use:
    """A section in a template. `near`: cut to the steps around the anomaly; `only`: these panels of it (all by default)."""

    section: str
    title: str = ""
    near: bool = False
    only: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Template:
    """A report. `about`: one anomaly, one run, or the runs of a project."""

    name: str
    title: str
    about: Literal["anomaly", "run", "project"]
    uses: tuple[Use, ...]


SECTIONS: Mapping[str, str] = {
    "story": "The story",
    "outcome": "Loss and gradient norm",
    "movers": "What moved first",
    "layers": "Layer by layer",
    "settings": "Learning rate and updates",
    "batch": "The batch",
    "speed": "Throughput",
    "memory": "Memory",
    "nonfinite": "NaN and infinity",
    "ranks": "Rank by rank",
    "recorder": "The recorder itself",
}
"""Sections by their id, with the heading they have unless a template gives another; in the order of a page."""

CONTENTS: Mapping[str, str] = {
    "post-mortem": "the post-mortem of the anomaly, as Markdown",
    "anomalies": "a row per anomaly of the run",
    "batch": "identity and token statistics of the batch at the onset",
    "counterfactuals": "a row per replay with one thing changed",
    "capsule": "the files of the capsule, and the commands that fetch and replay it",
}

LR, LR_GROUPS = "train/lr", "train/lr/<group>"
GRADIENTS, WEIGHTS = "layer/<parameter>/grad_norm", "layer/<parameter>/weight_norm"
UPDATES, KURTOSIS, LARGEST = "layer/<parameter>/update_ratio", "act/<module>/kurtosis", "act/<module>/max"

PANELS: tuple[Panel, ...] = (
    Panel("loss", "outcome", "Loss", ("train/loss",)),
    Panel("gradient-norm", "outcome", "Gradient norm", ("grad/norm", "grad/norm_clipped"), scale="log"),
    Panel("loss-parts", "outcome", "Terms of the loss", ("train/loss/<part>",)),
    Panel("rank-losses", "ranks", "Loss over ranks", ("ranks/loss_min", "ranks/loss_max")),
    Panel("rank-worst", "ranks", "Rank with the largest loss, and the slowest", ("ranks/loss_max_rank", "ranks/slowest")),
    Panel("rank-busy", "ranks", "Longest step outside of the passes in which ranks wait", ("ranks/busy_s_max",)),
    Panel("rank-broken", "ranks", "Ranks that are not finite, and ranks in the row", ("ranks/nonfinite", "ranks/merged")),
    Panel("replicas", "ranks", "Parameters whose replicas differ in bits", ("param/replicas_differ",)),
    Panel("score", "outcome", "Anomaly score (sparse: no point is lost)", ("anomaly/score",), marked=False),
    Panel("count", "outcome", "Anomalies so far", ("anomaly/count",), view="scalar", marked=False, width=6),
    Panel("largest-gradient", "movers", "Largest gradient norm of any parameter", ("layers/grad_norm_max",), scale="log"),
    Panel("largest-kurtosis", "movers", "Largest kurtosis of any module", ("layers/kurtosis_max",)),
    Panel("largest-update", "movers", "Largest relative update of any parameter", ("layers/update_ratio_max",), scale="log"),
    Panel("largest-activation", "movers", "Largest activation of any module", ("layers/act_max",), scale="log"),
    Panel(
        "hottest-rows", "movers", "Gradient norm of the hottest embedding rows", ("embedding/hottest_norm/<module>",),
        scale="log",
    ),
    Panel("largest-channels", "movers", "Largest kurtosis over channels", ("layers/channel_kurtosis_max",), scale="log"),
    Panel("largest-load", "movers", "Largest share of an expert of any router", ("layers/load_max",)),
    Panel("gradients", "layers", "Gradient norm by parameter", (GRADIENTS,), scale="log"),
    Panel("kurtosis", "layers", "Kurtosis by module", (KURTOSIS,)),
    Panel("updates", "layers", "Relative update by parameter", (UPDATES,), scale="log"),
    Panel("activations", "layers", "Largest activation by module", (LARGEST,), scale="log"),
    Panel("weights", "layers", "Weight norm by parameter", (WEIGHTS,), scale="log"),
    Panel("channels", "layers", "Kurtosis over channels by module", ("act/<module>/channel_kurtosis",), scale="log"),
    Panel("logits", "layers", "Largest attention logit of some queries by block", ("act/<module>/sampled_logit_max",)),
    Panel("loads", "layers", "Evenness of the load of experts by router", ("router/<module>/load_entropy",)),
    Panel("gradient-map", "layers", "Gradient norm, every parameter", (GRADIENTS,), "heatmap", "log", width=24),
    Panel("weight-map", "layers", "Weight norm, every parameter", (WEIGHTS,), "heatmap", "log", width=24),
    Panel("kurtosis-map", "layers", "Kurtosis, every module", (KURTOSIS,), "heatmap", "log", width=24),
    Panel("lr", "settings", "Learning rate", (LR, LR_GROUPS), width=8),
    Panel("loss-scale", "settings", "Loss scale", ("train/loss_scale",), scale="log", width=8),
    Panel("applied", "settings", "Updates applied and skipped", ("optim/applied", "optim/skipped"), width=8),
    Panel("update-ratio", "settings", "Size of updates relative to weights", ("optim/update_ratio",), scale="log", width=8),
    Panel("moments", "settings", "Adam's moments", ("optim/exp_avg_norm", "optim/exp_avg_sq_norm"), scale="log", width=8),
    Panel("weight-norm", "settings", "Norm of all parameters", ("param/norm",), width=8),
    Panel("guard", "settings", "Updates held back by run.guard", ("guard/held", "guard/dropped", "guard/flagged"), width=8),
    Panel("worst-sample", "batch", "Largest loss of one sample", ("train/sample_loss_max",)),
    Panel("untaught", "movers", "Parameters without a gradient, with one of zeros, with a vanishing one",
          ("grad/missing", "grad/zero", "grad/vanishing")),
    Panel("dead-rows", "movers", "Dead rows of weight matrices", ("param/dead_rows",)),
    Panel("largest-weight", "movers", "Largest weight of any parameter", ("layers/weight_max",)),
    Panel("repeated", "batch", "Repeated batches: steps since the same one", ("data/repeated",)),
    Panel("hottest-tokens", "batch", "Token ids of those rows", ("embedding/hottest_row/<module>",)),
    Panel("throughput", "speed", "Throughput", ("perf/tokens_per_s", "perf/padded_tokens_per_s", "perf/samples_per_s")),
    Panel(
        "step-time", "speed", "Step time and its parts",
        ("perf/step_s", "perf/fetch_s", "perf/forward_s", "perf/backward_s", "perf/optimizer_s", "perf/other_s"),
    ),
    Panel("utilisation", "speed", "Share of the device's peak", ("perf/mfu", "perf/hfu")),
    Panel("flops", "speed", "Model FLOPs per second", ("perf/flops_per_s",)),
    Panel("eta", "speed", "Time to the last step", ("perf/eta_s",)),
    Panel("pauses", "speed", "Pauses (evaluation, saving)", ("perf/paused_s/<what>",)),
    Panel("device-memory", "memory", "Device memory",
          ("mem/allocated_bytes", "mem/reserved_bytes", "mem/sampled_max_bytes", "mem/device_used_bytes")),
    Panel("fragmentation", "memory", "Reserved but not allocated", ("mem/fragmentation",)),
    Panel("host-memory", "memory", "Memory of the training process", ("host/rss_bytes",)),
    Panel("bad-elements", "nonfinite", "NaN and Inf elements",
          ("grad/nonfinite", "layers/grad_nonfinite", "layers/act_nonfinite", "param/nonfinite"), scale="linear"),
    Panel("unlocated", "nonfinite", "Steps whose counts do not say where it began", ("grad/unlocated",)),
    Panel("bad-series", "nonfinite", "Series that were NaN or infinite", ("nonfinite/<series>",)),
    Panel("overhead", "recorder", "Our share of the step's time", ("trackbridge/overhead_share",), marked=False),
    Panel("thinning", "recorder", "How many times more rarely it measures", ("trackbridge/thinning",), marked=False),
    Panel("losses", "recorder", "What the recorder lost",
          ("trackbridge/rows_dropped", "trackbridge/rows_lost", "trackbridge/contexts_dropped", "trackbridge/rows_thinned",
           "trackbridge/rows_unmerged",
           "trackbridge/capsules_given_up"), marked=False),
    Panel("lag", "recorder", "Records this tracker is behind", ("trackbridge/lag_rows",), marked=False),
    Panel("post-mortem", "story", "Post-mortem", view="text", content="post-mortem", width=24),
    Panel("anomalies", "story", "Anomalies", view="table", content="anomalies", width=24),
    Panel("batch", "batch", "The batch at the onset", view="table", content="batch", width=24),
    Panel("counterfactuals", "story", "What would have prevented it", view="table", content="counterfactuals", width=24),
    Panel("capsule", "story", "The capsule", view="table", content="capsule", width=24),
)  # fmt: skip

CONDITIONAL: Mapping[str, str] = {
    "train/loss/<part>": "a loss given as a dict",
    "train/sample_loss_max": "run.micro(sample_loss=...)",
    "train/loss_scale": "a GradScaler",
    LR_GROUPS: "several parameter groups",
    "perf/paused_s/<what>": "run.pause",
    "perf/samples_per_s": "samples given to run.step or run.micro",
    "perf/padded_tokens_per_s": "padded given to run.step or run.micro",
    "perf/mfu": "a device whose peak is known",
    "perf/hfu": "a device whose peak is known",
    "mem/allocated_bytes": "a CUDA device",
    "mem/reserved_bytes": "a CUDA device",
    "mem/sampled_max_bytes": "a CUDA device",
    "mem/fragmentation": "a CUDA device",
    "mem/device_used_bytes": "a CUDA device",
    "nonfinite/<series>": "a value that was NaN or infinite",
    "trackbridge/thinning": "max_overhead",
    "trackbridge/rows_dropped": "a loss of rows",
    "trackbridge/rows_lost": "a loss of rows",
    "trackbridge/rows_unmerged": "several ranks of which one is late",
    "trackbridge/contexts_dropped": "a loss of step contexts",
    "trackbridge/rows_thinned": "a journal over its budget",
    "trackbridge/capsules_given_up": "more capsules than the budget allows",
    "guard/held": "run.guard",
    "guard/dropped": "run.guard",
    "guard/flagged": "run.guard",
    "data/repeated": "a batch that comes again",
    "grad/unlocated": "a gradient that was NaN or infinite",
    "param/dead_rows": "a weight matrix and ten looks at its gradient",
    **dict.fromkeys(("ranks/loss_min", "ranks/loss_max", "ranks/loss_max_rank", "ranks/slowest", "ranks/busy_s_max",
                     "ranks/nonfinite", "ranks/merged"), "several ranks"),
    "param/replicas_differ": "several ranks that hold the same parameters",
    "layers/load_max": "a mixture of experts",
    "act/<module>/sampled_logit_max": "activations.attention_every",
    "router/<module>/load_entropy": "a mixture of experts",
    "embedding/hottest_norm/<module>": "a model with an embedding",
    "embedding/hottest_row/<module>": "a model with an embedding",
    "perf/flops_per_s": "a model whose FLOPs can be counted",
    "perf/eta_s": "a known last step",
}
"""Series that a run may lack, and what gives them."""

_STORY = ("post-mortem", "counterfactuals", "capsule")

TEMPLATES: Mapping[str, Template] = {
    template.name: template
    for template in (
        Template(
            "spike-forensics", "Spike forensics", "anomaly",
            (
                Use("outcome", "Loss and gradient norm around the onset", near=True, only=("loss", "gradient-norm")),
                Use("movers", "What moved first", near=True),
                Use("layers", "The cascade, layer by layer", near=True),
                Use("settings", "Learning rate, loss scale, updates", near=True),
                Use("batch", "The batch"),
                Use("speed", "Throughput at that moment", near=True, only=("throughput", "step-time", "utilisation", "flops")),
                Use("memory", "Memory at that moment", near=True),
                Use("nonfinite"),
                Use("ranks", near=True),
                Use("outcome", "The whole run"),
                Use("story", "Post-mortem, counterfactuals, capsule", only=_STORY),
            ),
        ),
        Template(
            "run-health", "Run health", "run",
            (
                Use("story", "Anomalies", only=("anomalies",)),
                *map(Use, ("outcome", "settings", "movers", "nonfinite", "ranks", "speed", "memory", "recorder")),
            ),
        ),
        Template("layer-atlas", "Layer atlas", "run", (Use("layers"), Use("movers", "The extremes over all layers"))),
        Template("throughput-memory", "Throughput and memory", "run", (Use("speed"), Use("memory"), Use("recorder"))),
        Template("run-comparison", "Run comparison", "project",
                 tuple(Use(section) for section in ("outcome", "settings", "movers", "speed", "memory"))),
        Template("workspace", "trackbridge", "project",
                 tuple(Use(section) for section in SECTIONS if section not in ("story", "batch"))),
    )
}  # fmt: skip
"""The prebuilt reports by the name that ``trackbridge report --template`` takes."""


def known(series: str) -> names.Metric | None:
    """The catalogue's entry of a series or family of a panel."""
    return next((metric for metric in names.CATALOGUE if metric.name == series), None) or names.describe(series)


PAGE = "page"
"""What the HTML page of a capsule is called where it is shown beside the pictures."""


def picture(panel: Panel, *, whole: bool = False) -> str:
    """What the picture of a heatmap panel is called in every tracker, and, with ``.png``, on disk: around an anomaly, or over
    the `whole` run."""
    return f"pictures/{panel.id}{'-run' if whole else ''}"


def catalogued(panel: Panel) -> tuple[str, ...]:
    """The series of a panel. Raises `KeyError` for one that the catalogue does not have."""
    for series in panel.series:
        if known(series) is None:
            raise KeyError(f"{series!r} of panel {panel.id!r} is not in the catalogue")
    return panel.series


def of(use: Use, present: Collection[str] | None = None) -> list[Panel]:
    """The panels of a section as `use` wants them, in the order of `PANELS`. `present` are the series of the run: panels that
    would be empty are left out; None leaves out none. Raises `KeyError` for a series that the catalogue does not have."""
    found = [panel for panel in PANELS if panel.section == use.section and (not use.only or panel.id in use.only)]
    return [panel for panel in found if not catalogued(panel) or present is None or any(map(panel.draws, present))]
