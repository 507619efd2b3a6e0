"""The protocol every tracker is served through, and the config class that builds one.

A backend is used by one thread of the shipper process, never by the training process (unless ``shipping="thread"``). It
receives records in ascending `seq`, each `Row` already reduced by the stream policy, and answers with the highest `seq` that
is *safe in the tracker*. It may be asked to write the same records again after a crash: `write` is idempotent in `seq`.

A method raises `TrackbridgeError` when a person must do something before the tracker takes anything (restore a deleted run,
ask for access): one line that names it. Then ``sync`` ends, and the run's shipper tries again every few minutes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import Self

from trackbridge.records import Record, RunEnd, RunInfo


class Backend(Protocol):
    """A tracker. Methods raise `RetryLater`, `Rejected`, `TrackbridgeError` (see the module), or anything else (back off: the
    journal keeps all)."""

    def open(self, run: RunInfo, /) -> int:
        """Create or find the tracker's run. Returns the highest `seq` the tracker is known to hold, -1 if unknown."""
        ...

    def write(self, batch: Sequence[Record], /, *, timeout: float) -> int:
        """Deliver `batch`; returns the highest `seq` now safe in the tracker (may lag behind the batch)."""
        ...

    def close(self, end: RunEnd | None, /, *, timeout: float) -> int:
        """Flush, and mark the run with `end` (None: only this connection ends). Returns like `write`. Bounded by `timeout`
        seconds. The seq of `end` may be lower than what is held (a capsule is sealed after it), and `end` may come again."""
        ...


class BackendConfig(BaseModel):
    """Base of every backend's settings; validates with the vendor's package absent.

    `kind` is the entry-point name. Secrets never go here (this is written to ``run.json``): a tracker's key comes from its
    own environment variable or login file.

    `rows_per_minute` and `values_per_minute` are what the tracker takes from one run, None for as much as there is: the
    stream policy coalesces what is more (`trackbridge.stream`). `environment`: what the vendor's SDK should find in
    ``os.environ`` unless the user set it; for our own processes (shipper, sync) only.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    environment: ClassVar[Mapping[str, str]] = {}

    kind: str
    rows_per_minute: int | None = Field(None, ge=10)
    values_per_minute: int | None = Field(None, ge=1000)

    @property
    def keeps(self) -> bool:
        """Whether -1 from `Backend.open` means that the tracker has nothing of the run, rather than that this is not known."""
        return False

    @property
    def in_process(self) -> bool:
        """Served by a thread of the training process: it speaks to that process's terminal, or to a run the user has open."""
        return False

    def met(self, *, join: bool) -> Self:
        """This config in view of a run that the user has open in this process: join it, or stay beside it, linked both ways.
        Called at `init` in the training process. As it is where there is no such run."""
        return self

    def introduce(self, run: RunInfo) -> None:
        """Tell the run that the user has open about `run`, ours beside it. Called once, in the training process."""

    def nearby(self) -> Self:
        """This config for a thread of the training process, where the SDK's run object can be had (`Run.native`)."""
        return self

    def check(self) -> None:
        """Raise `MissingExtraError` if the vendor's package is missing. Called at `init`; contacts nobody."""

    def secrets(self) -> Mapping[str, str]:
        """What the shipper's process needs to serve it and no file may hold, as environment variables."""
        return {}

    def lacking(self) -> str | None:
        """What is missing to serve it here and now, such as secrets that no file holds; None if nothing. What it is owed waits
        in the journal."""
        return None

    def anew(self, run: RunInfo) -> Self:
        """This config for delivering all of `run` again (``trackbridge sync --anew``), to a new run where the tracker's is
        gone. Forgets what was noted of the old one."""
        return self

    def build(self) -> Backend:
        raise NotImplementedError(f"{type(self).__name__}.build")

    def where(self, run: RunInfo) -> str | None:
        """How a person looks at this run in the tracker: a URL or a command. None if there is nothing to look at."""
        return None


def to_a_new_run(run: RunInfo, kind: str) -> str:
    """The words for what can be done where the tracker's run is gone."""
    return f"deliver all of it to a new run: trackbridge sync {run.directory} --to {kind} --anew"
