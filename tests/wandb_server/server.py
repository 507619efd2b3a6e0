"""The HTTP front: routes, the GraphQL root, authentication, faults, and stopping and starting on the same port."""

# ruff: noqa: N803 - arguments of resolvers have the names that the client gives them
from __future__ import annotations

import base64
import gzip
import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from tests.wandb_server.artifacts import Artifacts
from tests.wandb_server.faults import Action, Cut, Drop, Fault, Faults, Stall, Status
from tests.wandb_server.graphql import Executor, Object, connection, node_id
from tests.wandb_server.runs import NOW, RefusalError, Run, Runs
from tests.wandb_server.views import Views

KEY = "local-" + "0" * 40
"""The only API key the server takes."""

FEATURES = (
    "LARGE_FILENAMES", "ARTIFACT_TAGS", "CLIENT_IDS", "ARTIFACT_COLLECTION_MEMBERSHIP_FILES", "FILESTREAM_GZIP",
    "ARTIFACT_COLLECTION_MEMBERSHIP_FILE_DOWNLOAD_HANDLER", "USE_ARTIFACT_WITH_ENTITY_AND_PROJECT_INFORMATION",
    "PROJECT_ARTIFACT_COLLECTION_MEMBERSHIP", "TOTAL_COUNT_IN_FILE_CONNECTION", "ARTIFACT_COLLECTIONS_FILTERING_SORTING",
)  # fmt: skip


class WandbServer:
    """``with WandbServer() as server:``; then point a client at `url` with `KEY`. What it holds survives `stop`/`start`."""

    def __init__(self, entity: str = "team") -> None:
        self.entity = entity
        self.faults = Faults()
        self.unknown: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.errors: list[str] = []
        self.storage: dict[str, bytes] = {}
        self.lock = threading.RLock()
        self.runs = Runs(self.storage_url, self.project, self.viewer)
        self.artifacts = Artifacts(self.storage, self.storage_url, self.project)
        self.views = Views(self.project, self.viewer)
        self.runs.artifacts_of, self.runs.artifact = self.artifacts.of_run, self.artifacts.by_id
        self.artifacts.run, self.artifacts.show_run = self.runs.all.get, self.runs.show
        self._executor = Executor(self.unknown)
        self._http: _Http | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen; after `stop`, on the same port as before. Does nothing while it listens."""
        if self._http is not None:
            return
        self._http = _Http(self, self.port)
        self.port = self._http.server_address[1]
        threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, name="wandb-server", daemon=True
        ).start()

    def stop(self) -> None:
        """Refuse connections, and cut those that are open."""
        self.faults.clear()
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http.cut()
            self._http = None

    def forget(self) -> None:
        """Empty the server; faults are lifted, too."""
        self.faults.clear()
        with self.lock:
            self.runs.deleted.clear()
            self.runs.closed.clear()
            for held in (self.runs.all, self.storage, self.artifacts.collections, self.artifacts.versions, self.views.all):
                held.clear()

    def __enter__(self) -> WandbServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @contextmanager
    def fault(self, action: Action, **where: Any) -> Iterator[Fault]:
        """Break what matches (see `Fault`) inside the block."""
        fault = Fault(action, **where)
        self.faults.add(fault)
        try:
            yield fault
        finally:
            self.faults.remove(fault)

    def run(self, project: str, name: str) -> Run:
        found = self.runs.find(self.entity, project, name)
        assert found is not None, f"the server has no run {project}/{name}"
        return found

    # -- objects -----------------------------------------------------------------------------------------------------

    def storage_url(self, path: str) -> str:
        return f"{self.url}/storage/{quote(path)}"

    def viewer(self) -> Object:
        return {
            "__typename": "User", "id": node_id("User", 1), "entity": self.entity, "username": self.entity, "name": "Test",
            "email": "test@example.invalid", "admin": False, "flags": "{}", "deletedAt": None, "apiKeys": connection([]),
            "teams": connection([{"name": self.entity}]), "defaultEntity": self._entity(self.entity),
        }  # fmt: skip

    def _entity(self, name: str) -> Object:
        return {
            "__typename": "Entity", "id": node_id("Entity", name), "name": name, "isTeam": True, "available": True,
            "readOnly": False,
            "organization": {"name": "org", "coreWeaveOrganizationId": None, "orgEntity": {"name": name}},
            "projects": lambda first=None, after=None, **_: (
                connection(self._projects(name), lambda p: self.project(name, p), first, after)
            ),
        }  # fmt: skip

    def _projects(self, entity: str) -> list[str]:
        held = [*self.runs.all, *self.artifacts.collections, *((v.entity, v.project, "") for v in self.views.all.values())]
        return sorted({key[1] for key in held if key[0] == entity})

    def project(self, entity: str | None, name: str) -> Object:
        entity = entity or self.entity
        at = (entity, name)
        return {
            "__typename": "Project", "id": node_id("Project", name), "internalId": "1", "name": name, "entityName": entity,
            "entity": lambda: self._entity(entity), "createdAt": NOW, "isBenchmark": False, "readOnly": False,
            "user": self.viewer,
            "run": lambda name: self.runs.show(self.runs.find(*at, name)),
            "bucket": lambda name, missingOk=False: self.runs.show(self.runs.find(*at, name)),
            "runCount": lambda filters=None: len(self.runs.of(*at, filters)),
            "runs": lambda filters=None, first=None, after=None, order=None: (
                connection(self.runs.of(*at, filters), self.runs.show, first, after)
            ),
            "sweep": lambda **_: None,
            "allViews": lambda viewType="runs", viewName=None, userName=None, **page: (
                self.views.of(*at, viewType, viewName, **page)
            ),
            "artifactType": lambda name: self.artifacts.kind(*at, name),
            "artifactCollection": lambda name: self.artifacts.collection((*at, name)),
            "artifactCollectionMembership": lambda name: self.artifacts.by_name(*at, name),
            "artifact": lambda name: (self.artifacts.by_name(*at, name) or {}).get("artifact"),
        }  # fmt: skip

    def _root(self) -> Object:
        runs, artifacts, views = self.runs, self.artifacts, self.views
        return {
            "__typename": "Root", "viewer": self.viewer,
            "serverInfo": {"features": [{"name": name, "isEnabled": True} for name in FEATURES], "latestLocalVersionInfo": None,
                           "cliVersionInfo": {"max_cli_version": "99.0.0"}},
            "entity": lambda name=None: self._entity(name or self.entity),
            "organization": lambda **_: {"featureFlags": []},
            "project": lambda name, entityName=None: (
                self.project(entityName, name) if name in self._projects(entityName or self.entity) else None
            ),
            "model": lambda name, entityName=None: self.project(entityName, name),
            "models": lambda entityName, first=None, after=None: self._entity(entityName)["projects"](first, after),
            "artifact": lambda id: artifacts.by_id(id),
            "clientIDMapping": lambda clientID: (
                {"serverID": artifacts.clients[clientID]} if clientID in artifacts.clients else None
            ),
            "view": lambda id: views.show(id),
            "upsertBucket": lambda input: runs.upsert(input, self.entity),
            "upsertModel": lambda input: {"model": self.project(input.get("entityName"), input["name"]), "inserted": False},
            "createRunFiles": lambda input: runs.create_files(input),
            "notifyScriptableRunAlert": lambda input: runs.alert(input),
            "createArtifact": lambda input: artifacts.create(input, self.entity),
            "createArtifactManifest": lambda input: artifacts.create_manifest(input),
            "updateArtifactManifest": lambda input: artifacts.update_manifest(input),
            "createArtifactFiles": lambda input: artifacts.create_files(input),
            "commitArtifact": lambda input: artifacts.commit(input),
            "useArtifact": lambda input: artifacts.use(input),
            "upsertView": lambda input: views.upsert(input),
        }  # fmt: skip

    # -- requests ----------------------------------------------------------------------------------------------------

    def serve(self, method: str, path: str, operation: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of the answer to one request."""
        with self.lock:
            if path == "/graphql":
                self.operations[operation] += 1
                return self._graphql(json.loads(body))
            if found := re.fullmatch(r"/files/([^/]+)/([^/]+)/([^/]+)/file_stream", path):
                run = self.runs.find(*(unquote(part) for part in found.groups()))
                if run is None:
                    return 404, b'{"error": "run not found"}'
                if (run.entity, run.project) in self.runs.closed:
                    return 403, b'{"error": "permission denied"}'
                return 200, json.dumps(self.runs.stream(run, json.loads(body or b"{}"))).encode()
            if path.startswith("/storage/"):
                key = unquote(path.removeprefix("/storage/"))
                if method == "PUT":
                    self.storage[key] = body
                return (200, b"" if method == "PUT" else self.storage[key]) if key in self.storage else (404, b"")
        return 404, b'{"error": "no such path"}'

    def _graphql(self, request: Object) -> tuple[int, bytes]:
        try:
            data = self._executor.run(self._root(), request["query"], request.get("variables"), request.get("operationName"))
            return 200, json.dumps({"data": data}, allow_nan=False).encode()
        except RefusalError as refusal:
            error: Object = {"message": str(refusal), "path": [refusal.path]}
            if refusal.code is not None:
                error["extensions"] = {"code": refusal.code}
            return refusal.status, json.dumps({"errors": [error], "data": {refusal.path: None}}).encode()
        except Exception as trouble:
            self.errors.append(f"{type(trouble).__name__}: {trouble}")
            return 200, json.dumps({"data": None, "errors": [{"message": self.errors[-1]}]}).encode()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, wandb: WandbServer, port: int) -> None:
        self.wandb = wandb
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def cut(self) -> None:
        for connection_ in list(self._open):
            try:
                connection_.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients are cut off on purpose here; that is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Http

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_any(self) -> None:
        wandb, path = self.server.wandb, urlsplit(self.path).path
        size = int(self.headers.get("Content-Length") or 0)
        # The operation's name is only known from the body: a GraphQL request is read before faults are asked.
        body = self.rfile.read(size) if path == "/graphql" else None
        named = re.search(rb"(?:query|mutation)\s+(\w+)", body) if body else None
        operation = named[1].decode() if named else ""
        fault = wandb.faults.take(self.command, path, operation)
        action = fault.action if fault else None
        if isinstance(action, Cut):
            self.rfile.read(min(size, action.size))
        if fault and isinstance(action, Stall):
            fault.lifted.wait(action.limit)
        if isinstance(action, (Cut, Stall)) or action == Drop():
            self._hang_up()
            return
        if body is None:
            body = self._body(size)
        if isinstance(action, Status):
            code, answer = action.code, b'{"error": "on purpose"}'
        elif not self._known():
            code, answer = 401, b'{"errors": [{"message": "unknown api key"}]}'
        else:
            code, answer = wandb.serve(self.command, path, operation, body)
        if isinstance(action, Drop):
            self._hang_up()
            return
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_GET = do_HEAD = do_POST = do_PUT = do_any  # noqa: N815

    def _body(self, size: int) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            data = self.rfile.read(size)
        else:
            data = b""
            while length := int(self.rfile.readline(), 16):
                data += self.rfile.read(length)
                self.rfile.readline()
            self.rfile.readline()
        return gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data

    def _known(self) -> bool:
        """Storage URLs are pre-signed on a real server; everything else needs the key."""
        secret = base64.b64encode(f"api:{KEY}".encode()).decode()
        return self.path.startswith("/storage/") or self.headers.get("Authorization") == f"Basic {secret}"

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)
