"""One MLflow run and what is known of it: found or created, tagged, and written to in everything but rows."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from trackbridge.backends import exhibits, folders, mlflow_calls, mlflow_names, mlflow_view, words
from trackbridge.backends.base import to_a_new_run
from trackbridge.backends.mlflow_calls import Refused, calling
from trackbridge.errors import RetryLater, TrackbridgeError
from trackbridge.harmless import in_markdown
from trackbridge.records import Anomaly, Artifact, Params, RunEnd, RunInfo
from trackbridge.rundir import RunDirectory, dumps, storable

RUN_ID = "trackbridge.run_id"
SEQ = "trackbridge.seq"
ENDED = "trackbridge.ended_attempt"
NOTE = "mlflow.note.content"
NOTE_MARK = "<!-- trackbridge: written by the recorder from here on -->"

ANOMALY = "trackbridge.anomaly."
ANOMALY_TABLE = "trackbridge/anomalies.json"
LOGGED = "mlflow.loggedArtifacts"
VIEWS = "trackbridge.views"

REQUEST_TAGS = 100
PARAM_LENGTH = 6000
TAG_LENGTH = 8000
ANOMALY_TAGS = 100

_STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}


def milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


class Theirs(NamedTuple):
    """A run of the user's: `joined` is written into, `parent` gets ours nested in it. `experiment`: its id."""

    joined: str | None = None
    parent: str | None = None
    experiment: str | None = None


class MlflowRun:
    """Raises what `mlflow_calls.calling` raises. `tags` is the run's tags as far as this object read or wrote them."""

    def __init__(
        self,
        uri: str,
        info: RunInfo,
        experiment: str,
        artifact_location: str | None,
        theirs: Theirs | None = None,
        *,
        anew: bool = False,
    ) -> None:
        """Find the run of `info` by its tag, or create it, in the experiment of that name. A run of the user's that was joined
        stays theirs: its status and its end are not ours to tell. `anew`: in the place of a deleted one, too."""
        self.uri, self.info = uri, info
        self._theirs = theirs or Theirs()
        self._anew = anew
        self.client = mlflow_calls.client(uri)
        try:
            with calling(uri):
                self.experiment = self._theirs.experiment or self._experiment(experiment, artifact_location)
                found = self.client.get_run(self._theirs.joined) if self._theirs.joined else self._find() or self._create()
        except Refused as error:  # no record was sent: it is a name or a place that the user gave
            where = f"MLflow at {mlflow_calls.public(uri)}"
            raise TrackbridgeError(f"{where} refuses experiment {experiment[:80]!r}: {error}") from None
        self.id: str = found.info.run_id
        self.tags: dict[str, str] = dict(found.data.tags)
        self._params: dict[str, str] = dict(found.data.params)
        self._running = found.info.status in ("RUNNING", "SCHEDULED")
        self._uploaded: set[tuple[int, str]] = set()
        self._rows: dict[str, list[Any]] | None = None
        self._newest: Anomaly | None = None
        self._held: dict[int, str] = {}  # the capsule's artifact by the anomaly's step
        # Several recordings may have joined a run of the user's: none may take what another left for its own.
        self.seq_tag, self._ended_tag = f"{SEQ}{self._mark}", f"{ENDED}{self._mark}"
        if self._theirs.joined is not None:
            self.tag({RUN_ID: info.run_id})  # so that `pull` finds it by our id

    def _experiment(self, name: str, artifact_location: str | None) -> str:
        from mlflow.exceptions import MlflowException

        found = self.client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self.client.create_experiment(name, artifact_location=artifact_location))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = self.client.get_experiment_by_name(name)  # another run was faster
        if found.lifecycle_stage != "active":
            raise TrackbridgeError(
                f"MLflow experiment {name!r} is deleted; restore it with: mlflow experiments restore -x {found.experiment_id}"
            )
        return str(found.experiment_id)

    def _find(self) -> Any:
        """The run that this recording began: an id may be used again, when the run's directory is gone or elsewhere. Raises
        `TrackbridgeError` when it is deleted: another one would lack what that has."""
        from mlflow.entities import ViewType

        condition = f"tags.`{RUN_ID}` = '{self.info.run_id}'"
        begun = milliseconds(self.info.created)
        if begun:
            condition += f" and attributes.start_time = {begun}"
        found = self.client.search_runs([self.experiment], condition, ViewType.ALL, order_by=["start_time ASC"])
        active = [run for run in found if run.info.lifecycle_stage == "active"]
        if found and not active and not self._anew:
            raise self._deleted(found[0].info.run_id)
        return active[0] if active else None

    def _deleted(self, run_id: str) -> TrackbridgeError:
        otherwise = "" if self._theirs.joined is not None else f"; else {to_a_new_run(self.info, 'mlflow')}"
        return TrackbridgeError(
            f"MLflow run {run_id} is deleted; restore it with: mlflow runs restore --run-id {run_id}{otherwise}"
        )

    def _create(self) -> Any:
        info = self.info
        parent = self._theirs.parent
        facts = {
            RUN_ID: info.run_id, "trackbridge.group": info.group, "trackbridge.tags": ", ".join(info.tags),
            "mlflow.parentRunId": parent,
        }  # fmt: skip
        made = self.client.create_run(
            self.experiment,
            start_time=milliseconds(info.created) or None,
            tags={name: text for name, text in facts.items() if text},
            run_name=info.name,
        )
        if parent:
            self.client.set_tag(parent, "trackbridge.companion", made.info.run_id)
        return made

    @property
    def _mark(self) -> str:
        """What tags of this recording alone end in."""
        recording = f"{self.info.run_id} {milliseconds(self.info.created)}".encode()
        return "" if self._theirs.joined is None else f":{hashlib.blake2b(recording, digest_size=4).hexdigest()}"

    @contextmanager
    def calling(self) -> Iterator[None]:
        """A call about this run. A deleted run refuses everything; that is not the records' fault, so it is told apart."""
        try:
            with calling(self.uri):
                yield
        except Refused:
            with calling(self.uri):
                stage = self.client.get_run(self.id).info.lifecycle_stage
            if stage != "active":
                raise self._deleted(self.id) from None
            raise

    def tag(self, tags: Mapping[str, str]) -> None:
        """Set those of `tags` that are new or changed."""
        from mlflow.entities import RunTag

        fresh = iter([(k, v[:TAG_LENGTH]) for k, v in tags.items() if self.tags.get(k) != v[:TAG_LENGTH]])
        while some := dict(islice(fresh, REQUEST_TAGS)):
            with self.calling():
                self.client.log_batch(self.id, tags=[RunTag(k, v) for k, v in some.items()], synchronous=True)
            self.tags.update(some)

    def key(self, name: str) -> str:
        """MLflow's key for `name`; where they differ the original is kept first."""
        key = mlflow_names.key(name)
        if key != name:
            self.tag({f"trackbridge.name.{mlflow_names.digest(name)}": storable(name)})
        return key

    def begin(self, attempt: int, step: int) -> None:
        """Rows of `attempt` come. Only an attempt after the one that ended makes the run go on."""
        if self._theirs.joined is None and not self._running and attempt > int(self.tags.get(self._ended_tag, "-1")):
            with self.calling():
                self.client.update_run(self.id, status="RUNNING")
            self._running = True
        if f"trackbridge.attempt.{attempt}" not in self.tags:
            self.tag({"trackbridge.attempts": str(attempt + 1), f"trackbridge.attempt.{attempt}": f"from step {step}"})

    def end(self, end: RunEnd) -> None:
        if end.attempt < int(self.tags.get(self._ended_tag, "-1")):
            return
        self._views()
        self.tag({self._ended_tag: str(end.attempt), **({"trackbridge.error": end.error} if end.error else {})})
        if self._theirs.joined is not None:
            self.tag({"trackbridge.status": end.status})
            return
        with self.calling():
            self.client.set_terminated(self.id, _STATUS[end.status], end_time=milliseconds(end.time))
        self._running = False

    def anomaly(self, anomaly: Anomaly) -> None:
        """Tags a person can search for, a row in the table of anomalies, and the newest anomaly in the run's description."""
        tag = mlflow_names.key(f"{ANOMALY}{anomaly.id}")
        if tag in self.tags or sum(name.startswith(ANOMALY) for name in self.tags) < ANOMALY_TAGS:
            self.tag({tag: words.anomaly_line(anomaly)})
        rows = self._anomaly_rows()
        rows[anomaly.id] = words.anomaly_row(anomaly)
        self.tag({"trackbridge.anomalies": str(len(rows)), "trackbridge.anomaly_kind": anomaly.kind})
        self._table(ANOMALY_TABLE, words.ANOMALY_COLUMNS, sorted(rows.values(), key=lambda row: (row[1], row[0])))
        self._describe(anomaly)

    def _anomaly_rows(self) -> dict[str, list[Any]]:
        """The rows of the table of anomalies by their id, as an earlier life of ours left them."""
        if self._rows is None:
            self._rows = {}
            if ANOMALY_TABLE in self.tags.get(LOGGED, ""):
                with self.calling(), tempfile.TemporaryDirectory() as temporary:
                    text = Path(self.client.download_artifacts(self.id, ANOMALY_TABLE, temporary)).read_text(encoding="utf-8")
                self._rows = {str(row[0]): row for row in json.loads(text)["data"]}
        return self._rows

    def _describe(self, newest: Anomaly) -> None:
        """The run's description: below what people wrote there, the newest anomaly and where to look."""
        self._newest = newest
        held = self._held.get(newest.step)
        commands = [f"trackbridge pull mlflow:{self.info.run_id}@{newest.step}"] if held else []
        parts = [words.anomaly_markdown(newest, commands), self._links(held)]
        own = mlflow_names.key(f"{ANOMALY}{newest.id}")
        others = [line for tag, line in self.tags.items() if tag.startswith(ANOMALY) and tag != own]
        lines = "\n".join(f"- {in_markdown(line)}" for line in others[-20:])
        parts += [f"Other anomalies of this run:\n\n{lines}"] if others else []
        self._note("\n\n".join(parts))

    def _note(self, text: str) -> None:
        """Put `text` into the run's description, below what people wrote there."""
        with self.calling():
            note = self.client.get_run(self.id).data.tags.get(NOTE, "")
        theirs = note.partition(NOTE_MARK)[0].rstrip()
        said = f"{theirs}\n\n{NOTE_MARK}\n\n".lstrip()
        if len(said) < TAG_LENGTH:  # else people have filled it
            self.tag({NOTE: said + text[: TAG_LENGTH - len(said)]})

    def _links(self, held: str | None) -> str:
        run = f"#/experiments/{self.experiment}/runs/{self.id}/artifacts"
        places = {"Charts": mlflow_view.link(self.experiment)}
        if ANOMALY_TABLE in self.tags.get(LOGGED, ""):
            places["anomalies"] = f"{run}/{ANOMALY_TABLE}"
        if VIEWS in self.tags:
            places["the page of the run"] = f"{run}/views/{exhibits.PAGE}"
        if held is not None:
            places |= {"the page of this anomaly": f"{run}/{held}/{exhibits.PAGE}", "its capsule": f"{run}/{held}"}
        return " · ".join(f"[{name}]({place})" for name, place in places.items())

    def _views(self) -> None:
        """What shows the run as a whole, below ``views/``."""
        views = RunDirectory(self.info.directory).views
        made = str(exhibits.made(views))
        if made == "-1" or self.tags.get(VIEWS) == made:
            return
        for name, path in folders.files(views):
            with self.calling():
                self._upload(path, f"{views.name}/{name}")
        self.tag({VIEWS: made})
        if self._newest is not None:
            self._describe(self._newest)
        elif not any(tag.startswith(ANOMALY) for tag in self.tags):
            self._note(f"No anomaly was detected in this run.\n\n{self._links(None)}")

    def charts(self, series: Collection[str]) -> bool:
        """Lay out the experiment's charts for runs with `series`. False where that did not work, such as for want of a right to
        change the experiment: no reason to stop."""
        try:
            with calling(self.uri):
                held = self.client.get_experiment(self.experiment).tags.get(mlflow_view.TAG)
                value = mlflow_view.build(series, held, milliseconds(time.time()), mlflow_names.key)
                if value is not None:
                    self.client.set_experiment_tag(self.experiment, mlflow_view.TAG, value)
        except (Refused, RetryLater, TrackbridgeError):
            return False
        return True

    def _table(self, path: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table as MLflow's own ``log_table`` stores it, replaced as a whole: that appends, and would show each row twice."""
        with self.calling():
            self.client.log_text(self.id, dumps({"columns": list(columns), "data": [list(row) for row in rows]}), path)
        self._declare([path])

    def _declare(self, paths: Sequence[str]) -> None:
        """Tell MLflow's page which files are tables."""
        known = json.loads(self.tags.get(LOGGED, "[]"))
        fresh = [entry for path in paths if (entry := {"path": path, "type": "table"}) not in known]
        text = json.dumps([*known, *fresh])
        if fresh and len(text) <= TAG_LENGTH:
            self.tag({LOGGED: text})

    def params(self, record: Params) -> None:
        """Parameters are immutable in MLflow: a changed value is ``name:attempt-N``. All of it is also a JSON artifact."""
        from mlflow.entities import Param

        fresh: dict[str, str] = {}
        for name, text in words.flatten(record.values).items():
            cut = text if len(text) <= PARAM_LENGTH else f"{text[: PARAM_LENGTH - 1]}…"
            for label in (name, f"{name}:attempt-{self.info.attempt}"):
                key = self.key(label)
                known = self._params.get(key, fresh.get(key))
                if known is None:
                    fresh[key] = cut
                if known in (None, cut):
                    break
        with self.calling():
            self.client.log_text(self.id, dumps(record.values), f"trackbridge/params-{record.seq}.json")
            waiting = iter(fresh.items())
            while some := dict(islice(waiting, REQUEST_TAGS)):
                self.client.log_batch(self.id, params=[Param(k, v) for k, v in some.items()], synchronous=True)
                self._params.update(some)

    def artifact(self, record: Artifact, deadline: float) -> None:
        """Upload file by file, each call at least one; the next call goes on where the deadline passed. A tag at the end says
        that all of it is there."""
        renamed: dict[str, str] = {}
        sent = 0
        for name, path in folders.files(Path(self.info.directory) / record.path):
            label = mlflow_names.file(name)
            if label != name:
                renamed[label] = name
            if (record.seq, name) in self._uploaded:
                continue
            if sent and time.monotonic() > deadline:
                raise RetryLater(0.0, f"uploading {record.name} takes longer than the time given; it goes on at the next try")
            with self.calling():
                self._upload(path, f"{record.name}/{label}")
            self._uploaded.add((record.seq, name))
            sent += 1
        facts = {"seq": record.seq, "step": record.step, "kind": record.kind, **({"renamed": renamed} if renamed else {})}
        tag = mlflow_names.key(f"trackbridge.artifact.{record.name}")
        self.tag({tag: dumps({**facts, "metadata": record.metadata})})
        folder = Path(self.info.directory) / record.path
        self._declare([f"{record.name}/{path}" for path in exhibits.tables(folder)])
        if exhibits.page(folder) is not None:
            self._held[record.step] = record.name
            if self._newest is not None and self._newest.step == record.step:
                self._describe(self._newest)

    def _upload(self, path: Path, target: str) -> None:
        folder, _, name = target.rpartition("/")
        if path.name == name:
            self.client.log_artifact(self.id, str(path), folder)
            return
        with tempfile.TemporaryDirectory() as temporary:
            renamed = Path(temporary) / name
            renamed.symlink_to(path.absolute())
            self.client.log_artifact(self.id, str(renamed), folder)
