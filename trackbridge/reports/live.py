"""A run that is being recorded, for a page that follows it: the page once, then what is new since.

Nothing here waits or keeps a thread; a server asks. What is held in memory is bounded: rows older than `HELD_BYTES` reach back
to are forgotten, and a page that asks for them is told to load itself again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from trackbridge import history
from trackbridge.journal import JournalReader, last_seq
from trackbridge.records import Row
from trackbridge.reports import page_sections
from trackbridge.reports.embed import base64_of, float32
from trackbridge.reports.embed_histograms import histogram_block
from trackbridge.reports.page import page
from trackbridge.reports.page_data import marks, subject
from trackbridge.reports.run_page import run_page_data
from trackbridge.rundir import RunDirectory

HELD_BYTES = 64 << 20
ROW_BYTES = 400
"""What a row takes beside its values; most of it where it has only a few."""
ANSWER_BYTES = 4 << 20
STATUS_EVERY = 5.0
"""Seconds between two looks at whether the trainer still lives, while nothing comes."""
BUILD_SHARE = 20
"""A page or its words are built again only after this many times the seconds that it took last time, at least `LEAST_AGE`."""
LEAST_AGE = 2.0


@dataclass(frozen=True)
class _Built:
    after: int
    at: float
    seconds: float
    value: Any


class LiveRun:
    """The leader's journal of the run at `path`, read as it grows. Safe to ask from several threads."""

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.directory = history.find(path)
        self._clock = clock
        self._lock = Lock()
        self._building = Lock()
        leader = next(iter(self.directory.ranks()), 0)
        self._journal = self.directory.rows(leader)
        self._reader = JournalReader(self._journal, last_seq(self._journal))
        self._first = self._reader.position + 1  # the oldest seq that `rows` can still tell
        self._held: deque[Row] = deque()
        self._bytes = 0
        self._changed = self._reader.position  # the newest record that is no row: words may differ since
        self._status, self._looked = "running", float("-inf")
        self._page: _Built | None = None
        self._words: _Built | None = None

    def page(self) -> str:
        """The page as of now, or of a moment ago."""
        with self._building:
            if self._page is None or self._stale(self._page):
                self._status = "running"  # until looked at: it may have been resumed
                self._page = self._build(self._whole)
            html: str = self._page.value
            return html

    def news(self, after: int, changed: int) -> dict[str, Any]:
        """What a page that has everything up to the records `after` (rows) and `changed` (words) lacks: rows as blocks of one
        schema, and, when anomalies, ends or histograms came, the sections with words. At most about `ANSWER_BYTES` of rows.
        "page": the record up to which `page` would know the run now."""
        with self._lock:
            self._read()
            if after + 1 < self._first or after > self._reader.position:
                return {"reload": True}
            rows = self._after(after)
            reached = rows[-1].seq if rows and rows[-1] is not self._held[-1] else self._reader.position
            newest, last = self._changed, self._reader.position
        ended = self._ended(quiet=not rows)
        held = self._page
        fresh = last if held is None or self._stale(held) else held.after
        answer: dict[str, Any] = {"after": reached, "changed": changed, "page": fresh, "blocks": _blocks(rows), "ended": False}
        if ended and newest == changed:
            newest += 1  # how it ended is news, too
        if newest > changed:
            with self._building:
                if self._words is None or (self._words.after < newest and self._stale(self._words)):
                    self._words = self._build(self._sections)
                if self._words.after >= min(newest, self._reader.position):
                    answer |= {**self._words.value, "changed": newest}
        answer["ended"] = ended and reached == self._reader.position and answer["changed"] >= newest
        return answer

    def _read(self) -> None:
        for record in self._reader.read():
            if isinstance(record, Row):
                self._held.append(record)
                self._bytes += record.values.nbytes + ROW_BYTES
            else:
                self._changed = record.seq
        while self._bytes > HELD_BYTES and self._held:
            gone = self._held.popleft()
            self._bytes -= gone.values.nbytes + ROW_BYTES
            self._first = gone.seq + 1

    def _after(self, after: int) -> list[Row]:
        found, size = [], 0
        for row in self._held:
            if row.seq > after:
                found.append(row)
                size += row.values.nbytes
                if size > ANSWER_BYTES:
                    break
        return found

    def _ended(self, quiet: bool) -> bool:
        if self._status == "running" and quiet and self._clock() - self._looked > STATUS_EVERY:
            self._looked = self._clock()
            self._status = history.runs(self.directory.path)[0].status
            if self._status != "running":
                self._page = self._words = None  # they do not know how it ended
        return self._status != "running"

    def _stale(self, built: _Built) -> bool:
        return self._clock() - built.at > max(LEAST_AGE, BUILD_SHARE * built.seconds)

    def _build(self, make: Callable[[history.RunRecord, int], Any]) -> _Built:
        started, after = self._clock(), last_seq(self._journal)
        record = history.RunRecord(RunDirectory(self.directory.path))
        value = make(record, after)
        return _Built(after, self._clock(), self._clock() - started, value)

    def _whole(self, record: history.RunRecord, after: int) -> str:
        return page(run_page_data(record, live={"after": after}))

    def _sections(self, record: history.RunRecord, after: int) -> dict[str, Any]:
        data = run_page_data(record, live={"after": after})
        found = data.anomalies
        return {
            "sections": {
                "head": page_sections.head(data),
                "answers": page_sections.questions(data),
                "spike": page_sections.spikes(data),
                "record": page_sections.record(data, ()),
            },
            "marks": marks(found),
            "subject": subject(found[0]) if found else None,
            "histograms": histogram_block(data.histograms, found[0].onset if found else None),
        }


def _blocks(rows: list[Row]) -> list[dict[str, Any]]:
    """Consecutive rows of one schema as {"names", "steps", "values"}, the values row by row."""
    groups: list[list[Row]] = []
    for row in rows:
        if groups and groups[-1][0].schema is row.schema:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [
        {
            "names": list(group[0].schema.names),
            "steps": base64_of(np.array([row.step for row in group], "<f8")),
            "values": base64_of(float32(np.stack([row.values for row in group]))),
        }
        for group in groups
    ]
