"""A real headless browser for the tests: Debian's chromium, driven by selenium through its own chromedriver."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
DRIVER = shutil.which("chromedriver") or ""
FLAGS = ("--headless", "--no-first-run")
FLAGS += tuple(f"--disable-{what}" for what in ("gpu", "quic", "background-networking", "component-update", "sync"))


def _axe() -> Path | None:
    """axe-core's one script, of the Python package that brings it; None where that is not installed."""
    spec = find_spec("axe_core_python")
    scripts = [Path(folder) / "axe.min.js" for folder in (spec.submodule_search_locations or () if spec else ())]
    return next(filter(Path.exists, scripts), None)


AXE = _axe()
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER and find_spec("selenium")),
    reason="needs selenium, and chromium and chromedriver on PATH (Debian: apt-get install chromium chromium-driver)",
)


def unpacked(html: str, name: str) -> str:
    """Return what a page has packed under this id."""
    packed = re.search(rf'<script type="application/gzip" id="{name}">([^<]*)</script>', html)[1]
    return gzip.decompress(base64.b64decode(packed)).decode()


class Browser:
    """One window.  A fresh profile, and nothing that looks for updates."""

    def __init__(self, profile: Path):
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
        from selenium.webdriver.support.ui import WebDriverWait

        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in (*FLAGS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        # The path is given, so that selenium looks for no driver in the network.
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        self.wait = WebDriverWait(self.driver, 20)

    def open(self, path: Path, width: int = 1200, height: int = 900, dark: bool = False, media: str = "screen") -> None:
        """Until all plots of the report are drawn."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": [scheme]})
        self.driver.get(path.as_uri())
        self.wait.until(lambda _: self.js("document.documentElement.dataset.plots === 'drawn'"))

    def unfold(self) -> None:
        """Open all that is folded, until its plots are drawn too."""
        self.driver.execute_script("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        drawn = "[...document.querySelectorAll('.plot')].every((each) => each.querySelector('.main-svg'))"
        self.wait.until(lambda _: self.js(drawn))

    def resize(self, width: int, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def js(self, code: str, *arguments):
        return self.driver.execute_script(f"return {code}", *arguments)

    def console(self) -> list:
        """Return what was written to the console since the last call: errors, warnings and broken policies."""
        return [line for line in self.driver.get_log("browser") if line["level"] != "INFO"]

    def requests(self) -> list:
        """Addresses asked for since the last call, those of the browser's own pages (a new tab) left out."""
        events = [json.loads(line["message"])["message"] for line in self.driver.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent if not params["documentURL"].startswith("chrome")]

    def violations(self) -> list:
        """[rule, where] of what axe-core finds that people with a keyboard, magnifier or screen reader cannot use."""
        self.driver.execute_script(AXE.read_text(encoding="utf-8"))
        return self.driver.execute_async_script(
            "const done = arguments[0], where = (node) => `${node.target.join(' ')}: ${node.failureSummary}`;"
            "axe.run({resultTypes: ['violations']}).then("
            "({violations}) => done(violations.map(({id, nodes}) => [id, nodes.slice(0, 3).map(where)])),"
            "(error) => done([String(error)]))"
        )

    def screenshot(self, path: Path, height: int = 0, of: str = "body") -> None:
        """The element that `of` selects, seen or not, or the upper `height` pixels of the page, as PNG."""
        box = self.js("document.querySelector(arguments[0]).getBoundingClientRect()", of)
        clip = {"x": box["x"], "y": box["y"], "width": box["width"], "height": box["height"], "scale": 2}
        if height:
            clip = {"x": 0, "y": 0, "width": self.js("innerWidth"), "height": height, "scale": 1}
        taken = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        path.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        self.driver.quit()
