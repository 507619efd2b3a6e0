"""The step's clock: evaluation does not count."""

from __future__ import annotations

from trackbridge.clock import StepClock


def test_pauses_are_taken_out() -> None:
    now = [0.0]
    clock = StepClock(lambda: now[0])
    now[0] = 1.0
    assert clock.lap() == 1.0
    now[0] = 1.5
    clock.pause()
    now[0] = 61.5
    clock.resume()
    now[0] = 62.0
    assert clock.lap() == 1.0


def test_a_step_may_end_inside_a_pause() -> None:
    now = [0.0]
    clock = StepClock(lambda: now[0])
    now[0] = 2.0
    clock.pause()
    now[0] = 10.0
    assert clock.lap() == 2.0
    now[0] = 12.0
    clock.resume()
    now[0] = 15.0
    assert clock.lap() == 3.0


def test_pauses_nest() -> None:
    now = [0.0]
    clock = StepClock(lambda: now[0])
    clock.pause()
    now[0] = 1.0
    clock.pause()
    now[0] = 2.0
    assert clock.resume() == 0.0 and clock.paused
    now[0] = 5.0
    assert clock.resume() == 5.0 and not clock.paused
    now[0] = 6.0
    assert clock.lap() == 1.0
