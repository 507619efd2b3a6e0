"""Settings: one pydantic model, filled from keyword arguments, a YAML file or ``TRACKBRIDGE_*`` variables alike.

Environment variables use ``__`` between section and key: ``TRACKBRIDGE_RECORDER__SNAPSHOT_EVERY=200``. An unknown key is an
error that names the nearest valid one. Nothing here is read at import.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from trackbridge.errors import ConfigError, nearest
from trackbridge.rules import Rule

MiB = 1024 * 1024
PREFIX = "TRACKBRIDGE_"
RAREST = 64
"""Times more rarely than set, at most, that statistics are taken to keep to `max_overhead`."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ParametersConfig(Section):
    """Per-parameter statistics at optimizer-step time. `*_every` is a cadence in optimizer steps; 0 switches off."""

    gradients_every: int = Field(1, ge=0, description="norm and non-finite elements of each gradient")
    elements_every: int | None = Field(
        None, ge=0, description="largest element, mean and zeros of each gradient; default: 1, on the CPU 10: more passes there"
    )
    weights_every: int = Field(10, ge=0, description="weights move slowly; also measured at the first step")
    moments_every: int = Field(10, ge=0, description="Adam's first and second moment")
    rows_every: int = Field(10, ge=0, description="looks for rows of weight matrices whose gradient stays zero")
    checksums_every: int = Field(100, ge=0, description="of each parameter's bits, which ranks compare")
    histograms_every: int = Field(100, ge=0, description="of weights and gradients; also after an anomaly that gets a capsule")


class ActivationsConfig(Section):
    """Activation statistics in forward hooks."""

    sites: Literal["blocks", "blocks+branches", "leaf", "none"] | list[str] = Field(
        "blocks", description="whose outputs are measured: a choice, or names of modules (patterns with * and ? too)"
    )
    every: int = Field(1, ge=1, description="cadence in optimizer steps")
    tokens: int | None = Field(
        None,
        ge=1,
        le=1 << 20,
        description="measure every N-th token only, N rounded up to an odd prime; default: all; in a compiled graph and "
        "on the CPU every 7th, 5th or 3rd that leaves 128 tokens and 16,384 elements; see docs/statistics.md",
    )
    channels_every: int = Field(10, ge=0, description="cadence of the kurtosis over channels, one more read; 0: never")
    embedding_rows: int = Field(3, ge=0, le=16, description="rows of the embedding with the largest gradients; 0: none")
    embedding_every: int = Field(
        1, ge=1, description="cadence of that in optimizer steps; reads the table's gradient once more"
    )
    attention_every: int = Field(0, ge=0, description="cadence of the largest attention logit of each block; 0: never")
    attention_queries: int = Field(16, ge=1, description="query positions of each sequence whose logits are looked at")
    routers: list[str] | None = Field(
        None, description="name patterns of the routers of mixtures of experts; default: those that look like one"
    )
    inside_compiled: bool = Field(True, description="measure inside a whole-model torch.compile region")


class RecorderConfig(Section):
    """The flight recorder: what a replay needs."""

    enabled: bool = Field(True, description="keep what a replay needs; off, anomalies are told but get no capsule")
    batch_bytes: int = Field(4 * MiB, ge=0, description="keep a step's batches when they fit in this many bytes")
    context_bytes: int = Field(256 * MiB, ge=MiB, description="size of the ring of step contexts on disk")
    snapshot_every: int = Field(100, ge=0, description="steps between parameter snapshots; 0: none")
    snapshot_bytes: int = Field(2048 * MiB, ge=0, description="host memory for snapshots; larger models get none")
    before: int = Field(8, ge=0, description="steps before the onset in a capsule, at least")
    after: int = Field(8, ge=0, description="steps after the anomaly in a capsule")
    max_capsules: int = Field(20, ge=0, description="capsules of a run; the most severe anomalies keep theirs")
    capsule_bytes: int = Field(16384 * MiB, ge=0, description="what they may take on this disk together; one is always kept")
    upload_batches: bool = Field(False, description="let raw batches leave this disk with the capsule")


class LearningRateConfig(Section):
    """A learning rate that jumps where its schedule does not. Warm-up, decay and restarts are none."""

    enabled: bool = Field(True, description="look for it")
    rise: float = Field(1.5, gt=1, description="a rise by this factor in one step, above every rate so far")
    fall: float = Field(30.0, gt=1, description="a fall by this factor in one step; a decay in steps is 2 to 10")
    back: int = Field(50, ge=1, description="a rise that is taken back within so many steps was no restart")


class RepeatsConfig(Section):
    """The same batch again within an epoch. Needs batches that the recorder saw."""

    enabled: bool = Field(True, description="look for it")
    memory: int = Field(256, ge=1, description="steps back in which a batch is recognised")
    least_samples: int = Field(4, ge=1, description="samples from which on a single equal batch cannot be chance")


class OptimizerStateConfig(Section):
    """Adam's second moment fell faster than it can: the state was lost, or one layer's is stale."""

    enabled: bool = Field(True, description="look for it")
    fall: float = Field(0.3, gt=0, lt=1, description="share that is left ten steps later; decays from 0.9 on leave 0.35")
    longest_gap: int = Field(50, ge=1, description="steps between measurements beyond which nothing is concluded")


class LossScaleConfig(Section):
    """A gradient scaler's scale that collapses after it had found its level."""

    enabled: bool = Field(True, description="look for it")
    fall: float = Field(16.0, gt=1, description="a fall by this factor without growth in between: four halvings")
    within: int = Field(100, ge=1, description="steps without a halving after which a fall is over")
    calm: int = Field(20, ge=1, description="steps without a halving after which the scaler's search is over")
    least: float = Field(1.0, ge=0, description="a scale below this is a collapse by itself")


class ThroughputConfig(Section):
    """The run became slower per token (or sample, or step), and stays so."""

    enabled: bool = Field(True, description="look for it")
    drop: float = Field(0.3, gt=0, lt=1, description="share of the usual pace that is lost")
    steps: int = Field(30, ge=1, description="slow steps in a row before it is told")
    seconds: float = Field(60.0, ge=0, description="how long they must have taken together: less is not worth a word")


class MemoryConfig(Section):
    """Device or host memory that creeps up over some thousand steps."""

    enabled: bool = Field(True, description="look for it")
    least_bytes: float = Field(256 * MiB, gt=0, description="smallest rise worth telling")
    least_share: float = Field(0.05, ge=0, description="the same, as a share of what was held before")


class StallConfig(Section):
    """No step for a long time. `run.pause` stops this clock."""

    enabled: bool = Field(True, description="look for it")
    factor: float = Field(20.0, gt=1, description="times the usual step time")
    seconds: float = Field(300.0, gt=0, description="never told before so many seconds: an evaluation may take minutes")


class PlateauConfig(Section):
    """A loss that no longer falls. Off by default: every loss flattens."""

    enabled: bool = Field(False, description="look for it")
    steps: int = Field(3000, ge=3, description="steps without a better loss that make a plateau")
    least: float = Field(0.002, ge=0, description="share of the loss by which it must have fallen to count as better")


class LevelConfig(Section):
    """A loss or gradient norm that stays up, or climbs, without a single value that gives it away."""

    enabled: bool = Field(True, description="look for it")
    step: float = Field(3.5, gt=0, description="scales by which the median of 6 values must lie above the 24 before them")
    share: float = Field(0.12, ge=0, description="share of the loss that such a step must be worth")
    climb: float = Field(6.0, gt=0, description="the same for a climb over 48 values")
    climb_share: float = Field(0.15, ge=0, description="share of the loss that a climb must be worth")
    factor: float = Field(3.0, gt=1, description="factor of the gradient norm that either must be worth")


class LayersConfig(Section):
    """Gradients, kurtosis or updates of single layers that stay out of their band while the loss does not follow."""

    enabled: bool = Field(True, description="look for it")
    after: int = Field(8, ge=2, description="values in a row out of the band before it is told")
    score: float = Field(8.0, gt=0, description="robust sigmas that the worst of them must reach")
    rest: int = Field(500, ge=0, description="steps after such an event in which no other is told")


class DetectionConfig(Section):
    """Anomaly detection. Defaults were chosen on real curves, cross-validated by family, and on synthetic ones: see
    docs/detection-measured.md."""

    enabled: bool = Field(True, description="look for anomalies at all")
    threshold: float = Field(4.505, gt=0, description="robust sigmas above the expected loss that make a spike")
    grad_threshold: float = Field(8.0, gt=0, description="the same for the global gradient norm")
    grad_least: float = Field(4.0, ge=1, description="times its usual value that make a spike of the global gradient norm")
    layer_threshold: float = Field(6.0, gt=0, description="the same for per-layer series, which only explain")
    warmup: int = Field(24, ge=4, description="values of a series before it can alarm (non-finite always can)")
    release: float = Field(2.5, gt=0, description="robust sigmas below which an excursion is over")
    floor: float = Field(0.009, ge=0, description="least scale, as a share of the level: smaller wiggles are no news")
    log_floor: float = Field(0.1, gt=0, description="least scale of norms, ratios and kurtosis, in nats")
    drift_threshold: float = Field(3.9, gt=0, description="sigmas of the smoothed loss that make a drift")
    slow_drift_threshold: float = Field(8.0, gt=0, description="the same over some 500 steps")
    least_drift: float = Field(0.02, ge=0, description="smallest drift worth telling, as a share of the level")
    log_drift: float = Field(0.25, gt=0, description="smallest drift of a norm worth telling, in nats")
    grad_drift: float = Field(0.5, gt=0, description="the same of the global norm over some 15 steps; or 3 scales")
    accept_after: int = Field(16, ge=2, description="values after which a settled new level is a shift")
    patience: int = Field(200, ge=2, description="values after which any excursion is accepted as the new level")
    quiet: int = Field(3, ge=1, description="values back in the band that end an episode")
    lookback: int = Field(16, ge=0, description="steps before the onset in which a first mover is sought")
    cascade_steps: int = Field(8, ge=0, description="steps after the detection in which series still join its cascade")
    after_resume: int = Field(50, ge=0, description="steps after a resume in which anomalies carry the note after_resume")
    learning_rate: LearningRateConfig = LearningRateConfig()
    repeats: RepeatsConfig = RepeatsConfig()
    optimizer_state: OptimizerStateConfig = OptimizerStateConfig()
    loss_scale: LossScaleConfig = LossScaleConfig()
    throughput: ThroughputConfig = ThroughputConfig()
    memory: MemoryConfig = MemoryConfig()
    stall: StallConfig = StallConfig()
    plateau: PlateauConfig = PlateauConfig()
    level: LevelConfig = LevelConfig()
    layers: LayersConfig = LayersConfig()
    rules: tuple[Rule, ...] = Field((), description="your own thresholds, see trackbridge.rules")
    detectors: tuple[str, ...] = Field(
        (), description="further detectors by name: published ones (olmo, trainscope, z-100, z-500), installed packages' own"
    )


class GuardConfig(Section):
    """What `run.guard` does about a step whose loss or gradient norm is out of its band; only where the loop asks it."""

    action: Literal["warn", "skip", "raise", "stop"] = Field("warn", description="what happens to a flagged step")
    threshold: float = Field(6.0, gt=0, description="robust sigmas above the expected value that flag a step")
    max_consecutive: int = Field(3, ge=1, description="flagged steps in a row after which it asks for a rollback")
    patience: int = Field(50, ge=1, description="steps in a row that must be in band for the trouble to count as over")
    max_rollbacks: int = Field(2, ge=0, description="rollbacks without such a recovery between them before it gives up")
    timeout: float = Field(60.0, gt=0, description="seconds that a rank waits for the others' answer")


class PerfConfig(Section):
    """MFU and its relatives. Both counts are this process' own: its shapes over its device's peak. See docs/mfu.md."""

    peak_flops: float | None = Field(None, gt=0, description="FLOP/s this device can do at most; default: by its exact name")
    flops_per_token: float | None = Field(None, gt=0, description="forward and backward; where they cannot be counted")
    full_attention: bool = Field(False, description="count the (query, key) pairs that a mask hides too, as PaLM did")
    steps: int | None = Field(None, gt=0, description="length of the run in optimizer steps, for perf/eta_s")


class MemorySnapshotsConfig(Section):
    """Snapshots of the CUDA allocator as artifacts (`trackbridge.memory`). Off by default: torch then notes the stack of every
    allocation, which costs some microseconds each, and to write one down holds Python up for a moment."""

    snapshots: int = Field(0, ge=0, description="snapshots of a run at most, on each rank; 0: none, and no history")
    at: tuple[int, ...] = Field((), description="steps after which one is taken; also at memory trouble")
    history: int = Field(20_000, ge=0, description="newest allocations and releases that torch keeps; 0: only what is held")
    bytes: int = Field(64 * MiB, ge=MiB, description="size of one; older events are left out to fit")


class AlertsConfig(Section):
    """Messages about anomalies, sent by the shipper's process (`trackbridge.backends.alerts`). The URLs are secrets: give them
    here or in the environment variable TRACKBRIDGE_ALERTS__URLS; they are written to no file."""

    urls: tuple[SecretStr, ...] = Field((), description="apprise URLs: slack://, mailto://, json://, ...")
    severity: float = Field(0.5, ge=0, le=1, description="least severity of an anomaly that is worth a message")
    cooldown: float = Field(600.0, ge=0, description="seconds between two messages about the same kind and series")
    per_hour: int = Field(12, ge=1, description="messages at most; those left out are counted in the next")

    @field_validator("urls", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class JournalConfig(Section):
    """The row journal of a rank. Nothing is left out before it outgrows `budget_bytes`; then what is oldest is thinned first,
    and the newest `full_resolution_steps`, like rows that a tracker still lacks, only where nothing else is left."""

    segment_bytes: int = Field(64 * MiB, ge=4096, description="size at which a new file of the journal begins")
    fsync_seconds: float = Field(5.0, gt=0, description="what a crash of the whole machine may lose, at most")
    budget_bytes: int = Field(4096 * MiB, ge=1 << 16, description="rows on disk; anomalies and their windows stay whole")
    full_resolution_steps: int = Field(100_000, ge=0, description="newest steps that keep every value, if the budget allows")


class RanksConfig(Section):
    """Merging over ranks: rank 0's rows are of all ranks together (`trackbridge.merging`)."""

    merge_up_to: int = Field(1024, ge=0, description="ranks; in larger worlds, and with 0, rows are rank 0's own")
    wait_seconds: float = Field(10.0, ge=0, description="how long a row waits for other ranks' numbers; training never does")


class StreamConfig(Section):
    """What goes to trackers; the journal always keeps everything. `layers`: which wide series are sent: none but their extrema
    over all layers, those of activations (of at most `max_series`, from evenly spaced modules), or all of them."""

    layers: Literal["summary", "blocks", "all"] = Field("blocks", description="which wide series are sent, as said above")
    every: int = Field(1, ge=1, description="send every N-th step row; rows of an anomaly are always sent")
    max_series: int = Field(1000, ge=1, description='wide series that "blocks" sends')


class TrackbridgeConfig(BaseSettings):
    """All settings of a run. See `trackbridge.init` for what each argument means."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, validate_default=False
    )

    backend: Any = Field(None, description="the trackers to deliver to; null: the journal on disk only")
    project: str = Field("trackbridge", description="the tracker's project or experiment")
    name: str | None = Field(None, description="what people call the run; null: its id")
    dir: Path = Field(Path("runs"), description="where run folders live; this run's is dir/<run id>/")
    id: str | None = Field(None, description="the run's id; null: a new one, agreed across ranks")
    resume: Literal["never", "auto", "must"] = Field("never", description="whether an id that is there is gone on with")
    tags: tuple[str, ...] = Field((), description="for the tracker's filters")
    group: str | None = Field(None, description="the tracker's group of runs")
    shipping: Literal["process", "thread"] = Field("process", description="a child process talks to the trackers, or a thread")
    join: bool = Field(False, description="write into the W&B or MLflow run that is open in this process")
    strict: bool = Field(False, description="raise our own bugs in the training instead of logging them once: for tests")
    stop_on_anomaly: float | None = Field(None, ge=0, le=1, description="severity from which run.should_stop says so")
    slots: int = Field(64, ge=2, description="depth of the ring between training thread and scribe")

    max_overhead: float | None = Field(
        None, gt=0, lt=1, description="largest share of the step's time that measuring may take; beyond it some is taken rarely"
    )

    parameters: ParametersConfig = ParametersConfig()
    activations: ActivationsConfig = ActivationsConfig()
    recorder: RecorderConfig = RecorderConfig()
    detection: DetectionConfig = DetectionConfig()
    guard: GuardConfig = GuardConfig()
    perf: PerfConfig = PerfConfig()
    memory: MemorySnapshotsConfig = MemorySnapshotsConfig()
    journal: JournalConfig = JournalConfig()
    stream: StreamConfig = StreamConfig()
    ranks: RanksConfig = RanksConfig()
    alerts: AlertsConfig = AlertsConfig()

    @classmethod
    def load(cls, source: TrackbridgeConfig | str | Path | None = None, **given: Any) -> TrackbridgeConfig:
        """Merge keyword arguments over `source` (settings, or a YAML file) over the environment, section by section.

        Keyword arguments equal to None count as not given. Raises `ConfigError` in one line.
        """
        given = {key: value for key, value in given.items() if value is not None}
        if isinstance(source, TrackbridgeConfig):
            given = _merge(source.model_dump(exclude_unset=True, exclude={"backend"}) | {"backend": source.backend}, given)
        elif source is not None:
            given = _merge(_read_yaml(Path(source)), given)
        _check_environment(cls)
        try:
            return cls(**given)
        except ValidationError as error:
            raise ConfigError(_one_line(error, cls)) from None
        except SettingsError as error:
            raise ConfigError(f"{' '.join(str(error).split())}; write it as JSON, or one key: {PREFIX}SECTION__KEY") from None


def _check_environment(model: type[BaseModel]) -> None:
    """An unknown ``TRACKBRIDGE_*`` variable is an error, like an unknown key anywhere else."""
    for variable in os.environ:
        if variable.upper().startswith(PREFIX):
            key = variable[len(PREFIX) :].split("__", 1)[0].lower()
            if key not in model.model_fields:
                hint = nearest(key, model.model_fields)
                raise ConfigError(f"unknown setting {key!r} in the environment variable {variable}{hint}; unset it")


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read settings file {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"settings file {path} is not YAML: {str(error).splitlines()[0]}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"settings file {path} must hold a mapping of settings, not a {type(data).__name__}")
    return data


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Section):
            value = value.model_dump(exclude_unset=True)
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _one_line(error: ValidationError, model: type[BaseModel]) -> str:
    """The first problem of `error`, in words a person can act on."""
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        owner: Any = model
        for part in path[:-1]:
            owner = owner.model_fields[part].annotation
        known = [name for name in owner.model_fields if name != "kind"]
        return f"unknown setting {'.'.join(path)!r}{nearest(path[-1], known)}; known here: {', '.join(known)}"
    if first["type"] == "value_error":  # our own words
        return f"setting {'.'.join(path)!r}: {first['ctx']['error']}"
    shown = f"{first['input']!r}"[:80]
    if path[:1] == ["alerts"]:  # an address is a secret, wherever it was put
        shown = f"a {type(first['input']).__name__}"
        if path[1:] in ([], ["urls"]):
            shown += "; write alerts={'urls': ['json://...']}"
    if first["type"] == "model_type":
        section: Any = model
        for name in path:
            section = section.model_fields[name].annotation if name in getattr(section, "model_fields", ()) else None
        inside = f"; in it: {', '.join(section.model_fields)}" if hasattr(section, "model_fields") else ""
        return f"setting {'.'.join(path)!r} is a section: give it a dict, got {shown}{inside}"
    if "[" in path[-1]:  # a choice or a list, which pydantic tells of one by one
        path, first = path[:-1], first | {"msg": f"{first['msg']}, or a list such as ['h.*.attn']"}
    return f"setting {'.'.join(path)!r}: {first['msg'].lower()}, got {shown}"
