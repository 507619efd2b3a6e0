"""Diagnoses anomalies that get no capsule of their own: slow ones, neighbours in another's window, those past the budget.

Like sealing it is done by a child process (``python -m trackbridge.explain``), so that reading the journal and weighing the
rules takes nothing from training: one at a time, in turn with sealing. The answers come back through `tell`.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trackbridge import children
from trackbridge.answers import DIAGNOSED
from trackbridge.diagnosis.registry import RULES
from trackbridge.records import Anomaly, Hypothesis
from trackbridge.rundir import RunDirectory

logger = logging.getLogger("trackbridge")

MOST = 50
"""Anomalies that are explained in one attempt; the first ones."""
EXPLAIN_SECONDS = 120.0


@dataclass(slots=True)
class _Open:
    anomaly: Anomaly
    last: int
    asked: bool = False
    done: threading.Event = field(default_factory=threading.Event)


class Explainer:
    """`consider`, `advance` and `finish` are for one thread; ``tell(id, hypotheses)`` is called on another, where `run` has
    jobs done one after the other. `sync` brings the record to the disk."""

    def __init__(
        self,
        directory: RunDirectory,
        after: int,
        tell: Callable[[str, tuple[Hypothesis, ...]], None],
        sync: Callable[[], None],
        run: Callable[[Callable[[], None]], None],
    ) -> None:
        self._directory = directory
        self._after = after
        self._tell = tell
        self._sync = sync
        self._run = run
        self._open: list[_Open] = []
        self._waiting: deque[_Open] = deque()
        self._child: subprocess.Popen[str] | None = None

    def consider(self, anomaly: Anomaly) -> None:
        """A new anomaly: explained once the record reaches as far past it as a capsule's would."""
        named = any(note.partition(": ")[0] in RULES for note in anomaly.notes)  # by a monitor
        if (anomaly.kind in DIAGNOSED or named) and len(self._open) < MOST:
            self._open.append(_Open(anomaly, anomaly.step + self._after))

    def advance(self, step: int) -> None:
        """`step` is in the journal."""
        self._ask([one for one in self._open if not one.asked and step >= one.last])

    def finish(self, timeout: float) -> bool:
        """Explain the rest. False if that takes longer than `timeout` seconds."""
        deadline = time.monotonic() + timeout
        self._ask([one for one in self._open if not one.asked])
        done = all(one.done.wait(max(deadline - time.monotonic(), 0)) for one in self._open)
        child = self._child  # the worker forgets it when it is done
        if not done and child is not None:
            child.kill()
        return done

    def _ask(self, due: list[_Open]) -> None:
        if due:
            self._sync()
            for one in due:
                one.asked = True
            self._waiting.extend(due)
            self._run(self._explain)

    def _explain(self) -> None:
        """All that wait, in one child: its imports cost more than its work."""
        due = []
        while self._waiting:
            due.append(self._waiting.popleft())
        if not due:
            return
        try:
            command = [sys.executable, "-m", "trackbridge.explain", str(self._directory.path), *(one.anomaly.id for one in due)]
            for line in self._child_says(command).splitlines():
                found = json.loads(line)
                self._tell(found["id"], tuple(_hypothesis(each) for each in found["hypotheses"]))
        except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
            logger.warning("trackbridge: %d anomalies could not be diagnosed: %s", len(due), error)
        finally:
            for one in due:
                one.done.set()

    def _child_says(self, command: list[str]) -> str:
        """Run the child, in its own session; it imports nothing from the folder we run in."""
        child = self._child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            start_new_session=True, env=children.environment(),
        )  # fmt: skip
        try:
            said, complaints = child.communicate(timeout=EXPLAIN_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            raise
        finally:
            self._child = None
        if child.returncode:
            lines = complaints.strip().splitlines() or ["the process was ended"]
            raise subprocess.SubprocessError(lines[-1])
        return said


def _hypothesis(plain: Mapping[str, Any]) -> Hypothesis:
    said, denied, of_batch = (tuple(map(str, plain[key])) for key in ("evidence_for", "evidence_against", "of_batch"))
    return Hypothesis(str(plain["name"]), said, denied, plain["intervention"], of_batch)
