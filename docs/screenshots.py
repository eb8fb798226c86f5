"""Take the pictures of the page in docs/web.md from a `ddrl web` that shows runs; needs chromium.

python docs/screenshots.py http://127.0.0.1:8265 RUN [RUN ...]      # the first one is shown
"""

from __future__ import annotations

import io
import re
import shutil
import sys
import time
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright
from rich.console import Console

from ddrl.cli import view
from ddrl.cli.watcher import Watcher
from ddrl.store import connection

DOCS = Path(__file__).parent
WIDTH, HEIGHT = 1200, 800
LOADING_MS = 3_000  # charts are drawn and pictures loaded


COLUMNS, ROWS = 100, 30


def terminal(browser: Browser, run: str) -> None:
    """Write terminal.png: what `ddrl watch RUN` shows."""
    with connection.connect() as client:
        watched = Watcher(client, run)
        watched.poll()
        time.sleep(2 * LOADING_MS / 1e3)  # speeds are those since the look before
        shown = view.one_run(watched.poll(), width=COLUMNS, height=ROWS)
    console = Console(record=True, force_terminal=True, width=COLUMNS, height=ROWS, file=io.StringIO())
    console.print(shown)
    picture = re.sub(
        r"@font-face \{.*?\}", "", console.export_svg(title=f"ddrl watch {run}"), flags=re.DOTALL
    )
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    page.set_content(picture)
    page.locator("svg").screenshot(path=DOCS / "terminal.png")
    page.close()


def main(address: str, run: str, *others: str) -> None:
    """Write web-*.png."""
    compared = "&".join(f"run={one}" for one in (run, *others))
    pages = {
        "runs": "/",
        "run": f"/runs/{run}",
        "compare": f"/compare?{compared}",
        "fleet": "/fleet",
        "episodes": f"/runs/{run}/episodes?play=1&version=best&seed=7",
        "log": f"/runs/{run}/logs",
        "audit": f"/runs/{run}/audit",
    }
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, path in pages.items():
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
            page.goto(address.rstrip("/") + path, timeout=120_000)
            page.wait_for_timeout(LOADING_MS)
            page.screenshot(path=DOCS / f"web-{name}.png")
            page.close()
        narrow = browser.new_page(viewport={"width": 360, "height": HEIGHT}, color_scheme="dark")
        narrow.goto(address.rstrip("/") + pages["run"])
        narrow.wait_for_timeout(LOADING_MS)
        narrow.screenshot(path=DOCS / "web-narrow.png")
        terminal(browser, run)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
