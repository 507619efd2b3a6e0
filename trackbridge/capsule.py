"""SpikeCapsule: one anomaly with all that is needed to explain it and to run the bad step again, as a folder.

The folder's format is ``docs/capsule.md``. There is no pickle in it, every file's digest is in the manifest and checked by
`load`, so loading a capsule that a stranger made runs no code and reads nothing outside it.

A folder may have a neighbour ``<name>.local`` with the raw batches, which stay on the recording machine unless
``recorder.upload_batches`` is on. The manifest names and digests them; `load` joins them when they are there.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import FloatSchema

from trackbridge import lab, untrusted
from trackbridge.capsule_parts import (
    BATCHES,
    HISTOGRAMS,
    HISTORY,
    LAYERS,
    RNG,
    TENSORS,
    WINDOW,
    Batches,
    RngStates,
    read_frame,
    read_histograms,
    read_narrow,
    read_series,
)
from trackbridge.errors import CapsuleError, ReferenceNotFoundError
from trackbridge.histograms import merge_steps
from trackbridge.records import Anomaly, Histograms
from trackbridge.rundir import alone, dumps

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from trackbridge.rng import RestoreReport

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
POST_MORTEM = "post-mortem.md"
POST_MORTEM_BYTES = 1 << 20
LOCAL = ".local"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

Tier: TypeAlias = Literal["explain", "re-feed", "re-execute"]
ReportT = TypeVar("ReportT", bound=BaseModel)
SectionT = TypeVar("SectionT", bound=BaseModel)


class FileEntry(BaseModel):
    """A file of the capsule: lower-case hex SHA-256 and size."""

    model_config = ConfigDict(frozen=True)

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    bytes: Annotated[int, Field(ge=0)]


class LocalFiles(BaseModel):
    """What the recording machine keeps beside the capsule, and what the capsule is with it."""

    model_config = ConfigDict(frozen=True)

    tier: Tier
    files: dict[str, FileEntry]
    missing: list[str] = []


class SpikeCapsule(BaseModel):
    """The manifest of a capsule, and, when it was loaded, the way to its contents.

    `step` is where the anomaly was detected, `restart_step` the first step a replay runs, `span` (``window`` in the JSON)
    the first and last recorded step; `checkpoint` is the path of the user's own before `restart_step`, where no snapshot is
    here. `missing` says in words what is lacking and what that costs a replay. `settings` are the
    recording's own: a replay must attach the same probes. `ranks` are those whose folders are here, of `world_size`.
    """

    model_config = ConfigDict(extra="ignore", populate_by_name=True, protected_namespaces=())

    format_version: int = FORMAT_VERSION
    tier: Tier
    project: str = ""
    run: str
    name: str = ""
    attempt: int = 0
    step: int
    restart_step: int
    checkpoint: str | None = None
    anomaly: Anomaly
    span: tuple[int, int] = Field(alias="window")
    world_size: int = Field(1, ge=1)
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field((0,), min_length=1)
    created: float = 0.0
    provenance: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    config: dict[str, Any] = {}
    files: dict[str, FileEntry] = {}
    local: LocalFiles | None = None
    missing: list[str] = []

    _path: Path | None = PrivateAttr(None)
    _local_path: Path | None = PrivateAttr(None)

    @field_validator("span")
    @classmethod
    def _ordered(cls, span: tuple[int, int]) -> tuple[int, int]:
        if span[0] > span[1]:
            raise ValueError(f"the window ends at {span[1]}, before it begins at {span[0]}")
        return span

    def to_json(self) -> str:
        """The manifest as strict JSON; a non-finite number is the string "NaN", "Infinity" or "-Infinity"."""
        return dumps(self.model_dump(by_alias=True, mode="python", exclude_none=False) | {"anomaly": _anomaly(self.anomaly)})

    # -- what the replay lab found out about it since

    @cached_property
    def replay(self) -> lab.ReplayReport | None:
        """The newest replay's verdict that was kept here, None before there is one."""
        return self._found(lab.REPLAY, lab.ReplayReport)

    @cached_property
    def counterfactuals(self) -> lab.CounterfactualReport | None:
        """The newest table of replays with one thing changed that was kept here, None before there is one."""
        return self._found(lab.COUNTERFACTUALS, lab.CounterfactualReport)

    def _found(self, name: str, kind: type[ReportT]) -> ReportT | None:
        if name not in self.files:
            return None
        try:
            return kind.model_validate(untrusted.read_json(self.path / name))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])[:120]
            raise CapsuleError(f"{name} is not valid: {where!r}: {first['msg'][:160]}") from None

    def section(self, name: str, kind: type[SectionT]) -> SectionT:
        """The section `name` of the recording's settings; what a newer trackbridge added to it is left out."""
        try:
            return kind.model_validate(_known(self.settings.get(name, {}), kind))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise CapsuleError(f"settings.{name} in {MANIFEST} is not valid: {first['msg'][:160]}") from None

    # -- what is in it (rank by rank where ranks differ)

    @property
    def path(self) -> Path:
        """The capsule's folder."""
        if self._path is None:
            raise CapsuleError("this is a manifest only; load the capsule with trackbridge.pull(path)")
        return self._path

    def at(self, folder: Path) -> SpikeCapsule:
        """This manifest with `folder` as the place of its files, unchecked: for the writer's own use."""
        placed = self.model_copy()
        placed._path = folder
        return placed

    @property
    def joined(self) -> bool:
        """True where the batches that stayed on the recording machine are at hand."""
        return self._local_path is not None

    @property
    def steps(self) -> range:
        """Steps of the window, first to last."""
        return range(self.span[0], self.span[1] + 1)

    @cached_property
    def window(self) -> pd.DataFrame:
        """Run-level series, a row per step from the restart point to the window's end: step, time, attempt, series..."""
        return read_frame(self.path / WINDOW)

    @cached_property
    def history(self) -> dict[int, dict[str, float]]:
        """{step: {series: value}} of the run-level series of up to 256 steps before the window, those of earlier attempts
        included; empty in a capsule that has none."""
        return read_narrow(self.path / HISTORY) if HISTORY in self.files else {}

    def history_of(self, rank: int) -> dict[int, dict[str, float]]:
        """`history` as `rank` recorded it: its own values, like `series(rank)`."""
        own = f"rank-{rank:04d}/{HISTORY}"
        if own in self.files:
            return read_narrow(self.path / own)
        return self.history if rank == 0 else {}

    @cached_property
    def layers(self) -> pd.DataFrame:
        """Per-layer statistics: step, family ("layer", "act", ...), layer, a column per statistic (NaN: absent or NaN)."""
        return read_frame(self.path / LAYERS)

    @cached_property
    def histograms(self) -> list[Histograms]:
        """Histograms of weights and gradients around the anomaly, by step, from before the window on; shards of all ranks are
        merged. Empty when none were recorded (``parameters.histograms_every`` 0)."""
        found = [read_histograms(self.path / name) for name in map(_histograms_of, self.ranks) if name in self.files]
        return merge_steps(found, self.world_size) if found else []

    def series(self, rank: int | None = None) -> dict[int, dict[str, float]]:
        """{step: {series: value}}, wide series included; what is absent is absent. Of all ranks together (of rank 0 where they
        were not merged), or exactly as `rank` recorded its own."""
        folder = self.path
        if rank is not None and (rank or f"rank-0000/{WINDOW}" in self.files):
            folder = self._rank(rank)
        return read_series(folder / WINDOW, folder / LAYERS)

    @cached_property
    def batches(self) -> Batches:
        """Micro-batches of rank 0 by step; `.frame` is the table. See `micro_batches` for other ranks."""
        return self.micro_batches()

    def micro_batches(self, rank: int = 0) -> Batches:
        name = f"rank-{rank:04d}/{TENSORS}"
        tensors = None
        if name in self.files:
            tensors = self.path / name
        elif self._local_path is not None and self.local is not None and name in self.local.files:
            tensors = self._local_path / name
        return Batches(self._rank(rank) / BATCHES, tensors, self.rng_states(rank))

    def rng_states(self, rank: int = 0) -> RngStates:
        return RngStates(self._rank(rank) / RNG)

    def rng(self, step: int, rank: int = 0) -> dict[str, np.ndarray]:
        """Packed RNG states before `step`, by generator; empty if not recorded."""
        return self.rng_states(rank).before(step)

    def has_state(self, rank: int = 0) -> bool:
        """True if the parameters and optimizer state at the restart point are here."""
        prefix = f"rank-{rank:04d}/state/"
        return any(name.startswith(prefix) for name in self.files)

    def state(self, rank: int = 0) -> Any:
        """Models, optimizers, scaler and further state before `restart_step` (`trackbridge.recorder`). Imports torch."""
        from trackbridge import tree

        if not self.has_state(rank):
            raise CapsuleError(f"this capsule holds no parameter snapshot of rank {rank}: its tier is {self.tier!r}")
        skeleton, arrays, _ = tree.load(self._rank(rank) / "state")
        return tree.unpack(skeleton, arrays)

    def state_facts(self, rank: int = 0) -> dict[str, Any]:
        """What the snapshot says of itself: step, attempt, rank, and `first` (its step is the first of its process)."""
        from trackbridge import tree

        _, _, facts = tree.load(self._rank(rank) / "state")
        return facts

    def restore_rng(
        self, rank: int = 0, step: int | None = None, generators: Mapping[str, Any] | None = None, *, strict: bool = False
    ) -> RestoreReport:
        """Set this process' generators to their states before `step` (default: the anomaly's). Imports torch.

        `generators` are those the user registered with `run.watch(generators=...)`. The report says what was restored and
        what could not be; with `strict` the latter raises `CapsuleError`.
        """
        from trackbridge import rng

        step = self.step if step is None else step
        packed = self.rng(step, rank)
        if not packed:
            recorded = _ranges(self.rng_states(rank).steps)
            raise CapsuleError(f"no RNG state of rank {rank} before step {step}; recorded: {recorded}")
        return rng.restore(packed, generators or {}, strict=strict)

    def verify(self) -> int:
        """Check every file against the manifest again. Returns how many were checked; raises `CapsuleError` at the first
        that does not match."""
        checked = _check_files(self.path, self.files)
        if self.local is not None and self._local_path is not None:
            checked += _check_files(self._local_path, self.local.files)
        return checked

    def _rank(self, rank: int) -> Path:
        if rank not in self.ranks:
            raise CapsuleError(f"this capsule holds nothing of rank {rank}; it has {_ranges(list(self.ranks))}")
        return self.path / f"rank-{rank:04d}"


def write(
    destination: Path,
    manifest: SpikeCapsule,
    fill: Callable[[Path], None],
    fill_local: Callable[[Path], None] | None = None,
    *,
    replace: bool = False,
) -> Path:
    """Write a capsule so that `destination` is whole or absent: under a temporary name, fsynced, renamed.

    `fill(folder)` writes the files, `fill_local(folder)` those that stay on this machine (``<destination>.local``). The
    manifest's `files` and `local.files` are filled in here. Raises `CapsuleError` if `destination` exists, unless it is to be
    replaced.
    """
    if destination.exists() and not replace:
        raise CapsuleError(f"{destination} exists already")
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}.tmp")
    beside = destination.with_name(f".{destination.name}{LOCAL}.{os.getpid()}.tmp")
    try:
        for folder in (temporary, beside):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        fill(temporary)
        local = manifest.local
        if local is not None and fill_local is not None:
            fill_local(beside)
            local = local.model_copy(update={"files": _entries(beside)})
        complete = manifest.model_copy(update={"files": _entries(temporary), "local": local})
        (temporary / MANIFEST).write_text(complete.to_json(), encoding="utf-8")
        _alike(temporary, beside, mode=(temporary / MANIFEST).stat().st_mode)
        _sync(temporary)
        if local is not None:
            _sync(beside)
        target = destination.with_name(destination.name + LOCAL)
        with alone(destination.parent):  # the trainer's sealing and the shipper's may meet here
            there = destination.exists()
            if there and not replace:
                raise CapsuleError(f"{destination} was written by another process meanwhile")
            shutil.rmtree(target, ignore_errors=True)  # of the old capsule, or of a sealing that was killed below
            if there:
                _exchange(temporary, destination)
            if local is not None:
                beside.rename(target)
            if not there:
                temporary.rename(destination)
            _sync_folder(destination.parent)
    finally:
        for folder in (temporary, beside):
            shutil.rmtree(folder, ignore_errors=True)
    return destination


def rewrite(capsule: SpikeCapsule, change: Callable[[SpikeCapsule, Path], SpikeCapsule | None]) -> SpikeCapsule:
    """The same capsule with other files: ``change(capsule, folder)`` works on a copy of the folder, which then takes its
    place. It may return the manifest with other facts about the anomaly.

    The copy is made of hard links where the file system has them, so `change` must write new files (`Path.unlink` first, or
    `replace`), never into old ones; `capsule` is the copy, unchecked. The raw batches beside are not touched. A crash leaves
    the old capsule or the new one, each whole.
    """
    folder = capsule.path
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        shutil.copytree(folder, temporary, copy_function=_link, ignore=shutil.ignore_patterns(".*", MANIFEST))
        recorded = parse_manifest(untrusted.read_json(folder / MANIFEST))  # as sealed: `capsule` may be joined with its batches
        changed = change(recorded.at(temporary), temporary) or recorded
        complete = changed.model_copy(update={"files": _entries(temporary)})
        (temporary / MANIFEST).write_text(complete.to_json(), encoding="utf-8")
        _sync(temporary)
        _exchange(temporary, folder)
        _sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return load(folder)


def load(path: str | Path, *, max_bytes: int = untrusted.TOTAL_BYTES) -> SpikeCapsule:
    """Open the capsule at `path` after checking all of it. Safe for a capsule from a stranger.

    Raises `ReferenceNotFoundError` if there is none, `CapsuleError` in one line if it is damaged, hostile, of an unknown
    format, or claims more than `max_bytes`.
    """
    folder = Path(path).absolute()
    if not (folder / MANIFEST).is_symlink() and not (folder / MANIFEST).exists():
        raise ReferenceNotFoundError(f"{folder} is not a capsule: it has no {MANIFEST}")
    capsule = parse_manifest(untrusted.read_json(folder / MANIFEST))
    recorded = Path(capsule.anomaly.capsule or "").name  # a tracker may have given the folder another name
    names = (folder.name, *([recorded] if untrusted.is_name(recorded) else []))
    beside = next((b for name in names if (b := folder.with_name(name + LOCAL)).is_dir()), folder)
    joined = beside is not folder and capsule.local is not None and beside.is_dir() and not beside.is_symlink()
    entries = list(capsule.files.items()) + (list(capsule.local.files.items()) if joined and capsule.local else [])
    check_entries(dict(entries), max_bytes=max_bytes)
    _check_files(folder, capsule.files)
    if joined and capsule.local is not None:
        _check_files(beside, capsule.local.files)
        capsule = capsule.model_copy(update={"tier": capsule.local.tier, "missing": capsule.local.missing})
        capsule._local_path = beside
    capsule._path = folder
    return capsule


def parse_manifest(data: Any) -> SpikeCapsule:
    """The manifest in `data` (from strict JSON). Raises `CapsuleError` in one line."""
    if not isinstance(data, dict):
        raise CapsuleError(f"{MANIFEST} holds a {type(data).__name__}, not an object")
    version = data.get("format_version")
    if not isinstance(version, (int, str)) or isinstance(version, bool) or not str(version).split(".")[0].isdecimal():
        raise CapsuleError(f"{MANIFEST} states no format version")
    major = int(str(version).split(".")[0][:9])
    if major != FORMAT_VERSION:
        raise CapsuleError(
            f"the capsule has format version {str(version)[:20]}; this trackbridge reads version {FORMAT_VERSION}: upgrade it"
        )
    try:
        return SpikeCapsule.model_validate(data | {"format_version": major})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:120]
        raise CapsuleError(f"{MANIFEST} is not valid: {where!r}: {first['msg'][:160]}") from None


def check_entries(files: Mapping[str, FileEntry], *, max_bytes: int = untrusted.TOTAL_BYTES) -> None:
    """Refuse paths and sizes of a manifest before any file is opened or fetched."""
    for name in files:
        untrusted.check_path(name)
    if len(files) > untrusted.FILES:
        raise CapsuleError(f"the capsule claims {len(files)} files, more than {untrusted.FILES}")
    total = sum(entry.bytes for entry in files.values())
    if total > max_bytes:
        raise CapsuleError(f"the capsule claims {total} bytes, more than the limit of {max_bytes}; max_bytes= raises it")


def _check_files(folder: Path, files: Mapping[str, FileEntry]) -> int:
    """Presence, kind, size and digest of every file; nothing unlisted. People write into the post-mortem: it must be there."""
    found = untrusted.listing(folder)
    found.pop(MANIFEST, None)
    for name, entry in files.items():
        if name not in found:
            raise CapsuleError(f"{name} is in the manifest but not in {folder.name}")
        if name == POST_MORTEM and found[name] > POST_MORTEM_BYTES:
            raise CapsuleError(f"{name} has {found[name]} bytes, more than a person writes")
        if found[name] != entry.bytes and name != POST_MORTEM:
            raise CapsuleError(f"{name} has {found[name]} bytes, the manifest says {entry.bytes}: truncated or altered")
    extra = sorted(found.keys() - files.keys())
    if extra:
        raise CapsuleError(f"{extra[0][:120]!r} is in {folder.name} but not in its manifest")
    for name, entry in files.items():
        if name != POST_MORTEM and untrusted.digest(folder / name) != entry.sha256:
            raise CapsuleError(f"{name} does not match its digest: damaged or altered")
    return len(files)


def _entries(folder: Path) -> dict[str, FileEntry]:
    found = untrusted.listing(folder)
    for name in found:
        untrusted.check_path(name)  # we write what we would read
    return {name: entry(folder / name) for name in sorted(found)}


def entry(path: Path) -> FileEntry:
    """What a manifest says of the file at `path`."""
    return FileEntry(sha256=untrusted.digest(path), bytes=path.stat().st_size)


def json_schema() -> dict[str, Any]:
    """The JSON schema of ``manifest.json``; published as docs/capsule.schema.json."""

    class Schema(GenerateJsonSchema):
        def float_schema(self, schema: FloatSchema) -> JsonSchemaValue:
            return {"anyOf": [super().float_schema(schema), {"enum": ["NaN", "Infinity", "-Infinity"]}]}

    return SpikeCapsule.model_json_schema(by_alias=True, schema_generator=Schema)


def _known(given: Any, kind: type[BaseModel]) -> Any:
    """`given` without the keys that `kind` has no field for."""
    if not isinstance(given, dict):
        return given
    found = {}
    for name, field in kind.model_fields.items():
        if name in given:
            inner: Any = field.annotation
            nested = isinstance(inner, type) and issubclass(inner, BaseModel)
            found[name] = _known(given[name], inner) if nested else given[name]
    return found


def _histograms_of(rank: int) -> str:
    return HISTOGRAMS if rank == 0 else f"rank-{rank:04d}/{HISTOGRAMS}"


def _anomaly(anomaly: Anomaly) -> dict[str, Any]:
    return asdict(anomaly)


def _alike(*folders: Path, mode: int) -> None:
    """Every file as readable as the user's umask makes files: safetensors' own are private."""
    for folder in folders:
        for name in untrusted.listing(folder):
            (folder / name).chmod(stat.S_IMODE(mode))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _exchange(new: Path, old: Path) -> None:
    """Swap two folders: in one step where the system can (Linux: renameat2 with RENAME_EXCHANGE), else in two."""
    libc = ctypes.CDLL(None, use_errno=True)
    renameat2 = getattr(libc, "renameat2", None)
    if renameat2 is not None and renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE) == 0:
        return
    aside = old.with_name(f".{old.name}.{os.getpid()}.old")
    old.rename(aside)
    new.rename(old)
    shutil.rmtree(aside)


def _sync(folder: Path) -> None:
    for current, _, names in os.walk(folder, topdown=False):
        for name in names:
            with (Path(current) / name).open("rb") as handle:
                os.fsync(handle.fileno())
        _sync_folder(Path(current))


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _ranges(numbers: list[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
