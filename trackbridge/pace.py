"""How fast the run goes: step time, fetch time, pauses, tokens and samples per second."""

from __future__ import annotations

from trackbridge.clock import StepClock


class Pace:
    """Sums what one step consumed and turns it into series when the step closes. Seconds, tokens, samples."""

    def __init__(self, clock: StepClock | None = None) -> None:
        self.tokens = 0.0  # in the whole run
        self._clock = clock or StepClock()
        self._fetch_s = 0.0
        self._tokens = 0.0
        self._samples = 0.0
        self._pauses: dict[str, float] = {}

    def begin(self) -> None:
        """The first step starts now."""
        self._clock.lap()

    def fetched(self, seconds: float) -> None:
        if not self._clock.paused:
            self._fetch_s += seconds

    def consumed(self, tokens: float, samples: float) -> None:
        self._tokens += tokens
        self._samples += samples

    def pause(self) -> None:
        self._clock.pause()

    def resume(self, series: str) -> None:
        """Go on; the pause is added to `series`."""
        self._pauses[series] = self._pauses.get(series, 0.0) + self._clock.resume()

    def close(self, tokens: float | None, samples: float | None) -> dict[str, float]:
        """The step ends now. `tokens` and `samples` replace what `consumed` summed. Absent where nothing was counted."""
        seconds = self._clock.lap()
        step_tokens = self._tokens if tokens is None else float(tokens)
        step_samples = self._samples if samples is None else float(samples)
        found = {"perf/step_s": seconds, **self._pauses}
        if self._fetch_s:
            found["perf/fetch_s"] = self._fetch_s
        if step_tokens:
            self.tokens += step_tokens
            found["train/tokens"] = self.tokens
            found["perf/tokens_per_s"] = step_tokens / seconds if seconds else 0.0
        if step_samples:
            found["perf/samples_per_s"] = step_samples / seconds if seconds else 0.0
        self._fetch_s = self._tokens = self._samples = 0.0
        self._pauses = {}
        return found
