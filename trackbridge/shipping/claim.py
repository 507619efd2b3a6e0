"""One process at a time for each tracker, without locks that network file systems get wrong.

A claim is a small file, created exclusively, that names its owner; the owner touches it now and then. It is stale when its
process is gone (same host) or when it has not been touched for `STALE_SECONDS` by the file server's own clock.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from trackbridge.liveness import alive

TOUCH_SECONDS = 20.0
STALE_SECONDS = 120.0


@dataclass
class Claim:
    """The right to serve what `path` stands for. `take`, `touch` now and then, `release`."""

    path: Path
    _token: str = field(default_factory=lambda: secrets.token_hex(8))
    _touched: float = float("-inf")
    held: bool = False

    def take(self) -> str | None:
        """None on success, else who has it, in words. Raises `OSError` where nothing can be written (now)."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        words = self._create()
        if words is not None and self._stale():
            self._clear()
            words = self._create()
        self.held = words is None
        return words

    def keep(self, now: float) -> None:
        """Touch when it is time to. `now` is any clock, in seconds."""
        if self.held and now - self._touched >= TOUCH_SECONDS:
            self._touched = now
            self.touch()

    def touch(self) -> bool:
        """Say that we are still here. False if someone else took over, thinking that we were not."""
        if self.held:
            self.held = self._read().get("token") == self._token
        if self.held:
            try:
                os.utime(self.path)
            except OSError:
                pass  # seen at the next call
        return self.held

    def release(self) -> None:
        if self.held and self._read().get("token") == self._token:
            self.path.unlink(missing_ok=True)
        self.held = False

    def _create(self) -> str | None:
        owner = {"token": self._token, "pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        try:
            file = self.path.open("x", encoding="utf-8")
        except FileExistsError:
            other = self._read()
            return f"process {other.get('pid', '?')} on {other.get('host', '?')}"
        try:
            with file:
                file.write(json.dumps(owner))
        except OSError:  # a full disk: a claim of nobody would keep everybody waiting
            self.path.unlink(missing_ok=True)
            raise
        return None

    def _read(self) -> dict[str, object]:
        try:
            owner = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return owner if isinstance(owner, dict) else {}

    def _stale(self) -> bool:
        owner = self._read()
        pid, since = owner.get("pid"), owner.get("since")
        here = owner.get("host") == socket.gethostname()
        if here and isinstance(pid, int) and isinstance(since, float) and not alive(pid, since):
            return True
        now = self.path.with_name(f".{self.path.name}.{self._token}")  # what time is it where the file lives?
        try:
            now.touch()
            return now.stat().st_mtime - self.path.stat().st_mtime > STALE_SECONDS
        except FileNotFoundError:
            return True
        finally:
            now.unlink(missing_ok=True)

    def _clear(self) -> None:
        """Remove a stale claim. Renamed first: of two that try, one gets it."""
        aside = self.path.with_name(f".{self.path.name}.{self._token}.stale")
        try:
            self.path.rename(aside)
            aside.unlink()
        except FileNotFoundError:
            pass
