"""How fast the run goes: step time, fetch time, pauses, tokens and samples per second."""

from __future__ import annotations

from trackbridge.clock import StepClock, compiled_graphs


class Pace:
    """Sums what one step consumed and turns it into series when the step closes. Seconds, tokens, samples.

    `steady` is False in the first step and in one in which something was compiled: their time is no rate of training.
    """

    def __init__(self, clock: StepClock | None = None, *, steps: int | None = None) -> None:
        """`steps`: how long the run is going to be, for ``perf/eta_s``."""
        self.tokens = 0.0  # in the whole run
        self.steady = False
        self.consumed_tokens = 0.0  # in the step that was closed last
        self._clock = clock or StepClock()
        self._steps = steps
        self._typical_s = 0.0
        self._begun = False
        self._compiled = compiled_graphs()
        self._fetch_s = 0.0
        self._tokens = 0.0
        self._samples = 0.0
        self._padded = 0.0
        self._pauses: dict[str, float] = {}

    def begin(self) -> None:
        """The first step starts now."""
        self._clock.lap()

    @property
    def paused(self) -> bool:
        return self._clock.paused

    def fetched(self, seconds: float) -> None:
        if not self._clock.paused:
            self._fetch_s += seconds

    def consumed(self, tokens: float, samples: float, padded: float = 0.0) -> None:
        """`padded` counts the padding in."""
        self._tokens += tokens
        self._samples += samples
        self._padded += padded

    def pause(self) -> None:
        self._clock.pause()

    def resume(self, series: str) -> None:
        """Go on; the pause is added to `series`."""
        self._pauses[series] = self._pauses.get(series, 0.0) + self._clock.resume()

    def close(
        self, tokens: float | None, samples: float | None, step: int = 0, padded: float | None = None
    ) -> dict[str, float]:
        """Step `step` ends now. `tokens`, `samples` and `padded` replace what `consumed` summed. Absent where nothing was
        counted."""
        seconds = self._clock.lap()
        graphs = compiled_graphs()
        self.steady = self._begun and graphs == self._compiled and seconds > 0
        self._compiled = graphs
        self._begun = True
        step_tokens = self._tokens if tokens is None else float(tokens)
        step_samples = self._samples if samples is None else float(samples)
        step_padded = self._padded if padded is None else float(padded)
        found = {"perf/step_s": seconds, **self._pauses}
        if self._fetch_s:
            found["perf/fetch_s"] = self._fetch_s
        if step_tokens:
            self.tokens += step_tokens
            found["train/tokens"] = self.tokens
            if self.steady:
                found["perf/tokens_per_s"] = step_tokens / seconds
        if step_padded:
            found["data/padding_share"] = 1.0 - step_tokens / step_padded
            if self.steady:
                found["perf/padded_tokens_per_s"] = step_padded / seconds
        if step_samples and self.steady:
            found["perf/samples_per_s"] = step_samples / seconds
        if self._steps is not None and self.steady:
            self._typical_s += (seconds - self._typical_s) * (0.02 if self._typical_s else 1.0)
            found["perf/eta_s"] = max(self._steps - step - 1, 0) * self._typical_s
        self.consumed_tokens = step_tokens
        self._fetch_s = self._tokens = self._samples = self._padded = 0.0
        self._pauses = {}
        return found
