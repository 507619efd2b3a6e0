"""`init` and `Run`: what the user holds, and the composition root. The only module that knows both ends.

How a run is opened is in `trackbridge.opening`, what a step becomes in `trackbridge.steps`, what works beside training in
`trackbridge.assembly`.

Everything a `Run` does on the training thread is bounded and free of host synchronisation; what takes longer is handed to the
scribe, and the copying of artifacts to a thread of its own. Errors that the user can cause are raised on the first call; a
bug of ours after that is logged once and switched off.
"""

from __future__ import annotations

import atexit
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trackbridge import assembly, hostcopy, names, process, provenance, redact
from trackbridge.backends.base import BackendConfig
from trackbridge.batches import Feed
from trackbridge.config import TrackbridgeConfig
from trackbridge.delivery import Delivery, FinishReport
from trackbridge.errors import Part, TrackbridgeError, UsageError
from trackbridge.flops.meter import Meter
from trackbridge.guard import Guard
from trackbridge.handover import Logged
from trackbridge.intake import Intake
from trackbridge.keep import Keeper
from trackbridge.memory import MemorySnapshots
from trackbridge.misuse import Misuse
from trackbridge.opening import opened
from trackbridge.overhead import Expense, economy
from trackbridge.own import OwnScalars
from trackbridge.pace import Pace
from trackbridge.probes import Instruments
from trackbridge.probes.host import HostSampler
from trackbridge.ranks import any_rank
from trackbridge.rebuilding import refuse
from trackbridge.recorder import Recorder
from trackbridge.records import Anomaly, RunEnd, RunInfo, RunStatus
from trackbridge.rundir import RunDirectory, dumps, write_atomic
from trackbridge.scalars import count, losses, of_samples, scalar, whole
from trackbridge.skip import SkipPlan, never_came
from trackbridge.steps import Steps
from trackbridge.watched import AutoStep, check, device_of, hyperparameters, left_behind, named

T = TypeVar("T")

logger = logging.getLogger("trackbridge")


def init(
    settings: TrackbridgeConfig | str | Path | None = None,
    *,
    backend: str | BackendConfig | Mapping[str, Any] | Sequence[Any] | None = None,
    project: str | None = None,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    dir: str | Path | None = None,
    id: str | None = None,
    resume: Literal["never", "auto", "must"] | None = None,
    tags: Sequence[str] | None = None,
    group: str | None = None,
    join: bool | None = None,
    **sections: Any,
) -> Run:
    """Start a run, or go on with one, and return it.

    Args:
        settings: a `TrackbridgeConfig`, or the path of a YAML file. Keyword arguments win over it, it wins over
            ``TRACKBRIDGE_*`` variables.
        backend: ``"wandb"``, ``"mlflow"``, ``"tensorboard"``, ``"console"``, a list of these, backend config objects, or
            None: journal only (`trackbridge sync` can ship the run later).
        config: your own hyperparameters, for the tracker's config panel. Values under secret-sounding names are redacted.
        dir: where runs live; this one in ``dir/<run id>/``.
        id: the run's id; agreed across ranks when None.
        resume: "never" (an existing id is an error), "auto" (go on if it exists) or "must".
        join: write into the W&B or MLflow run that you have open in this process. By default ours is a companion of it,
            linked both ways.
        sections: any section or key of the settings, for example ``recorder={"snapshot_every": 50}``.

    Raises:
        ConfigError: an unknown or contradictory setting, a directory that cannot be written.
        MissingExtraError: a requested backend's package is not installed.
        UsageError: the ranks do not agree; or a replay is importing this code for what it builds.
    """
    named_settings = {
        "backend": backend, "project": project, "name": name, "dir": dir, "id": id,
        "resume": resume, "tags": tags, "group": group, "join": join,
    }  # fmt: skip
    refuse()
    merged = TrackbridgeConfig.load(settings, **named_settings, **sections)
    directory, info, served = opened(merged, config)
    return Run(merged, directory, info, served, dict(config or {}))


class Run:
    """One training run being recorded. Made by `init`; use it as a context manager or call `finish`.

    Attributes:
        id: the run's id. dir: its directory. urls: how to look at it, by backend kind.
        guard: acts on the step under way where you ask it to (`trackbridge.guard.Guard`).
        intake: where an integration feeds batches and says what its framework knows (`trackbridge.intake.Intake`).
    """

    def __init__(
        self,
        settings: TrackbridgeConfig,
        directory: RunDirectory,
        info: RunInfo,
        backends: Sequence[BackendConfig],
        config: Mapping[str, Any],
    ) -> None:
        self._pid = process.pid()
        self._settings = settings
        self._directory = directory
        self._info = info
        self._watching = False
        self._ended = False
        self._models: dict[str, nn.Module] = {}
        self._optimizers: dict[str, Optimizer] = {}
        self._auto: AutoStep | None = None
        self._report: FinishReport | None = None
        self._own = OwnScalars()
        misuse = Misuse()
        self._using = {method: misuse.of() for method in ("micro", "log", "log_artifact", "checkpoint_saved")}
        self._using_step = misuse.of()

        strict = settings.strict
        self._expense = timer = Expense()
        self._economy = None if settings.max_overhead is None else economy(info, settings.max_overhead)
        self._part = Part("the run", strict=strict, timer=timer)
        self._pace = Pace(steps=settings.perf.steps)
        self._meter = Meter(settings.perf, lambda: self._pace.paused, Part("MFU", strict=strict, timer=timer))
        self._host = HostSampler()
        self._instruments = Instruments(
            settings.parameters, settings.activations, slots=settings.slots, strict=strict, timer=timer
        )
        self._recorder = None
        if settings.recorder.enabled:
            self._recorder = Recorder(settings.recorder, directory, info.rank, attempt=info.attempt, strict=strict, timer=timer)

        self._scribe = assembly.scribe(settings, directory, info, self._instruments, self._recorder)
        self._anomalies = self._scribe.anomalies
        self._queue = self._scribe.queue
        self._queue.submit_facts("config", redact.tree(dict(config)))
        self._steps = Steps(
            info.start_step,
            scribe=self._scribe,
            instruments=self._instruments,
            recorder=self._recorder,
            pace=self._pace,
            meter=self._meter,
            host=self._host,
            expense=self._expense,
            economy=self._economy,
            inert=self._inert,
        )
        self.guard = Guard(settings.guard, settings.detection, self._steps.guarded)
        feeding = Part("batch recording", strict=strict, timer=timer)
        self.intake = Intake(self._recorder, self._pace, feeding, info.rank, self._inert, self._queue.submit_facts)
        self._keeper = Keeper(directory, self._queue.submit)
        self._memory = MemorySnapshots(
            settings.memory, directory, info.rank, self._queue.submit, Part("memory snapshots", strict=strict)
        )
        self._memory.start()
        self._delivery = Delivery(directory, info, backends, in_process=settings.shipping == "thread")
        atexit.register(self._at_exit)

    # identity

    @property
    def id(self) -> str:
        return self._info.run_id

    @property
    def dir(self) -> Path:
        return self._directory.path

    @property
    def urls(self) -> dict[str, str]:
        """How to look at this run, by backend kind: a URL or a command."""
        return self._delivery.urls

    @property
    def anomalies(self) -> list[Anomaly]:
        """Every anomaly of this attempt so far, each in its newest version, in order of detection."""
        return sorted(self._anomalies.latest.values(), key=lambda anomaly: anomaly.step)

    def native(self, backend: str, timeout: float = 30.0) -> Any:
        """The tracker SDK's own run object (``"wandb"``: a `wandb.Run`; ``"mlflow"``: a `mlflow.entities.Run`), where the
        tracker is served in this process: with ``shipping="thread"``, or a run of yours that was joined.

        Waits up to `timeout` seconds until it is open. Raises `UsageError` where there is none.
        """
        return self._delivery.native(backend, timeout)

    @property
    def should_stop(self) -> Anomaly | None:
        """The first anomaly at least as severe as the setting `stop_on_anomaly`; None when there is none, or it is not set.

        trackbridge never stops a run by itself: ``if run.should_stop: break``. This is what this rank knows, a bit late;
        ranks that must leave their loop together ask `agree_to_stop`.
        """
        limit = self._settings.stop_on_anomaly
        if limit is None:
            return None
        return next((anomaly for anomaly in self.anomalies if anomaly.severity >= limit), None)

    def agree_to_stop(self) -> bool:
        """Whether any rank's `should_stop` is set, the same answer on every rank. A collective: call it on all ranks at one
        step. It waits for the device; without a process group or without `stop_on_anomaly` it costs nothing."""
        if self._settings.stop_on_anomaly is None:
            return False
        return any_rank(self.should_stop is not None, device_of(self._models))

    # recording

    def watch(
        self,
        model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        optimizer: Optimizer | Iterable[Optimizer] | Mapping[str, Optimizer] | None = None,
        *,
        scaler: Any = None,
        state: Mapping[str, Any] | None = None,
        generators: Mapping[str, Any] | None = None,
        auto_step: bool = False,
    ) -> None:
        """Attach the probes. Watching the same objects again changes nothing; other objects replace them.

        Args:
            model: a module, a list of modules, or a mapping; in a mapping the keys prefix the series (``g.head.weight``).
            optimizer: likewise; a trainer's container of optimizers (anything that iterates over them) counts as a list.
            scaler: a `torch.amp.GradScaler`, for its scale and skipped steps, and for a replay.
            state: further objects with ``state_dict`` that a replay must restore (a scheduler, an EMA).
            generators: further random generators that a replay must restore, by name.
            auto_step: close the step whenever the (last) optimizer steps; inputs and loss come from the model's forward.
        """
        if self._inert():
            return
        models = named("model", model, nn.Module)
        optimizers = named("optimizer", optimizer, Optimizer) if optimizer is not None else {}
        check(models, optimizers, scaler=scaler, state=state, auto_step=auto_step)
        self._instruments.attach(models, optimizers, scaler)
        if gone := left_behind(self._models, self._optimizers, models, optimizers):
            logger.warning(
                "trackbridge: run.watch replaces what was watched before, so %s is no longer measured. Watch several in one "
                'call: run.watch({"g": g, "d": d}, {"g": of_g, "d": of_d})',
                ", ".join(gone),
            )
        self._models, self._optimizers = models, optimizers
        self._meter.attach(models, device_of(models))
        devices = {parameter.device for module in models.values() for parameter in module.parameters()}
        self._host.watch(devices)
        self._expense.device = next((device for device in devices if device.type == "cuda"), None)
        if self._recorder is not None:
            self._recorder.attach(models, optimizers, scaler, state or {}, generators or {})
        if self._auto is not None:
            self._auto.remove()
        self._auto = None
        if auto_step:
            part = Part("auto_step", strict=self._settings.strict, timer=self._expense)
            self._auto = AutoStep(self._auto_step, models, optimizers, part)
        if not self._watching:
            self._queue.submit_facts("provenance", self._write_provenance())
            self._pace.begin()
        self._watching = True
        with Part("describing what is watched", strict=self._settings.strict):
            self._queue.submit_facts("training", hyperparameters(models, optimizers))

    def batches(self, loader: Iterable[T], *, skip: SkipPlan | str | Path | None = None, epoch: int | None = None) -> Feed[T]:
        """Iterate over `loader`, noting for each batch what a replay needs: number, ids, RNG state, fetch time.

        The order of the batches, their content and every RNG state are those of the bare loop. `skip`, a plan or its file,
        names batches that are fetched but not handed out, each once; `epoch` numbers the next pass where the loop knows better
        than the state of `load_state_dict`.
        """
        return self.intake.feed(loader, skip=skip, epoch=epoch)

    def fetched(
        self,
        batch: Any,
        *,
        epoch: int | None = None,
        index: int | None = None,
        sample_ids: Sequence[int | str] | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Tell of a batch that somebody else's loop fetched, before the step uses it. Where the loader is yours to wrap, use
        `run.batches`: it also sees the sampler's indices and what is drawn while fetching.

        Args:
            batch: the batch as the step will get it. It is copied here, so that what the loop does to it later does not count.
            epoch, index: its place in the data; sample_ids: which samples are in it, where these are known.
            seconds: how long the loop waited for it.
        """
        self.intake.told(batch, epoch=epoch, index=index, sample_ids=sample_ids, seconds=seconds)

    def micro(
        self,
        loss: Tensor | float,
        *,
        tokens: int | None = None,
        samples: int | None = None,
        sample_loss: Tensor | None = None,
        padded: int | None = None,
    ) -> None:
        """One micro-batch under gradient accumulation. The step's loss is their mean, weighted by `tokens`. No sync.

        `loss` is the micro-batch's mean loss, not divided by the number of micro-batches; `padded`: `tokens` with the padding.
        """
        if self._inert() or not self._part.alive:
            return
        with self._using["micro"] as used:
            value, tokens_read, samples_read = scalar("loss", loss), count("tokens", tokens), count("samples", samples)
            padded_read, sample_losses = count("padded", padded), of_samples("sample_loss", sample_loss)
            with self._part:
                self._pace.consumed(tokens_read or 0.0, samples_read or 0.0, padded_read or 0.0)
                self._instruments.micro(value, tokens_read, sample_losses)
            used.accepted = True

    def step(
        self,
        loss: Tensor | float | Mapping[str, Tensor | float] | None = None,
        *,
        tokens: int | None = None,
        samples: int | None = None,
        grad_norm: Tensor | float | None = None,
        batch: Any = None,
        batch_index: int | None = None,
        sample_ids: Sequence[int | str] | None = None,
        skipped: bool | None = None,
        step: int | None = None,
        padded: int | None = None,
    ) -> list[Anomaly]:
        """Close one optimizer step. Never waits for a device; returns the anomalies found since the last call.

        They arrive a step or two late.

        Args:
            loss: 0-d tensor, float, or a mapping of them (`"loss"` is the total; else the total is their sum).
            tokens, samples: consumed in this step, unless given to `micro`.
            grad_norm: the norm before clipping that your own clip returned.
            batch, batch_index, sample_ids: the batch, where `run.batches` is not used.
            skipped: True if you skipped the update.
            step: your own step number; by default steps count from 0.
            padded: `tokens` with the padding counted in, for the rate at which the device worked.

        Raises:
            UsageError: on the first call only, for a loss that is not a scalar and the like.
        """
        if self._inert() or not self._part.alive:
            return []
        given: dict[str, Tensor | float] = {}
        consumed: tuple[float | None, float | None, float | None] = (None, None, None)
        number = self._steps.number
        used = self._using_step
        with used:  # each on its own: what is wrong is left out, the rest is kept
            given = losses(loss)
        if grad_norm is not None:
            with used:
                given["grad/norm"] = scalar("grad_norm", grad_norm)
        with used:
            consumed = count("tokens", tokens), count("samples", samples), count("padded", padded)
        if step is not None:
            with used:
                number = whole("step", step)
        used.accepted = True
        with self._part:
            self._steps.close(number, given, *consumed, skipped, batch, batch_index, sample_ids)
        news = self._anomalies.news()
        self._memory.note(number, news, squeezed=self._host.squeezed)
        return news

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        model: str | None = None,
    ) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` over the watched parameters, its result to the bit; the norm before is recorded.

        `model` names one of several watched models; default: all. Raises `UsageError` before `watch`.
        """
        if self._inert():  # clipping is the user's arithmetic: it goes on after `finish`
            models = [self._models[model]] if model is not None else list(self._models.values())
            parameters = [p for module in models for p in module.parameters()]
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        return self._instruments.clip_grad_norm_(
            max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, foreach=foreach, model=model
        )

    @contextmanager
    def pause(self, what: str = "pause") -> Iterator[None]:
        """Evaluation, saving: the step's clock stands still, statistics and recording are off.

        The seconds it took are the series ``perf/paused_s/<what>`` of the step that was under way.
        """
        if self._inert():
            yield
            return
        with self._part:
            self._scribe.pause()
            self._pace.pause()
            self._instruments.pause()
            if self._recorder is not None:
                self._recorder.pause()
        try:
            yield
        finally:
            with self._part:
                if self._recorder is not None:
                    self._recorder.resume()
                self._instruments.resume()
                self._pace.resume(f"perf/paused_s/{names.legal(what)}")
                self._scribe.resume()

    def log(self, values: Mapping[str, Tensor | float], *, step: int | None = None) -> None:
        """Your own scalars, at `step` (default: the newest closed step). Tensors on a device are copied here and read later,
        elsewhere.

        Raises `UsageError` on the first call only, for a value that is no scalar.
        """
        if self._inert():
            return
        if not isinstance(values, Mapping):
            raise UsageError(f"log takes a mapping of names to scalars, not {type(values).__name__}")
        used, at = self._using["log"], None
        with used:
            at = max(self._steps.number - 1, 0) if step is None else whole("step", step)
        if at is None:  # left out: values at some other step would be wrong ones
            return
        series, numbers, tensors = self._own.read(values, used)
        with self._part:
            self._queue.submit(Logged(at, time.time(), series, numbers, hostcopy.copy(tensors)))
        used.accepted = True

    def log_artifact(self, path: str | Path, *, kind: str = "file", name: str | None = None) -> None:
        """Copy a file or folder into the run directory, and ship it. The copy stays until the tracker has it. Returns at
        once: the file may be deleted or replaced right after, but should not be written to in place before it is copied.

        Raises `UsageError` on the first call only, for a path that cannot be read.
        """
        if self._inert():
            return
        with self._using["log_artifact"] as used:
            self._keeper.keep(Path(path), kind=kind, name=name, step=max(self._steps.number - 1, 0))
            used.accepted = True

    def memory_snapshot(self, why: str = "asked for") -> bool:
        """Have a snapshot of the CUDA allocator written as an artifact, on another thread. False where there is none to be had:
        no CUDA, or none left of ``memory={"snapshots": N}``."""
        return not self._inert() and self._memory.ask(max(self._steps.number - 1, 0), why, again=True)

    def checkpoint_saved(self, path: str | Path, step: int) -> None:
        """Tell the record that a checkpoint of the state after `step` steps is at `path`: a place on disk, or an address with
        ``://`` in it.

        Raises `UsageError` on the first call only, for what is no path or no number of steps.
        """
        if self._inert():
            return
        with self._using["checkpoint_saved"] as used:
            try:
                remote = isinstance(path, str) and "://" in path
                place, steps = path if remote else str(Path(path).absolute()), int(step)
            except (TypeError, ValueError, OverflowError) as error:
                raise UsageError(f"run.checkpoint_saved takes a path and a number of steps: {error}") from None
            if steps < 0:
                raise UsageError(f"run.checkpoint_saved: a checkpoint has 0 steps or more in it, not {steps}")
            self._queue.submit_facts("checkpoint", {"path": place, "step": steps})
            used.accepted = True

    # your own checkpoint

    def state_dict(self) -> dict[str, Any]:
        """What your checkpoint should hold so that a resumed run goes on seamlessly. JSON, a few kilobytes."""
        return {
            "run_id": self.id,
            "attempt": self._info.attempt,
            "step": self._steps.number,
            "tokens": self._pace.tokens,
            "epochs": self.intake.book.state(),
            "guard": self.guard.state_dict(),
            "watch": self._scribe.watch_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`: step number, token count and the detectors' baselines. Raises `UsageError` if it is not one."""
        if "step" not in state:
            raise UsageError("this is not a state that run.state_dict() made: it has no 'step'")
        self._steps.number = whole("step", state["step"])
        self._pace.tokens = float(state.get("tokens", 0.0))
        self.intake.book.resume(state.get("epochs", ()))
        if "guard" in state:
            self.guard.load_state_dict(state["guard"])
        self._scribe.resume_watch(state.get("watch"), self._steps.number)

    # the end

    def finish(self, timeout: float = 60.0, *, status: RunStatus = "finished", error: str | None = None) -> FinishReport:
        """End the run: seal capsules, write the end, wait for delivery. Returns within `timeout` seconds (and a little).

        What is not delivered by then stays in the journal; the report names the command that ships it. Safe to call twice.
        """
        if self._report is not None or process.pid() != self._pid:
            return self._report or FinishReport({}, True, self.dir)
        deadline = time.monotonic() + (60.0 if timeout is None else float(timeout))
        end = RunEnd(-1, time.time(), status, self._info.attempt, redact.text(str(error)) if error else None)
        self._ended = True
        for skip in never_came(self.intake.plans, rank=self._info.rank):
            logger.warning("trackbridge: a batch to skip never came: %s", skip)
        atexit.unregister(self._at_exit)
        closed, unshipped, refused = False, {}, {}
        with Part("closing the run", strict=self._settings.strict):  # first: what is still under way needs recorder and probes
            kept = self._keeper.wait(max(deadline - time.monotonic(), 0.1))
            kept = self._memory.close(max(deadline - time.monotonic(), 0.1)) and kept
            closed = self._scribe.close(end, timeout=max(deadline - time.monotonic(), 0.1)) and kept
        with Part("detaching from the model", strict=self._settings.strict):
            self._detach()
        with Part("waiting for delivery", strict=self._settings.strict):
            try:
                unshipped = self._delivery.wait(deadline)
                refused = self._delivery.refused()
            except TrackbridgeError as error_now:
                logger.error("trackbridge: %s", error_now)
                closed = False
        lost = self._steps.rows_dropped + int(sum(self._scribe.losses.values()))
        self._report = FinishReport(unshipped, closed, self.dir, lost, refused)
        if not self._report:
            logger.warning("%s", self._report)
        return self._report

    def _detach(self) -> None:
        if self._auto is not None:
            self._auto.remove()
        self.guard.detach()
        self._instruments.detach()
        self._optimizers = {}
        self._meter.detach()
        if self._economy is not None:
            self._economy.stop()
        self._host.close()
        if self._recorder is not None:
            self._recorder.detach()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.finish()
        else:
            left = isinstance(error, SystemExit) and not error.code
            status: RunStatus = "finished" if left else "failed" if isinstance(error, Exception) else "killed"
            words = str(error).strip().splitlines()
            self._out_of_memory(error)
            self.finish(status=status, error=f"{type(error).__name__}: {words[0] if words else ''}")

    def _at_exit(self) -> None:
        """Forgotten `finish`: bounded, and honest about an uncaught exception."""
        error = getattr(sys, "last_value", None)
        self._out_of_memory(error)
        self.finish(10.0, status="failed" if error is not None else "finished", error=repr(error) if error else None)

    # helpers on the training thread

    def _out_of_memory(self, error: BaseException | None) -> None:
        """The run ends because there was no memory: a snapshot of what held it, and of what asked for it, if that is wanted."""
        if isinstance(error, torch.cuda.OutOfMemoryError) and not self._inert():
            self._memory.ask(self._steps.number, "out of memory")

    def _inert(self) -> bool:
        """True after `finish`, and in a forked child (a DataLoader worker), where this run must do nothing."""
        return self._ended or process.pid() != self._pid

    def _auto_step(self, loss: Tensor | None, batch: Any) -> None:
        for anomaly in self.step(loss, batch=batch):
            logger.warning("trackbridge: %s of %s at step %d", anomaly.kind, anomaly.series, anomaly.step)

    def _write_provenance(self) -> dict[str, Any]:
        facts = provenance.collect()
        if self._info.rank == 0:
            write_atomic(self._directory.provenance, dumps(facts).encode())
        return {key: value for key, value in facts.items() if key != "packages"}
