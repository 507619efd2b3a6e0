"""MLflow: synchronous batches, every point with its record's own time, so that sending twice stores once.

The run is found by the tag ``trackbridge.run_id`` (clients cannot choose run ids) and created once. MLflow keeps a point per
(key, timestamp, step, value), so a retry adds nothing, and after a resume both the older and the newer value of a step are
there; ``trackbridge/attempt`` and ``trackbridge/seq`` at the same timestamp tell which is which. The tag ``trackbridge.seq``,
written with the last points of a batch, says what is held. SQL stores turn infinities into +-1.797e308: a tag names the
series that had one.

Artifacts go to ``<artifact name>/...``, the manifest last; a tag ``trackbridge.artifact.<name>`` says that all of it is there.
A later artifact of the same name replaces the files. The run's description ends with the newest anomaly.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import field_validator, model_validator

from trackbridge import names, plugins
from trackbridge.backends import folders, mlflow_calls, mlflow_names, words
from trackbridge.backends.base import Backend, BackendConfig
from trackbridge.backends.mlflow_calls import Refused, calling
from trackbridge.backends.mlflow_fetch import fetch_capsule
from trackbridge.errors import Rejected, RetryLater, TrackbridgeError
from trackbridge.records import Anomaly, Artifact, Params, Record, Row, RunEnd, RunInfo
from trackbridge.rundir import dumps

__all__ = ["MlflowBackend", "MlflowConfig", "fetch_capsule"]

RUN_ID = "trackbridge.run_id"
SEQ = "trackbridge.seq"
ENDED = "trackbridge.ended_attempt"
NOTE = "mlflow.note.content"
NOTE_MARK = "<!-- trackbridge: written by the recorder from here on -->"

REQUEST_ENTITIES = 1000
REQUEST_TAGS = 100
PARAM_LENGTH = 6000
TAG_LENGTH = 8000
ANOMALY_TAGS = 100
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}


class MlflowConfig(BackendConfig):
    """`tracking_uri`: default ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in the working directory; it is fixed when the run
    begins, so that a later `sync` finds the same place. `experiment`: default the run's project. `artifact_location`: for an
    experiment that does not exist yet."""

    kind: Literal["mlflow"] = "mlflow"
    tracking_uri: str | None = None
    experiment: str | None = None
    artifact_location: str | None = None

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

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config
        self._uri = config.uri
        self._held = -1
        self.url: str | None = None

    def open(self, run: RunInfo, /) -> int:
        self._run = run
        self._client = mlflow_calls.client(self._uri)
        with calling(self._uri):
            experiment = self._experiment(self._config.experiment or run.project)
            found = self._find(experiment) or self._create(experiment)
        self._id: str = found.info.run_id
        self._tags: dict[str, str] = dict(found.data.tags)
        self._params: dict[str, str] = dict(found.data.params)
        self._running = found.info.status in ("RUNNING", "SCHEDULED")
        self._uploaded: set[tuple[int, str]] = set()
        self._held = int(self._tags.get(SEQ, "-1"))
        if mlflow_calls.is_http(self._uri):
            self.url = f"{mlflow_calls.public(self._uri).rstrip('/')}/#/experiments/{experiment}/runs/{self._id}"
        return self._held

    def write(self, batch: Sequence[Record], /, *, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        refused: dict[int, str] = {}
        waiting = [record for record in batch if record.seq > self._held]
        while waiting:
            if isinstance(waiting[0], Row):
                done = self._rows(waiting, deadline, refused)
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
        if end is not None and end.seq > self._held:
            self.write([end], timeout=timeout)
        return self._held

    # -- the run

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name, artifact_location=self._config.artifact_location))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = self._client.get_experiment_by_name(name)  # another run was faster
        if found.lifecycle_stage != "active":
            raise TrackbridgeError(
                f"MLflow experiment {name!r} is deleted; restore it with: mlflow experiments restore -x {found.experiment_id}"
            )
        return str(found.experiment_id)

    def _find(self, experiment: str) -> Any:
        found = self._client.search_runs([experiment], f"tags.`{RUN_ID}` = '{self._run.run_id}'", order_by=["start_time ASC"])
        return found[0] if found else None

    def _create(self, experiment: str) -> Any:
        run = self._run
        facts = {RUN_ID: run.run_id, "trackbridge.group": run.group, "trackbridge.tags": ", ".join(run.tags)}
        return self._client.create_run(
            experiment,
            start_time=_milliseconds(run.created) or None,
            tags={name: text for name, text in facts.items() if text},
            run_name=run.name,
        )

    def _tag(self, tags: Mapping[str, str]) -> None:
        """Set those of `tags` that are new or changed."""
        from mlflow.entities import RunTag

        fresh = iter([(k, v[:TAG_LENGTH]) for k, v in tags.items() if self._tags.get(k) != v[:TAG_LENGTH]])
        while some := dict(islice(fresh, REQUEST_TAGS)):
            with calling(self._uri):
                self._client.log_batch(self._id, tags=[RunTag(k, v) for k, v in some.items()], synchronous=True)
            self._tags.update(some)

    def _key(self, name: str) -> str:
        """MLflow's key for `name`; where they differ the original is kept first."""
        key = mlflow_names.key(name)
        if key != name:
            self._tag({f"trackbridge.name.{mlflow_names.digest(name)}": name})
        return key

    # -- rows

    def _rows(self, records: Sequence[Record], deadline: float, refused: dict[int, str]) -> int:
        """Send the rows that `records` begins with, in as few requests as there can be. Stops at another kind of record, at
        another attempt, at a refusal and, after at least one row, at the deadline. Returns how many rows were sent."""
        first = records[0]
        assert isinstance(first, Row)
        self._begin(first.attempt, first.step)
        room = REQUEST_ENTITIES - 1  # and the tag
        points: list[tuple[int, Any]] = []
        sent = 0
        for record in records:
            if not isinstance(record, Row) or record.attempt != first.attempt or refused:
                break
            if sent and time.monotonic() > deadline:
                break
            points += [(record.seq, metric) for metric in self._metrics(record)]
            sent += 1
            while len(points) >= room:
                some, points = points[:room], points[room:]
                self._send(some, record.seq - bool(points), refused)  # what is left belongs to this row
        if points:
            self._send(points, points[-1][0], refused)
        return sent

    def _metrics(self, row: Row) -> Iterator[Any]:
        from mlflow.entities import Metric

        when = _milliseconds(row.time)
        own = {names.SEQ: float(row.seq), names.ATTEMPT: float(row.attempt)}
        for name, value in {**own, **dict(row.items())}.items():
            if math.isinf(value):
                self._infinite(name, value, row.step)
            yield Metric(self._key(name), value, when, row.step)

    def _infinite(self, name: str, value: float, step: int) -> None:
        tag = mlflow_names.key(f"trackbridge.infinite.{name}")
        if tag not in self._tags:
            self._tag({tag: f"{name} is {value} at step {step}; SQL stores keep infinities as +-1.797e308"})

    def _send(self, points: Sequence[tuple[int, Any]], complete: int, refused: dict[int, str]) -> None:
        """One request; on a refusal halves of it, down to the point that is refused. `complete`: the seq held after it."""
        from mlflow.entities import RunTag

        tags = [RunTag(SEQ, str(complete))] if complete > self._held else []
        try:
            with calling(self._uri):
                self._client.log_batch(self._id, metrics=[metric for _, metric in points], tags=tags, synchronous=True)
        except Refused as error:
            self._still_there()
            if len(points) == 1:
                seq, metric = points[0]
                refused[seq] = f"{metric.key!r} = {metric.value} at step {metric.step}: {error}"
                return
            half = len(points) // 2
            self._send(points[:half], self._held, refused)
            self._send(points[half:], complete, refused)

    def _still_there(self) -> None:
        """A deleted run refuses everything; that is not the records' fault."""
        with calling(self._uri):
            stage = self._client.get_run(self._id).info.lifecycle_stage
        if stage != "active":
            raise TrackbridgeError(
                f"MLflow run {self._id} is deleted; restore it with: mlflow runs restore --run-id {self._id}"
            )

    def _begin(self, attempt: int, step: int) -> None:
        """The run goes on when an attempt after the one that ended has something to say."""
        if not self._running and attempt > int(self._tags.get(ENDED, "-1")):
            with calling(self._uri):
                self._client.update_run(self._id, status="RUNNING")
            self._running = True
        if f"trackbridge.attempt.{attempt}" not in self._tags:
            self._tag({"trackbridge.attempts": str(attempt + 1), f"trackbridge.attempt.{attempt}": f"from step {step}"})

    # -- everything else

    def _other(self, record: Record, deadline: float, refused: dict[int, str]) -> None:
        try:
            if isinstance(record, Anomaly):
                self._anomaly(record)
            elif isinstance(record, Params):
                self._write_params(record)
            elif isinstance(record, Artifact):
                self._artifact(record, deadline)
            elif isinstance(record, RunEnd):
                self._end(record)
            self._tag({SEQ: str(record.seq)})
        except Refused as error:
            self._still_there()
            refused[record.seq] = str(error)
        except FileNotFoundError as error:
            refused[record.seq] = f"not on this disk any more: {error.filename}"

    def _anomaly(self, anomaly: Anomaly) -> None:
        tag = mlflow_names.key(f"trackbridge.anomaly.{anomaly.id}")
        if tag in self._tags or sum(name.startswith("trackbridge.anomaly.") for name in self._tags) < ANOMALY_TAGS:
            self._tag({tag: words.anomaly_line(anomaly)})
        with calling(self._uri):  # a person may have written there in the meantime
            note = self._client.get_run(self._id).data.tags.get(NOTE, "")
        theirs = note.partition(NOTE_MARK)[0].rstrip()
        self._tag({NOTE: f"{theirs}\n\n{NOTE_MARK}\n\n{words.anomaly_markdown(anomaly)}".lstrip()})

    def _write_params(self, record: Params) -> None:
        """Parameters are immutable in MLflow: a changed value is ``name:attempt-N``. All of it is also a JSON artifact."""
        from mlflow.entities import Param

        fresh: dict[str, str] = {}
        for name, text in words.flatten(record.values).items():
            cut = text if len(text) <= PARAM_LENGTH else f"{text[: PARAM_LENGTH - 1]}…"
            for label in (name, f"{name}:attempt-{self._run.attempt}"):
                key = self._key(label)
                known = self._params.get(key, fresh.get(key))
                if known is None:
                    fresh[key] = cut
                if known in (None, cut):
                    break
        with calling(self._uri):
            self._client.log_text(self._id, dumps(record.values), f"trackbridge/params-{record.seq}.json")
            waiting = iter(fresh.items())
            while some := dict(islice(waiting, REQUEST_TAGS)):
                self._client.log_batch(self._id, params=[Param(k, v) for k, v in some.items()], synchronous=True)
                self._params.update(some)

    def _artifact(self, record: Artifact, deadline: float) -> None:
        renamed: dict[str, str] = {}
        sent = 0
        for name, path in folders.files(Path(self._run.directory) / record.path):
            label = mlflow_names.file(name)
            if label != name:
                renamed[label] = name
            if (record.seq, name) in self._uploaded:
                continue
            if sent and time.monotonic() > deadline:
                raise RetryLater(0.0, f"uploading {record.name} takes longer than the time given; it goes on at the next try")
            with calling(self._uri):
                self._upload(path, f"{record.name}/{label}")
            self._uploaded.add((record.seq, name))
            sent += 1
        facts = {"seq": record.seq, "step": record.step, "kind": record.kind, **({"renamed": renamed} if renamed else {})}
        self._tag({mlflow_names.key(f"trackbridge.artifact.{record.name}"): dumps({**facts, "metadata": record.metadata})})

    def _upload(self, path: Path, target: str) -> None:
        folder, _, name = target.rpartition("/")
        if path.name == name:
            self._client.log_artifact(self._id, str(path), folder)
            return
        with tempfile.TemporaryDirectory() as temporary:
            renamed = Path(temporary) / name
            renamed.symlink_to(path.absolute())
            self._client.log_artifact(self._id, str(renamed), folder)

    def _end(self, end: RunEnd) -> None:
        if end.attempt < int(self._tags.get(ENDED, "-1")):
            return
        self._tag({ENDED: str(end.attempt), **({"trackbridge.error": end.error} if end.error else {})})
        with calling(self._uri):
            self._client.set_terminated(self._id, _STATUS[end.status], end_time=_milliseconds(end.time))
        self._running = False


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
