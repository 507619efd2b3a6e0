"""Following a journal from a given `seq`, while it is being written or long after."""

from __future__ import annotations

import bisect
import errno
from collections.abc import Collection, Container
from dataclasses import dataclass, field
from pathlib import Path

from trackbridge.journal import codec, segments, thin
from trackbridge.journal.scan import Walk
from trackbridge.journal.segments import Entry, Segment
from trackbridge.records import Record, Schema

_PLACES = 20  # of damage, kept for the message
_GONE = (errno.ENOENT, errno.ESTALE)  # the latter on network file systems


@dataclass
class Damage:
    """What could not be read. False when nothing is wrong.

    `records_lost` counts sequence numbers that should be there and are not; `where` holds "segment@offset" of the first few
    places.
    """

    directory: Path
    bytes_skipped: int = 0
    records_lost: int = 0
    where: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.bytes_skipped or self.records_lost)

    def __str__(self) -> str:
        if not self:
            return f"the journal {self.directory} is undamaged"
        place = f", first at {self.where[0]}" if self.where else ""
        records = {0: "an unknown number of records", 1: "1 record"}.get(self.records_lost, f"{self.records_lost} records")
        return (
            f"the journal {self.directory} is damaged: {records} lost, {self.bytes_skipped} bytes unreadable{place}; "
            "what is whole was read"
        )

    def note(self, place: str) -> None:
        if len(self.where) < _PLACES:
            self.where.append(place)


class JournalReader:
    """Reads records with `seq` > `after`, in order, each once. Never writes, takes no lock, holds no file open between calls.

    `kinds` and `steps` narrow what is returned (everything by default); what they leave out is passed without being read.
    Equal schemas are one `Schema` object. `damage` grows as reading goes on; a segment that retention has deleted is none.
    """

    def __init__(
        self,
        directory: str | Path,
        after: int = -1,
        *,
        kinds: Collection[type] | None = None,
        steps: Container[int] | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.position = after  # the highest seq passed
        self.damage = Damage(self.directory)
        self._kinds = None if kinds is None else {codec.KINDS[kind] for kind in kinds}
        self._steps = steps
        self._schemas: dict[bytes, Schema] = {}
        self._unfindable: set[bytes] = set()
        self._walk: Walk | None = None
        self._ahead: list[Segment] = []  # a listing, for as long as it shows segments after the current one
        self._expected: int | None = None  # the seq that comes next, None where a gap would not be damage

    def read(self, limit: int | None = None) -> list[Record]:
        """Up to `limit` records (a few more from a thinned stretch) that are there now; empty when there are none yet. Raises
        `TrackbridgeError` when the journal was written by a newer trackbridge."""
        records: list[Record] = []
        while limit is None or len(records) < limit:
            # listed before reading: if a later segment exists now, this one is complete
            later = self._later()
            if self._walk is None:
                if later is None:
                    break
                self._enter(later)
                continue
            try:
                self._read_segment(self._walk, later is not None, limit, records)
            except OSError as error:
                if error.errno not in _GONE:
                    raise
                self._expected = None  # retention took it while we were in it
                replaced = self._replacement(self._walk.segment)
                if replaced is not None:
                    self._walk = Walk(replaced)
                    continue
            if later is None or (limit is not None and len(records) >= limit):
                break
            self._enter(later)
        return records

    @property
    def unread_bytes(self) -> int:
        """Bytes behind the last good entry of the newest segment: being written, or cut off when the writer died."""
        return 0 if self._walk is None else self._walk.size - self._walk.at

    def _later(self) -> Segment | None:
        """The segment to read after the current one; at the start, the one that holds `position` + 1."""
        if self._walk is not None:
            current = self._walk.segment.number
            if not self._ahead or self._ahead[-1].number <= current:
                self._ahead = segments.listing(self.directory)
            at = bisect.bisect_right(self._ahead, current, key=lambda segment: segment.number)
            return self._ahead[at] if at < len(self._ahead) else None
        found = segments.listing(self.directory)
        before = [segment for segment in found if segment.first_seq <= self.position + 1]
        return before[-1] if before else (found[0] if found else None)

    def _replacement(self, gone: Segment) -> Segment | None:
        """The thinned segment that took the place of `gone`: it goes on behind `position`."""
        self._ahead = []
        return next((s for s in segments.listing(self.directory) if s.number == gone.number and s.level > gone.level), None)

    def _enter(self, segment: Segment) -> None:
        walked = self._walk.segment if self._walk is not None else None
        if walked is None or segment.number != walked.number + 1 or walked.level or segment.level:
            self._expected = max(segment.first_seq, self.position + 1)
        self._walk = Walk(segment)

    def _read_segment(self, walk: Walk, sealed: bool, limit: int | None, records: list[Record]) -> None:
        def damaged(start: int, end: int, entry: Entry | None) -> None:
            self.damage.bytes_skipped += end - start
            self.damage.note(f"{walk.segment.path.name}@{start}")
            if entry is not None and entry.kind != codec.SCHEMA and entry.seq > self.position:
                self._pass(entry)
                self.damage.records_lost += 1

        for entry, payload in walk.entries(sealed, self._wants, damaged):
            if entry.kind == codec.SCHEMA:
                if payload is not None:
                    self._learn(payload)
                continue
            if entry.seq <= self.position:
                continue
            if entry.kind == thin.KIND:
                known, self.position, self._expected = self.position, entry.seq, None
                if payload is not None:
                    self._expand(payload, known, records, f"{walk.segment.path.name}@{walk.at - len(payload)}")
                continue
            if walk.segment.level:
                self._expected = None  # what is missing here was left out on purpose
            self._pass(entry)
            if payload is not None:
                record = self._decode(entry, payload)
                if record is None:
                    self.damage.records_lost += 1
                    self.damage.note(f"{walk.segment.path.name}@{walk.at - len(payload)}")
                else:
                    records.append(record)
            if limit is not None and len(records) >= limit:
                return

    def _wants(self, entry: Entry) -> bool:
        if entry.kind == codec.SCHEMA:
            return True
        if entry.kind == thin.KIND:
            return entry.seq > self.position and (self._kinds is None or codec.ROW in self._kinds)
        return (
            entry.seq > self.position
            and entry.kind in codec.TYPES  # kinds of a newer version are passed over
            and (self._kinds is None or entry.kind in self._kinds)
            and (self._steps is None or entry.step in self._steps)
        )

    def _pass(self, entry: Entry) -> None:
        if self._expected is not None and entry.seq > self._expected:
            self.damage.records_lost += entry.seq - self._expected
        self.position = entry.seq
        self._expected = entry.seq + 1

    def _expand(self, payload: bytes, known: int, records: list[Record], place: str) -> None:
        """The rows of a thinned stretch: real values at their own steps, but not all of them."""
        try:
            schema = self._schema(thin.digest(payload))
            rows = thin.rows(payload, schema) if schema is not None else None
        except codec.MALFORMED:
            rows = None
        if rows is None:
            self.damage.records_lost += 1
            self.damage.note(place)
            return
        records += [row for row in rows if row.seq > known and (self._steps is None or row.step in self._steps)]

    def _decode(self, entry: Entry, payload: bytes) -> Record | None:
        try:
            if entry.kind != codec.ROW:
                return codec.decode(entry.kind, entry.seq, entry.step, payload)
            schema = self._schema(codec.digest_in_row(payload))
            return None if schema is None else codec.decode_row(entry.seq, entry.step, payload, schema)
        except codec.MALFORMED:
            return None

    def _schema(self, digest: bytes) -> Schema | None:
        """The schema with this digest. Its own entry may be damaged: writers repeat schemas, so look for another copy."""
        if digest not in self._schemas and digest not in self._unfindable:
            others = JournalReader(self.directory, kinds=())
            others.read()
            for other, schema in others._schemas.items():
                self._schemas.setdefault(other, schema)
            if digest not in self._schemas:
                self._unfindable.add(digest)
        return self._schemas.get(digest)

    def _learn(self, payload: bytes) -> None:
        if codec.digest_of_schema(payload) in self._schemas:
            return
        try:
            digest, schema = codec.decode_schema(payload)
        except codec.MALFORMED:
            return
        self._schemas[digest] = schema
