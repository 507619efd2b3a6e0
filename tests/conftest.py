"""What every test starts from."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def usual_logging() -> None:
    """Trackers' clients change the root logger for the whole process; a test about our messages must not depend on which test
    ran before it."""
    logging.getLogger().setLevel(logging.WARNING)
    ours = logging.getLogger("trackbridge")
    ours.setLevel(logging.NOTSET)
    ours.disabled = False
