"""A W&B-compatible server on loopback, for tests: the real wandb client talks to it in online mode. No network, no disk.

``graphql`` runs queries without a schema, ``runs``, ``artifacts`` and ``views`` are the three kinds of objects, ``faults``
breaks things on demand, ``server`` is the HTTP front. What the client asks for and we do not have is counted in
`WandbServer.unknown`, so a new client version degrades visibly.
"""

from tests.wandb_server.faults import Cut, Drop, Fault, Stall, Status
from tests.wandb_server.server import KEY, WandbServer

__all__ = ["KEY", "Cut", "Drop", "Fault", "Stall", "Status", "WandbServer"]
