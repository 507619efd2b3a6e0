"""A conformance suite for backends, and factories of records. Needs pytest; ships in the package for third parties.

A backend proves itself by a subclass that says how to build its config and how to read a run back *with the tracker's own
reader*::

    class TestMyTracker(BackendContract):
        def config(self, tmp_path):
            return MyConfig(path=tmp_path / "db")

        def read_back(self, config, run):
            return ReadBack(series={...}, artifacts={...}, status="finished")

To see a failed comparison spelled out, put ``pytest.register_assert_rewrite("trackbridge.testing")`` into ``conftest.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from trackbridge.backends.base import Backend, BackendConfig
from trackbridge.errors import MissingExtraError
from trackbridge.records import Anomaly, Artifact, Hypothesis, Params, Record, Row, RunEnd, RunInfo, RunStatus, Schema

try:
    import pytest
except ModuleNotFoundError:
    raise MissingExtraError("trackbridge.testing needs pytest; run: pip install pytest", name="pytest") from None

T0 = 1_750_000_000.0
"""Time of step 0 of every run made here; one step takes a second, an attempt begins 100,000 s after the one before."""

UGLY_NAMES = (
    "layer[0].weight", "layer_0_.weight", "a//b", "/x", "x/", "a/../b", ".", "n" * 300, "n" * 301, "потеря/β", "val@1",
    "val_at_1", "a b", "50%", "a#b", "a?b", "Val@1", "loss (GiB)", "a\\b", 'q"uote', "a,b=c|d<e>",
    "\\", "*", "$", "\\.", "a.", "..",
)  # fmt: skip

Points = dict[str, list[tuple[int, float]]]


@dataclass(frozen=True)
class ReadBack:
    """What a tracker holds of one run, as its own reader gives it.

    `series`: per original name, the points as (step, value) that are current: where attempts overlap, the newest.
    `superseded`: the points of earlier attempts that a later one replaced, however they are reached. A point that the
    tracker holds twice must be listed twice. `artifacts`: per artifact name, bytes by path inside it. `params`: flattened
    with dots, values as text; the user's own with or without ``config.`` before them. `anomalies`: the text a person finds,
    per anomaly id. `status` is None while the run goes on.
    """

    series: Points
    superseded: Points = field(default_factory=dict)
    artifacts: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    anomalies: Mapping[str, str] = field(default_factory=dict)
    status: RunStatus | None = None


def newest(points: Iterable[tuple[int, int, float]]) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Split (attempt, step, value) points of one series into (current, superseded), both ordered by step.

    A point is superseded when a later attempt has a point at the same step or at an earlier one: it went back over it.
    """
    ordered = sorted(points, key=lambda point: point[1])
    starts: dict[int, int] = {}
    for attempt, step, _ in ordered:
        starts.setdefault(attempt, step)
    current: list[tuple[int, float]] = []
    superseded: list[tuple[int, float]] = []
    for attempt, step, number in ordered:
        replaced = any(later > attempt and start <= step for later, start in starts.items())
        (superseded if replaced else current).append((step, number))
    return current, superseded


def run_info(directory: Path, **changes: Any) -> RunInfo:
    """A run whose directory is `directory`."""
    given = {"project": "contract", "run_id": "run-0001", "name": "a run", "created": T0, "tags": ("t",), **changes}
    return RunInfo(directory=str(directory), **given)


def row(seq: int, step: int, values: Mapping[str, float], *, attempt: int = 0, **changes: Any) -> Row:
    """A row with plausible times: ascending within an attempt and over attempts."""
    given = {"time": T0 + 100_000.0 * attempt + step, "schema": Schema(tuple(values)), **changes}
    return Row(seq=seq, step=step, attempt=attempt, values=np.array(list(values.values()), np.float64), **given)


def rows(
    steps: Iterable[int], names: Sequence[str] = ("train/loss", "grad/norm"), *, first_seq: int = 0, attempt: int = 0
) -> list[Row]:
    """Rows of `names` at `steps` with values that differ everywhere and use all 53 bits of the mantissa."""
    return [
        row(seq, step, {name: value(name, step, attempt) for name in names}, attempt=attempt)
        for seq, step in enumerate(steps, first_seq)
    ]


def value(name: str, step: int, attempt: int = 0) -> float:
    """The value that `rows` gives `name` at `step`: irrational, and different for each argument."""
    return math.sqrt(2.0 + step) + 100.0 * attempt + len(name) + sum(name.encode()) / 7.0


def anomaly(seq: int, step: int, **changes: Any) -> Anomaly:
    """A loss spike with a hypothesis."""
    given: dict[str, Any] = {
        "id": f"spike-{step}", "kind": "spike", "step": step, "onset": step, "severity": 0.9, "series": "train/loss",
        "value": 9.5, "expected": 2.25, "score": 31.0, "time": T0 + step, "first_mover": ("grad/norm", step),
        "hypotheses": (Hypothesis("corrupt-batch", ("token entropy 7.9 bits",), (), "skip the batch"),),
    }  # fmt: skip
    return Anomaly(seq=seq, **{**given, **changes})


def artifact(seq: int, step: int, run: RunInfo, name: str, files: Mapping[str, bytes], kind: str = "capsule") -> Artifact:
    """Write `files` into the run directory and describe them as an artifact."""
    folder = Path(run.directory) / "artifacts" / name
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return Artifact(seq=seq, step=step, time=T0 + step, name=name, kind=kind, path=f"artifacts/{name}", metadata={"n": 1})


def end(seq: int, status: RunStatus = "finished", *, attempt: int = 0, error: str | None = None) -> RunEnd:
    return RunEnd(seq=seq, time=T0 + 100_000.0 * attempt + 50_000, status=status, attempt=attempt, error=error)


def deliver(backend: Backend, batch: Sequence[Record], *, timeout: float = 30.0) -> int:
    """Write `batch` as the shipper does: what was not confirmed is offered again as long as the confirmed `seq` moves (a
    backend may return early when `timeout` is up, and some confirm only at `close`). Returns the highest confirmed `seq`."""
    safe, rest = -1, list(batch)
    while rest:
        got = backend.write(rest, timeout=timeout)
        if got <= safe:
            break
        safe = got
        rest = [record for record in rest if record.seq > safe]
    return safe


class BackendContract:
    """Subclass me, name the subclass ``Test...``, and define `config` and `read_back`."""

    number: ClassVar[type[np.floating[Any]]] = np.float64
    """The tracker's own number type: values must come back equal after this conversion."""

    infinity: ClassVar[Literal["kept", "clamped"]] = "kept"
    """How the tracker keeps infinities: as they are, or as the largest finite number of their sign."""

    signed_zero: ClassVar[bool] = False
    """Whether the tracker keeps the sign of -0.0. Where it does not, the sign is not compared."""

    has_params: ClassVar[bool] = True
    wide: ClassVar[int] = 2500
    """Values in the widest row that is tried."""

    def config(self, tmp_path: Path) -> BackendConfig:
        raise NotImplementedError(f"{type(self).__name__}.config")

    def read_back(self, config: BackendConfig, run: RunInfo) -> ReadBack:
        raise NotImplementedError(f"{type(self).__name__}.read_back")

    # -- helpers -----------------------------------------------------------------------------------------------------

    def ship(
        self, config: BackendConfig, run: RunInfo, records: Sequence[Record], final: RunEnd | None, *, expect: int | None = None
    ) -> int:
        """One life of a shipper: open, write, close. Asserts that everything is confirmed at the end. Returns what `open`
        returned."""
        backend = config.build()
        held = backend.open(run)
        deliver(backend, records)
        safe = backend.close(final, timeout=60.0)
        last = max([record.seq for record in records] + ([] if final is None else [final.seq]), default=-1)
        expect = last if expect is None else expect
        assert safe >= expect, f"close confirmed seq {safe}, but {expect} was written"
        return held

    def as_kept(self, number: float) -> float:
        """What the tracker should give back for `number`."""
        with np.errstate(over="ignore"):
            kept = float(self.number(number))
        if math.isinf(kept) and self.infinity == "clamped":
            return math.copysign(float(np.finfo(self.number).max), kept)
        return kept

    def expected(self, records: Iterable[Record]) -> Points:
        points: Points = {}
        for record in records:
            if isinstance(record, Row):
                for name, number in record.items():
                    points.setdefault(name, []).append((record.step, self.as_kept(number)))
        return points

    def assert_series(self, got: Points, wanted: Points) -> None:
        """`got` holds exactly the points of `wanted`; names that only the backend adds (``trackbridge/...``) are ignored."""
        strange = {name for name in got if name not in wanted and not name.startswith(("trackbridge/", "nonfinite/"))}
        assert not strange, f"names nobody logged: {sorted(strange)[:5]}"
        missing = wanted.keys() - got.keys()
        assert not missing, f"series lost: {sorted(missing)[:5]}"
        for name, points in wanted.items():
            same = _same(sorted(got[name]), sorted(points), self.signed_zero)
            assert same, f"{name!r}: got {got[name][:20]}, wanted {points[:20]}"

    @pytest.fixture
    def run(self, tmp_path: Path) -> RunInfo:
        directory = tmp_path / "runs" / "run-0001"
        directory.mkdir(parents=True)
        return run_info(directory)

    # -- the contract ------------------------------------------------------------------------------------------------

    def test_every_row_arrives_once_and_equal(self, tmp_path: Path, run: RunInfo) -> None:
        config, records = self.config(tmp_path), rows(range(50))
        self.ship(config, run, records, end(50))
        back = self.read_back(config, run)
        self.assert_series(back.series, self.expected(records))
        assert not any(back.superseded.values()), f"points held twice: {back.superseded}"
        assert back.status == "finished"

    def test_a_wide_row_and_a_sparse_one(self, tmp_path: Path, run: RunInfo) -> None:
        """More values than a tracker takes in one request, then a step with a single series."""
        config = self.config(tmp_path)
        names = [f"layer/h.{i}.weight/grad_norm" for i in range(self.wide)]
        records = [*rows([0, 1], names), row(2, 2, {"eval/loss": 0.5}, kind="log")]
        self.ship(config, run, records, end(3))
        self.assert_series(self.read_back(config, run).series, self.expected(records))

    def test_nothing_twice(self, tmp_path: Path, run: RunInfo) -> None:
        """The same records again: in one object, in a new one after a crash, and in a new one after a proper close."""
        config, records = self.config(tmp_path), rows(range(12))
        backend = config.build()
        backend.open(run)
        deliver(backend, records[:8])
        deliver(backend, records[:8])
        deliver(backend, records[4:10])
        backend.close(None, timeout=60.0)
        self.ship(config, run, records, None)
        held = self.ship(config, run, records, end(12))
        assert held <= 11, f"open() claims seq {held}, which nobody wrote"
        back = self.read_back(config, run)
        self.assert_series(back.series, self.expected(records))
        assert not any(back.superseded.values()), f"points held twice: {back.superseded}"

    def test_what_open_claims_is_held(self, tmp_path: Path, run: RunInfo) -> None:
        """A shipper may skip everything up to what `open` returns."""
        config, records = self.config(tmp_path), rows(range(10))
        self.ship(config, run, records[:6], None)
        backend = config.build()
        held = backend.open(run)
        assert -1 <= held <= 5
        deliver(backend, [record for record in records if record.seq > held])
        backend.close(end(10), timeout=60.0)
        self.assert_series(self.read_back(config, run).series, self.expected(records))

    def test_resume_goes_back(self, tmp_path: Path, run: RunInfo) -> None:
        """Attempt 1 starts from an older step: its values are what a reader sees, the older ones can still be reached."""
        config = self.config(tmp_path)
        old = rows(range(13))
        self.ship(config, run, old, end(13, "killed"))
        new = rows(range(8, 20), first_seq=14, attempt=1)
        again = run_info(Path(run.directory), attempt=1, start_step=8)
        self.ship(config, again, new, end(26, attempt=1))
        back = self.read_back(config, again)
        self.assert_series(back.series, self.expected([*old[:8], *new]))
        self.assert_series(back.superseded, self.expected(old[8:]))
        assert back.status == "finished"

    def test_non_finite_values_are_visible(self, tmp_path: Path, run: RunInfo) -> None:
        config, nan, inf = self.config(tmp_path), math.nan, math.inf
        losses = [1.5, nan, inf, -inf, nan]
        records = [row(i, i, {"train/loss": x, "fine": 1.0, "big": 1e300, "zero": -0.0}) for i, x in enumerate(losses)]
        self.ship(config, run, records, None)
        self.ship(config, run, records, end(5))
        self.assert_series(self.read_back(config, run).series, self.expected(records))

    def test_ugly_names_stay_apart(self, tmp_path: Path, run: RunInfo) -> None:
        config, records = self.config(tmp_path), rows([0, 1], UGLY_NAMES)
        self.ship(config, run, records, end(2))
        self.assert_series(self.read_back(config, run).series, self.expected(records))

    def test_artifacts_arrive_intact(self, tmp_path: Path, run: RunInfo) -> None:
        """A folder, written again by a new object after a crash, and a second one."""
        config = self.config(tmp_path)
        noise = np.random.default_rng(7).bytes(300_000)
        files = {
            "manifest.json": b'{"format_version": 1, "step": 3}',
            "window.parquet": noise,
            "rank-0000/rng.safetensors": bytes(range(256)) * 9,
            "rank-0000/state/deep.bin": b"\r\n\x00",
        }
        records: list[Record] = [*rows(range(4)), artifact(4, 3, run, "spike-3", files)]
        self.ship(config, run, records, None)
        more = artifact(5, 3, run, "notes.v1-a_b", {"notes.md": b"# hi\n"}, kind="file")
        self.ship(config, run, [*records, more], end(6))
        back = self.read_back(config, run)
        assert set(back.artifacts) == {"spike-3", "notes.v1-a_b"}
        assert dict(back.artifacts["spike-3"]) == files
        assert dict(back.artifacts["notes.v1-a_b"]) == {"notes.md": b"# hi\n"}
        self.assert_series(back.series, self.expected(records))

    @pytest.mark.parametrize("status", ["failed", "killed"])
    def test_the_end_is_told(self, tmp_path: Path, run: RunInfo, status: RunStatus) -> None:
        config, records = self.config(tmp_path), rows(range(2))
        self.ship(config, run, records, end(2, status, error="RuntimeError: boom" if status == "failed" else None))
        assert self.read_back(config, run).status == status

    def test_the_end_may_be_older_than_the_last_record(self, tmp_path: Path, run: RunInfo) -> None:
        """A capsule is sealed after the end: the artifact comes first, and `close` gets the end again."""
        config = self.config(tmp_path)
        records: list[Record] = [*rows(range(3)), artifact(4, 2, run, "spike-2", {"manifest.json": b"{}"})]
        self.ship(config, run, records, end(3, "failed"), expect=4)
        self.ship(config, run, [], end(3, "failed"))
        back = self.read_back(config, run)
        assert back.status == "failed"
        assert set(back.artifacts) == {"spike-2"}
        self.assert_series(back.series, self.expected(records))

    def test_close_without_an_end_then_go_on(self, tmp_path: Path, run: RunInfo) -> None:
        """The shipper is stopped and started again while training goes on; the object itself can be opened again, too."""
        config, records = self.config(tmp_path), rows(range(9))
        backend = config.build()
        backend.open(run)
        deliver(backend, records[:3])
        backend.close(None, timeout=60.0)
        assert self.read_back(config, run).status in (None, "killed"), "a run that goes on must not read finished"
        backend.open(run)
        deliver(backend, records[3:6])
        backend.close(None, timeout=60.0)
        self.ship(config, run, records[6:], end(9))
        back = self.read_back(config, run)
        self.assert_series(back.series, self.expected(records))
        assert back.status == "finished"

    def test_params_and_anomalies_are_found(self, tmp_path: Path, run: RunInfo) -> None:
        """Params come twice with one value changed (a resume); an anomaly is told when seen and again when it is over."""
        config = self.config(tmp_path)
        params = {"config": {"lr": 3e-4, "model": {"width": 128, "act": "gelu"}, "odd key [x]": True, "long": "y" * 9000}}
        first = anomaly(4, 2)
        records: list[Record] = [
            Params(0, T0, params),
            *rows(range(3), first_seq=1),
            first,
            row(5, 3, {"train/loss": 2.0}),
            first.updated(seq=6, recovered_after=1, capsule="capsules/spike-2"),
            Params(7, T0 + 4, {"config": {**params["config"], "lr": 1e-4}}),
        ]
        self.ship(config, run, records, None)
        self.ship(config, run, records, end(8))
        back = self.read_back(config, run)
        self.assert_series(back.series, self.expected(records))
        assert set(back.anomalies) == {"spike-2"}
        told = back.anomalies["spike-2"]
        assert "spike" in told and "train/loss" in told and "9.5" in told, f"the anomaly is told as {told!r}"
        if self.has_params:
            found = {name.removeprefix("config."): text for name, text in back.params.items()}
            assert found.get("model.width") == "128"
            assert found.get("model.act") == "gelu"
            assert found.get("lr") in ("0.0003", "0.0001")
            assert any("odd key" in name for name in found)


def _same(got: Sequence[tuple[int, float]], wanted: Sequence[tuple[int, float]], signed_zero: bool) -> bool:
    """Equal steps and values, NaN equal to NaN."""
    if [step for step, _ in got] != [step for step, _ in wanted]:
        return False
    by_step: dict[int, list[float]] = {}
    for step, number in wanted:
        by_step.setdefault(step, []).append(number)
    return all(_take(by_step[step], number, signed_zero) for step, number in got)


def _take(numbers: list[float], number: float, signed_zero: bool) -> bool:
    for index, other in enumerate(numbers):
        equal = number == other and (not signed_zero or math.copysign(1.0, number) == math.copysign(1.0, other))
        if equal or (math.isnan(number) and math.isnan(other)):
            del numbers[index]
            return True
    return False
