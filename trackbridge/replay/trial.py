"""One replay with one thing changed: what an intervention is given, and what it may ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.optim import Optimizer

from trackbridge.capsule import SpikeCapsule
from trackbridge.replay.feed import Incomplete

if TYPE_CHECKING:
    from trackbridge.replay.norms import GradientNorm
    from trackbridge.replay.rebuilt import Rebuilt

LEAD = 4
"""A change acts from this many steps before the suspected batch on: a loss shows what the updates before it did."""


class NotRunnable(Incomplete):
    """This change cannot be made to this replay; the text says why, in a sentence."""


class Trial:
    """What an intervention gets: ``intervention(trial, value)`` is called once, when the recorded state is restored, asks for
    what it wants to happen, and returns a sentence that says so. It raises `NotRunnable` where it makes no sense.

    Attributes:
        capsule, rebuilt: the record, and the user's objects with the recorded state in them.
        guilty: the steps whose batches are suspected, ascending.
        start, last: the steps between which the change is to act, both included.
        aimed: the steps that were asked for by number; empty where none were.
        step: the step under way.
        acted: how often the change came into play, where the intervention counts that; None where it does not.
        norm, on_step: what the caller wants to know of each step.
    """

    def __init__(
        self,
        capsule: SpikeCapsule,
        intervene: Callable[[Trial, str | None], str],
        value: str | None,
        guilty: tuple[int, ...],
        start: int | None = None,
        last: int | None = None,
    ) -> None:
        self.capsule = capsule
        self.guilty = guilty
        self.start = max(capsule.restart_step, guilty[0] - LEAD if start is None else start)
        self.last = capsule.span[1] if last is None else last
        self.aimed = range(0) if start is None else range(self.start, (start if last is None else last) + 1)
        self.step = capsule.restart_step
        self.rebuilt: Rebuilt
        self.what = ""
        self.acted: int | None = None
        self.skipped: list[int] = []
        self.norm: GradientNorm | None = None
        self.on_step: Callable[[int], None] | None = None
        self._intervene, self._value = intervene, value
        self._given_up: dict[int, float] = {}
        self._skip: set[int] = set()
        self._before: list[Callable[[], None]] = []
        self._updates: list[Callable[[Optimizer], None]] = []
        self._restores: list[Callable[[Optimizer], None]] = []
        self._contexts: list[Callable[[], AbstractContextManager[Any]]] = []
        self._ends: list[Callable[[], None]] = []

    # -- what an intervention asks for

    @property
    def acting(self) -> bool:
        """Whether the step under way is one of those in which the change acts."""
        return self.start <= self.step <= self.last

    def skip(self, step: int) -> None:
        """Do not run `step`: its batch is not trained on."""
        self._skip.add(step)

    def before_step(self, action: Callable[[], None]) -> None:
        """Call `action` before each step in which the change acts."""
        self._before.append(action)

    def before_update(self, action: Callable[[Optimizer], None], after: Callable[[Optimizer], None] | None = None) -> None:
        """Call ``action(optimizer)`` just before each optimizer of an acting step steps, and `after` when it has."""
        self._updates.append(action)
        if after is not None:
            self._restores.append(after)

    def during_steps(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Run each acting step inside ``context()``."""
        self._contexts.append(context)

    def at_end(self, check: Callable[[], None]) -> None:
        """Call `check` after the last step; it may still raise `NotRunnable`."""
        self._ends.append(check)

    def scale_learning_rate(self, factor: Callable[[], float]) -> None:
        """Multiply every group's learning rate by ``factor()`` for the time of each acting update. What is taken from it
        counts as training given up."""
        kept: dict[int, list[Any]] = {}

        def lower(optimizer: Optimizer) -> None:
            by = factor()
            kept[id(optimizer)] = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * by
            self.give_up(1.0 - by)

        def restore(optimizer: Optimizer) -> None:
            for group, rate in zip(optimizer.param_groups, kept.pop(id(optimizer), ()), strict=False):
                group["lr"] = rate

        self.before_update(lower, restore)

    def give_up(self, share: float) -> None:
        """The step under way lost this share of its effect, 0 to 1; the largest share told for a step counts."""
        self._given_up[self.step] = max(self._given_up.get(self.step, 0.0), min(max(share, 0.0), 1.0))

    @property
    def given_up(self) -> float:
        """The share of the training given up, from where the change acts (or the suspected batch) to the end of the window."""
        first = min(self.start, self.guilty[0])
        return sum(self._given_up.values()) / (self.capsule.span[1] - first + 1)

    # -- what the replay calls

    @contextmanager
    def applied(self, rebuilt: Rebuilt, together: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
        """Around all steps. `together` makes what one rank finds impossible impossible on all."""
        self.rebuilt = rebuilt
        with together("a change to the replay"):
            self.what = self._intervene(self, self._value)
        handles = []
        for optimizer in rebuilt.optimizers.values():
            handles.append(optimizer.register_step_pre_hook(lambda it, *_: self._run(self._updates, it)))
            handles.append(optimizer.register_step_post_hook(lambda it, *_: self._run(self._restores, it)))
        try:
            with nullcontext() if self.norm is None else self.norm.watching(rebuilt):
                yield
            with together("the end of a changed replay"):
                for check in self._ends:
                    check()
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def around(self, step: int) -> Iterator[bool]:
        """Around one step; False: it is left out."""
        self.step = step
        if step in self._skip:
            self.give_up(1.0)
            self.skipped.append(step)
            yield False
            return
        scaler = self.rebuilt.scaler
        scale = scaler.get_scale() if scaler is not None else 1.0
        with ExitStack() as contexts:
            if self.acting:
                for action in self._before:
                    action()
                for context in self._contexts:
                    contexts.enter_context(context())
            yield True
        if self.norm is not None:
            self.norm.close(step, scale)
        if self.on_step is not None:
            self.on_step(step)

    def _run(self, actions: list[Callable[[Optimizer], None]], optimizer: Optimizer) -> None:
        if self.acting:
            for action in actions:
                action(optimizer)


Intervention: TypeAlias = Callable[[Trial, "str | None"], str]
