"""A real browser without a window: Chromium, controlled through chromedriver. Selenium downloads nothing."""

import base64
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.chrome.service import Service

from tests.cluster.harness import binaries

FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
    ),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)

WITHIN = 30.0
"""Seconds in which the page must show the expected content, also on a busy machine."""


PACKAGES = ("chromium", "chromium-driver", "fonts-dejavu-core")

AXE = "axe-core@4.10.3"
"""The npm package with rules for accessible pages."""


def find() -> tuple[str, str]:
    """Return the paths of the browser and its driver. Raises MissingError."""
    browser, driver = map(shutil.which, ("chromium", "chromedriver"))
    if browser is None or driver is None:
        raise binaries.MissingError("not on this machine: chromium with chromedriver")
    return browser, driver


def install(say: Callable[[str], None]) -> tuple[str, str]:
    """Install the browser and its driver if they are missing, and return their paths. Raises MissingError."""
    try:
        return find()
    except binaries.MissingError:
        say(f"installing {', '.join(PACKAGES)}")
        binaries.install_packages([(name,) for name in PACKAGES])
    return find()


def find_axe() -> Path:
    """Return the source of axe-core. Raises MissingError if it was not downloaded yet."""
    source = _axe_directory() / "node_modules/axe-core/axe.min.js"
    if not source.is_file():
        raise binaries.MissingError(f"not on this machine: {AXE}")
    return source


def install_axe(say: Callable[[str], None]) -> Path:
    """Download axe-core with npm if it is missing. Raises MissingError if that fails."""
    with binaries.locked_cache():
        if not _axe_directory().is_dir():
            say(f"fetching {AXE}")
            binaries.npm_install(_axe_directory(), [AXE])
    return find_axe()


def _axe_directory() -> Path:
    return binaries.cache_directory() / AXE.replace("@", "-")


class Browser:
    """A browser window. Blocking calls run on a thread, so that the test's event loop continues."""

    def __init__(self, programs: tuple[str, str], profile: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = programs[0]
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self._driver = webdriver.Chrome(options=options, service=Service(programs[1]))

    def close(self) -> None:
        self._driver.quit()

    async def open(self, url: str, *, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Show a page in a window of this width and height (pixels), for a viewer who prefers this colour scheme."""

        def opened() -> None:
            self._driver.get("about:blank")
            self.logs()
            media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            self._driver.get(url)

        await anyio.to_thread.run_sync(opened)

    async def run(self, script: str, *arguments: object) -> Any:
        """Run a script in the page and return its result."""
        return await anyio.to_thread.run_sync(lambda: self._driver.execute_script(script, *arguments))

    async def command(self, name: str, **arguments: object) -> Mapping[str, Any]:
        """Send a command of the DevTools protocol and return the answer."""
        result = await anyio.to_thread.run_sync(lambda: self._driver.execute_cdp_cmd(name, arguments))
        assert isinstance(result, dict)
        return result

    async def press(self, *keys: str) -> None:
        """Press keys, one after the other, in the element with the focus."""
        actions = webdriver.ActionChains(self._driver)
        for key in keys:
            actions.send_keys(key)
        await anyio.to_thread.run_sync(actions.perform)

    async def until(self, script: str, met: Callable[[Any], bool] = bool) -> Any:
        """Run a script until `met` returns True for its result, and return the result."""
        last: object = None
        with anyio.move_on_after(WITHIN):
            while True:
                try:
                    if met(last := await self.run(script)):
                        return last
                except WebDriverException as error:  # the browser is loading another page
                    last = error
                await anyio.sleep(0.05)
        raise AssertionError(f"{script} did not return the expected result in time; the last result: {last!r}")

    async def picture(self, file: Path) -> None:
        """Write a picture of the whole page to a file."""
        height = await self.run("return document.documentElement.scrollHeight")
        width = await self.run("return innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        result = await self.command("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(result["data"]))

    def logs(self) -> tuple[Sequence[str], Sequence[str]]:
        """Return the console's messages and the requested addresses since the last call."""
        messages = [entry["message"] for entry in self._driver.get_log("browser")]
        events = [json.loads(entry["message"])["message"] for entry in self._driver.get_log("performance")]
        asked = [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]
        return messages, asked
