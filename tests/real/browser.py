"""A real browser without a window: Chromium, driven through its own driver. Nothing is downloaded by the tool that drives it."""

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
"""Seconds in which the page must show what it should, on a machine that is busy with other things."""


PACKAGES = ("chromium", "chromium-driver", "fonts-dejavu-core")

AXE = "axe-core@4.10.3"
"""Rules for accessible pages, of npm's registry."""


def find() -> tuple[str, str]:
    """Where the browser and its driver are. Raises MissingError."""
    browser, driver = map(shutil.which, ("chromium", "chromedriver"))
    if browser is None or driver is None:
        raise binaries.MissingError("not on this machine: chromium with chromedriver")
    return browser, driver


def install(say: Callable[[str], None]) -> tuple[str, str]:
    """The same, installed where they are missing. Raises MissingError."""
    try:
        return find()
    except binaries.MissingError:
        say(f"installing {', '.join(PACKAGES)}")
        binaries.install_packages([(name,) for name in PACKAGES])
    return find()


def find_axe() -> Path:
    """The source of axe-core. Raises MissingError where it was not fetched yet."""
    source = _axe_directory() / "node_modules/axe-core/axe.min.js"
    if not source.is_file():
        raise binaries.MissingError(f"not on this machine: {AXE}")
    return source


def install_axe(say: Callable[[str], None]) -> Path:
    """The same, fetched with npm where it is missing. Raises MissingError where that fails."""
    with binaries.locked_cache():
        if not _axe_directory().is_dir():
            say(f"fetching {AXE}")
            binaries.npm_install(_axe_directory(), [AXE])
    return find_axe()


def _axe_directory() -> Path:
    return binaries.cache_directory() / AXE.replace("@", "-")


class Browser:
    """One window. What blocks runs on a thread, so that the event loop of the test goes on."""

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
        """Shows a page in a window so wide and high, with colours as the viewer prefers them."""

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
        """What a script gives in the page."""
        return await anyio.to_thread.run_sync(lambda: self._driver.execute_script(script, *arguments))

    async def command(self, name: str, **arguments: object) -> Mapping[str, Any]:
        """The answer to a command of the DevTools protocol."""
        told = await anyio.to_thread.run_sync(lambda: self._driver.execute_cdp_cmd(name, arguments))
        assert isinstance(told, dict)
        return told

    async def press(self, *keys: str) -> None:
        """Presses keys, one after the other, wherever the focus is."""
        actions = webdriver.ActionChains(self._driver)
        for key in keys:
            actions.send_keys(key)
        await anyio.to_thread.run_sync(actions.perform)

    async def until(self, script: str, met: Callable[[Any], bool] = bool) -> Any:
        """What a script gives once that is as it should be."""
        last: object = None
        with anyio.move_on_after(WITHIN):
            while True:
                try:
                    if met(last := await self.run(script)):
                        return last
                except WebDriverException as error:  # the page is being replaced
                    last = error
                await anyio.sleep(0.05)
        raise AssertionError(f"{script} never gave what it should; the last time: {last!r}")

    async def picture(self, file: Path) -> None:
        """Writes the whole page down as it is seen."""
        height = await self.run("return document.documentElement.scrollHeight")
        width = await self.run("return innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        told = await self.command("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(told["data"]))

    def logs(self) -> tuple[Sequence[str], Sequence[str]]:
        """What the console complained of, and which addresses were asked for, since the last time."""
        said = [entry["message"] for entry in self._driver.get_log("browser")]
        events = [json.loads(entry["message"])["message"] for entry in self._driver.get_log("performance")]
        asked = [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]
        return said, asked
