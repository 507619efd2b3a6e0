"""Prometheus: what is now, on ``/metrics``, for a scraper and its alert rules. Not a history: values come and go.

The shipper serves the page, on loopback unless another address is chosen; it ends with the run. A series of the catalogue is
a gauge of its own (``train/loss`` is ``trackbridge_train_loss``). What there can be many of comes under a few names with a
label: ``trackbridge_layer{layer,statistic}``, ``trackbridge_act``, ``trackbridge_router`` and ``trackbridge_expert`` (the same
with `module`, `router` and `expert`), and ``trackbridge_logged{series}``, at most `max_series` together; what is beyond is
counted in ``trackbridge_series_left_out``. Anomalies are a counter by kind.

So that counters survive a restart of the shipper, the state is a small file in the run directory, replaced at each write:
``prometheus/state.json``. It is also what makes writing the same records twice harmless.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from trackbridge import names, plugins
from trackbridge.backends.base import Backend, BackendConfig
from trackbridge.errors import RetryLater
from trackbridge.records import Anomaly, Record, Row, RunEnd, RunInfo
from trackbridge.rundir import dumps, write_atomic

PORTS = 20
"""How many ports are tried from the configured one on: several runs on one host."""
ANOMALIES = ("spike", "nonfinite", "drift", "divergence", "plateau", "shift", "throughput", "memory", "stall", "rule")
_PREFIX = "trackbridge_"
_WIDE = {
    names.LAYER: ("layer", "a statistic of a parameter"),
    names.ACT: ("module", "a statistic of an output"),
    names.ROUTER: ("router", "a statistic of a router"),
    names.EXPERT: ("expert", "a statistic of one expert, <router>.<number>"),
}
"""What labels a series of each wide family, and what the family is."""
_STAMPS = (names.STEP, names.SEQ, names.ATTEMPT)


class PrometheusConfig(BackendConfig):
    """`address` and `port`: where the page is served; 0 is any free port. There is no authentication: an address that others
    can reach shows them the run's numbers. `max_series` bounds the labelled series."""

    kind: Literal["prometheus"] = "prometheus"
    address: str = "127.0.0.1"
    port: int = Field(9464, ge=0, le=65535)
    max_series: int = Field(200, ge=0)

    def check(self) -> None:
        plugins.require("prometheus_client", "prometheus")

    def build(self) -> Backend:
        return PrometheusBackend(self)

    def where(self, run: RunInfo) -> str | None:
        """The page's URL while it is served."""
        try:
            return str(json.loads((_folder(run) / "where.json").read_text(encoding="utf-8"))["url"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass
class State:
    """What the page shows. `labelled` maps (family, label values as JSON) to a value; `anomalies` ids to kinds."""

    held: int = -1
    step: int = -1
    attempt: int = 0
    time: float = 0.0
    status: str = "running"
    gauges: dict[str, float] = field(default_factory=dict)
    labelled: dict[str, float] = field(default_factory=dict)
    nonfinite: dict[str, float] = field(default_factory=dict)
    left_out: int = 0
    anomalies: dict[str, str] = field(default_factory=dict)
    anomaly_step: int = -1

    @classmethod
    def load(cls, path: Path) -> State:
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            for part in ("gauges", "labelled", "nonfinite"):
                saved[part] = {key: float(value) for key, value in saved[part].items()}
            known = {name for name in saved["gauges"] if names.describe(name) is not None}
            return cls(**{**saved, "gauges": {name: saved["gauges"][name] for name in known}})
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return cls()


class PrometheusBackend:
    """See the module. `url` is the page once the run is open."""

    def __init__(self, config: PrometheusConfig) -> None:
        self._config = config
        self._state = State()
        self._server: Any = None
        self._left_out: set[str] = set()
        self.url: str | None = None

    def open(self, run: RunInfo, /) -> int:
        self._run = run
        self._state = State.load(_folder(run) / "state.json")
        self._state.attempt = max(run.attempt, self._state.attempt)
        if self._server is None:
            self._serve()
        return self._state.held

    def write(self, batch: Sequence[Record], /, *, timeout: float) -> int:
        for record in batch:
            if record.seq > self._state.held:
                self._take(record)
                self._state.held = record.seq
        self._save()
        return self._state.held

    def close(self, end: RunEnd | None, /, *, timeout: float) -> int:
        if end is not None:
            self._state.status = end.status
            self._state.held = max(self._state.held, end.seq)
            self._save()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
            (_folder(self._run) / "where.json").unlink(missing_ok=True)
        return self._state.held

    # -- records in --------------------------------------------------------------------------------------------------

    def _take(self, record: Record) -> None:
        state = self._state
        if isinstance(record, Anomaly):
            state.anomaly_step = max(state.anomaly_step, record.step)
            state.anomalies.setdefault(record.id, record.kind if record.kind in ANOMALIES else "other")
        elif isinstance(record, Row):
            state.status = "running"
            if record.kind == "step":
                state.step = record.step
            state.attempt, state.time = max(state.attempt, record.attempt), max(state.time, record.time)
            for name, value in record.items():
                self._value(name, value)

    def _value(self, name: str, value: float) -> None:
        state = self._state
        if name in _STAMPS or name.startswith(("coalesced/", "anomaly/")):
            return
        if name.startswith(names.NONFINITE):
            self._labelled(state.nonfinite, dumps([name.removeprefix(names.NONFINITE)]), value, add=True)
        elif (metric := names.describe(name)) is not None and metric.name == name:
            state.gauges[name] = value
        elif names.is_wide(name):
            family, _, rest = name.partition("/")
            part, _, statistic = rest.rpartition("/")
            self._labelled(state.labelled, dumps([family, part, statistic]), value)
        else:
            self._labelled(state.labelled, dumps(["logged", name]), value)

    def _labelled(self, where: dict[str, float], key: str, value: float, *, add: bool = False) -> None:
        if key not in where and len(self._state.labelled) + len(self._state.nonfinite) >= self._config.max_series:
            if key not in self._left_out and len(self._left_out) < 100_000:
                self._left_out.add(key)
                self._state.left_out = max(self._state.left_out, len(self._left_out))
            return
        where[key] = where.get(key, 0.0) + value if add else value

    def _save(self) -> None:
        try:
            write_atomic(_folder(self._run) / "state.json", dumps(asdict(self._state)).encode())
        except OSError as error:
            raise RetryLater(5.0, f"cannot write {_folder(self._run)}: {error.strerror or error}") from error

    # -- the page ----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        from prometheus_client import start_http_server
        from prometheus_client.registry import CollectorRegistry

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        first = self._config.port
        for port in range(first, first + (PORTS if first else 1)):
            try:
                self._server, _ = start_http_server(port, self._config.address, registry)
                break
            except (OSError, OverflowError) as error:
                trouble = error
        else:
            raise RetryLater(30.0, f"cannot serve {self._config.address}:{first} (to {first + PORTS - 1}): {trouble}")
        host = f"[{self._config.address}]" if ":" in self._config.address else self._config.address
        self.url = f"http://{host}:{self._server.server_address[1]}/metrics"
        write_atomic(_folder(self._run) / "where.json", dumps({"url": self.url, "since": time.time()}).encode())

    def collect(self) -> Iterator[Any]:
        """What prometheus_client asks for at each scrape, on its own thread."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        state, run = self._state, [self._run.run_id, self._run.project]
        who = ["run", "project"]

        def one(family: type[Any], name: str, help_: str, value: float) -> Any:
            made = family(f"{_PREFIX}{name}", help_, labels=who)
            made.add_metric(run, value)
            return made

        for name, value in list(state.gauges.items()):
            metric = names.describe(name)
            assert metric is not None
            yield one(GaugeMetricFamily, name.removeprefix("trackbridge/").replace("/", "_"), metric.meaning, value)
        yield one(GaugeMetricFamily, "step", "newest optimizer step", state.step)
        yield one(GaugeMetricFamily, "attempt", "0 at first, one more with each resume", state.attempt)
        yield one(GaugeMetricFamily, "last_row_timestamp_seconds", "when the newest row was recorded", state.time)
        yield one(GaugeMetricFamily, "last_anomaly_step", "step of the newest anomaly, -1 without", state.anomaly_step)
        yield one(GaugeMetricFamily, "series_left_out", "labelled series beyond max_series", state.left_out)
        status = GaugeMetricFamily(f"{_PREFIX}run_status", "1 for what the run is", labels=[*who, "status"])
        for word in ("running", "finished", "failed", "killed"):
            status.add_metric([*run, word], float(word == state.status))
        yield status
        counted = CounterMetricFamily(f"{_PREFIX}anomalies", "anomalies detected so far", labels=[*who, "kind"])
        kinds = list(state.anomalies.values())
        for kind in (*ANOMALIES, "other"):
            counted.add_metric([*run, kind], kinds.count(kind))
        yield counted
        bad = CounterMetricFamily(f"{_PREFIX}nonfinite", "steps at which a series was NaN or Inf", labels=[*who, "series"])
        for key, value in list(state.nonfinite.items()):
            bad.add_metric([*run, *json.loads(key)], value)
        yield bad
        families = {
            family.rstrip("/"): GaugeMetricFamily(f"{_PREFIX}{family.rstrip('/')}", help_, labels=[*who, label, "statistic"])
            for family, (label, help_) in _WIDE.items()
        }
        families["logged"] = GaugeMetricFamily(f"{_PREFIX}logged", "a series of your own", labels=[*who, "series"])
        for key, value in list(state.labelled.items()):
            family, *labels = json.loads(key)
            families[family].add_metric([*run, *labels], value)
        yield from families.values()


def _folder(run: RunInfo) -> Path:
    return Path(run.directory) / "prometheus"
