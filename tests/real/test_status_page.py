"""Tests of the status page in Chromium, with the real daemon on a simulated node and a simulated kubelet.

If the environment variable E2E_PICTURES is set, pictures of the page are written to that directory.
"""

import os
import re
import socket
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import anyio
import pytest

from demo.stand_in_kubelet import StandInKubelet
from gpu_plugin.runtime.control import request
from tests.needed import found
from tests.node.daemon import GPU, DaemonProcess, healthy
from tests.real import browser as browser_module
from tests.real.browser import Browser

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

SHARED = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 28}]}}\n"

TAB, ENTER, SPACE = "\ue004", "\ue007", " "

HEADLINE = "return document.getElementById('headline')?.textContent"
STATE = "return document.getElementById('connection')?.className"
PROBLEMS = "return document.getElementById('problems')?.innerText"


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
    await seen(browser, "well")
    await browser.run(
        "window.marked = 1; const one = document.querySelector('#details details'); one.open = true;"
        "one.querySelector('summary').focus()"
    )
    daemon.fault(3, xid=79)
    await browser.until(HEADLINE, lambda result: result.startswith("GPU 3 is Unhealthy"))
    result = await browser.run(PROBLEMS)
    for words in ("Xid 79", "default/train-0", "What to do", "kubectl drain node-1", "Recovers when"):
        assert words in result
    assert "node-1: GPU 3 is Unhealthy" in await browser.run("return document.title")
    assert await browser.run("return window.marked") == 1
    assert await browser.run("return document.querySelector('#details details').open")
    assert await browser.run("return document.activeElement.tagName") == "SUMMARY"
    await browser.until("return document.getElementById('events').textContent", lambda result: "Xid 79" in result)
    assert await browser.until("return document.querySelector('#links img').naturalWidth") > 100
    await seen(browser, "sick")
    clean(browser, url)


async def test_a_fold_that_was_closed_stays_closed_and_a_tile_leads_to_its_gpu(browser, daemon, kubelet, port, url):
    await serving(daemon, kubelet, port)
    daemon.fault(3, xid=79)
    await browser.open(url)
    await browser.until(HEADLINE, lambda result: result.startswith("GPU 3 is Unhealthy"))
    await browser.run("document.querySelector('#problems details').open = false")
    await browser.run("document.querySelector('.tile.unhealthy').click()")
    await browser.until("return document.querySelector('#details details[open]')?.innerText", lambda result: result)
    daemon.fault(4, xid=79)
    await browser.until(PROBLEMS, lambda result: "GPU 4 is Unhealthy" in result)
    assert not await browser.run("return document.querySelector('#problems details').open")
    opened = await browser.run(
        "return [...document.querySelectorAll('#details details[open] b')].map((b) => b.textContent)"
    )
    assert opened[0] == "GPU 3"


async def test_a_worse_problem_above_leaves_folds_and_the_focus_where_they_are(browser, daemon, kubelet, port, url):
    await serving(daemon, kubelet, port)
    daemon.fault(3, xid=79)
    await browser.open(url)
    await browser.until(HEADLINE, lambda result: result.startswith("GPU 3 is Unhealthy"))
    await browser.run(
        "window.mine = document.querySelector('#problems .card details'); window.mine.open = false;"
        "window.mine.querySelector('summary').focus(); document.querySelectorAll('#details details')[5].open = true"
    )
    daemon.fault(1, xid=79)
    await browser.until(HEADLINE, lambda result: result.startswith("GPU 1 is Unhealthy"))
    kept = (
        "return [mine.isConnected, mine.open, mine.contains(document.activeElement), mine.closest('.card').innerText]"
    )
    connected, is_open, focused, text = await browser.run(kept)
    assert (connected, is_open, focused) == (True, False, True)
    assert "GPU 3" in text
    opened = "return [...document.querySelectorAll('#details details')].map((each) => each.open)"
    assert await browser.run(opened) == [number == 5 for number in range(8)]


async def test_a_tile_opens_its_gpu_again_after_it_was_closed(browser, daemon, kubelet, port, url):
    await serving(daemon, kubelet, port)
    await browser.open(url)
    await browser.until(STATE, lambda state: state == "live")
    for _ in range(2):
        await browser.run("document.querySelectorAll('.tile')[2].click()")
        await browser.until("return document.querySelectorAll('#details details')[2].open")
        await browser.run("document.querySelectorAll('#details details')[2].open = false")


@pytest.mark.parametrize("clipboard", [True, False])
async def test_a_command_is_copied_also_without_the_clipboard_of_secure_pages(
    browser, daemon, kubelet, port, url, clipboard
):
    await serving(daemon, kubelet, port)
    daemon.fault(3, xid=79)
    await browser.open(url)
    await browser.until(HEADLINE, lambda result: result.startswith("GPU 3 is Unhealthy"))
    if clipboard:
        await browser.command(
            "Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"], origin=url
        )
    else:  # a page without TLS under a node's address
        await browser.run("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    await browser.run(
        "document.addEventListener('copy', () => { window.copied = String(getSelection()) });"
        "document.querySelector('.command button').focus()"
    )
    await browser.press(ENTER)
    copied = "return navigator.clipboard.readText()" if clipboard else "return window.copied"
    await browser.until(copied, lambda result: result == "kubectl cordon node-1")


async def test_after_a_restart_it_goes_on_and_meanwhile_it_calls_itself_stale(browser, daemon, kubelet, port, url):
    await serving(daemon, kubelet, port)
    await browser.open(url)
    await browser.until(STATE, lambda state: state == "live")
    await browser.run("window.marked = 1")
    status, _ = await daemon.stop()
    assert status == 0
    await browser.until(STATE, lambda state: state == "stale")
    assert "does not answer" in await browser.run("return document.getElementById('connection').innerText")
    await seen(browser, "stale")
    browser.logs()  # discard the console's errors about the missing server
    daemon.start(*flags(port))
    await kubelet.wait_for(healthy(kubelet, 8), timeout=60)
    daemon.fault(2, xid=79)
    await browser.until(STATE, lambda state: state == "live")
    await browser.until(HEADLINE, lambda result: result.startswith("GPU 2 is Unhealthy"))
    assert await browser.run("return window.marked") == 1


@pytest.mark.parametrize(
    ("verb", "more", "state"), [("cordon", {}, "held-back"), ("fault", {"pcie-width": 4}, "degraded")]
)
async def test_a_cordon_and_a_degraded_gpu_are_notes_in_a_neutral_colour(
    browser, daemon, kubelet, port, url, verb, more, state
):
    await serving(daemon, kubelet, port)
    await anyio.to_thread.run_sync(partial(request, daemon.state, verb, gpu=5, **more))
    await browser.open(url)
    await browser.until(f"return document.querySelectorAll('.tile.{state}').length", lambda count: count == 1)
    assert await browser.run("return document.getElementById('headline').className") == "headline note"
    assert (await browser.run("return document.getElementById('severity').textContent")).endswith("Note")
    assert await browser.run("return document.querySelectorAll('.card.critical, .card.warning').length") == 0
    await seen(browser, state)


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
    assert reached[0] == "Skip to the content"
    for name in ("GPU 0", "GPU 7", "Table of links", "status.json"):
        assert any(each.startswith(name) for each in reached), f"{name} is not among {reached}"
    await browser.run("document.querySelector('#details summary').focus()")
    await browser.press(ENTER)
    assert await browser.run("return document.querySelector('#details details').open")
    await browser.press(SPACE)
    assert not await browser.run("return document.querySelector('#details details').open")


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
    await browser.until(HEADLINE, lambda result: result.startswith("GPU 3 is Unhealthy"))
    await browser.until("return document.querySelector('#links img')?.complete")
    result = await names(browser)
    for role in ("banner", "main", "contentinfo", "status"):
        assert len(result[role]) == 1
    assert {"Problems", "GPUs", "Resources", "Details of each GPU", "Links between GPUs"} <= set(result["region"])
    assert any("GPU 3 is Unhealthy" in name for name in result["heading"])
    if width > 480:  # narrow rows have the headings in each cell
        assert {"Resource", "Healthy", "Held", "Registered"} <= set(result["columnheader"])
    assert "Resources" in result["table"]
    assert [name for name in result["image"] if "NVLink" in name]


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (320, "light")])
async def test_rules_for_accessible_pages(browser, daemon, kubelet, port, url, width, scheme, axe):
    await crowded(daemon, kubelet, port)
    await browser.open(url, width=width, scheme=scheme)
    await browser.until(PROBLEMS, lambda result: "GPU 1 is Unhealthy" in result and "GPU 3 is Unhealthy" in result)
    await browser.run(axe)
    await browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true })")
    await browser.run("window.judged = null; axe.run().then((result) => { window.judged = result })")
    judged = await browser.until("return window.judged", lambda result: result is not None)
    assert [(each["id"], each["nodes"][0]["html"][:200]) for each in judged["violations"]] == []
    assert {"color-contrast", "region", "list", "image-alt"} <= {each["id"] for each in judged["passes"]}


@pytest.fixture(scope="module")
def axe() -> str:
    """The source of axe-core."""
    return found(browser_module.find_axe).read_text()


@pytest.mark.parametrize(("width", "height"), [(1280, 2600), (390, 3600)])
async def test_448_devices_of_100_pods_are_a_short_page(browser, daemon, kubelet, port, url, width, height):
    await crowded(daemon, kubelet, port)
    await browser.open(url, width=width, scheme="dark" if width < 480 else "light")
    await browser.until("return document.getElementById('tiles').innerText", lambda result: "/28 held" in result)
    await browser.until(PROBLEMS, lambda result: "GPU 3 is Unhealthy" in result)
    assert await browser.run("return document.documentElement.scrollWidth") <= width
    assert await browser.run("return document.documentElement.scrollHeight") <= height
    tiles = "return [...document.querySelectorAll('#tiles > .tiles .tile')].length"
    assert await browser.run(tiles) == (16 if width > 480 else 3)  # healthy tiles are folded on a phone
    await browser.run("document.getElementById('pods-all').open = true")
    assert await browser.run("return document.querySelectorAll('#pods tbody tr').length") == 100
    await browser.run("document.getElementById('pods-all').open = false")
    await seen(browser, f"crowded-{width}")
    clean(browser, url)


async def test_nothing_sticks_out_at_any_width(browser, daemon, kubelet, port, url):
    await crowded(daemon, kubelet, port)
    for width in (1920, 1280, 1160, 800, 600, 390, 320):
        await browser.open(url, width=width)
        await browser.until(PROBLEMS, lambda result: "GPU 3 is Unhealthy" in result)
        await browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true })")
        assert await browser.run("return document.documentElement.scrollWidth") <= width


async def test_names_of_pods_are_texts_and_scripts_of_others_never_run(browser, daemon, kubelet, port, url):
    await serving(daemon, kubelet, port)
    hostile = "<img src=x onerror=window.caught=1><script>window.caught=1</script>"
    await kubelet.admit(hostile, {GPU: 1})
    await browser.open(url)
    await browser.until("return document.getElementById('pods').textContent", lambda result: hostile in result)
    assert await browser.run("return document.querySelectorAll('#pods img').length") == 0
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
    headline = await browser.run(HEADLINE)
    assert headline == "Nothing is served yet"
    assert len(await browser.run(PROBLEMS)) > 20
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
