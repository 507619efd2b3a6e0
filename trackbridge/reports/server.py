"""A server on this machine's loopback for a page that follows a run. Two addresses: the page, and what is new.

Whoever is not told the address cannot read: it holds a random token, and requests under another host's name are refused.
"""

from __future__ import annotations

import json
import secrets
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import BoundedSemaphore
from typing import Any
from urllib.parse import parse_qs, urlsplit

from trackbridge.errors import UsageError
from trackbridge.reports.live import LiveRun

HOST = "127.0.0.1"
AT_ONCE = 8
"""Requests that are answered at the same time; more are told to come again."""
SECONDS = 15.0


class LiveServer(ThreadingHTTPServer):
    """Serves `run` until `shutdown`; `url` is the page. Raises `UsageError` when the port is taken."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, run: LiveRun, port: int = 0) -> None:
        self.run = run
        self.token = secrets.token_urlsafe(18)
        self.slots = BoundedSemaphore(AT_ONCE)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise UsageError(
                f"port {port} cannot be used ({error.strerror}); give another with --port, or leave it out"
            ) from None
        except OverflowError:
            raise UsageError(f"{port} is no port; give one from 1 to 65535 with --port, or leave it out") from None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = SECONDS
    server_version, sys_version = "trackbridge", ""

    def do_GET(self) -> None:
        port = self.server.server_address[1]
        asked = urlsplit(self.path)
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            return self._answer(403, "text/plain", b"this server answers on the loopback only\n")
        own, _, name = asked.path.lstrip("/").partition("/")
        if not secrets.compare_digest(own.encode(), self.server.token.encode()) or name not in ("", "rows"):
            return self._answer(404, "text/plain", b"not here; see the address that `trackbridge view --live` printed\n")
        if not self.server.slots.acquire(blocking=False):
            return self._answer(503, "text/plain", b"busy\n")
        try:
            if name:
                query = parse_qs(asked.query)
                after, changed = (_number(query.get(key, [""])[0]) for key in ("after", "changed"))
                body = json.dumps(self.server.run.news(after, changed), allow_nan=False, separators=(",", ":"))
                return self._answer(200, "application/json", body.encode())
            return self._answer(200, "text/html; charset=utf-8", self.server.run.page().encode())
        finally:
            self.server.slots.release()

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        for header, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Content-Security-Policy", "frame-ancestors 'none'"),
        ):
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: the terminal belongs to the user."""


def _number(text: str) -> int:
    return int(text) if text.lstrip("-").isdecimal() and len(text) < 19 else -(2**31)
