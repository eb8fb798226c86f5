"""The page in a real browser: it draws, follows a run, is usable without a mouse, and loads quickly."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis import Redis
from support.store import add_history, append, end, make_run
from web.conftest import PASSWORD, Visitor

from ddrl.store import metrics, runs

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(not BROWSER, reason="no browser: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page of a visitor's; whatever the console says fails the test."""
    opened, said = [], []

    def open_(visitor: Visitor, path: str = "/", *, width: int = 1280, dark: bool = False) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light"
        )
        context.set_default_timeout(60_000)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(f"http://localhost:{visitor.port}{path}")
        opened.append(context)
        return page

    yield open_
    for context in opened:
        context.close()
    assert said == []


def until(page: Any, holds: str) -> None:
    """Wait until a JavaScript expression holds; the page's own policy forbids it to look for itself."""
    deadline = time.monotonic() + 60.0
    while not page.evaluate(holds):
        assert time.monotonic() < deadline, holds
        page.wait_for_timeout(50)


def findings(page: Any) -> list[str]:
    """Return what axe-core finds serious or worse."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    serious = [row for row in found if row["impact"] in ("serious", "critical")]
    return [f"{row['id']}: {[node['html'] for node in row['nodes']][:3]}" for row in serious]


def test_a_chart_follows_the_run(client: Redis, visitor: Visitor, open_page: Callable[..., Any]) -> None:
    run = make_run(client)
    token = add_history(client, run)
    page = open_page(visitor, f"/runs/{run}?over=env_steps")
    page.wait_for_selector(".chart canvas")
    num = "document.querySelectorAll('.chart')[0].plot.data[0].length"
    before = page.evaluate(num)
    assert before >= 30
    append(client, run, 30, episode_returns=[123.0] * 4)
    metrics.add(client, run, token, {"env_steps": 31_000, "updates": 8_123, "env_steps_per_s": 5.0})
    until(page, f"{num} > {before}")
    page.get_by_text("8,123").wait_for()
    runs.note(client, run, "noted", "by hand")
    page.get_by_text("by hand").wait_for()
    page.emulate_media(color_scheme="dark")
    until(page, "document.querySelectorAll('.chart canvas').length == 2")
    page.get_by_role("combobox", name="Over").select_option("updates")
    page.wait_for_url("**over=updates**")
    assert page.evaluate("document.querySelectorAll('.chart')[0].plot.data[0].at(-1)") > 7_000


@pytest.mark.parametrize(("width", "dark"), [(360, True), (1920, False)])
def test_it_fits_and_axe_finds_nothing_serious(
    client: Redis, serve: Callable[..., Visitor], open_page: Callable[..., Any], width: int, dark: bool
) -> None:
    visitor, one, other = (
        serve(password=PASSWORD, controls=True),
        make_run(client),
        make_run(client, weight=2),
    )
    add_history(client, one)
    page = open_page(visitor, width=width, dark=dark)
    assert findings(page) == []
    page.get_by_label("Your name").fill("Ada")
    page.get_by_label("Password").fill(PASSWORD)
    page.keyboard.press("Enter")
    page.wait_for_selector("table")
    for path in ("/", f"/runs/{one}", f"/compare?run={one}&run={other}", "/fleet", f"/runs/{one}/episodes",
                 f"/runs/{one}/logs", f"/runs/{one}/audit"):  # fmt: skip
        page.goto(f"http://localhost:{visitor.port}{path}")
        assert findings(page) == [], path
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path


def test_filters_and_comparison_by_keyboard(
    client: Redis, visitor: Visitor, open_page: Callable[..., Any]
) -> None:
    first, second = make_run(client), make_run(client, algorithm={"name": "sac", "gamma": 0.9})
    end(client, second)
    page = open_page(visitor)
    page.get_by_label("Search").fill(first)
    page.get_by_role("link", name=second).wait_for(state="detached")
    page.get_by_label("Search").fill("")
    for run in (first, second):
        box = page.get_by_label(f"Compare {run}")
        box.focus()
        page.keyboard.press("Space")
    page.get_by_role("button", name="Compare").focus()
    page.keyboard.press("Enter")
    page.get_by_text("algorithm.gamma").wait_for()


def test_a_change_is_made_with_a_form(
    client: Redis, serve: Callable[..., Visitor], open_page: Callable[..., Any]
) -> None:
    visitor, run = serve(password=PASSWORD, controls=True), make_run(client)
    page = open_page(visitor)
    page.get_by_label("Your name").fill("Ada")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("link", name=run).click()
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("Ada: paused").wait_for()
    assert runs.status(client, run) == "paused"
    page.get_by_role("button", name="Resume").wait_for()
