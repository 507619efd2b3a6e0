"""Getting a capsule out of MLflow again."""

from __future__ import annotations

import re
import socket
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trackbridge import untrusted
from trackbridge.backends import held, mlflow_calls
from trackbridge.backends.held import RemoteFile
from trackbridge.backends.mlflow_calls import calling
from trackbridge.errors import ReferenceNotFoundError, RetryLater, TrackbridgeError

_CONNECT_SECONDS = 5.0
_REFERENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def fetch_capsule(run_ref: str, step: int | None, dest: Path, *, max_bytes: int = untrusted.TOTAL_BYTES) -> Path:
    """Download the capsule of `step` (None: the newest) of a run into the folder `dest`; returns the folder. What an
    interrupted try has brought there is not fetched again.

    `run_ref` is an MLflow run id or a trackbridge run id; the server is the one that ``MLFLOW_TRACKING_URI`` names.
    """
    uri = mlflow_calls.default_uri()
    _reachable(uri)
    try:
        client = mlflow_calls.client(uri)
        run = _run(client, uri, run_ref)
        with tempfile.TemporaryDirectory() as temporary:
            found = list(_held(client, uri, run, Path(temporary)))
        chosen = held.choose(found, step, f"MLflow run {run}")
        files = list(_files(client, uri, run, chosen.where))
        return held.bring(files, dest / chosen.where, f"{chosen.where} of run {run}", max_bytes=max_bytes)
    except RetryLater as error:
        raise TrackbridgeError(str(error)) from None


def _run(client: Any, uri: str, reference: str) -> str:
    """The MLflow run id that `reference` means."""
    if _REFERENCE.fullmatch(reference):
        with calling(uri):
            for experiments in _experiments(client):
                for field in ("tags.`trackbridge.run_id`", "attributes.run_id"):
                    found = client.search_runs(experiments, f"{field} = '{reference}'", order_by=["start_time DESC"])
                    if found:
                        return str(found[0].info.run_id)
    raise ReferenceNotFoundError(
        f"MLflow at {mlflow_calls.public(uri)} has no run {reference!r}, neither by its own id nor by trackbridge's; "
        f"is {mlflow_calls.URI_VARIABLE} right?"
    )


def _experiments(client: Any) -> Iterator[list[str]]:
    """The ids of all experiments, a page at a time."""
    token = None
    while True:
        page = client.search_experiments(max_results=500, page_token=token)
        yield [experiment.experiment_id for experiment in page]
        token = page.token
        if not token:
            return


def _held(client: Any, uri: str, run: str, temporary: Path) -> Iterator[held.HeldCapsule]:
    with calling(uri):
        folders = [item.path for item in client.list_artifacts(run) if item.is_dir]
    for folder in folders:
        with calling(uri):
            inside = {item.path for item in client.list_artifacts(run, folder)}
            if f"{folder}/{held.MANIFEST}" not in inside:
                continue
            manifest = client.download_artifacts(run, f"{folder}/{held.MANIFEST}", str(temporary))
        capsule = held.read_manifest(Path(manifest), run=run, where=folder)
        if capsule is not None:
            yield capsule


def _files(client: Any, uri: str, run: str, folder: str) -> Iterator[RemoteFile]:
    """Every file of an artifact folder, its folders gone through one by one."""
    waiting = [folder]
    while waiting:
        with calling(uri):
            inside = client.list_artifacts(run, waiting.pop())
        for item in inside:
            if item.is_dir:
                waiting.append(item.path)
            else:
                name = item.path.removeprefix(f"{folder}/")
                yield RemoteFile(name, item.file_size, partial(_download, client, uri, run, item.path))


def _download(client: Any, uri: str, run: str, path: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".mlflow-") as folder, calling(uri):
        Path(client.download_artifacts(run, path, folder)).replace(target)


def _reachable(uri: str) -> None:
    """A dead server or a missing file is said at once: MLflow's own client would try for four minutes, or create the file."""
    if uri.startswith("sqlite:///"):
        path = Path(uri.removeprefix("sqlite:///").partition("?")[0])
        if not path.exists():
            raise ReferenceNotFoundError(f"there is no MLflow database {path}; set {mlflow_calls.URI_VARIABLE}")
    if mlflow_calls.is_http(uri):
        parts = urlsplit(uri)
        try:
            address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
            socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            raise TrackbridgeError(f"cannot reach MLflow at {mlflow_calls.public(uri)}: {error}") from None


class History:
    """The metrics of one run, whole. `run_ref` is an MLflow run id or a trackbridge run id; the server is the one that
    ``MLFLOW_TRACKING_URI`` names. Raises `ReferenceNotFoundError` when there is no such run, `TrackbridgeError` for a server
    that does not answer."""

    def __init__(self, run_ref: str) -> None:
        self._uri = mlflow_calls.default_uri()
        _reachable(self._uri)
        try:
            self._client = mlflow_calls.client(self._uri)
            self._run_id = _run(self._client, self._uri, run_ref)
            with calling(self._uri):
                self._metrics = list(self._client.get_run(self._run_id).data.metrics)
        except RetryLater as error:
            raise TrackbridgeError(str(error)) from None

    def columns(self) -> list[str]:
        return self._metrics

    def read(self, name: str) -> dict[int, float]:
        """{step: value}; of a step that was logged twice the later value."""
        try:
            with calling(self._uri):
                metrics = self._client.get_metric_history(self._run_id, name)
        except RetryLater as error:
            raise TrackbridgeError(str(error)) from None
        return {metric.step: float(metric.value) for metric in sorted(metrics, key=lambda metric: metric.timestamp)}
