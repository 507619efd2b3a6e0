"""`watch`: an Accelerate loop, told to a `Run`.

Methods of the accelerator and of its optimizers are replaced on these objects. Each does what it did, with the same arguments;
where ours fails, it goes on alone. Nothing is gathered from other processes.

| replaced | for |
|---|---|
| `Accelerator.backward` | the loss of each micro-batch, before it is divided for accumulation |
| `Accelerator.clip_grad_norm_`, `clip_grad_value_` | the gradient before it is clipped |
| `AcceleratedOptimizer.step` | the end of a step: when it steps, not when it accumulates |
| `Accelerator.save_state`, `load_state` | a pause; the run's state beside the checkpoint |
| `Accelerator.skip_first_batches` | the rest of an epoch after a resume, noted as well |
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from trackbridge.batches import Feed, Fetch
from trackbridge.errors import Part
from trackbridge.integrations import saved
from trackbridge.integrations.accelerate.hearing import Hearing, prepared, schedules
from trackbridge.integrations.accelerators import clips_by_torch, torch_optimizer
from trackbridge.integrations.given import warn
from trackbridge.integrations.losses import Count, covers, scale_of, total_norm
from trackbridge.integrations.wires import Method, Wires
from trackbridge.run import Run
from trackbridge.skip import SkipPlan
from trackbridge.watched import named

T = TypeVar("T")

logger = logging.getLogger("trackbridge")


@overload
def watch(
    run: Run,
    accelerator: Accelerator,
    model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer],
    loader: Iterable[T],
    *,
    skip: SkipPlan | str | Path | None = None,
    generators: Mapping[str, Any] | None = None,
    tokens: Count | None = None,
    samples: Count | None = None,
) -> Feed[T]: ...


@overload
def watch(
    run: Run,
    accelerator: Accelerator,
    model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer],
    loader: None = None,
    *,
    skip: None = None,
    generators: Mapping[str, Any] | None = None,
    tokens: Count | None = None,
    samples: Count | None = None,
) -> None: ...


def watch(
    run: Run,
    accelerator: Accelerator,
    model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer],
    loader: Iterable[Any] | None = None,
    *,
    skip: SkipPlan | str | Path | None = None,
    generators: Mapping[str, Any] | None = None,
    tokens: Count | None = None,
    samples: Count | None = None,
) -> Feed[Any] | None:
    """Record the loop that uses these objects, all as ``accelerator.prepare`` returned them.

    Micro-batches, the end of each step, the loss, the norm before clipping and checkpoints are then known without another line;
    only an evaluation is to be put into ``with run.pause("eval")``.

    Args:
        model, optimizer: one, a list or a mapping, as for `run.watch`. With several optimizers a step ends when the last one
            steps, and each has its own loss: what was back-propagated before it.
        loader: the prepared training loader. Iterate what is returned instead: each batch is noted with its sample ids before
            it is used. Without it a batch is what the model is called with: enough to run a step again only where the loss is
            made in the model.
        skip: a `SkipPlan` or its file, as for `run.batches`.
        generators: further random generators that a replay must restore, by name.
        tokens, samples: count a batch, for tokens per second, and as the weight of a micro-batch's loss.

    Called again for the same accelerator, it replaces what was there. Raises `UsageError` for what was not prepared.
    """
    before = vars(accelerator).get("_trackbridge")
    if before is not None:
        before.close()
    watching = Watching(run, accelerator, model, optimizer, generators, tokens, samples)
    vars(accelerator)["_trackbridge"] = watching
    if loader is None:
        watching.note_inputs()
        return None
    return watching.feed(loader.loader if isinstance(loader, Feed) else loader, skip)


class Watching:
    """The wires between one accelerator and one run, until `close`."""

    def __init__(
        self,
        run: Run,
        accelerator: Any,
        model: Any,
        optimizer: Any,
        generators: Mapping[str, Any] | None,
        tokens: Count | None,
        samples: Count | None,
    ) -> None:
        self.run = run
        self.batch: Any = None  # the one under way
        self._accelerator = accelerator
        self._count = (tokens, samples)
        self._part = Part("the Accelerate integration")
        self._saves = Part("the run's state beside accelerate's checkpoints")
        self._skip: SkipPlan | str | Path | None = None
        self._norm: Tensor | float | None = None
        self._counts: tuple[int | None, ...] = (None, None)  # tokens and samples of the batch under way
        self._consumed = [0, 0]  # and of a step's batches that have no loss of their own
        self._models = named("model", model, nn.Module)
        self._optimizers = prepared(accelerator, optimizer)
        run.watch(
            self._models,
            {key: torch_optimizer(one) for key, one in self._optimizers.items()},
            scaler=accelerator.scaler,
            state=schedules(accelerator),
            generators=generators,
        )
        self._parameters = [parameter for one in self._models.values() for parameter in one.parameters()]
        self._handles: list[Any] = []
        self._wires = Wires()
        Hearing(accelerator, self._optimizers, self._wires, self._micro, self._closed)
        self._wires.replace(accelerator, "clip_grad_norm_", self._clipping_norm)
        self._wires.replace(accelerator, "clip_grad_value_", self._clipping_value)
        self._wires.replace(accelerator, "save_state", self._saving)
        self._wires.replace(accelerator, "load_state", self._loading)
        self._wires.replace(accelerator, "skip_first_batches", self._skipping)

    def close(self) -> None:
        """Every method is what it was."""
        self._wires.cut()
        for handle in self._handles:
            handle.remove()

    def feed(self, loader: Any, skip: SkipPlan | str | Path | None, known_as: Any = None) -> Feed[Any]:
        """`loader`, each batch noted. `known_as` is the loader of whole epochs, where this is the rest of one."""
        self._skip = skip
        return self.run.intake.feed(loader, skip=skip, known_as=known_as, observer=_Noting(self))

    def note_inputs(self) -> None:
        """A micro-batch is what the first model is called with. Before the recorder's own hook, which begins the step."""
        root = next(iter(self._models.values()))

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if module.training and torch.is_grad_enabled() and self._part.alive and not self.run.intake.book.state():
                with self._part:
                    self.told({"args": args, "kwargs": kwargs})
                    self.run.fetched(self.batch)

        self._handles.append(root.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))

    def told(self, batch: Any) -> None:
        """`batch` is about to be used."""
        self.batch = batch
        self._counts = tuple(None if count is None else count(batch) for count in self._count)
        if len(self._optimizers) > 1:
            self._consumed = [total + (more or 0) for total, more in zip(self._consumed, self._counts, strict=True)]

    # what is heard

    def _micro(self, loss: Tensor) -> None:
        if self._part.alive:
            with self._part:
                tokens, samples = self._counts
                self.run.micro(loss, tokens=tokens, samples=samples)
                if self._handles:  # no feed marks the fetch that comes next
                    self.run.intake.fetching()

    def _closed(self, losses: dict[str, Tensor] | None) -> None:
        if not self._part.alive:
            return
        with self._part:
            norm, self._norm = self._norm, None
            if any(one.step_was_skipped for one in self._optimizers.values()):
                norm = None  # a scale that was tried
            (tokens, samples), self._consumed = self._consumed, [0, 0]
            warn(self.run.step(losses, tokens=tokens or None, samples=samples or None, grad_norm=norm))

    # what is replaced

    def _clipping_norm(self, original: Method) -> Method:
        def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, **kwargs: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            plain = norm_type == 2 and not kwargs and clips_by_torch(self._accelerator)
            if plain and self._part.alive and covers(parameters, self._parameters):
                self._accelerator.unscale_gradients()
                return self.run.clip_grad_norm_(max_norm)
            norm = original(parameters, max_norm, norm_type, **kwargs)
            if norm_type == 2 and len(parameters) == len(self._parameters):
                self._norm = norm if isinstance(norm, (Tensor, float)) and not hasattr(norm, "to_local") else None
            return norm

        return clip_grad_norm_

    def _clipping_value(self, original: Method) -> Method:
        def clip_grad_value_(parameters: Any, clip_value: float, **kwargs: Any) -> Any:
            if self._part.alive:
                with self._part:
                    norm = total_norm(self._parameters)
                    scale = scale_of(self._accelerator.scaler, torch_optimizer(next(iter(self._optimizers.values()))))
                    self._norm = norm if norm is None or scale is None else norm / scale
            return original(parameters, clip_value, **kwargs)

        return clip_grad_value_

    def _saving(self, original: Method) -> Method:
        def save_state(*args: Any, **kwargs: Any) -> Any:
            with self.run.pause("save"):
                place = original(*args, **kwargs)
                if isinstance(place, (str, Path)):
                    with self._saves:
                        now = self.run.state_dict()
                        saved.write(Path(place), self._accelerator.process_index, now)
                        self.run.checkpoint_saved(place, now["step"])
            return place

        return save_state

    def _loading(self, original: Method) -> Method:
        def load_state(*args: Any, **kwargs: Any) -> Any:
            place: list[Any] = []  # accelerate may choose it itself
            handle = self._accelerator.register_load_state_pre_hook(lambda models, input_dir: place.append(input_dir))
            try:
                found = original(*args, **kwargs)
            finally:
                handle.remove()
            with self._saves:
                for folder in place:
                    self._go_on(saved.read(Path(folder), self._accelerator.process_index))
            return found

        return load_state

    def _skipping(self, original: Method) -> Method:
        def skip_first_batches(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(dataloader, Feed):
                return original(dataloader, *args, **kwargs)
            return self.feed(original(dataloader.loader, *args, **kwargs), self._skip, known_as=dataloader.loader)

        return skip_first_batches

    def _go_on(self, before: dict[str, Any] | None) -> None:
        if before is None:
            return
        if before["run_id"] != self.run.id:
            logger.warning(
                "trackbridge: this checkpoint is of run %s, not of %s; trackbridge.init(id=%r, resume='auto') goes on with it",
                before["run_id"],
                self.run.id,
                before["run_id"],
            )
        saved.resume(self.run, before)


class _Noting:
    """A feed's observer that also keeps the newest batch."""

    def __init__(self, watching: Watching) -> None:
        self._watching = watching
        self._intake = watching.run.intake

    def before_fetch(self, *, opening: bool = False) -> None:
        self._watching.batch = None
        self._intake.before_fetch(opening=opening)

    def fetched(self, batch: Any, fetch: Fetch, /) -> None:
        self._watching.told(batch)
        self._intake.fetched(batch, fetch)

    def exhausted(self) -> None:
        self._intake.exhausted()
