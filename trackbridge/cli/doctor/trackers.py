"""Whether the trackers' servers answer, which versions they are, and whether there is a key for them. Asks in plain HTTP with a
time limit; sends no key and no data."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from trackbridge import redact
from trackbridge.cli.doctor.finding import Finding
from trackbridge.cli.doctor.software import installed

PATIENCE_S = 3.0
_ANSWER_BYTES = 1 << 16


def look() -> Iterator[Finding]:
    if version := installed("mlflow"):
        yield mlflow(os.environ.get("MLFLOW_TRACKING_URI", ""), version)
    if version := installed("wandb"):
        yield from wandb(os.environ.get("WANDB_MODE", ""), os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"), version)


def mlflow(uri: str, client: str) -> Finding:
    if not uri:
        return Finding("MLflow store", "ok", "MLFLOW_TRACKING_URI is not set: mlflow.db in the working directory")
    if not uri.startswith(("http://", "https://")):
        return Finding("MLflow store", "ok", redact.text(uri))
    advice = "rows wait in the journal; start the server, or correct MLFLOW_TRACKING_URI"
    answer = ask(uri.rstrip("/") + "/version")
    if isinstance(answer, Finding):
        return Finding("MLflow server", "note", answer.found, advice)
    server = answer.decode("utf-8", "replace").strip()
    shown = redact.text(uri)
    if not server[:1].isdigit() or len(server) > 40:
        return Finding("MLflow server", "ok", f"{shown} answers")
    if server.split(".")[0] != client.split(".")[0]:
        advice = f"take a client of the server's major version: pip install 'mlflow=={server.split('.')[0]}.*'"
        return Finding("MLflow server", "note", f"{shown} is {server}, the client here {client}", advice)
    return Finding("MLflow server", "ok", f"{shown} answers, version {server}")


def wandb(mode: str, url: str, client: str) -> Iterator[Finding]:
    if mode in ("offline", "disabled"):
        yield Finding("W&B", "ok", f"WANDB_MODE={mode}")
        return
    shown = redact.text(url)
    body = json.dumps({"query": "query { serverInfo { cliVersionInfo } }"}).encode()
    answer = ask(url.rstrip("/") + "/graphql", body)
    if isinstance(answer, Finding):
        advice = "rows wait in the journal until it answers; WANDB_MODE=offline writes files instead"
        yield Finding("W&B server", "note", answer.found, advice)
    elif (newest := _newest(answer)) and _numbers(client) > _numbers(newest):
        advice = f"pip install 'wandb<={newest}', or upgrade the server"
        yield Finding("W&B server", "note", f"{shown} knows clients up to {newest}, here is {client}", advice)
    else:
        yield Finding("W&B server", "ok", f"{shown} answers{f', knows clients up to {newest}' if newest else ''}")
    host = urlsplit(url).hostname or ""
    if where := _key(host):
        yield Finding("W&B key", "ok", f"in {where}")
    else:
        yield Finding("W&B key", "note", f"none for {host}", f"wandb login --host {shown}; or WANDB_MODE=offline")


def ask(url: str, body: bytes | None = None) -> bytes | Finding:
    """What a server answers within `PATIENCE_S`, names looked up included; ``b""`` where it answers with an error of its own.
    A finding that says why where nobody answers. A user and password in `url` stay here."""
    parts = urlsplit(url)
    shown = redact.text(f"{parts.scheme}://{parts.netloc}")
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()

    def read() -> bytes:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        with urlopen(Request(bare, data=body, headers=headers), timeout=PATIENCE_S) as answer:
            return bytes(answer.read(_ANSWER_BYTES))

    got = within(PATIENCE_S + 1, read)
    if isinstance(got, bytes):
        return got
    if isinstance(got, HTTPError):
        got.close()
        return b""
    reason = getattr(got, "reason", got)
    why = getattr(reason, "strerror", None) or reason or f"nothing within {PATIENCE_S:.0f} s"
    return Finding("server", "note", f"{shown} does not answer: {' '.join(redact.text(str(why)).split())}")


def within(seconds: float, do: Callable[[], bytes]) -> bytes | Exception | None:
    """What `do` gives or raises; None when it takes longer. (The lookup of a name has no time limit of its own.)"""
    box: list[bytes | Exception] = []

    def work() -> None:
        try:
            box.append(do())
        except Exception as error:
            box.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return box[0] if box else None


def _newest(answer: bytes) -> str | None:
    """The newest client that a W&B server says it knows."""
    try:
        found: Any = json.loads(answer)["data"]["serverInfo"]["cliVersionInfo"]["max_cli_version"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) and found[:1].isdigit() else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


def _key(host: str) -> str | None:
    """Where a key for `host` is. The key itself is not kept."""
    import netrc

    if os.environ.get("WANDB_API_KEY"):
        return "WANDB_API_KEY"
    for path in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        file = Path(path).expanduser() if path else None
        try:
            if file is not None and file.is_file() and netrc.netrc(file).authenticators(host):
                return str(file)
        except (netrc.NetrcParseError, OSError):
            continue
    return None
