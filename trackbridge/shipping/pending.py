"""What was read from the journal and is not known to be safe in the tracker yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator

from trackbridge.records import Record, Row, RunEnd

_MOST_RECORDS = 4096
_MOST_VALUES = 4_000_000  # in rows: 32 MB


class Pending:
    """Records in ascending `seq`, each with the attempt it belongs to. Bounded: ask `full` before adding.

    `before`: where reading goes on after a restart that must give the first of them again.
    """

    def __init__(self) -> None:
        self._items: deque[tuple[int, Record]] = deque()
        self._before: dict[int, int] = {}
        self._values = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def full(self) -> bool:
        return len(self._items) >= _MOST_RECORDS or self._values >= _MOST_VALUES

    @property
    def first_attempt(self) -> int:
        return self._items[0][0]

    @property
    def last_attempt(self) -> int:
        return self._items[-1][0]

    @property
    def before(self) -> int:
        seq = self._items[0][1].seq
        return self._before.get(seq, seq - 1)

    def add(self, attempt: int, record: Record, before: int | None = None) -> None:
        """`before`: the seq before the first record that this one stands for; by default it stands for itself."""
        self._items.append((attempt, record))
        if before is not None:
            self._before[record.seq] = before
        self._values += _values(record)

    def of(self, attempt: int) -> Iterator[Record]:
        return (record for owner, record in self._items if owner == attempt)

    def drop(self, safe: int, *, ended: bool) -> list[tuple[int, Record]]:
        """Remove and return what has `seq` <= `safe`. The end of an attempt stays unless `ended`: only `close` delivers it."""
        return self._remove(
            [item for item in self._items if item[1].seq <= safe and (ended or not isinstance(item[1], RunEnd))]
        )

    def refuse(self, seqs: Collection[int]) -> list[tuple[int, Record]]:
        """Remove and return the records with these `seq`."""
        return self._remove([item for item in self._items if item[1].seq in seqs])

    def _remove(self, gone: list[tuple[int, Record]]) -> list[tuple[int, Record]]:
        if gone:
            numbers = {record.seq for _, record in gone}
            self._items = deque(item for item in self._items if item[1].seq not in numbers)
            for seq in numbers:
                self._before.pop(seq, None)
            self._values -= sum(_values(record) for _, record in gone)
        return gone


def _values(record: Record) -> int:
    return len(record.values) if isinstance(record, Row) else 0
