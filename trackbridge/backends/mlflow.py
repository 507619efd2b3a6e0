"""MLflow: synchronous batches, every point with its record's own time, so that sending twice stores once.

The run is found by the tag ``trackbridge.run_id`` (clients cannot choose run ids) and created once. MLflow keeps a point per
(key, timestamp, step, value), so a retry adds nothing, and after a resume both the older and the newer value of a step are
there; ``trackbridge/attempt`` and ``trackbridge/seq`` at the same timestamp tell which is which. The tag ``trackbridge.seq``,
written with the last points of a group of rows, says what is held. A group is sent series by series: a server keeps the newest
point of each series besides, and a request of a thousand points of few series costs it less than two steps of hundreds. SQL
stores turn infinities into +-1.797e308: a tag names the series that had one.

Artifacts go to ``<artifact name>/...``, the manifest last; a tag ``trackbridge.artifact.<name>`` says that all of it is there.
A later artifact of the same name replaces the files. The run's description ends with the newest anomaly, all of them are a
table, and the experiment has a saved view of its charts (`mlflow_view`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, ClassVar, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from trackbridge import names, plugins
from trackbridge.backends import mlflow_calls, mlflow_names
from trackbridge.backends.base import Backend, BackendConfig
from trackbridge.backends.mlflow_calls import Refused
from trackbridge.backends.mlflow_fetch import fetch_capsule
from trackbridge.backends.mlflow_run import MlflowRun, Theirs, milliseconds
from trackbridge.errors import Rejected, RetryLater
from trackbridge.records import Anomaly, Artifact, Params, Record, Row, RunEnd, RunInfo

__all__ = ["MlflowBackend", "MlflowConfig", "fetch_capsule"]

GROUP_SECONDS = 3.0
"""How long a group of rows may take, by what the group before it took a request."""
GROUP_REQUESTS = 8
"""The most requests of a group: all are sent again when one of them fails."""
CAUTIOUS = 100
"""Points of a request after a failure. What is there already, a server on SQLite seeks in the whole run, once for each hundred
points: it answers a request of a thousand too late then, and would again."""
IN_FLIGHT = 2
_INT64 = 2**63


class MlflowConfig(BackendConfig):
    """`tracking_uri`: default ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in the working directory; it is fixed when the run
    begins, so that a later `sync` finds the same place. `experiment`: default the run's project. `artifact_location`: for an
    experiment that does not exist yet."""

    kind: Literal["mlflow"] = "mlflow"
    tracking_uri: str | None = None
    experiment: str | None = None
    artifact_location: str | None = None
    values_per_minute: int | None = Field(300_000, ge=1000)  # 5,000 a second is what one server takes

    joined: str | None = Field(None, description="the user's run that ours is written into (`join=True`)")
    parent: str | None = Field(None, description="the user's run that ours is nested in")
    experiment_id: str | None = Field(None, description="of that run")
    _near: bool = PrivateAttr(False)
    _anew: bool = PrivateAttr(False)

    environment: ClassVar[Mapping[str, str]] = mlflow_calls.ENVIRONMENT

    @field_validator("tracking_uri")
    @classmethod
    def _fixed(cls, value: str | None) -> str | None:
        if value is not None:
            mlflow_calls.refuse_secret(value, "tracking_uri")
            return mlflow_calls.absolute(value)
        return value

    @field_validator("artifact_location")
    @classmethod
    def _public(cls, value: str | None) -> str | None:
        if value is not None:
            mlflow_calls.refuse_secret(value, "artifact_location")
        return value

    @model_validator(mode="before")
    @classmethod
    def _where_we_are(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("tracking_uri") is None:
            default = mlflow_calls.default_uri()
            if not mlflow_calls.holds_secret(default):  # else the variable must be there whenever it is used
                return {**given, "tracking_uri": default}
        return given

    def check(self) -> None:
        plugins.require("mlflow", "mlflow")

    def met(self, *, join: bool) -> MlflowConfig:
        """Join the run that is active in this process, or be nested in it, in its experiment: an id is all that it takes."""
        theirs = mlflow_calls.active()
        if theirs is None or (self.experiment is not None and not join):
            return self
        place = {"experiment_id": theirs.experiment_id}
        if not mlflow_calls.holds_secret(theirs.uri):
            place["tracking_uri"] = mlflow_calls.absolute(theirs.uri)
        return self.model_copy(update={**place, "joined" if join else "parent": theirs.run_id})

    def nearby(self) -> MlflowConfig:
        near = self.model_copy()
        near._near = True
        return near

    @property
    def keeps(self) -> bool:
        return self.joined is None  # into a run of the user's another recording may have been written since

    def anew(self, run: RunInfo) -> MlflowConfig:
        fresh = self.model_copy()
        fresh._anew = True
        return fresh

    def build(self) -> Backend:
        return MlflowBackend(self)

    @property
    def uri(self) -> str:
        return self.tracking_uri or mlflow_calls.default_uri()

    def where(self, run: RunInfo) -> str:
        shown = mlflow_calls.public(self.uri)
        if mlflow_calls.is_http(self.uri) or self.uri.startswith("databricks"):
            return f"{shown} (experiment {self.experiment or run.project!r}, run {run.name!r})"
        return f"mlflow ui --backend-store-uri {shown}"


class MlflowBackend:
    """See the module. `url` is the page of the run once it is open, None where there is no server."""

    room: ClassVar[int] = 999
    """The most points of a request: MLflow takes 1,000 entities, and one may be the tag."""

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config
        self._held = -1
        self._run: Any = None
        self.url: str | None = None

    @property
    def native(self) -> Any:
        """MLflow's own run, where this is served in the training process and the run is open."""
        return self._run.client.get_run(self._run.id) if self._config._near and self._run is not None else None

    def open(self, run: RunInfo, /) -> int:
        config, uri = self._config, self._config.uri
        theirs = Theirs(config.joined, config.parent, config.experiment_id)
        self._run = MlflowRun(uri, run, config.experiment or run.project, config.artifact_location, theirs, anew=config._anew)
        self._held = int(self._run.tags.get(self._run.seq_tag, "-1"))
        self._series: set[str] = set()
        self._charted, self._laid_out = 0, True
        self._room, self._requests = self.room, 1
        if mlflow_calls.is_http(uri):
            page = f"#/experiments/{self._run.experiment}/runs/{self._run.id}"
            self.url = f"{mlflow_calls.public(uri).rstrip('/')}/{page}"
        return self._held

    def write(self, batch: Sequence[Record], /, *, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        refused: dict[int, str] = {}
        waiting = [record for record in batch if record.seq > self._held]
        while waiting:
            if isinstance(waiting[0], Row):
                done = self._rows(waiting, timeout, deadline, refused)
            else:
                done = 1
                self._other(waiting[0], deadline, refused)
            self._held = waiting[done - 1].seq
            del waiting[:done]
            if refused:
                raise Rejected(refused)
            if time.monotonic() > deadline:
                break
        return self._held

    def close(self, end: RunEnd | None, /, *, timeout: float) -> int:
        self._lay_out()
        if end is not None:
            refused: dict[int, str] = {}
            self._other(end, time.monotonic() + timeout, refused)
            if refused:
                raise Rejected(refused)
            self._held = max(self._held, end.seq)
        return self._held

    # -- rows

    def _rows(self, records: Sequence[Record], timeout: float, deadline: float, refused: dict[int, str]) -> int:
        """Send a group of the rows that `records` begins with: at least one, none of another attempt, none after another
        kind of record; none after the deadline. Returns how many. Raises `RetryLater` when that takes `timeout` seconds."""
        first = records[0]
        assert isinstance(first, Row)
        self._run.begin(first.attempt, first.step)
        room, most = self._room, self._room * self._requests
        self._room, self._requests = min(self.room, CAUTIOUS), 1  # until this group was sent
        series: dict[str, list[tuple[Row, float]]] = {}
        sent = held = 0
        for record in records:
            if not isinstance(record, Row) or record.attempt != first.attempt:
                break
            if sent and (held + len(record.values) + 2 > most or time.monotonic() > deadline):
                break
            sent += 1
            if not _fits(record):
                refused[record.seq] = f"time {record.time} or step {record.step} is outside of what MLflow stores"
                continue
            held += self._add(record, series)
        begun = time.monotonic()
        until = begun + timeout if sent > 1 else math.inf  # a row that is too much for the time given is sent all the same
        count = self._send_all(self._points(series), room, records[sent - 1].seq, until, refused)
        each = max((time.monotonic() - begun) / max(count, 1), 1e-3)
        self._room, self._requests = min(4 * room, self.room), min(max(int(GROUP_SECONDS / each), 1), GROUP_REQUESTS)
        if not self._charted:
            self._lay_out()
        return sent

    def _add(self, row: Row, series: dict[str, list[tuple[Row, float]]]) -> int:
        """Sort the row's values, and two of ours, into `series`; returns how many they are."""
        self._series.update(row.schema.names)
        values = {names.SEQ: float(row.seq), names.ATTEMPT: float(row.attempt), **dict(row.items())}
        for name, value in values.items():
            if math.isinf(value):
                self._infinite(name, value, row.step)
            series.setdefault(name, []).append((row, value))
        return len(values)

    def _points(self, series: Mapping[str, list[tuple[Row, float]]]) -> Iterator[tuple[int, Any]]:
        from mlflow.entities import Metric

        for name, values in series.items():
            key = self._run.key(name)
            for row, value in values:
                yield row.seq, Metric(key, value, milliseconds(row.time), row.step)

    def _lay_out(self) -> None:
        """The charts, once the first rows tell what there is to draw, and at the end for what came later or did not work."""
        if len(self._series) > self._charted or not self._laid_out:
            self._charted = len(self._series)
            self._laid_out = self._run.charts(self._series)

    def _send_all(
        self, points: Iterator[tuple[int, Any]], room: int, complete: int, until: float, refused: dict[int, str]
    ) -> int:
        """In requests of `room` points. Returns how many there were. Raises `RetryLater` when it is later than `until`.

        A server gets two at a time: while it stores one, MLflow's client encodes the next. Their order does not matter:
        the last one is sent when the others are safe, and it alone has the tag that says so."""
        some = list(islice(points, room))
        count = 0
        with ThreadPoolExecutor(IN_FLIGHT if mlflow_calls.is_http(self._config.uri) else 1) as pool:
            flying: deque[Future[None]] = deque()
            while some:
                some, now = list(islice(points, room)), some
                while flying and (len(flying) >= IN_FLIGHT or not some):
                    flying.popleft().result()
                if count and time.monotonic() > until:
                    raise RetryLater(0.0, "sending rows takes longer than the time given; fewer are sent at the next try")
                flying.append(pool.submit(self._send, now, self._held if some else complete, refused))
                count += 1
            if flying:
                flying.pop().result()
        return count

    def _infinite(self, name: str, value: float, step: int) -> None:
        tag = mlflow_names.key(f"trackbridge.infinite.{name}")
        if tag not in self._run.tags:
            self._run.tag({tag: f"{name} is {value} at step {step}; SQL stores keep infinities as +-1.797e308"})

    def _send(self, points: Sequence[tuple[int, Any]], complete: int, refused: dict[int, str]) -> None:
        """One request; on a refusal halves of it, down to the point that is refused. `complete`: the seq held after it."""
        from mlflow.entities import RunTag

        run = self._run
        tags = [RunTag(run.seq_tag, str(complete))] if complete > self._held else []
        try:
            with run.calling():
                run.client.log_batch(run.id, metrics=[metric for _, metric in points], tags=tags, synchronous=True)
        except Refused as error:
            if len(points) == 1:
                seq, metric = points[0]
                refused[seq] = f"{metric.key!r} = {metric.value} at step {metric.step}: {error}"
                return
            half = len(points) // 2
            self._send(points[:half], self._held, refused)
            self._send(points[half:], complete, refused)

    # -- everything else

    def _other(self, record: Record, deadline: float, refused: dict[int, str]) -> None:
        run = self._run
        try:
            if isinstance(record, Anomaly):
                run.anomaly(record)
            elif isinstance(record, Params):
                run.params(record)
            elif isinstance(record, Artifact):
                run.artifact(record, deadline)
            elif isinstance(record, RunEnd):
                run.end(record)
            run.tag({run.seq_tag: str(max(record.seq, self._held))})
        except Refused as error:
            refused[record.seq] = str(error)
        except FileNotFoundError as error:
            refused[record.seq] = f"not on this disk any more: {error.filename}"


def _fits(row: Row) -> bool:
    """MLflow stores times and steps as 64-bit integers and refuses negative times."""
    return 0 <= row.time < _INT64 / 1000 and -_INT64 <= row.step < _INT64
