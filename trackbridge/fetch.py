"""`pull`: a spike capsule from wherever it is, verified before it is handed over."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from trackbridge import capsule as capsules
from trackbridge import plugins, untrusted
from trackbridge.backends import folders, held
from trackbridge.capsule import SpikeCapsule
from trackbridge.errors import CapsuleError, ReferenceNotFoundError, TrackbridgeError, UsageError, nearest
from trackbridge.rundir import alone, lock

LOCAL = "local"
FORMS = (
    "a capsule's folder, RUN_DIR[@STEP], wandb:ENTITY/PROJECT/RUN_ID[@STEP], wandb:ENTITY/PROJECT/ARTIFACT:ALIAS, "
    "mlflow:RUN_ID[@STEP], tensorboard:LOGDIR[@STEP]"
)


@dataclass(frozen=True, slots=True)
class Reference:
    """Where a capsule is. `kind` is "local" or a backend's name, `where` that backend's own address, `step` the anomaly's
    step or None for the newest capsule there."""

    kind: str
    where: str
    step: int | None = None

    @classmethod
    def parse(cls, text: str | Path) -> Reference:
        """Raises `UsageError` naming the forms when `text` is none of them."""
        if isinstance(text, Path) or Path(text).exists():
            return cls(LOCAL, *_step(str(text), is_path=True))
        head, colon, rest = text.partition(":")
        if not colon or len(head) == 1 or "/" in head:  # a drive letter is no tracker, and neither is a folder
            return cls(LOCAL, *_step(text, is_path=True))
        if head not in plugins.available(plugins.BACKENDS) or not rest or rest.startswith("//"):
            known = [name for name in plugins.available(plugins.BACKENDS) if _fetcher(name) is not None]
            raise UsageError(f"{text!r} is no capsule reference{nearest(head, known)}; the forms are: {FORMS}")
        return cls(head, *_step(rest, is_path=head == "tensorboard"))


def pull(ref: str | Path, dest: str | Path | None = None, *, max_bytes: int = untrusted.TOTAL_BYTES) -> SpikeCapsule:
    """The capsule that `ref` names, every file of it checked against its digest.

    A capsule on this disk is opened where it is, unless `dest` is given; a run's id means that run in ``./runs``. One in a
    tracker is downloaded into the folder `dest` (default ``./capsules``) and appears there, under its own name, only when it
    has been verified; an older copy is replaced.
    An interrupted download goes on where it was when the same reference is pulled into the same folder again.

    Raises:
        UsageError: `ref` is of no known form.
        ReferenceNotFoundError: there is no such capsule; says what there is.
        CapsuleError: the capsule is damaged, hostile, larger than `max_bytes`, or of an unknown format.
        MissingExtraError: the tracker's package is not installed.
    """
    if not isinstance(ref, (str, Path)) or not str(ref):
        raise UsageError(f"a capsule reference is a path or one of: {FORMS}; not {ref!r}")
    reference = Reference.parse(ref)
    if reference.kind == LOCAL:
        found = _local(Path(reference.where), reference.step)
        return capsules.load(found, max_bytes=max_bytes) if dest is None else _copied(found, Path(dest), max_bytes)
    fetch = _fetcher(reference.kind)
    if fetch is None:
        raise UsageError(f"capsules cannot be pulled from {reference.kind}; the forms are: {FORMS}")
    return _arrive(
        Path("capsules" if dest is None else dest),
        f"{reference.kind}:{reference.where}@{reference.step}",
        lambda new: fetch(reference.where, reference.step, new, max_bytes=max_bytes),
        max_bytes,
    )


def _arrive(folder: Path, what: str, bring: Callable[[Path], Path], max_bytes: int) -> SpikeCapsule:
    """Have `bring` put a capsule into a quarantine inside `folder`; move it into `folder` if it passes all checks.

    The quarantine is named after `what` is pulled, and stays when the tracker fails or we are interrupted, so that the next
    pull goes on from there. Of a capsule that is refused nothing stays.
    """
    folder = folder.absolute()
    new = not folder.exists()
    quarantine = folder / f".pull-{hashlib.sha256(what.encode()).hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot put a capsule into {folder}: {error.strerror}; choose another destination") from None
    try:
        with _locked(quarantine) as own:
            try:
                arrived = bring(own)
                capsules.load(arrived, max_bytes=max_bytes)
                with alone(folder):
                    return _placed(arrived, folder / arrived.name, max_bytes)
            except BaseException as error:
                if not isinstance(error, (CapsuleError, ReferenceNotFoundError, UsageError)) and any(own.rglob("*.*")):
                    own = Path()  # keep it
                    if isinstance(error, TrackbridgeError):
                        said = f"{error}; what has arrived is kept in {folder}: pull again to go on"
                        raise type(error)(said) from error
                raise
            finally:
                if own != Path():
                    shutil.rmtree(own, ignore_errors=True)
    finally:
        if new and not any(folder.iterdir()):
            folder.rmdir()  # nothing came


def _placed(arrived: Path, target: Path, max_bytes: int) -> SpikeCapsule:
    """The verified capsule at `target`. An equal one that is there stays: another rank of a replay may be reading it."""
    try:
        if (target / capsules.MANIFEST).read_bytes() == (arrived / capsules.MANIFEST).read_bytes():
            return capsules.load(target, max_bytes=max_bytes)
    except (OSError, TrackbridgeError):
        pass  # nothing there, or damaged
    return capsules.load(held.place(arrived, target), max_bytes=max_bytes)


@contextmanager
def _locked(quarantine: Path) -> Iterator[Path]:
    """The folder `quarantine`, this process' alone; a fresh one while another pulls the same."""
    quarantine.mkdir(exist_ok=True)
    descriptor = os.open(quarantine, os.O_RDONLY)
    try:
        if lock(descriptor):
            yield quarantine
        else:
            own = quarantine.with_name(f"{quarantine.name}-{uuid.uuid4().hex}")
            own.mkdir()
            try:
                yield own
            finally:
                shutil.rmtree(own, ignore_errors=True)  # nobody would go on from here
    finally:
        os.close(descriptor)


def _copied(found: Path, dest: Path, max_bytes: int) -> SpikeCapsule:
    """A copy in the folder `dest`, with the batches that are kept beside the original."""
    capsule = capsules.load(found, max_bytes=max_bytes)
    if dest.absolute() == found.absolute().parent:
        return capsule
    beside = found.with_name(found.name + capsules.LOCAL)

    def bring(quarantine: Path) -> Path:
        if capsule.joined:
            local = held.bring(folders.plain(beside), quarantine / beside.name, str(beside), max_bytes=max_bytes)
            target = dest.absolute() / beside.name
            if target.exists():
                target.rename(quarantine / f"{beside.name}.old")
            local.rename(target)
        return held.bring(folders.plain(found), quarantine / found.name, str(found), max_bytes=max_bytes)

    return _arrive(dest, f"local:{found.absolute()}", bring, max_bytes)


def _local(path: Path, step: int | None) -> Path:
    """The folder of the capsule at `path`, which is a capsule, a run directory, or its ``capsules`` folder."""
    if (path / capsules.MANIFEST).is_file():
        return path.resolve() if path.is_symlink() else path  # its batches lie beside it, not beside the link
    if not path.exists() and len(path.parts) == 1 and (Path("runs") / path / "run.json").is_file():
        path = "runs" / path  # a run's id, as the commands take it
    if not path.is_dir():
        raise ReferenceNotFoundError(f"there is no {path}; a capsule reference is one of: {FORMS}")
    inside = path / "capsules" if (path / "run.json").is_file() else path
    there = []
    for manifest in inside.glob(f"*/{capsules.MANIFEST}"):
        folder = manifest.parent
        capsule = None if folder.name.startswith(".") else held.read_manifest(manifest, run=str(path), where=str(folder))
        if capsule is not None:
            there.append(capsule)
    if not there and not (path / "run.json").is_file():
        raise ReferenceNotFoundError(f"{path} is neither a capsule nor a run directory; a reference is one of: {FORMS}")
    return Path(held.choose(there, step, str(path)).where)


def _fetcher(kind: str) -> Callable[..., Path] | None:
    """The backend module's ``fetch_capsule(where, step, folder, max_bytes=) -> path in folder``, if it has one."""
    module = import_module(plugins.available(plugins.BACKENDS)[kind].module)
    fetch: Callable[..., Path] | None = getattr(module, "fetch_capsule", None)
    return fetch


def _step(text: str, *, is_path: bool) -> tuple[str, int | None]:
    """Split ``text@STEP``; a path that exists as it stands has no step."""
    match = re.fullmatch(r"(.+)@(\d{1,18})", text, re.DOTALL)
    if match is None or (is_path and Path(text).exists()):
        return text, None
    return match[1], int(match[2])
