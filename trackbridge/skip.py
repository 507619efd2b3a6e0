"""Batches to leave out when training goes on after a spike, as JSON that a person can read and edit."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from trackbridge.errors import UsageError


class Skip(BaseModel):
    """One batch. Fields that are given must all match; None matches anything. `rank` is the process that fetches it, `index`
    the batch's number within its epoch, `sample_ids` the sampler's indices in the batch's order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int | None = Field(None, ge=0)
    loader: int | None = Field(None, ge=0)
    epoch: int | None = Field(None, ge=0)
    index: int | None = Field(None, ge=0)
    sample_ids: tuple[int | str, ...] | None = None
    why: str = ""

    @model_validator(mode="after")
    def _names_a_batch(self) -> Skip:
        if self.index is None and self.sample_ids is None:
            raise ValueError("give index or sample_ids")
        return self

    def __str__(self) -> str:
        known = {"loader": self.loader, "epoch": self.epoch, "index": self.index}
        words = [f"{name} {value}" for name, value in known.items() if value is not None]
        if self.sample_ids is not None:
            words.append(f"samples {', '.join(map(str, self.sample_ids[:4]))}{', ...' if len(self.sample_ids) > 4 else ''}")
        return ", ".join(words) + (f" ({self.why})" if self.why else "")

    def matches(
        self, loader: int, epoch: int, index: int | None, sample_ids: tuple[int | str, ...] | None, *, rank: int = 0
    ) -> bool:
        return (
            self.rank in (None, rank)
            and self.loader in (None, loader)
            and self.epoch in (None, epoch)
            and self.index in (None, index)
            and self.sample_ids in (None, sample_ids)
        )


class SkipPlan(BaseModel):
    """A list of batches to skip. Each entry applies once in the life of this object, to the first batch it matches: an
    epoch later the same batch is trained on, unless an entry names that epoch too."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format_version: Literal[1] = 1
    skips: tuple[Skip, ...] = ()
    _applied: set[int] = PrivateAttr(default_factory=set)
    _told: set[Skip] = PrivateAttr(default_factory=set)

    @classmethod
    def load(cls, path: str | Path) -> SkipPlan:
        """Read a plan. Raises `UsageError` in one line if it is no plan."""
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except OSError as error:
            raise UsageError(f"cannot read skip plan {path}: {error.strerror}") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise UsageError(f"{path} is not a skip plan: {place}: {first['msg']}") from None

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.model_dump_json(indent=1, exclude_none=True) + "\n", encoding="utf-8")

    @property
    def pending(self) -> tuple[Skip, ...]:
        """Entries that have not matched a batch yet."""
        return tuple(skip for number, skip in enumerate(self.skips) if number not in self._applied)

    def take(
        self, loader: int, epoch: int, index: int | None, sample_ids: tuple[int | str, ...] | None, *, rank: int = 0
    ) -> bool:
        """True if this batch is to be skipped; the entry that says so is then used up."""
        for number, skip in enumerate(self.skips):
            if number not in self._applied and skip.matches(loader, epoch, index, sample_ids, rank=rank):
                self._applied.add(number)
                return True
        return False

    def missed(self, loader: int, epoch: int, *, rank: int = 0) -> list[Skip]:
        """Entries that named a batch of this epoch, which is over, and did not match any."""
        found = [s for s in self.pending if s.epoch == epoch and s.loader in (None, loader) and s.rank in (None, rank)]
        self._told.update(found)
        return found


def never_came(plans: Iterable[SkipPlan], *, rank: int = 0) -> list[Skip]:
    """Entries of this rank that matched no batch while any of `plans` was in use, and that `missed` did not tell of: their
    loader has another number now, their epoch was over before, or the training ended first. One file may have been loaded
    several times."""
    plans = list(plans)
    done = {skip for plan in plans for number, skip in enumerate(plan.skips) if number in plan._applied}
    done.update(*(plan._told for plan in plans))
    left = dict.fromkeys(skip for plan in plans for skip in plan.pending if skip.rank in (None, rank))
    return [skip for skip in left if skip not in done]
