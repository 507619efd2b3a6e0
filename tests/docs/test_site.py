"""The site as ``make docs`` builds it: strict, so that no link or anchor inside it is dead, complete, and without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, links, name, pages
from trackbridge import names, reference


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    # not --quiet: then warnings are not counted, and strict means nothing
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_there_and_loads_nothing_from_elsewhere(site: Path) -> None:
    built = {page.relative_to(site).with_suffix("").as_posix() for page in site.rglob("*.html")} - {"404"}
    assert built == {page.relative_to(ROOT / "docs").with_suffix("").as_posix() for page in pages() if "docs" in page.parts}
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?(https?:[^\" >]+)", page.read_text(encoding="utf-8"))
        styles = re.findall(
            r"<link[^>]* rel=\"?(?:stylesheet|preload|preconnect)[^>]*(https?:[^\" >]+)", page.read_text(encoding="utf-8")
        )
        assert loaded + styles == [], page.name


def test_the_generated_pages_have_every_setting_and_every_series(site: Path) -> None:
    settings = (site / "configuration.html").read_text(encoding="utf-8")
    series = (site / "metrics.html").read_text(encoding="utf-8")
    missing = [
        s.path for g in reference.groups() for s in g.settings if f"<code>{s.path.rpartition('.')[2]}</code>" not in settings
    ]
    assert missing == []
    shown = {metric.name.replace("<", "&lt;").replace(">", "&gt;") for metric in names.CATALOGUE}
    assert [series_name for series_name in shown if f"<code>{series_name}</code>" not in series] == []
    assert "generated:" not in settings + series


def test_links_of_the_pages_outside_the_site_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        for target in links(page):
            if not target.startswith(("http", "#")):
                assert (ROOT / target.partition("#")[0]).exists(), f"{name(page)}: {target}"


def test_links_to_elsewhere_are_known_and_are_not_fetched_here() -> None:
    """``python -m tests.docs.elsewhere`` fetches them, when somebody asks for it."""
    from tests.docs.elsewhere import external

    found = external()
    assert all(target.startswith("https://") for target in found), found
    assert all(" " not in target and ".." not in target for target in found)
