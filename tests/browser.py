"""A headless browser, for the pages that the library writes."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

WIDTH, HEIGHT = 1280, 900
DRAWN_S = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--no-first-run",
)


@contextlib.contextmanager
def headless(profile: Path) -> Iterator[Any]:
    """Yield headless Chromium with its own ``profile``, which logs its console and its requests. Skip the test if
    Chromium is not installed."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium, of the dev extra")
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and chromedriver):
        pytest.skip("needs a browser: Debian's packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in FLAGS:
        options.add_argument(flag)
    options.add_argument(f"--window-size={WIDTH},{HEIGHT}")
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(chromedriver))
    try:
        yield driver
    finally:
        driver.quit()


def wait_until_drawn(driver: Any) -> None:
    """Wait until the page has drawn all panels, which it marks with ``data-ready``."""
    wait = import_module("selenium.webdriver.support.wait").WebDriverWait(driver, DRAWN_S)
    wait.until(lambda _: driver.execute_script("return document.documentElement.dataset.ready") == "yes")
