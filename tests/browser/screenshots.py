"""The pictures of the documentation, taken from a demo: ``make screenshots``, or

    python -m tests.browser.screenshots DEMO_FOLDER [--out docs/images]

DEMO_FOLDER is what ``trackbridge demo --dir`` made. W&B is not among them: its server cannot be run here.
"""

from __future__ import annotations

import argparse
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.browser import servers
from tests.browser.conftest import PHONE, QUIET
from trackbridge import history
from trackbridge.reports.run_page import run_page

SIZE = (1366, 768)
SCALE = 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("demo", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        raise SystemExit("no chromium here: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    options.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as play, tempfile.TemporaryDirectory() as folder:
        browser = play.chromium.launch(executable_path=executable, args=QUIET)

        def shoot(
            name: str, url: str, ready: Callable[[Any], None], scheme: str = "light", size: tuple[int, int] = SIZE
        ) -> None:
            context = browser.new_context(
                color_scheme=scheme,
                viewport={"width": size[0], "height": size[1]},
                device_scale_factor=2 if size == PHONE else SCALE,
                reduced_motion="reduce",
            )
            tab = context.new_page()
            tab.set_default_timeout(60_000)
            tab.goto(url)
            ready(tab)
            tab.wait_for_timeout(1500)  # pictures of other people's animations
            tab.screenshot(path=options.out / f"{name}.png")
            context.close()
            print(options.out / f"{name}.png")

        ours(shoot, options.demo, Path(folder))
        theirs(shoot, options.demo)
        browser.close()


def ours(shoot: Callable[..., None], demo: Path, folder: Path) -> None:
    """The local page: light, dark, on a phone, and its sections."""
    file = demo / "report.html"
    whole = folder / "run.html"
    whole.write_text(run_page(history.load(next((demo / "runs").glob("*")))), encoding="utf-8")
    page = (file if file.exists() else whole).absolute().as_uri()

    def first(tab: Any) -> None:
        tab.wait_for_selector("#charts canvas")

    def section(name: str, canvas: str) -> Callable[[Any], None]:
        def show(tab: Any) -> None:
            tab.wait_for_selector("html[data-ready]")
            tab.evaluate(f"document.getElementById('{name}').scrollIntoView()")
            tab.wait_for_selector(canvas)
            tab.evaluate(f"document.getElementById('{name}').scrollIntoView()")

        return show

    shoot("page-light", page, first, size=(1366, 1000))
    shoot("page-dark", page, first, scheme="dark")
    shoot("page-phone", page, first, size=PHONE)
    shoot("page-layers-changed", page, section("changed", "#heatmap canvas"))
    shoot("page-anomaly", page, section("spike", "#spike"))
    shoot("page-layer", page, section("layers", "#layer canvas"), size=(1366, 1020))
    shoot("page-compare", page, section("compare", "#comparison tbody"))


def theirs(shoot: Callable[..., None], demo: Path) -> None:
    """TensorBoard with our layout; MLflow's run page, and our page inside it."""
    with servers.tensorboard(demo) as url:

        def whole(tab: Any) -> None:
            tab.wait_for_selector("path.line", state="attached")
            tab.get_by_text("Ignore outliers in chart scaling").click()  # or the spike is cut off

        shoot("tensorboard", f"{url}/#custom_scalars&_smoothingWeight=0", whole)
    with sqlite3.connect(demo / "mlflow.db") as store:
        experiment, run = store.execute("select experiment_id, run_uuid from runs").fetchone()
    with servers.mlflow(demo) as url:
        at = f"{url}/#/experiments/{experiment}/runs/{run}"

        def told(tab: Any) -> None:
            tab.get_by_text("What happened.").first.wait_for()
            tab.get_by_text("Show more").first.click()

        shoot("mlflow-run", at, told, size=(1366, 1100))

        def inside(tab: Any) -> None:
            tab.get_by_text("spike-").first.click()
            tab.get_by_text("report.html").first.click()
            tab.frame_locator("iframe").locator("html[data-ready]").wait_for(state="attached")

        shoot("mlflow-page", f"{at}/artifacts", inside, size=(1500, 900))


if __name__ == "__main__":
    main()
