"""What trackers show of a run as a whole: the folder ``views`` of the run directory, made by the shipper at the run's end.

Heatmaps of every layer over all steps, each column the largest value of its stretch, and the page of the run. They hold
nothing that the journal does not, so they are not in it; a backend that finds them shows them (`backends.exhibits`).
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trackbridge import history, panels
from trackbridge.backends import exhibits
from trackbridge.journal import JournalReader, last_seq
from trackbridge.records import Anomaly, Row, Schema
from trackbridge.reports import pictures
from trackbridge.reports.pictures import Matrix
from trackbridge.reports.run_page import run_page
from trackbridge.rundir import RunDirectory

COLUMNS = 256
"""At most this many columns; at least half of them once a run is longer."""
PAGE_BYTES = 1 << 30
"""A journal that is larger gets no page: that is made of all rows at once."""
_BATCH = 2048


class Stretches:
    """The largest value and the presence of each series in equal stretches of steps. Its memory does not grow with steps."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.width = 1
        self._rows: dict[str, int] = {}
        self._values = np.full((0, COLUMNS), -np.inf)
        self._bad = np.zeros((0, COLUMNS), bool)
        self._places: dict[int, tuple[Schema, npt.NDArray[np.intp], npt.NDArray[np.intp]]] = {}

    def add(self, row: Row) -> None:
        """Take one row; steps may go back after a resume, but not before the first."""
        _, places, rows = self._places.get(id(row.schema)) or self._place(row.schema)
        if not places.size:
            return
        self.first = row.step if self.first is None else self.first
        while (column := max(row.step - self.first, 0) // self.width) >= COLUMNS:
            self._fold()
        values = row.values[places]
        finite = np.isfinite(values)
        at = rows[finite]
        self._values[at, column] = np.maximum(self._values[at, column], values[finite])
        self._bad[rows[~finite], column] = True

    def matrix(self, panel: panels.Panel) -> Matrix | None:
        """The series of a heatmap panel; None if it has none."""
        rows = panel.members(self._rows)
        if not rows or self.first is None:
            return None
        where = [self._rows[row] for row in rows]
        values, bad = self._values[where], self._bad[where]
        there = np.isfinite(values) | bad
        used = np.flatnonzero(there.any(axis=0))
        steps = [self.first + self.width * column for column in used.tolist()]
        shown = np.where(bad, np.nan, values)
        return Matrix(rows, steps, shown[:, used], there[:, used])

    def _place(self, schema: Schema) -> tuple[Schema, npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        drawn = [panel for panel in panels.PANELS if panel.view == "heatmap"]
        places = [at for at, name in enumerate(schema.names) if any(panel.draws(name) for panel in drawn)]
        rows = [self._rows.setdefault(schema.names[at], len(self._rows)) for at in places]
        if (more := len(self._rows) - len(self._values)) > 0:
            self._values = np.concatenate((self._values, np.full((more, COLUMNS), -np.inf)))
            self._bad = np.concatenate((self._bad, np.zeros((more, COLUMNS), bool)))
        self._places[id(schema)] = schema, np.array(places, np.intp), np.array(rows, np.intp)
        return self._places[id(schema)]

    def _fold(self) -> None:
        """Stretches twice as long."""
        half = COLUMNS // 2
        pairs = self._values.reshape(-1, half, 2).max(axis=2), self._bad.reshape(-1, half, 2).any(axis=2)
        self._values[:, :half], self._values[:, half:] = pairs[0], -np.inf
        self._bad[:, :half], self._bad[:, half:] = pairs[1], False
        self.width *= 2


def atlas(run_dir: str | Path) -> dict[str, bytes]:
    """Pictures of every layer over the whole run, by `panels.picture` name."""
    directory = history.find(run_dir)
    stretches, onsets = Stretches(), set()
    reader = JournalReader(directory.rows(next(iter(directory.ranks()), 0)), kinds={Row, Anomaly})
    while records := reader.read(limit=_BATCH):
        for record in records:
            if isinstance(record, Row):
                stretches.add(record)
            elif isinstance(record, Anomaly):
                onsets.add(record.onset)
    drawn = {panel: matrix for panel in panels.PANELS if panel.view == "heatmap" and (matrix := stretches.matrix(panel))}
    return {
        panels.picture(panel, whole=True): pictures.draw(panel, matrix, marks=sorted(onsets)) for panel, matrix in drawn.items()
    }


def make(directory: RunDirectory) -> Path | None:
    """The folder of views of a run that has ended; made now unless it is as new as the journal. None without a journal."""
    newest = last_seq(directory.rows())
    if newest < 0:
        return None
    if exhibits.made(directory.views) == newest:
        return directory.views
    temporary = directory.path / f".views.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        pictures.write(temporary, atlas(directory.path))
        if sum(file.stat().st_size for file in directory.rows().glob("*")) <= PAGE_BYTES:
            (temporary / "report.html").write_text(run_page(history.RunRecord(directory)), encoding="utf-8")
        (temporary / exhibits.MADE).write_text(json.dumps({"seq": newest}), encoding="utf-8")
        shutil.rmtree(directory.views, ignore_errors=True)
        temporary.rename(directory.views)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return directory.views
