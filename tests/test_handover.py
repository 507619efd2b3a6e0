"""The queue between the training thread and the scribe: order, and how much of step contexts may wait in it."""

from __future__ import annotations

from queue import Empty
from typing import Any

import pytest

from trackbridge import handover
from trackbridge.handover import Ask, ClosedStep, Handover
from trackbridge.recorder import RawContext
from trackbridge.records import Params


def submit(queue: Handover, step: int, nbytes: int) -> None:
    slot: Any = None  # the queue does not look into it
    queue.submit_step(step, 0.0, slot, {}, RawContext(step, 0, None, (), (), nbytes), call=step)


def test_contexts_beyond_the_budget_are_dropped_and_counted_until_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "BACKLOG_BYTES", 100)
    queue = Handover()
    for step in range(4):
        submit(queue, step, 60)
    assert queue.contexts_dropped == 2, "two steps of 60 bytes are over 100: what comes then is dropped"
    kept = []
    for step in range(4):
        item = queue.take(0.0)
        assert isinstance(item, ClosedStep) and item.step == step, "no step is dropped, and they stay in order"
        kept.append(item.context is not None)
    assert kept == [True, True, False, False]
    submit(queue, 4, 60)
    assert queue.contexts_dropped == 2 and queue.take(0.0).context is not None  # type: ignore[union-attr]


def test_everything_comes_out_in_order_and_then_the_end() -> None:
    queue = Handover()
    queue.submit_facts("perf", {"peak": 1.0})
    queue.later(lambda: 7)
    queue.end()
    facts, ask, end = queue.take(0.0), queue.take(0.0), queue.take(0.0)
    assert isinstance(facts, Params) and facts.values == {"perf": {"peak": 1.0}}
    assert isinstance(ask, Ask) and ask.what() == 7 and end is None
    with pytest.raises(Empty):
        queue.take(0.0)
