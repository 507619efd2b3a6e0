"""What every test starts from."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")  # machines are shared: a test that waits for its turn has not failed


@pytest.fixture(autouse=True)
def usual_logging() -> None:
    """Trackers' clients change the root logger for the whole process; a test about our messages must not depend on which test
    ran before it."""
    logging.getLogger().setLevel(logging.WARNING)
    ours = logging.getLogger("trackbridge")
    ours.setLevel(logging.NOTSET)
    ours.disabled = False


@pytest.fixture(autouse=True)
def own_wandb_service() -> Iterator[None]:
    """wandb's client tells processes that are started later of the service that serves this one: a test's scripts would write
    through it, where an earlier test has left it."""
    yield
    os.environ.pop("WANDB_SERVICE", None)
