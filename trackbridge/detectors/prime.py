"""A watch for a resumed run that is not blind at first: it has read the end of the journal."""

from __future__ import annotations

from pathlib import Path

from trackbridge.config import DetectionConfig
from trackbridge.detectors.watch import Watch
from trackbridge.errors import Part
from trackbridge.journal import JournalReader, last_seq
from trackbridge.records import Row

ROWS = 256  # enough for the bands: a warm-up is 24 values, the scale's memory some 200
_SPAN = 2048  # records in which so many steps are looked for


def primed(settings: DetectionConfig, journal: Path, attempt: int, start_step: int, *, strict: bool = False) -> Watch:
    """A `Watch` for `attempt`, which begins at `start_step`. For a resumed one (`attempt` > 0) it knows the latest rows of the
    attempts before, and what comes in the next steps is marked ``after_resume``. A state from the user's checkpoint
    (`Watch.load_state_dict`) replaces all that."""
    watch = Watch(settings)
    if attempt == 0:
        return watch
    reading = Part("reading the journal's end", strict=strict)
    with reading:
        records = JournalReader(journal, max(last_seq(journal) - _SPAN, -1)).read()
        rows = {row.step: row for row in records if isinstance(row, Row) and row.kind == "step" and row.step < start_step}
        for step in sorted(rows)[-ROWS:]:
            watch.update(rows[step])  # what it finds there was told by the attempt before
        watch.finish()
    if not reading.alive:
        watch = Watch(settings)
    watch.note("resume", start_step)
    return watch
