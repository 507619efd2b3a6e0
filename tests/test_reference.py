"""The settings' reference and the catalogue of metrics, made from the models: complete, and true."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from trackbridge import names, reference
from trackbridge.cli import app
from trackbridge.config import TrackbridgeConfig


def write(file: Path) -> int:
    return CliRunner().invoke(app, ["init-config", str(file)]).exit_code


def test_the_written_file_loads_to_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "trackbridge.yaml"
    assert write(file) == 0
    assert TrackbridgeConfig.load(file) == TrackbridgeConfig.load()
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("snapshot_every: 100", "snapshot_every: 7"), encoding="utf-8")
    assert TrackbridgeConfig.load(file).recorder.snapshot_every == 7
    assert max(map(len, text.splitlines())) <= 120


def test_it_never_writes_over_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("project: mine\n")
    result = CliRunner().invoke(app, ["init-config", str(file)])
    assert result.exit_code == 2 and "is there already" in result.output
    assert file.read_text() == "project: mine\n"
    assert write(tmp_path / "nowhere" / "mine.yaml") == 2


def test_it_prints_to_stdout(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["init-config", "-"])
    assert said.exit_code == 0 and said.stdout == reference.settings_yaml()


def paths(tree: dict[str, object], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for key, value in tree.items():
        found |= paths(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}"}
    return found


def test_every_setting_is_there_once_and_says_what_it_is() -> None:
    settings = [setting for group in reference.groups() for setting in group.settings]
    assert {setting.path for setting in settings} == paths(TrackbridgeConfig().model_dump())
    assert len({setting.path for setting in settings}) == len(settings)
    assert [setting.path for setting in settings if not setting.description] == []
    assert [group.path for group in reference.groups() if not group.meaning] == []
    page = reference.settings_markdown()
    assert all(f"`{setting.path.rpartition('.')[2]}` | `{reference.as_yaml(setting.default)}`" in page for setting in settings)


@pytest.mark.parametrize("variable", ["TRACKBRIDGE_RECORDER__SNAPSHOT_EVERY", "TRACKBRIDGE_DETECTION__STALL__SECONDS"])
def test_the_variable_of_a_setting_sets_it(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (setting,) = [s for group in reference.groups() for s in group.settings if s.variable == variable]
    monkeypatch.setenv(variable, "31")
    value: object = TrackbridgeConfig.load()
    for part in setting.path.split("."):
        value = getattr(value, part)
    assert value == 31 != setting.default


def test_every_metric_is_on_the_page() -> None:
    page = reference.metrics_markdown()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] and {row.split("`")[1] for row in rows} == {m.name for m in names.CATALOGUE}
    assert len(rows) == len(names.CATALOGUE)
    assert all(row.count("|") - row.count("\\|") == 7 for row in rows), "a bar inside a cell would make another"


def test_the_yaml_is_the_models_own_words() -> None:
    assert yaml.safe_load(reference.settings_yaml())["detection"]["stall"] == TrackbridgeConfig().detection.stall.model_dump()
