"""What can be set and what is recorded, for a reader: walked once from the models and the catalogue, so that no list of either
is kept by hand. ``trackbridge init-config`` and the pages of the documentation are made of it.
"""

from __future__ import annotations

import inspect
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from trackbridge.config import PREFIX, TrackbridgeConfig
from trackbridge.names import CATALOGUE, Metric
from trackbridge.rules import Rule

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    SecretStr: "text, kept secret",
    Rule: "a rule",
    type(None): "null",
    Any: "a name, a list of names, or mappings with `kind`",
}
_BOUNDS = {Ge: ("ge", "at least"), Gt: ("gt", "above"), Le: ("le", "at most"), Lt: ("lt", "below")}


@dataclass(frozen=True)
class Setting:
    """One key. `path` is dotted; `default` as YAML reads it; `kind` says in words what it takes."""

    path: str
    default: Any
    kind: str
    description: str

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return PREFIX + self.path.upper().replace(".", "__")


@dataclass(frozen=True)
class Group:
    """The keys of one section (`path` "" for those at the top), with what its model says of itself."""

    path: str
    meaning: str
    settings: tuple[Setting, ...]


def groups(model: type[BaseModel] = TrackbridgeConfig, path: str = "") -> Iterator[Group]:
    """`model` and, below it, every section, in the order of their definition."""
    own, below = [], []
    for name, field in model.model_fields.items():
        full = f"{path}.{name}" if path else name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            below.append((field.annotation, full))
        else:
            own.append(Setting(full, _plain(field.get_default()), _kind(field), field.description or ""))
    yield Group(path, " ".join(inspect.cleandoc(model.__doc__ or "").split()), tuple(own))
    for section, full in below:
        yield from groups(section, full)


def settings_yaml() -> str:
    """Every setting with its default, as a YAML file that explains itself and loads to the defaults."""
    lines = [
        "# Every setting of trackbridge, with its default: trackbridge.init('trackbridge.yaml').",
        "# Keyword arguments of init win over this file, this file over TRACKBRIDGE_* variables: keep what you change,",
        "# delete the rest.",
    ]
    for group in groups():
        depth = group.path.count(".") + 1 if group.path else 0
        indent, inner = "  " * max(depth - 1, 0), "  " * depth
        if group.path:
            lines += ["", *_comment(group.meaning, indent), f"{indent}{group.path.rpartition('.')[2]}:"]
        for setting in group.settings:
            kind = setting.kind.replace("`", "")
            lines += _comment(f"{setting.description} ({kind})", inner)
            lines.append(f"{inner}{setting.path.rpartition('.')[2]}: {as_yaml(setting.default)}")
    return "\n".join(lines) + "\n"


def settings_markdown() -> str:
    """A table for each section."""
    parts = []
    for group in groups():
        parts.append(f"## {group.path or 'Of the run'}\n\n{_cell(group.meaning) if group.path else ''}\n")
        parts.append("| key | default | takes | what it is |\n|---|---|---|---|")
        parts += [
            f"| `{s.path.rpartition('.')[2]}` | `{as_yaml(s.default)}` | {_cell(s.kind)} | {_cell(s.description)} |"
            for s in group.settings
        ]
        parts.append("")
    return "\n".join(parts)


def metrics_markdown() -> str:
    """A table for each family of series, by the first part of their names."""
    families: dict[str, list[Metric]] = {}
    for metric in CATALOGUE:
        families.setdefault(metric.name.partition("/")[0], []).append(metric)
    parts = []
    for family, metrics in families.items():
        parts.append(f"## {family}\n\n| series | unit | what it is | formula | source | good |\n|---|---|---|---|---|---|")
        for m in metrics:
            formula = f"`{m.formula}`" if m.formula else ""
            cells = (f"`{m.name}`", m.unit, m.meaning, formula, m.source, m.better)
            parts.append(f"| {' | '.join(map(_cell, cells))} |")
        parts.append("")
    return "\n".join(parts)


def as_yaml(value: Any) -> str:
    """A default in one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _kind(field: FieldInfo) -> str:
    bounds = [
        f"{words} {getattr(limit, attribute)}"
        for limit in field.metadata
        for kind, (attribute, words) in _BOUNDS.items()
        if isinstance(limit, kind)
    ]
    return ", ".join([_words(field.annotation), *bounds])


def _words(annotation: Any) -> str:
    if annotation in _WORDS:
        return _WORDS[annotation]
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{option}`" for option in inner)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(option) for option in inner)
    if origin in (list, tuple):
        return f"a list, each {_words(inner[0])}"
    raise TypeError(f"no words for a setting of type {annotation!r}: add them to trackbridge/reference.py")


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, 110, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ", break_long_words=False)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
