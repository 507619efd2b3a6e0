"""Rows of all ranks: every rank sends the leader its share of a step, and the leader writes one row of all of them.

On the scribe's thread, over a connection of our own to the process group's store; no collective, nobody waits. The leader
holds a row back until every rank's share is there, in order, and for so long at most as `ranks.wait_seconds` says: then the
row is written with this rank's own values, and its series ``ranks/merged`` is 1 instead of the number of ranks.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from trackbridge import ranks
from trackbridge.config import RanksConfig
from trackbridge.detectors.units import is_loss
from trackbridge.errors import Part
from trackbridge.exchange import Exchange
from trackbridge.names import LOCAL, is_wide
from trackbridge.notices import private
from trackbridge.probes import moments
from trackbridge.probes.session import Reading
from trackbridge.records import Anomaly, Row, RunInfo, Schema, StepContext
from trackbridge.rowmaker import RowMaker
from trackbridge.shares import LOSS, Share, by_name

logger = logging.getLogger("trackbridge")

WAITING_BYTES = 64 << 20
"""Rows that the leader holds back at most; beyond it the oldest is written as it is."""
USED_TO = 32  # rows in a row that are this rank's own, after which its loss is judged as it is
IMPATIENT = 1.0  # seconds that are waited for ranks which were late for the row before
LOOK = (0.0005, 0.1)  # seconds between two questions to the store: at first, and at most
REPLICAS = "param/replicas_differ"
NAMED = 3  # parameters that a note names
RANKS_PER_LOOK = 64  # so many ranks more, so much longer


@dataclass(frozen=True, slots=True, eq=False)
class Concluded:
    """A row that may be judged and written. `broken` are the ranks whose own loss or activations are not finite, `apart` the
    parameters whose replicas differ, with the ranks that stand alone. `judged` is what detectors see of it."""

    row: Row
    context: StepContext | None
    judged: Row
    broken: tuple[int, ...] = ()
    apart: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def blamed(self, anomaly: Anomaly) -> Anomaly:
        """`anomaly`, which this row told, with the ranks that it is about where they are known."""
        if anomaly.series == REPLICAS and self.apart:
            ranks = sorted({rank for each in self.apart.values() for rank in each})
            where = f"in {', '.join(list(self.apart)[:NAMED])}{', ...' if len(self.apart) > NAMED else ''}"
            who = f"; rank {', '.join(map(str, ranks))} stands alone" if ranks else ""
            return anomaly.updated(ranks=tuple(ranks) or anomaly.ranks, notes=(*anomaly.notes, f"{where}{who}"))
        return anomaly.updated(ranks=self.broken) if self.broken else anomaly


class Shares:
    """What this rank has to tell of each step."""

    def __init__(self) -> None:
        self._narrow: dict[int, tuple[Schema, tuple[str, ...], npt.NDArray[np.int64]]] = {}

    def of(self, own: Row, reading: Reading, tokens: float) -> Share:
        """`own` is the rank's row, `tokens` what it consumed in the step (0: not known)."""
        known = self._narrow.get(id(own.schema))
        if known is None:
            if len(self._narrow) >= 64:
                self._narrow.clear()
            names = own.schema.names
            places = [place for place, name in enumerate(names) if not is_wide(name) and not name.endswith(LOCAL)]
            known = own.schema, tuple(names[place] for place in places), np.array(places, np.int64)
            self._narrow[id(own.schema)] = known
        _, names, at = known
        values = own.values[at]
        stats = reading.session.slab.unpack(reading.numbers)
        loss = float(values[names.index(LOSS)]) if LOSS in names else 0.0
        broken = not np.isfinite(loss) or bool(stats["activations"].reshape(-1, moments.WIDTH)[:, moments.NONFINITE].any())
        weight = float(stats["loss_tokens"][0]) if stats["loss_seen"][0] else tokens
        return Share(own.step, reading.session.layout, weight, broken, names, values, reading.share())


class Sender:
    """The side of every rank but the leader."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._shares = Shares()

    def send(self, call: int, own: Row, reading: Reading, tokens: float) -> None:
        """The share of call number `call` of `run.step`."""
        if self._exchange.alive:
            self._exchange.send(call, self._shares.of(own, reading, tokens).pack())

    def leave(self) -> None:
        """Nothing more is sent."""
        self._exchange.leave()

    def close(self) -> None:
        """Nothing more is read by the leader, if it says so."""
        self._exchange.finish()


@dataclass(slots=True)
class _Waiting:
    call: int
    own: Row
    reading: Reading
    share: Share
    context: StepContext | None
    since: float
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = self.reading.numbers.nbytes + self.own.values.nbytes


class Merger:
    """The leader's side: rows go in with `add`, come out of `ready` in order."""

    def __init__(
        self,
        exchange: Exchange,
        rows: RowMaker,
        world_size: int,
        wait_seconds: float,
        *,
        strict: bool = False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._exchange = exchange
        self._rows = rows
        self._world = world_size
        self._seconds = wait_seconds
        self._part = Part("merging ranks", strict=strict)
        self._clock, self._sleep = clock, sleep
        self._shares = Shares()
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0
        self._least = LOOK[0] * max(1.0, world_size / RANKS_PER_LOOK)
        self._pause = self._least
        self._next_look = -1.0
        self._late = False
        self._said: set[str] = set()
        self.unmerged = 0
        self._in_a_row = 0

    @property
    def pause(self) -> float | None:
        """Seconds after which `ready` should be asked again; None when nothing is held back."""
        return self._pause if self._waiting else None

    def add(self, call: int, own: Row, reading: Reading, tokens: float, context: StepContext | None) -> None:
        """This rank's part of call number `call` of `run.step`."""
        share = self._shares.of(own, reading, tokens)
        waiting = _Waiting(call, own, reading, share, None if context is None else _light(context), self._clock())
        self._waiting.append(waiting)
        self._bytes += waiting.nbytes

    def ready(self) -> Iterator[Concluded]:
        """The rows that need not be held back any longer, in order."""
        while self._waiting:
            head = self._waiting[0]
            asked, messages = self._look(head)
            if messages is None and not self._give_up(head, asked):
                return
            self._waiting.popleft()
            self._bytes -= head.nbytes
            self._next_look = self._clock()  # the next row has not been asked for
            yield self._conclude(head, messages)

    def settle(self, seconds: float) -> Iterator[Concluded]:
        """The rows that are held back, as far as the other ranks' shares come within `seconds`."""
        deadline = self._clock() + min(seconds, self._seconds)
        yield from self.ready()
        while self._waiting and self._clock() < deadline:
            self._sleep(self._pause)
            yield from self.ready()

    def finish(self, seconds: float) -> Iterator[Concluded]:
        """All rows that are held back; the other ranks' last shares get up to `seconds`."""
        yield from self.settle(seconds)
        self._seconds = 0.0
        while self._waiting:
            yield from self.ready()

    def close(self) -> None:
        """Nothing more is read."""
        self._exchange.finish()

    def _look(self, head: _Waiting) -> tuple[bool, list[bytes] | None]:
        """(whether the store was asked, the other ranks' messages). Asked less and less often while they do not come."""
        now = self._clock()
        if not self._exchange.alive or now < self._next_look:
            return False, None
        messages = self._exchange.take(head.call)
        if messages is None:
            self._next_look = now + self._pause
            self._pause = min(2 * self._pause, LOOK[1])
        else:
            self._next_look, self._pause = now, self._least
        return True, messages

    def _give_up(self, head: _Waiting, asked: bool) -> bool:
        """Whether the row is to be written without the others: they are late, or have left this step out."""
        if not self._exchange.alive or not self._part.alive or self._bytes > WAITING_BYTES:
            return True
        late = self._clock() - head.since >= (min(IMPATIENT, self._seconds) if self._late else self._seconds)
        newest = self._waiting[-1]
        gone = asked and self._pause >= LOOK[1] and self._exchange.left(self._exchange.lacking(head.call))
        if late or gone or (asked and newest is not head and self._exchange.sent(newest.call)):
            lacking = self._exchange.lacking(head.call)
            self._late = late and bool(lacking)
            if not lacking:  # it has come just now
                self._next_look = self._clock()
                return False
            self._say(
                "late",
                "rank%s %s did not send the numbers of step %d%s: that row is rank 0's own (its ranks/merged is 1)",
                "s" if len(lacking) > 1 else "",
                ", ".join(map(str, lacking[:8])),
                head.own.step,
                f" within {self._seconds:g} s" if late else ", and will not" if gone else ", though those of a later one",
            )
            return True
        return False

    def _conclude(self, head: _Waiting, messages: list[bytes] | None) -> Concluded:
        if messages is not None and self._part.alive:
            self._late = False
            with self._part:
                try:
                    return self._merged(head, [head.share, *map(Share.unpack, messages)])
                except ValueError as error:
                    self._say("unlike", "the numbers of step %d cannot be merged: %s", head.own.step, error)
        self.unmerged += 1
        named = {name: value for name, value in head.own.items() if not is_wide(name)}
        named |= {"ranks/merged": 1.0, "trackbridge/rows_unmerged": float(self.unmerged)}
        row = self._rows.whole(head.own, named, None)
        self._in_a_row += 1
        if not self._exchange.alive or self._in_a_row > USED_TO:
            return Concluded(row, head.context, row)
        # one rank's loss is noisier than the mean of all: in the band of the mean it would be a spike
        sound = {name: value for name, value in named.items() if not is_loss(name) or value - value != 0}
        return Concluded(row, head.context, self._rows.whole(head.own, sound, None, without=named.keys()))

    def _merged(self, head: _Waiting, shares: list[Share]) -> Concluded:
        if any(share.step != head.own.step for share in shares):
            raise ValueError(f"other ranks call it {', '.join(str(share.step) for share in shares[1:])}")
        named = by_name(shares)
        if self.unmerged:
            named["trackbridge/rows_unmerged"] = float(self.unmerged)
        reading = head.reading
        if all(share.layout == head.share.layout for share in shares):
            merged = reading.merged_with([share.numbers for share in shares[1:]])
        else:
            merged = None
            self._say("layouts", "ranks watch different modules: statistics of layers are rank 0's own, the rest is merged")
        self._in_a_row = 0
        row = self._rows.whole(head.own, named, merged)
        broken = tuple(rank for rank, share in enumerate(shares) if share.broken)
        apart = reading.apart([share.numbers for share in shares[1:]]) if row.get(REPLICAS) else {}
        return Concluded(row, head.context, row, broken, apart)

    def _say(self, what: str, words: str, *values: object) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning(f"trackbridge: {words}", *values)


def _light(context: StepContext) -> StepContext:
    """What a detector reads of a context: no batch, no random state."""
    micro = tuple(replace(each, rng=None, tensors=None, skeleton=None, opening_rng=None) for each in context.micro)
    return replace(context, rng={}, micro=micro)


def merging(run: RunInfo, config: RanksConfig, rows: RowMaker, *, strict: bool = False) -> Sender | Merger | None:
    """This rank's side; None for a single rank, and where rows stay each rank's own."""
    store = ranks.store()
    if run.world_size == 1 or run.world_size > config.merge_up_to or store is None:
        return None
    if not store.has_extended_api():
        logger.warning(
            "trackbridge: rows are rank 0's own: ranks exchange their numbers through the process group's store, which a %s "
            "does not allow; use init_method='env://'",
            type(store).__name__,
        )
        return None
    exchange = Exchange(private(store), f"{run.run_id}/{run.attempt}", run.rank, run.world_size)
    return Sender(exchange) if run.rank else Merger(exchange, rows, run.world_size, config.wait_seconds, strict=strict)
