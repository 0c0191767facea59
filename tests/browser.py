"""A real browser for tests of pages: headless Chromium through Playwright, which watches console and network.

Without a browser those tests are skipped, and the reason says how to have one.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
REMEDY = "NOT TESTED IN A BROWSER: install one (apt install chromium) and Playwright (pip install playwright)"


@dataclass
class Watched:
    """A page, and everything suspicious that happened in it."""

    page: object
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def fine(self, *, allowed: str) -> None:
        """No message in the console, no error, no dialog, no request elsewhere."""
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith((allowed, "data:"))] == []


@pytest.fixture(scope="module")  # while Playwright is open, its event loop counts as running in this thread
def chromium() -> Iterator[object]:
    playwright = pytest.importorskip("playwright.sync_api", reason=REMEDY)
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(REMEDY)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield browser
        browser.close()


@contextmanager
def opened(browser: object, url: str, **options: object) -> Iterator[Watched]:
    """The page at an address, in a context of its own."""
    with browser.new_context(**options) as context:
        watched = Watched(context.new_page())
        page = watched.page
        page.set_default_timeout(15_000)
        page.on("console", lambda message: watched.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: watched.complaints.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (watched.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: watched.requests.append(request.url))
        page.goto(url)
        yield watched
