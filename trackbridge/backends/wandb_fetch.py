"""Bringing a capsule back from W&B: from a server, or from the folder of an offline run.

A capsule is looked for among all artifacts of a run, page by page. What a server says is not trusted: entries that leave the
folder or point elsewhere are refused before a byte is fetched. The capsule itself is verified on load.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import tempfile
from datetime import datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from trackbridge import untrusted
from trackbridge.backends import held, wandb_file
from trackbridge.backends.held import HeldCapsule, RemoteFile
from trackbridge.backends.wandb_file import FileEntry, RecordedArtifact
from trackbridge.backends.wandb_process import ClientError, Process, ours
from trackbridge.errors import CapsuleError, ReferenceNotFoundError, TrackbridgeError, UsageError

KIND = "spike-capsule"
"""The type of artifacts that are capsules (`trackbridge.seal` gives it)."""
FORMS = "wandb:ENTITY/PROJECT/RUN_ID[@STEP], wandb:ENTITY/PROJECT/ARTIFACT:ALIAS, or the folder of an offline run"
_SECONDS = 3600.0


def fetch_capsule(where: str, step: int | None, dest: Path, *, max_bytes: int = untrusted.TOTAL_BYTES) -> Path:
    """Put the capsule that `where` means into the folder `dest`; returns its path. `step` None: the newest. What an
    interrupted try has brought there is not fetched again.

    Raises `UsageError` when `where` is of no known form, `ReferenceNotFoundError` when nothing is there, `TrackbridgeError`
    when the server does not let us in.
    """
    folder = Path(where).expanduser()
    if folder.exists():
        return _from_disk(folder, step, dest, max_bytes)
    if len(where.split("/")) != 3 or not all(where.split("/")):
        raise UsageError(f"{where!r} is no W&B reference; the forms are: {FORMS}")
    with tempfile.TemporaryDirectory(prefix="trackbridge-wandb-") as scratch:
        process = Process(Path(scratch))
        try:
            return Path(process.call("download", where, step, str(dest), max_bytes, timeout=_SECONDS))
        except ClientError as error:
            raise ours(error) from None
        except TimeoutError as error:
            raise TrackbridgeError(str(error)) from None
        finally:
            process.kill()


def download(where: str, step: int | None, dest: str, max_bytes: int, to_read: bool = False) -> str:
    """The part of `fetch_capsule` that talks to a server; runs in the client's process. `to_read`: only what people read, which
    leaves out weights, batches and random states."""
    import wandb

    api = wandb.Api(timeout=30)
    if ":" in where.rsplit("/", 1)[1]:
        artifact = asked(lambda: api.artifact(where), f"artifact {where}")
        if step is not None and artifact.metadata.get("step") != step:
            raise ReferenceNotFoundError(f"{where} is the capsule of step {artifact.metadata.get('step')}, not {step}")
    else:
        run = asked(lambda: api.run(where), f"run {where}")
        artifacts = [artifact for artifact in run.logged_artifacts() if artifact.type == KIND]
        capsules = [_held(where, str(index), artifact) for index, artifact in enumerate(artifacts)]
        artifact = artifacts[int(held.choose(capsules, step, f"W&B run {where}").where)]
    files = []
    for name, entry in artifact.manifest.entries.items():
        if to_read and name.endswith(".safetensors"):
            continue
        if entry.ref is not None:
            raise CapsuleError(f"{name[:120]!r} of {where} is a reference to somewhere else; a capsule holds its files itself")
        files.append(RemoteFile(name, entry.size, partial(_download, artifact, name)))
    return str(held.bring(files, Path(dest) / artifact.name.partition(":")[0], where, max_bytes=max_bytes))


def _download(artifact: Any, name: str, target: Path) -> None:
    """Through a folder of its own: the client writes where the entry's path says, which `held.bring` has checked."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".wandb-") as folder:
        artifact.download(root=folder, skip_cache=True, path_prefix=name)
        (Path(folder) / name).replace(target)


def asked(question: Any, what: str) -> Any:
    """W&B's client raises the same class for "not there" and "no connection"; only the words differ."""
    try:
        return question()
    except Exception as error:
        text = str(error)
        if any(words in text.lower() for words in ("could not find", "not found", "unable to fetch", "does not exist")):
            raise ReferenceNotFoundError(f"there is no {what}") from None
        raise


def _held(run: str, where: str, artifact: Any) -> HeldCapsule:
    created = datetime.fromisoformat(artifact.created_at.replace("Z", "+00:00")).timestamp()
    return HeldCapsule(int(artifact.metadata.get("step", -1)), created, run, where)


def _from_disk(folder: Path, step: int | None, dest: Path, max_bytes: int) -> Path:
    recorded = wandb_file.load(folder)
    artifacts = {artifact.name: artifact for artifact in recorded.artifacts if artifact.kind == KIND}
    capsules = [
        HeldCapsule(int(artifact.metadata.get("step", -1)), float(order), recorded.run_id, name)
        for order, (name, artifact) in enumerate(artifacts.items())
    ]
    artifact = artifacts[held.choose(capsules, step, str(folder)).where]
    files = []
    for name, entry in artifact.files.items():
        untrusted.check_path(name)
        source = _find(folder, artifact, name, entry)
        files.append(RemoteFile(name, source.stat().st_size, partial(shutil.copyfile, source)))
    return held.bring(files, dest / PurePosixPath(artifact.name).name, str(folder), max_bytes=max_bytes)


def _find(folder: Path, artifact: RecordedArtifact, name: str, entry: FileEntry) -> Path:
    """Where the bytes of a file are: where they were, or, when the run directory has moved, at the same place in it."""
    old = Path(entry.local)
    above = [parent for parent in folder.absolute().parents if parent.name][:3]
    moved = [parent.joinpath(*old.parts[-depth:]) for parent in above for depth in range(2, min(len(old.parts), 8))]
    for path in (old, *moved):
        if path.is_file() and not path.is_symlink() and _md5(path) == entry.md5:
            return path
    raise ReferenceNotFoundError(
        f"{name} of {artifact.name} is neither at {old} nor near {folder}, as it was recorded: an offline run only names its "
        "files, so keep the run directory's capsules and artifacts folders with it"
    )


def _md5(path: Path) -> str:
    with path.open("rb") as handle:
        digest = hashlib.md5(usedforsecurity=False)
        while piece := handle.read(1024 * 1024):
            digest.update(piece)
    return base64.b64encode(digest.digest()).decode()
