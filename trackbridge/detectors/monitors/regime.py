"""How much data a step uses, and when that changes: a switch of the batch size or the sequence length is no spike.

The size of a step comes from its batches where the recorder kept them, else from the tokens and samples that the loop counted.
A size that has held for `_ESTABLISHED` steps is the usual one; another that comes `_LASTS` times in a row replaces it, and the
bands learn anew. Until then values at another sequence length are not judged, and those of a smaller batch get a band that is
wider by the square root of the ratio: the mean of fewer samples is noisier. Sizes that always vary tell nothing.
"""

from __future__ import annotations

import math
from typing import ClassVar

from trackbridge.detectors.monitors.base import Look, Monitor, Sign

_ESTABLISHED = 20
_LASTS = 3


class Regime(Monitor):
    """Never tells a sign. After `update`: `judged` is False for a step whose values say nothing, `widen` (>= 1) multiplies the
    bar, and `words` says what is unusual about the step, empty if nothing is."""

    NAME = "regime"
    KEPT: ClassVar[tuple[str, ...]] = ("usual", "held", "other", "times", "tokens", "epoch")
    CAUSAL = False

    def __init__(self) -> None:
        super().__init__()
        self.usual: list[float] = []  # [samples, elements of a sample]; of the loop's own counts [samples, tokens, 0]
        self.held = 0
        self.other: list[float] = []
        self.times = 0
        self.tokens = 0.0
        self.epoch = -1
        self.judged, self.widen, self.words = True, 1.0, ""
        self._event: str | None = None

    def update(self, look: Look) -> Sign | None:
        self.judged, self.widen, self.words, self._event = True, 1.0, "", None
        self._epoch(look)
        size = _of_batches(look) or self._counted(look)
        if not size:
            return None
        if size == self.usual:
            self.held, self.other, self.times = self.held + 1, [], 0
        elif self.held < _ESTABLISHED or len(size) != len(self.usual):
            self.usual, self.held, self.other, self.times = size, 1, [], 0
        else:
            self._differs(size)
        return None

    def regime(self) -> str | None:
        return self._event

    def _differs(self, size: list[float]) -> None:
        self.times = self.times + 1 if size == self.other else 1
        self.other = size
        same_length = len(size) == 2 and size[1] == self.usual[1]
        if self.times >= _LASTS:
            self._event = "batch_size" if same_length else "sequence_length"
            self.usual, self.held, self.other, self.times = size, _ESTABLISHED, [], 0
        elif not same_length:
            self.judged = False
        else:
            self.widen = math.sqrt(max(self.usual[0] / max(size[0], 1.0), 1.0))
            self.words = f"a batch of {size[0]:g} samples, usually {self.usual[0]:g}"

    def _counted(self, look: Look) -> list[float]:
        """The size as the loop counted it; empty when it does not."""
        total, rate, seconds = look.finite("train/tokens"), look.finite("perf/samples_per_s"), look.finite("perf/step_s")
        tokens = 0.0
        if total is not None:
            tokens, self.tokens = total - self.tokens, total
        samples = round(rate * seconds) if rate is not None and seconds is not None else 0.0
        return [samples, tokens, 0.0] if tokens > 0 or samples > 0 else []

    def _epoch(self, look: Look) -> None:
        epochs = [micro.epoch for micro in look.context.micro if micro.epoch is not None] if look.context else []
        if epochs and max(epochs) != self.epoch:
            if self.epoch >= 0:
                self.words = f"the first step of epoch {max(epochs)}"
            self.epoch = max(epochs)


def _of_batches(look: Look) -> list[float]:
    """[samples, elements of a sample] of the step's batches; empty when the recorder did not keep them."""
    samples = length = 0.0
    for micro in look.context.micro if look.context else ():
        array = next((array for array in (micro.tensors or {}).values() if array.ndim), None)
        if array is None:
            return []
        samples += len(array)
        length = max(length, array.size / max(len(array), 1))
    return [samples, length] if samples else []
