"""Where a logged curve can be read from. A source knows its columns, and gives one of them as {step: value}.

All of a column is read, never a sample: a one-step spike is what samples lose. Where a step was logged twice (a resumed run),
the later value counts. Values that are no number are left out; NaN and infinities are numbers.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from trackbridge.errors import ReferenceNotFoundError, UsageError, nearest
from trackbridge.names import STEP
from trackbridge.plugins import require
from trackbridge.records import MAX_STEP
from trackbridge.scan.columns import like_loss, step_column

logger = logging.getLogger("trackbridge")

Points: TypeAlias = dict[int, float]
FORMS = (
    "a CSV file, a TensorBoard log folder, an offline W&B run, a run folder of trackbridge, wandb:ENTITY/PROJECT/RUN_ID, "
    "mlflow:RUN_ID or tensorboard:LOGDIR"
)
_TRACKERS = ("wandb", "mlflow", "tensorboard")


class Source:
    """One place. `where` names it in messages."""

    where: str

    def columns(self) -> list[str]:
        raise NotImplementedError

    def read(self, column: str) -> Points:
        raise NotImplementedError

    def runs(self, loss: str) -> list[str]:
        """The folders of the runs that have a loss of the name of `loss`, where there are several."""
        return []


def find(ref: str, step: str | None) -> Source:
    """The source that `ref` names. `step`: its column of steps, where that is not to be guessed."""
    path = Path(ref)
    if path.exists():
        return _on_disk(path, step)
    kind, colon, rest = ref.partition(":")
    whole, _, digits = ref.rpartition("@")
    if digits.isdigit() and (Path(whole).exists() or (kind in _TRACKERS and not Path(rest).exists())):
        raise UsageError(f"{ref!r} names a step, and a scan is of the whole run: leave @{digits} away")
    if colon and rest and kind in _TRACKERS:
        return _in_tracker(kind, rest, step)
    if colon and len(kind) > 1 and "/" not in kind:
        raise UsageError(f"{ref!r} is no reference of a known form{nearest(kind, _TRACKERS)}: {FORMS}")
    raise ReferenceNotFoundError(f"{ref} does not exist; give {FORMS}")


def _in_tracker(kind: str, where: str, step: str | None) -> Source:
    if kind == "tensorboard":
        if not Path(where).exists():
            raise ReferenceNotFoundError(f"there is no TensorBoard log folder {where}")
        return EventFolder(Path(where))
    if kind == "mlflow":
        return MlflowRun(where)
    if Path(where).exists():
        return OfflineRun(Path(where), step)
    if ":" in where:
        run = "wandb:ENTITY/PROJECT/RUN_ID"
        raise UsageError(f"wandb:{where} is an artifact, which `trackbridge pull` brings; what can be scanned is a run, {run}")
    return OnlineRun(where, step)


def _on_disk(path: Path, step: str | None) -> Source:
    if path.is_file() and path.suffix == ".wandb":
        return OfflineRun(path, step)
    if path.is_file() and "tfevents" in path.name:
        return EventFolder(path)
    if path.is_file():
        return CsvFile(path, step)
    if (path / "run.json").exists() or any(path.glob("*/run.json")):
        return OwnRun(path)
    if (path / "manifest.json").exists() and (path.parent.parent / "run.json").exists():
        raise UsageError(f"{path} is a capsule, the steps around one anomaly: scan its run, {path.parent.parent}")
    if any(path.glob("run-*.wandb")) or any(path.glob("*run-*/run-*.wandb")):
        return OfflineRun(path, step)
    if next(path.rglob("*tfevents*"), None) is not None:
        return EventFolder(path)
    if tables := sorted(path.glob("*.csv")):
        return CsvFile(_only([str(table) for table in tables], f"{path} holds {len(tables)} tables"), step)
    raise ReferenceNotFoundError(f"{path} holds no run that can be read; give {FORMS}")


def _only(paths: list[str], what: str) -> Path:
    """The one of `paths`. Raises `UsageError` that lists them where there are more."""
    if len(paths) > 1:
        more = f" and {len(paths) - 10} more" if len(paths) > 10 else ""
        raise UsageError(f"{what}, scan one of: {', '.join(paths[:10])}{more}")
    return Path(paths[0])


class Table(Source):
    """A source that is rows of named values, each row a step. Rows that trackbridge wrote know their step: W&B's own count
    goes on with records of other kinds."""

    def __init__(self, where: str, rows: Iterable[Mapping[str, Any]], step: str | None) -> None:
        self.where = where
        self._rows = list(rows)
        self._columns = list(dict.fromkeys(name for row in self._rows for name in row))
        self._step = step_column(self._columns, step)
        self._guessed = step is None

    def columns(self) -> list[str]:
        return [name for name in self._columns if name not in (self._step, STEP)]

    def read(self, column: str) -> Points:
        found: Points = {}
        values = lost = 0
        there = (row for row in self._rows if _number(row.get(column)) is not None)
        ours = self._guessed and all(_number(row.get(STEP)) is not None for row in there)
        step = STEP if ours else self._step
        for number, row in enumerate(self._rows):
            at = number if step is None else _number(row.get(step))
            value = _number(row.get(column))
            if value is None:
                continue
            values += 1
            if at is not None and abs(at) < MAX_STEP:
                found[int(at)] = value
            else:
                lost += 1
        if len(found) < values:
            logger.warning(
                "trackbridge: of %d values of %r %d have no step that is a number, and %d have one that comes again: the later "
                "counts. If %r begins anew with each epoch, or is no count of steps, name another column with --step",
                values, column, lost, values - lost - len(found), step,
            )  # fmt: skip
        return found


class CsvFile(Table):
    """A table with a header; separated by comma, semicolon or tab."""

    def __init__(self, path: Path, step: str | None) -> None:
        try:
            with path.open(newline="", encoding="utf-8-sig") as handle:
                first = handle.readline()
                separator = max(",;\t", key=first.count)
                handle.seek(0)
                rows = [
                    {name.strip(): value for name, value in row.items() if name is not None and value is not None}
                    for row in csv.DictReader((line for line in handle if line.strip()), delimiter=separator)
                ]
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UsageError(f"{path} cannot be read as a table: {error}; give {FORMS}") from None
        super().__init__(str(path), rows, step)


class OfflineRun(Table):
    """W&B's own run file."""

    def __init__(self, path: Path, step: str | None) -> None:
        from trackbridge.backends import wandb_file

        lives = {file.stem: file for file in wandb_file.run_files(path)}  # of one run there may be several
        _only(sorted(str(file.parent) for file in lives.values()), f"{path} holds {len(lives)} runs")
        run = wandb_file.load(path)
        super().__init__(str(path), run.history, step)

    def columns(self) -> list[str]:
        return [name for name in super().columns() if not name.startswith("_")]


class OnlineRun(Source):
    """A run on a W&B server, read with its full scan (not its sampled history)."""

    def __init__(self, where: str, step: str | None) -> None:
        from trackbridge.backends.wandb_history import History

        self.where = f"wandb:{where}"
        self._history = History(where)
        self._columns = self._history.columns()
        axis = step_column([*self._columns, "_step"], step) or "_step"
        self._axes = [axis] if step or STEP not in self._columns else [STEP, axis]

    def columns(self) -> list[str]:
        return [name for name in self._columns if name not in self._axes and not name.startswith("_")]

    def read(self, column: str) -> Points:
        for axis in self._axes:  # no row of somebody else's series has our step
            if rows := self._history.read([column, axis]):
                return Table(self.where, rows, axis).read(column)
        return {}


class MlflowRun(Source):
    """A run of MLflow; the server is the one that ``MLFLOW_TRACKING_URI`` names."""

    def __init__(self, run_id: str) -> None:
        from trackbridge.backends.mlflow_fetch import History

        self.where = f"mlflow:{run_id}"
        self._history = History(run_id)

    def columns(self) -> list[str]:
        return self._history.columns()

    def read(self, column: str) -> Points:
        return self._history.read(column)


class EventFolder(Source):
    """TensorBoard's event files, of one run."""

    def __init__(self, path: Path) -> None:
        module = require("tensorboard.backend.event_processing.event_accumulator", "tensorboard")
        self.where = str(path)
        folders = sorted({file.parent for file in path.rglob("*tfevents*")}) if path.is_dir() else [path]
        if not folders:
            raise ReferenceNotFoundError(f"{path} holds no TensorBoard event file")
        sizes = {module.SCALARS: 0, module.TENSORS: 0}
        self._runs = [module.EventAccumulator(str(f), size_guidance=sizes, purge_orphaned_data=False) for f in folders]
        for run in self._runs:
            run.Reload()
        names = [str(folder.relative_to(path)) if path.is_dir() else "." for folder in folders]
        self._names = dict(zip(names, self._runs, strict=True))
        self._tags = dict(self._all_tags())

    def columns(self) -> list[str]:
        return list(self._tags)

    def read(self, column: str) -> Points:
        run, kind = self._tags[column]
        if kind == "scalars":
            return {event.step: float(event.value) for event in run.Scalars(self._tag(column))}
        from tensorboard.util import tensor_util

        found: Points = {}
        for event in run.Tensors(self._tag(column)):
            array = tensor_util.make_ndarray(event.tensor_proto)
            if array.size == 1 and array.dtype.kind in "fiu":
                found[event.step] = float(array.reshape(-1)[0])
        return found

    def runs(self, loss: str) -> list[str]:
        tag = self._tag(loss)
        same = [name for name in self._tags if name.endswith(f":{tag}") and self._tag(name) == tag and like_loss(name)]
        return [f"{self.where}/{column.removesuffix(f':{tag}')}" for column in same]

    def _all_tags(self) -> Iterable[tuple[str, tuple[Any, str]]]:
        """Every tag with its run. Where several folders have it, the tag is prefixed with the folder."""
        for folder, run in self._names.items():
            prefix = "" if len(self._names) == 1 or folder == "." else f"{folder}:"
            tags = run.Tags()
            for kind in ("scalars", "tensors"):
                for tag in tags[kind]:
                    yield f"{prefix}{tag}", (run, kind)

    def _tag(self, column: str) -> str:
        run, _ = self._tags[column]
        folder = next(name for name, one in self._names.items() if one is run)
        return column.removeprefix(f"{folder}:")


class OwnRun(Source):
    """A run directory of trackbridge, judged anew: with other settings, or by a newer version."""

    def __init__(self, path: Path) -> None:
        from trackbridge.history import load

        self._record = load(path)
        self.where = str(path if (path / "run.json").exists() else self._record.path)

    def columns(self) -> list[str]:
        return list(self._record.names)

    def read(self, column: str) -> Points:
        steps, values = self._record.series(column)
        return dict(zip(steps.tolist(), values.tolist(), strict=True))


def _number(value: Any) -> float | None:
    if value is None or value == "" or isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
