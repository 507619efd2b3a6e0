"""While a replay imports the user's code no run may begin: a training script without a guard would train again, and with
``resume="auto"`` into the record that is being replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trackbridge.errors import UsageError

_imported: list[str] = []


@contextmanager
def importing(module: str) -> Iterator[None]:
    """The user's `module` is imported for what it builds."""
    _imported.append(module)
    try:
        yield
    finally:
        _imported.pop()


def refuse() -> None:
    """Raise `UsageError` where a run is about to begin meanwhile."""
    if _imported:
        raise UsageError(
            f"importing {_imported[-1]!r} for --build starts a training; put what trains under `if __name__ == '__main__':`, "
            "or build() into a module of its own"
        )
