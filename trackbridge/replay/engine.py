"""`rerun`: restore, feed, compare; at least twice, and oftener where the replays differ, so that their noise is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trackbridge import names, provenance, rng
from trackbridge.capsule import SpikeCapsule
from trackbridge.capsule_parts import RngStates
from trackbridge.clock import compiled_graphs
from trackbridge.config import ActivationsConfig, ParametersConfig
from trackbridge.errors import TrackbridgeError, UsageError
from trackbridge.lab.replay import EnvironmentDifference, ReplayReport, Verdict
from trackbridge.names import LOCAL
from trackbridge.probes import Instruments
from trackbridge.ranks import Ranks
from trackbridge.replay import settings
from trackbridge.replay.compare import LOSS, Observation
from trackbridge.replay.feed import Incomplete, MicroBatches, micro_batches
from trackbridge.replay.held import guard
from trackbridge.replay.judge import Ran, judge
from trackbridge.replay.noise import MOST
from trackbridge.replay.rebuilt import Rebuilt
from trackbridge.replay.trial import Trial
from trackbridge.replay.world import World

OnStep = Callable[[int, int, int], None]


def rerun(
    capsule: SpikeCapsule,
    build: Callable[[], Any],
    *,
    runs: int = 2,
    deterministic: bool | None = None,
    rank: int | None = None,
    on_step: OnStep | None = None,
) -> ReplayReport:
    """Run the window of `capsule` again and compare every step with the record.

    Args:
        capsule: from `trackbridge.pull`.
        build: your code as at training time; returns ``(model, optimizer, step)`` or a `Rebuilt`. Called once per run.
        runs: how many replays, at least two: their differences are the noise floor. Where they differ from each other, or
            differ from the record on a GPU without deterministic algorithms, they become five.
        deterministic: torch's deterministic algorithms on or off; None: as recorded.
        rank: whose record; default this process' rank (torchrun's, where there is no process group yet), else 0.
        on_step: called as ``on_step(run, step, last)`` after each step.

    A run of several ranks is replayed by as many, each calling this (``torchrun --nproc-per-node N``); `build` makes the
    process group if there is none. All get the same report, that of the rank with the worst verdict.

    This process' random state and torch's switches are put back afterwards.

    Raises:
        UsageError: what `build()` returned does not fit the record.
        TrackbridgeError: the step function raised; its exception is the cause.
    """
    if not isinstance(capsule, SpikeCapsule):
        raise UsageError(f"a replay takes a capsule, from trackbridge.pull(REF), not a {type(capsule).__name__}")
    if not callable(build):
        raise UsageError(f"build must be a function that returns (model, optimizer, step), not a {type(build).__name__}")
    if not isinstance(runs, int) or runs < 2:
        raise UsageError(f"runs must be at least 2, not {runs!r}: without a second replay the noise is not known")
    began = time.monotonic()
    replay = Replay(capsule, build, this_rank() if rank is None else rank, deterministic, on_step)
    try:
        replay.world.check(capsule.world_size)
        with settings.kept(), replay.random_state_kept():
            histories = [replay.run(number) for number in range(runs)]
            found = judge(replay.record, histories)
            noisy = found.noisy or (found.first_divergence is not None and replay.may_vary)
            if runs < MOST and replay.world.any(noisy):
                histories += [replay.run(number) for number in range(runs, MOST)]
                found = judge(replay.record, histories)
    except Incomplete as missing:
        words = (*missing.args, *capsule.missing)
        return replay.world.verdict(replay.report(began, runs, "incomplete", str(missing.args[0]), missing=words))
    report = replay.report(
        began,
        len(histories),
        found.verdict,
        found.reason,
        missing=found.missing,
        steps=found.steps,
        first_divergence=found.first_divergence,
        noise_ulp=found.noise_ulp,
        noise_max_ulp=found.noise_max_ulp,
    )
    return replay.world.verdict(report)


class Replay:
    """The parts that every run of one `rerun` (or `what_if`) shares."""

    def __init__(
        self, capsule: SpikeCapsule, build: Callable[[], Any], rank: int, deterministic: bool | None, on_step: OnStep | None
    ) -> None:
        self.capsule = capsule
        self.world = World()
        self._lacks = rank not in capsule.ranks
        source = capsule.ranks[0] if self._lacks else rank  # `check` refuses it
        self.record = capsule.series(source)
        self._build = build
        self._rank = rank
        self._deterministic = deterministic
        self._on_step = on_step
        self._states: RngStates = capsule.rng_states(source)
        self._batches = capsule.micro_batches(source)
        recorded = capsule.section("parameters", ParametersConfig)
        self._parameters = recorded.model_copy(update={"histograms_every": 0})  # nothing to compare them with
        self._activations = capsule.section("activations", ActivationsConfig)
        self._environment: tuple[EnvironmentDifference, ...] = ()
        self._used_deterministic = False

    @property
    def may_vary(self) -> bool:
        """Whether the order of additions is the hardware's, so that two runs may differ in the last bits, or happen not to."""
        return bool(self._devices()) and torch.cuda.is_available() and not self._used_deterministic

    def check(self) -> None:
        """What can be known to be missing before anything runs."""
        capsule = self.capsule
        if self._lacks:
            raise Incomplete(f"this capsule holds nothing of rank {self._rank}")
        if self._devices() and torch.cuda.is_available():
            settings.check_cublas(capsule.provenance, self._deterministic)
        if not capsule.has_state(self._rank) and capsule.checkpoint is None:
            lacking = next((text for text in capsule.missing if text.startswith("parameter snapshot")), "parameter snapshot")
            raise Incomplete(lacking)
        for step in capsule.steps:
            if step not in self.record:
                raise Incomplete(f"step {step} has no recorded row to compare with")
            if not self._states.before(step):
                raise Incomplete(f"the random state before step {step} was not recorded")
            if step not in self._batches:
                raise Incomplete(f"no batch of step {step} was recorded: pass them through run.batches or run.step(batch=...)")

    def run(self, number: int, trial: Trial | None = None) -> dict[int, Ran]:
        """One replay of the window with freshly built objects; `trial` changes something in it, and may leave out steps."""
        settings.as_recorded(self.capsule.provenance, self._deterministic)
        if self.world.alone:
            self.check()
        rebuilt = Rebuilt.of(self._build())
        with self.world.together("replay.rerun"):
            if not self.world.alone:  # only now is there a process group to say it to
                self.check()
            self._restore(rebuilt)
        settings.as_recorded(self.capsule.provenance, self._deterministic)  # build() may have set its own
        if self._reorders(rebuilt):
            self._warm_up(rebuilt)
        if number == 0:
            self._used_deterministic = torch.are_deterministic_algorithms_enabled()
            self._environment = tuple(
                EnvironmentDifference(name=name, recorded=recorded, now=now)
                for name, recorded, now in provenance.differences(self.capsule.provenance, provenance.collect())
            )
        instruments = Instruments(self._parameters, self._activations, strict=True)
        history: dict[int, Ran] = {}
        # first, so that the probes see what it does
        with nullcontext() if trial is None else trial.applied(rebuilt, self.world.together):
            instruments.attach(rebuilt.models, rebuilt.optimizers, rebuilt.scaler)
            with _rates(rebuilt, instruments) as rates:
                try:
                    for step in self.capsule.steps:
                        rates.clear()
                        with nullcontext(True) if trial is None else trial.around(step) as wanted:
                            if wanted:
                                history[step] = self._step(step, rebuilt, instruments, rates)
                        if self._on_step is not None:
                            self._on_step(number, step, self.capsule.span[1])
                finally:
                    instruments.detach()
        return history

    def _reorders(self, rebuilt: Rebuilt) -> bool:
        """DDP puts its gradients into buckets in another order after the first step of a process, and with more than two ranks
        that order decides in which the ranks are added. A recorded step that was not the first had the later one."""
        if Ranks.current().world_size < 3:
            return False
        if self.capsule.has_state(self._rank) and self.capsule.state_facts(self._rank).get("first", True):
            return False
        modules = (module for model in rebuilt.models.values() for module in model.modules())
        return any(isinstance(module, nn.parallel.DistributedDataParallel) for module in modules)

    def _warm_up(self, rebuilt: Rebuilt) -> None:
        """The window's first step, to be forgotten: everything that it changed is restored."""
        first = self.capsule.steps[0]
        with self.world.together("warming up"):
            batches = micro_batches(first, self._batches[first], rebuilt)
            rng.restore(self._states.before(first), rebuilt.generators)
        self._call(first, rebuilt, batches)
        for optimizer in rebuilt.optimizers.values():
            optimizer.state.clear()
            optimizer.zero_grad()
        self._restore(rebuilt)

    def _restore(self, rebuilt: Rebuilt) -> None:
        """The snapshot, else the user's checkpoint, put into what was built. Raises `Incomplete`."""
        capsule = self.capsule
        if capsule.has_state(self._rank):
            missing = rebuilt.restore(capsule.state(self._rank))
            if missing:
                raise Incomplete(*missing)
            return
        path = Path(capsule.checkpoint or "")
        if rebuilt.checkpoint is None:
            raise Incomplete(f"no snapshot was kept; return Rebuilt(..., checkpoint=load), which loads your checkpoint {path}")
        try:
            rebuilt.checkpoint(path)
        except FileNotFoundError as error:
            raise Incomplete(f"the checkpoint {error.filename or path}, from which the replay begins, is not here") from None

    def _step(self, step: int, rebuilt: Rebuilt, instruments: Instruments, rates: list[Mapping[str, float]]) -> Ran:
        with self.world.together(f"step {step} of the replay"):
            batches = micro_batches(step, self._batches[step], rebuilt)
            before = rng.restore(self._states.before(step), rebuilt.generators)
        graphs = compiled_graphs()
        with guard.as_recorded(self.record[step], rebuilt.optimizers):
            loss = self._call(step, rebuilt, batches)
        rates.append(instruments.lr())
        slot = instruments.close(step)
        assert slot is not None, "a replay frees each slot before the next"
        values, present = instruments.finalize(slot)
        local = instruments.local_series
        known = [f"{name}{LOCAL}" if name in local else name for name in instruments.series]
        total, eps, parts = _loss(loss, step)
        seen = Observation(
            loss=total,
            loss_eps=eps,
            values={name: float(v) for name, v, here in zip(known, values, present, strict=True) if here} | parts,
            known=frozenset(known) | parts.keys(),
            rates=tuple(rates),
            micros=len(batches),
        )
        return Ran(seen, _problem(before, batches), self._found_again(step, rebuilt), compiled_graphs() > graphs)

    @staticmethod
    def _call(step: int, rebuilt: Rebuilt, batches: MicroBatches) -> Any:
        try:
            return rebuilt.step(rebuilt.model, rebuilt.optimizer, batches, step)
        except Exception as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())
            raise TrackbridgeError(f"the step function raised at step {step} of the replay: {words[:300]}") from error

    def _found_again(self, step: int, rebuilt: Rebuilt) -> bool | None:
        """Whether torch's generators are now as they were at the end of the recorded step, or all as they were before the next
        one; None where neither is known."""
        now = rng.capture(rebuilt.generators, self._torch_devices())
        after = self._states.after(step)
        if after is not None:
            digests = now.digests()
            if all(digests.get(name) == digest for name, digest in after.items()):
                return True
        if step + 1 not in self.capsule.steps:
            return None if after is None else False
        opening = self._states.opening(step + 1, 0)
        following, packed = opening or self._states.before(step + 1), now.pack()
        if all(name in packed and np.array_equal(packed[name], state) for name, state in following.items()):
            return True
        return None if after is None else False

    @contextmanager
    def random_state_kept(self) -> Iterator[None]:
        found = rng.capture({}, self._torch_devices()).pack()
        try:
            yield
        finally:
            rng.restore(found)

    def _devices(self) -> list[str]:
        return [name for name in self._states.before(self.capsule.span[0]) if name.startswith("cuda:")]

    def _torch_devices(self) -> list[torch.device]:
        """The recorded CUDA devices that are here and in use: before CUDA starts there is no state to look at."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return []
        return [torch.device(name) for name in self._devices() if int(name[5:]) < torch.cuda.device_count()]

    def report(self, began: float, runs: int, verdict: Verdict, reason: str, **found: Any) -> ReplayReport:
        return ReplayReport(
            verdict=verdict,
            reason=reason,
            run=self.capsule.run,
            anomaly_step=self.capsule.step,
            restart_step=self.capsule.restart_step,
            last_step=self.capsule.span[1],
            rank=self._rank,
            runs=runs,
            deterministic=self._used_deterministic,
            environment=self._environment,
            seconds=time.monotonic() - began,
            **found,
        )


@contextmanager
def _rates(rebuilt: Rebuilt, instruments: Instruments) -> Iterator[list[Mapping[str, float]]]:
    """Learning rates as each optimizer steps: a scheduler may move them before the step function returns."""
    found: list[Mapping[str, float]] = []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: found.append(instruments.lr())) for optimizer in rebuilt.optimizers.values()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _loss(loss: Any, step: int) -> tuple[float, float, dict[str, float]]:
    """(total, eps of its dtype, parts by series) of what the step function returned."""
    if isinstance(loss, Mapping) and loss:
        parts = {name: _number(value, step) for name, value in loss.items()}
        total = parts["loss"] if "loss" in parts else (sum(v for v, _ in parts.values()), max((e for _, e in parts.values())))
        return *total, {f"{LOSS}/{names.legal(name)}": value for name, (value, _) in parts.items() if name != "loss"}
    return *_number(loss, step), {}


def _number(value: Any, step: int) -> tuple[float, float]:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        eps = torch.finfo(value.dtype).eps if value.dtype.is_floating_point else 0.0
        return float(value.detach()), max(eps, torch.finfo(torch.float32).eps)
    if isinstance(value, (int, float, np.integer, np.floating)):
        return float(value), torch.finfo(torch.float32).eps
    kind = f"{value.dtype} tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise UsageError(f"the step function returned a {kind} at step {step}; return the step's loss, a real scalar")


def _problem(before: rng.RestoreReport, batches: MicroBatches) -> str | None:
    return next((str(report) for report in (before, *batches.reports) if not report.exact), None)


def this_rank() -> int:
    """This process' rank in an initialised process group, else the launcher's, else 0."""
    return Ranks.current().rank
