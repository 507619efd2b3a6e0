"""What follows a fault by name, and belongs to its event until things have settled.

A learning rate that jumped and stays does not make the loss leave its band once: it comes back, leaves again, settles higher,
the gradient norm drifts, single layers move. All that begins within `CAUSE` steps of the fault is its effect, and while the
fault lasts, so is what begins within as many steps of the end of such an effect. After that a run has settled, and what comes
then is an event of its own. So is an excursion that is `AGAIN` times as far out as all before it: it may have a cause of its
own, and is news if it has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trackbridge.detectors.episodes import Episode

CAUSE = 50  # steps after a fault, or after its latest effect, in which what begins is its effect
AGAIN = 2.0
_AFTER = 5  # steps after the end of a fault in which an effect may still begin


@dataclass
class Owner:
    """A fault's `episode`, which began at `onset`. What begins up to step `until` belongs to it. `worst`: the largest score of
    an excursion so far, 0 before there is one."""

    episode: Episode
    onset: int
    until: int
    lasts: bool = True
    worst: float = 0.0


class Aftermath:
    """The latest fault of each monitor, by the monitor's name."""

    def __init__(self) -> None:
        self._owners: dict[str, Owner] = {}

    def begin(self, name: str, episode: Episode, onset: int, worst: float = 0.0) -> None:
        """A fault is told by `episode`; nothing before `onset` is its effect."""
        episode.since = onset
        self._owners[name] = Owner(episode, onset, episode.anomaly.onset + CAUSE, worst=worst)

    def over(self, name: str, end: int) -> None:
        """The fault of that monitor has ended."""
        if (owner := self._owners.get(name)) is not None:
            owner.lasts, owner.until = False, min(owner.until, end + _AFTER)

    def of(self, onset: int) -> Owner | None:
        """Whose effect it is that something begins at `onset`: of several faults the latest."""
        found = [owner for owner in self._owners.values() if owner.onset <= onset <= owner.until]
        return max(found, key=lambda owner: owner.onset, default=None)

    def unsettled(self, step: int) -> list[Owner]:
        """Whose effects may still begin at `step`, while the fault lasts."""
        return [owner for owner in self._owners.values() if owner.lasts and step <= owner.until]

    def saw(self, episode: Episode, score: float) -> None:
        """So far out is a value of the excursion under way that `episode` tells."""
        for owner in self._owners.values():
            if owner.episode is episode:
                owner.worst = max(owner.worst, score)

    def moved(self, episode: Episode, step: int) -> None:
        """`episode` is not settled at `step`: what follows it within `CAUSE` steps belongs to it as well."""
        for owner in self._owners.values():
            if owner.episode is episode and owner.lasts:
                owner.until = max(owner.until, step + CAUSE)

    def state_dict(self) -> dict[str, Any]:
        return {
            name: {"episode": o.episode.state(), "onset": o.onset, "until": o.until, "lasts": o.lasts, "worst": o.worst}
            for name, o in self._owners.items()
        }

    def load_state_dict(self, state: dict[str, Any], episodes: dict[str, Episode]) -> None:
        """`episodes`: as `Episode.known` takes them."""
        self._owners = {}
        for name, kept in state.items():
            episode = Episode.known(kept["episode"], episodes)
            self._owners[name] = Owner(episode, kept["onset"], kept["until"], kept["lasts"], kept["worst"])
