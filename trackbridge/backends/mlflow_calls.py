"""MLflow's client and its errors, as this package means them.

Only the synchronous client is used, never the fluent interface: a run that the user has active is not touched. With MLflow's
own settings a call blocks for four minutes when the server is gone; `ENVIRONMENT` turns its retries off and bounds a request,
because the shipper backs off by itself. It is applied by the shipper to its own process.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from trackbridge import plugins, redact
from trackbridge.errors import NO_PLACE, ConfigError, RetryLater, TrackbridgeError

ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
URI_VARIABLE = "MLFLOW_TRACKING_URI"

_FOR_GOOD = {"PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED", "RESOURCE_DOES_NOT_EXIST", "NOT_FOUND",
             "ENDPOINT_NOT_FOUND", "FEATURE_DISABLED", "NOT_IMPLEMENTED"}  # fmt: skip
_BACK_OFF_SECONDS = 1.0
_FOLDER_VARIABLE = "MLFLOW_ALLOW_FILE_STORE"
_FOLDER = (
    f"this MLflow does not open a store that is a folder of files; set {_FOLDER_VARIABLE}=true, or make a database of it "
    "(mlflow migrate-filestore)"
)


class Refused(Exception):  # noqa: N818 - a signal
    """MLflow understood the request and says no to its content."""


def client(uri: str) -> Any:
    """A client of `uri`; for a database this creates or opens it. Raises `RetryLater`, or `TrackbridgeError` when a person must
    do something, as with a folder of files (``mlruns``), which a new MLflow opens only when told to."""
    plugins.require("mlflow", "mlflow")
    from mlflow.tracking import MlflowClient

    try:
        with calling(uri):
            _make(uri)
            return MlflowClient(tracking_uri=uri)
    except Refused as error:  # no content was sent: it is the address, or a kind of store that this MLflow does not open
        raise TrackbridgeError(f"MLflow at {public(uri)}: {_FOLDER if _FOLDER_VARIABLE in str(error) else error}") from None


def _make(uri: str) -> None:
    """Make the SQLite database of `uri` if there is none: aside, and in its place when it is whole. MLflow takes dozens of
    steps to make one, and a database that a full disk has left half made can never be opened again."""
    from mlflow.tracking import MlflowClient

    path = _sqlite_file(uri)
    if path is None or path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        MlflowClient(tracking_uri=f"sqlite:///{quote(str(aside))}").search_experiments(max_results=1)
        _place(aside, path)
    finally:
        for part in path.parent.glob(f"{escape(aside.name)}*"):  # a journal of SQLite's among them
            part.unlink(missing_ok=True)


def _place(aside: Path, path: Path) -> None:
    """Call `aside` `path`, unless somebody else has made one meanwhile."""
    try:
        os.link(aside, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        if not path.exists():
            aside.rename(path)


def _sqlite_file(uri: str) -> Path | None:
    """The database's file; None for what is no SQLite file. ``%20`` in a URI is a space for MLflow."""
    if not uri.startswith("sqlite:///"):
        return None
    path = unquote(uri.removeprefix("sqlite:///").partition("?")[0])
    return None if path in ("", ":memory:") else Path(path).absolute()


@contextmanager
def calling(uri: str) -> Iterator[None]:
    """Run a call to MLflow at `uri`. Raises `RetryLater` when it may work later, `Refused` when it is the content, and
    `TrackbridgeError` in one line when a person must do something. No credential gets into a message."""
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException

    try:
        yield
    except (MlflowException, RequestException, OSError) as error:
        raise _meaning(error, uri) from None
    except Exception as error:
        if not type(error).__module__.startswith("sqlalchemy."):  # not in every installation of MLflow
            raise
        raise _of_database(error, uri) from None


_HALF_MADE = ("already exists", "duplicate column", "no such table", "no such column", "malformed", "not a database")


def _of_database(error: Exception, uri: str) -> Exception:
    """What SQL's own error means, without the statement."""
    said = redact.text(" ".join(str(getattr(error, "orig", None) or error).split()))[:200]
    if _sqlite_file(uri) is not None and any(words in said for words in _HALF_MADE):
        _forget(uri)
        return TrackbridgeError(
            f"MLflow's database {public(uri)} is broken ({said}): a disk that was full when it was made or upgraded? "
            "Move the file away, and a new one is made"
        )
    return RetryLater(_BACK_OFF_SECONDS, f"MLflow at {public(uri)}: {said}")


def _forget(uri: str) -> None:
    """Let MLflow open the database anew: it keeps its connections by address, also those to a file that was moved away."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    engine = getattr(SqlAlchemyStore, "_engine_map", {}).pop(uri, None)
    if engine is not None:
        engine.dispose()


def _meaning(error: Exception, uri: str) -> Exception:
    from mlflow.exceptions import MlflowException, RestException
    from requests.exceptions import HTTPError

    text = redact.text(" ".join(str(error).split()))[:500]
    said = f"MLflow at {public(uri)}: {text}"
    if isinstance(error, HTTPError) and error.response is not None:
        status = error.response.status_code
        return TrackbridgeError(said) if 400 <= status < 500 and status not in (408, 425, 429) else RetryLater(1.0, said)
    if isinstance(error, MlflowException):
        # an answer that is not MLflow's own JSON comes from something in between: nobody has judged the content
        mlflow_itself = isinstance(error, RestException) or not is_http(uri)
        if error.error_code == "INVALID_PARAMETER_VALUE" and mlflow_itself:
            return Refused(text)
        if error.error_code in _FOR_GOOD:
            return TrackbridgeError(said)
    if isinstance(error, OSError) and error.errno in NO_PLACE:  # for a database, or artifacts in a folder
        return TrackbridgeError(said)
    return RetryLater(_BACK_OFF_SECONDS, said)


def is_http(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def public(uri: str) -> str:
    """`uri` without what may be secret in it: user, password, query."""
    scheme, mark, rest = uri.partition("://")
    host, slash, path = rest.partition("/")
    return redact.text(f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path.partition('?')[0].partition('#')[0]}")


def holds_secret(uri: str) -> bool:
    """True if `uri` carries a password, a token, or (over HTTP) a user name, which is often a token."""
    if "://" not in uri:
        return False
    parts = urlsplit(uri)
    user, at, _ = parts.netloc.rpartition("@")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    return bool(at and (is_http(uri) or ":" in user)) or redact.tree(query) != query


class Active(NamedTuple):
    """The run that the user has active in this process."""

    run_id: str
    experiment_id: str
    uri: str


def active() -> Active | None:
    """None if there is none. Never imports mlflow: who has a run active did. Contacts nobody."""
    mlflow = sys.modules.get("mlflow")
    run = mlflow.active_run() if mlflow is not None and hasattr(mlflow, "active_run") else None
    if mlflow is None or run is None:
        return None
    return Active(run.info.run_id, run.info.experiment_id, mlflow.get_tracking_uri())


def from_environment() -> str | None:
    return os.environ.get(URI_VARIABLE) or None


def absolute(uri: str) -> str:
    """A relative SQLite file belongs to the directory it was named in, not to that of whoever opens it later."""
    if _sqlite_file(uri) is None or uri.startswith("sqlite:////"):
        return uri
    named, mark, query = uri.removeprefix("sqlite:///").partition("?")
    return f"sqlite:///{quote(str(Path.cwd()))}/{Path(named)}{mark}{query}"


def default_uri() -> str:
    """What MLflow itself would use here: its variable, else ``mlflow.db`` in the working directory."""
    return absolute(from_environment() or "sqlite:///mlflow.db")


def refuse_secret(uri: str, setting: str) -> None:
    if holds_secret(uri):
        raise ConfigError(
            f"mlflow {setting} holds credentials, which would be written to run.json: set MLFLOW_TRACKING_USERNAME and "
            f"MLFLOW_TRACKING_PASSWORD (or MLFLOW_TRACKING_TOKEN), or put the whole URI into {URI_VARIABLE}"
        )
