"""Replaying on several ranks: whoever cannot go on takes the others along, and one verdict holds for all.

Under FSDP and DDP a step is a collective, so a rank that stops alone leaves the others waiting in it. What can fail on one
rank alone is therefore done `together`: each says how it went before any goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from trackbridge import errors
from trackbridge.errors import CapsuleError, TrackbridgeError, UsageError
from trackbridge.lab import ReplayReport, Verdict
from trackbridge.names import ACT
from trackbridge.ranks import Ranks, store
from trackbridge.replay.feed import Incomplete

SECONDS = 600.0
"""How long a rank waits for the slowest: building a model and compiling it may take minutes."""

_WORST: tuple[Verdict, ...] = ("incomplete", "not-reproduced", "within-noise", "exact")


class World:
    """The ranks of this replay: those of the process group, or the launcher's, before `build()` has made the group."""

    @property
    def alone(self) -> bool:
        return Ranks.current().world_size == 1

    def check(self, recorded: int) -> None:
        """Raise `Incomplete` unless as many ranks replay as were recorded."""
        here = Ranks.current().world_size
        if here != recorded:
            count = f"{recorded} rank{'s' * (recorded != 1)}"
            raise Incomplete(
                f"the run was recorded on {count}, this replay runs on {here}: start it with "
                f"`torchrun --nproc-per-node {recorded}` (or on as many hosts as then)"
            )

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Do the block on all ranks or on none: an error of ours on one rank is an error on each, naming it."""
        ranks = Ranks.current()
        if ranks.world_size == 1:
            yield
            return
        if store() is None:
            raise UsageError("there is no process group to replay in: let build() call torch.distributed.init_process_group")
        own: Exception | None = None
        try:
            yield
        except (Incomplete, TrackbridgeError) as error:
            own = error
        kind = Incomplete if isinstance(own, Incomplete) else type(own)
        said = "" if own is None else json.dumps([kind.__name__, *map(str, own.args)])
        for rank, answer in enumerate(ranks.gather(said, timeout=SECONDS, what=what)):
            if answer:
                raise _error(rank, *json.loads(answer)) from own

    def any(self, here: bool) -> bool:
        """Whether it is so on any rank; the same answer on all."""
        ranks = Ranks.current()
        if ranks.world_size == 1 or store() is None:
            return here
        return "yes" in ranks.gather("yes" if here else "no", timeout=SECONDS, what="trackbridge.replay.rerun")

    def verdict(self, report: ReplayReport) -> ReplayReport:
        """The report of the rank with the worst verdict, the same on all ranks; `verdicts` has each one's."""
        ranks = Ranks.current()
        if ranks.world_size == 1 or store() is None:
            return report
        answers = ranks.gather(report.model_dump_json(), timeout=SECONDS, what="trackbridge.replay.rerun")
        reports = [ReplayReport.model_validate_json(answer) for answer in answers]
        worst = min(reports, key=lambda each: (_WORST.index(each.verdict), *_left_at(each), each.rank))
        return worst.model_copy(update={"verdicts": tuple(each.verdict for each in reports)})


def _left_at(report: ReplayReport) -> tuple[int, int, float]:
    """The earliest divergence first, in a step that of an activation, then the largest: a fault of one rank spreads to the
    others' gradients."""
    first = report.first_divergence
    if first is None:
        return report.last_step + 1, 0, 0.0
    return first.step, 0 if first.series.startswith(ACT) else 1, -first.change


def _error(rank: int, kind: str, *words: str) -> Exception:
    said = [f"rank {rank}: {word}" for word in words] or [f"rank {rank}"]
    if kind == Incomplete.__name__:
        return Incomplete(*said)
    known = getattr(errors, kind, TrackbridgeError)
    return (known if known in (UsageError, CapsuleError) else TrackbridgeError)(said[0])
