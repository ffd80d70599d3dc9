"""The status page in a real browser: the real daemon on a simulated node, under the stand-in kubelet.

If the environment variable E2E_PICTURES is set, pictures of the page are written to that directory.
"""

import os
import re
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from demo.stand_in_kubelet import StandInKubelet
from tests.needed import found
from tests.node.daemon import GPU, DaemonProcess, healthy
from tests.real import browser as browser_module
from tests.real.browser import Browser

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

SHARED = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 28}]}}\n"

TAB, ENTER, SPACE = "\ue004", "\ue007", " "

HEADLINE = "return document.getElementById('headline-text')?.textContent"
STATE = "return document.getElementById('connection')?.className"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(found(browser_module.find), tmp_path_factory.mktemp("browser"))
    yield made
    made.close()


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture
def url(port: int) -> str:
    return f"http://127.0.0.1:{port}/"


@pytest.fixture
async def daemon(directory: Path) -> AsyncIterator[DaemonProcess]:
    made = DaemonProcess(directory)
    yield made
    made.kill()


def flags(port: int) -> tuple[str, str]:
    return f"--http-address=127.0.0.1:{port}", "--node-name=node-1"


async def serving(daemon: DaemonProcess, kubelet: StandInKubelet, port: int, *more: str, count: int = 8) -> None:
    daemon.start(*flags(port), *more)
    await kubelet.wait_for(healthy(kubelet, count), timeout=60)


async def crowded(daemon: DaemonProcess, kubelet: StandInKubelet, port: int) -> None:
    """16 GPUs of 28 replicas each, held by 100 pods, and faults of three."""
    config = daemon.directory / "config.yaml"
    config.write_text(SHARED)
    daemon.profile = "dgx2-16"
    await serving(daemon, kubelet, port, f"--config-file={config}", count=448)
    for number in range(100):
        await kubelet.admit(f"train-{number}", {GPU: 1 + number % 3})
    daemon.fault(1, temperature=95)
    daemon.fault(3, xid=79)
    daemon.fault(6, **{"nvlink-down": 4})


async def seen(browser: Browser, name: str) -> None:
    """Write a picture of the page if E2E_PICTURES is set."""
    if folder := os.environ.get("E2E_PICTURES"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        await browser.picture(Path(folder) / f"{name}.png")


def clean(browser: Browser, url: str) -> None:
    """Check that the console has no messages, and that the page requested nothing from other addresses."""
    messages, asked = browser.logs()
    assert messages == []
    assert [address for address in asked if not address.startswith((url, "about:"))] == []


async def test_a_fault_is_seen_without_a_reload_and_what_one_was_doing_goes_on(browser, daemon, kubelet, port, url):
    await serving(daemon, kubelet, port)
    await kubelet.admit("train-0", {GPU: 8})
    await browser.open(url)
    await browser.until(HEADLINE, lambda result: result == "All 8 GPUs are Healthy")
    await browser.until(STATE, lambda state: state == "live")
    assert "No problems found" in await browser.run("return document.getElementById('complaints').textContent")
    await seen(browser, "well")
    await browser.run(
        "window.marked = 1; const one = document.querySelector('#devices details'); one.open = true;"
        "one.querySelector('summary').focus()"
    )
    daemon.fault(3, xid=79)
    await browser.until(HEADLINE, lambda result: result == "1 of 8 GPUs is Unhealthy")
    result = await browser.run("return document.getElementById('complaints').innerText")
    for words in (
        "GPU 3 is Unhealthy",
        "Xid 79",
        "since",
        "What to do",
        "drain the node and reboot it",
        "default/train-0",
    ):
        assert words in result
    assert await browser.run("return document.getElementById('announcement').textContent") == "1 of 8 GPUs is Unhealthy"
    assert await browser.run("return document.title") == "1 of 8 GPUs is Unhealthy - node-1"
    assert await browser.run("return window.marked") == 1
    assert await browser.run("return document.querySelector('#devices details').open")
    assert await browser.run("return document.activeElement.tagName") == "SUMMARY"
    await browser.until("return document.querySelector('#events tbody').innerText", lambda result: "Xid 79" in result)
    await browser.until(
        "return document.querySelector('.age').textContent", lambda result: re.search(r"\d+ s ago", result)
    )
    assert await browser.until("return document.querySelector('.wide img').naturalWidth") > 100
    clean(browser, url)


async def test_after_a_restart_it_goes_on_and_meanwhile_it_calls_itself_stale(browser, daemon, kubelet, port, url):
    await serving(daemon, kubelet, port)
    await browser.open(url)
    await browser.until(STATE, lambda state: state == "live")
    await browser.run("window.marked = 1")
    began = anyio.current_time()
    status, _ = await daemon.stop()
    assert status == 0
    await browser.until(STATE, lambda state: state == "stale")
    assert anyio.current_time() - began < 10
    assert "does not answer" in await browser.run("return document.getElementById('announcement').textContent")
    assert await browser.run("return document.getElementById('connection').innerText.includes('Stale')")
    await seen(browser, "stale")
    browser.logs()  # discard the console's errors about the missing server
    daemon.start(*flags(port))
    await kubelet.wait_for(healthy(kubelet, 8), timeout=60)
    daemon.fault(2, xid=79)
    await browser.until(STATE, lambda state: state == "live")
    await browser.until(HEADLINE, lambda result: result == "1 of 8 GPUs is Unhealthy")
    assert await browser.run("return window.marked") == 1


async def test_who_gets_no_stream_looks_again_every_few_seconds(browser, daemon, kubelet, port, url):
    await serving(daemon, kubelet, port)
    others = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(8)]
    for client in others:
        await client.send(b"GET /status.stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await client.receive()).startswith(b"HTTP/1.1 200")
    await browser.open(url)
    words = "return document.getElementById('connection-state').textContent"
    await browser.until(words, lambda result: result == "Updated every few seconds")
    daemon.fault(3, xid=79)
    await browser.until(HEADLINE, lambda result: result == "1 of 8 GPUs is Unhealthy")
    for client in others:
        await client.aclose()
    await browser.until(STATE, lambda state: state == "live")


async def test_light_and_dark(browser, daemon, kubelet, port, url):
    await serving(daemon, kubelet, port)
    paper = {}
    for scheme in ("light", "dark"):
        await browser.open(url, scheme=scheme)
        await browser.until(STATE, lambda state: state == "live")
        result = await browser.run("return getComputedStyle(document.body).backgroundColor")
        paper[scheme] = sum(int(part) for part in re.findall(r"\d+", result)[:3])
    assert paper["light"] > 600
    assert paper["dark"] < 120


async def test_all_of_it_is_within_reach_of_the_keyboard(browser, daemon, kubelet, port, url):
    await serving(daemon, kubelet, port)
    await browser.open(url)
    await browser.until(STATE, lambda state: state == "live")
    reached = []
    for _ in range(40):
        await browser.press(TAB)
        result = await browser.run(
            "const one = document.activeElement, style = getComputedStyle(one);"
            "return [one.tagName, one.getAttribute('aria-label') || one.textContent.trim(), style.outlineStyle]"
        )
        if result[0] == "BODY":
            break
        assert result[2] != "none", f"the focus cannot be seen on {result}"
        reached.append(result[1])
    assert reached[:3] == ["Skip to the content", "Needs attention", "Node"]
    for name in ("GPU 0: 1 device", "GPU 7: 1 device", "Picture of the links", "As a table", "status.json"):
        assert any(each.startswith(name) for each in reached), f"{name} is not among {reached}"
    await browser.run("document.querySelector('#devices summary').focus()")
    await browser.press(ENTER)
    assert await browser.run("return document.querySelector('#devices details').open")
    await browser.press(SPACE)
    assert not await browser.run("return document.querySelector('#devices details').open")


async def names(browser: Browser) -> dict[str, list[str]]:
    """Return the names in the accessibility tree by role, as a screen reader gets them."""
    result = await browser.command("Accessibility.getFullAXTree")
    found: dict[str, list[str]] = {}
    for node in result["nodes"]:
        if not node.get("ignored"):
            found.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    return found


@pytest.mark.parametrize("width", [1280, 320])
async def test_what_a_screen_reader_is_told(browser, daemon, kubelet, port, url, width):
    await serving(daemon, kubelet, port)
    daemon.fault(3, xid=79)
    await browser.open(url, width=width)
    await browser.until(HEADLINE, lambda result: result == "1 of 8 GPUs is Unhealthy")
    result = await names(browser)
    for role in ("banner", "main", "contentinfo", "status"):
        assert len(result[role]) == 1
    assert result["navigation"] == ["Sections"]
    headings = ["Needs attention", "Node", "GPUs", "Pods", "Devices", "Links", "Events"]
    assert [name for name in result["region"] if name in headings] == headings
    assert {"GPUs of node node-1", *headings} <= set(result["heading"])
    assert any("GPU 3 is Unhealthy" in name for name in result["heading"])
    assert {"GPUs of this node", "Resources served to the kubelet"} <= set(result["table"])
    assert {"GPU", "Health", "Temperature", "Power", "Memory", "Devices"} <= set(result["columnheader"])
    assert len([name for name in result["rowheader"] if "NVIDIA H100" in name]) == 8
    assert [name for name in result["image"] if "How the GPUs are linked" in name]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (320, "light")])
async def test_rules_for_accessible_pages(browser, daemon, kubelet, port, url, width, scheme, axe):
    await crowded(daemon, kubelet, port)
    await browser.open(url, width=width, scheme=scheme)
    await browser.until(HEADLINE, lambda result: result.startswith("2 of 16 GPUs are Unhealthy"))
    await browser.run(axe)
    await browser.run("document.querySelectorAll('details').forEach((each, at) => { each.open = at < 3 })")
    await browser.run("window.judged = null; axe.run().then((result) => { window.judged = result })")
    judged = await browser.until("return window.judged", lambda result: result is not None)
    assert [(each["id"], each["nodes"][0]["html"][:200]) for each in judged["violations"]] == []
    assert {"color-contrast", "region", "list", "image-alt"} <= {each["id"] for each in judged["passes"]}


@pytest.fixture(scope="module")
def axe() -> str:
    """The source of axe-core."""
    return found(browser_module.find_axe).read_text()


@pytest.mark.parametrize("width", [1280, 320])
async def test_448_devices_of_100_pods_are_legible(browser, daemon, kubelet, port, url, width):
    await crowded(daemon, kubelet, port)
    await browser.open(url, width=width, scheme="dark" if width == 320 else "light")
    await browser.until(HEADLINE, lambda result: result == "2 of 16 GPUs are Unhealthy, 1 degraded")
    drawn = "return [...document.querySelectorAll('.cells path:not(.cross)')].map((each) => each.getAttribute('d')).join('')"
    await browser.until(drawn, lambda result: result.count("h8v8h-8z") == 448)
    await browser.until("return document.getElementById('gpus').innerText", lambda result: "held" in result)
    assert await browser.run("return document.documentElement.scrollWidth") <= width
    smallest = await browser.run(
        "return Math.min(...[...document.querySelectorAll('main *')].filter((each) => each.innerText)"
        ".map((each) => parseFloat(getComputedStyle(each).fontSize)))"
    )
    assert smallest >= 10.5
    cut = await browser.run(
        "return [...document.querySelectorAll('#gpus td, #gpus th, .card')].filter((each) => each.offsetWidth)"
        ".filter((each) => each.scrollWidth > each.clientWidth + 1).map((each) => each.innerText)"
    )
    assert cut == []
    await browser.run("document.querySelector('#pods details').open = true")
    assert await browser.run("return document.querySelectorAll('#pods tbody tr').length") >= 100
    await browser.run("document.querySelector('#pods details').open = false")
    await seen(browser, f"crowded-{width}")
    clean(browser, url)


async def test_nothing_sticks_out_at_any_width(browser, daemon, kubelet, port, url):
    await crowded(daemon, kubelet, port)
    for width in (1920, 1280, 1160, 1150, 800, 600, 320):
        await browser.open(url, width=width)
        await browser.until(HEADLINE, lambda result: result == "2 of 16 GPUs are Unhealthy, 1 degraded")
        await browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true })")
        assert await browser.run("return document.documentElement.scrollWidth") <= width
        laid_out = await browser.run("return getComputedStyle(document.querySelector('#gpus tbody tr')).display")
        assert laid_out == ("table-row" if width > 1152 else "block")


async def test_without_scripts_it_is_as_it_was_when_it_was_loaded_and_says_so(browser, daemon, kubelet, port, url):
    await serving(daemon, kubelet, port)
    daemon.fault(3, xid=79)
    await kubelet.wait_for(healthy(kubelet, 7), timeout=60)
    await browser.command("Emulation.setScriptExecutionDisabled", value=True)
    try:
        await browser.open(url)
        root = await browser.command("DOM.getDocument")
        result = (await browser.command("DOM.getOuterHTML", nodeId=root["root"]["nodeId"]))["outerHTML"]
    finally:
        await browser.command("Emulation.setScriptExecutionDisabled", value=False)
    for words in ("1 of 8 GPUs is Unhealthy", "Xid 79", "This page does not update itself.", "reload the page"):
        assert words in result


async def test_names_of_pods_are_texts_and_scripts_of_others_never_run(browser, daemon, kubelet, port, url):
    await serving(daemon, kubelet, port)
    hostile = "<img src=x onerror=window.caught=1><script>window.caught=1</script>"
    await kubelet.admit(hostile, {GPU: 1})
    await browser.open(url)
    await browser.until("return document.getElementById('gpus').innerText", lambda result: hostile in result)
    assert await browser.run("return document.querySelectorAll('#gpus img').length") == 0
    clean(browser, url)
    await browser.run(
        "const one = document.createElement('script'); one.textContent = 'window.caught = 1'; document.body.append(one);"
        "document.body.insertAdjacentHTML('beforeend', '<img src=none onerror=\"window.caught=1\">')"
    )
    await anyio.sleep(0.3)  # enough time for such a script to run
    assert await browser.run("return window.caught === undefined")
    messages, _ = browser.logs()
    assert any("Content Security Policy" in line for line in messages)


async def test_before_the_daemon_has_a_configuration_the_page_says_what_it_waits_for(
    browser, daemon, kubelet, directory, port, url
):
    del kubelet
    configs = directory / "configs"
    configs.mkdir()
    (configs / "one").write_text("version: v1\nflags: {migStrategy: some}\n")
    kubeconfig = directory / "kubeconfig"
    kubeconfig.write_text(KUBECONFIG)
    daemon.start(*flags(port), f"--config-file-srcdir={configs}", f"--kubeconfig={kubeconfig}")
    with anyio.fail_after(60):
        while True:
            try:
                await (await anyio.connect_tcp("127.0.0.1", port)).aclose()
                break
            except OSError:
                await anyio.sleep(0.05)
    await browser.open(url)
    await browser.until(STATE, lambda state: state == "live")
    assert await browser.run(HEADLINE) == "Nothing is served yet"
    result: Any = await browser.run("return document.getElementById('complaints').innerText")
    assert len(result) > 20
    await seen(browser, "waiting")
    clean(browser, url)


KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: here
clusters: [{name: here, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: here, user: {}}]
contexts: [{name: here, context: {cluster: here, user: here}}]
"""
