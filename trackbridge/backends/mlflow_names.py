"""Names as MLflow takes them: injective, readable, and stable over runs.

MLflow allows letters, digits and ``_-. :/`` in at most 250 characters, refuses what is not a plain relative path, and one bad
name fails the whole request. A name that is allowed stays as it is. Any other becomes ``<what is left of it>:<digest>`` with 16
hex digits of its SHA-256; an allowed name that looks like that is treated the same way, so two names never meet. The original
is kept in a tag of the run.
"""

from __future__ import annotations

import hashlib
import posixpath
import re

LIMIT = 250
_ALLOWED = re.compile(r"[A-Za-z0-9_\-. :/]+")
_ILLEGAL = re.compile(r"[^A-Za-z0-9_\-./]+")
_DIGEST = re.compile(r".*:[0-9a-f]{16}")
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_FILE_BYTES = 200  # of a mapped part, before its digest: a file system takes 255


def key(name: str) -> str:
    """The MLflow key of a metric, parameter or tag called `name`."""
    plain = _ALLOWED.fullmatch(name) and posixpath.normpath(name) == name and name[0] not in "./ " and name[-1] != " "
    if plain and len(name) <= LIMIT and not _DIGEST.fullmatch(name):
        return name
    rest = "/".join(part for part in _ILLEGAL.sub("_", name).split("/") if part.strip("."))
    return f"{rest.lstrip('.')[:200] or 'name'}:{digest(name)}"


def digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def file(path: str) -> str:
    """A relative path whose parts survive a URL: over HTTP MLflow cuts names at ``#`` and ``?`` and unquotes ``%XX``."""
    return "/".join(
        part if _FILE.fullmatch(part) else f"{_ILLEGAL.sub('_', part)[:_FILE_BYTES]}.{digest(part)}" for part in path.split("/")
    )
