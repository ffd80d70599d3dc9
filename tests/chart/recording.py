"""Scrapes of real daemons on simulated nodes, and a real Prometheus with these scrapes over the last half hour."""

import json
import random
import re
import socket
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from demo.stand_in_kubelet import StandInKubelet
from demo.stand_in_kubelet.client import CallError, PluginClient
from gpu_plugin.kubelet import messages, wire
from gpu_plugin.runtime.control import request
from tests.chart.prometheus import Prometheus
from tests.node.daemon import GPU, DaemonProcess, healthy
from tests.short_paths import short_directory

PATIENCE = 300.0
"""Seconds for each event. The tests run with the processor time that a cluster leaves."""

MINUTES = 30
STEP = 60

SMALL_MIG = "nvidia.com/mig-1g.5gb"

HELD_BACK = 3
"""The GPU of the second node that an operator holds back."""

Scrapes = Mapping[str, Sequence[str]]
"""By node: OpenMetrics, from before the faults and from after them."""


def record() -> Scrapes:
    """Has two nodes run pods and then meet faults. A node of whole GPUs, and one half of whose GPUs are in MIG mode."""
    return anyio.run(_record)


async def _record() -> Scrapes:
    whole: list[str] = []
    parts: list[str] = []
    async with anyio.create_task_group() as nodes:
        nodes.start_soon(_whole, whole)
        nodes.start_soon(_parts, parts)
    return {"node-1": whole, "node-2": parts}


async def _whole(scrapes: list[str]) -> None:
    with _daemon("hgx-h100") as (daemon, port):
        async with StandInKubelet(daemon.directory) as kubelet:
            await kubelet.wait_for(healthy(kubelet, 8), timeout=PATIENCE)
            await kubelet.admit("train-0", {GPU: 4})
            await kubelet.admit("train-1", {GPU: 1})
            scrapes.append(
                await _scraped(port, "gpu_plugin_pod_device{", 'gpu_plugin_registered{resource="nvidia.com/gpu"} 1')
            )
            (endpoint,) = daemon.directory.glob("gpu-plugin*.sock")
            client = PluginClient(GPU, str(endpoint))
            await client.dial(PATIENCE, 0.1, random.Random(0))
            unknown = messages.ContainerAllocateRequest(["GPU-that-nobody-knows"])
            try:
                await client.call(wire.ALLOCATE, bytes(messages.AllocateRequest([unknown])))
            except CallError:
                pass
            else:
                raise AssertionError("a GPU that nobody knows was allocated")
            client.close()
            for gpu in range(4):
                daemon.fault(gpu, xid=79)
            daemon.fault(4, **{"pcie-width": 4})
            daemon.fault(4, **{"remap-pending": True})
            daemon.fault(5, **{"remap-failure": True})
            daemon.fault(5, **{"clocks-event-reasons": 0x40})
            daemon.fault(6, error=999)
            daemon.fault(7, hang=600)
            wanted = (
                'state="unhealthy"} 1',
                'state="degraded"} 1',
                "gpu_row_remap_pending{",
                'reason="hw_thermal_slowdown"} 1',
                "gpu_plugin_nvml_call_errors_total{",
                'code="NOT_FOUND"} 1',
                "gpu_plugin_nvml_calls_hanging 1",
            )
            scrapes.append(await _scraped(port, *wanted))


async def _parts(scrapes: list[str]) -> None:
    with _daemon("a100-mig-mixed", "--mig-strategy=mixed") as (daemon, port):
        async with StandInKubelet(daemon.directory) as kubelet:
            await kubelet.wait_for(healthy(kubelet, 4), timeout=PATIENCE)
            await kubelet.wait_for(healthy(kubelet, 8, SMALL_MIG), timeout=PATIENCE)
            await kubelet.admit("notebook", {SMALL_MIG: 2})
            scrapes.append(await _scraped(port, f'resource="{SMALL_MIG}"', "gpu_plugin_pod_device{"))
            daemon.fault(0, temperature=88)
            request(daemon.state, "cordon", gpu=HELD_BACK)
            scrapes.append(await _scraped(port, "temperature_celsius", "} 88", 'by="cordon"} 1'))


@dataclass(frozen=True)
class Incident:
    """A simulated node with one cause of trouble, and the alerts that must fire for it.

    `faults` are the faults of each GPU by its index, `cordoned` are the GPUs that an operator holds back. `until` are texts of
    the scrape in which the trouble is known.
    """

    profile: str
    alerts: set[str]
    until: Sequence[str] = ()
    faults: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    cordoned: Sequence[int] = ()
    kubelet_stops: bool = False
    flags: Sequence[str] = ()


MIXED = ("--mig-strategy=mixed",)

INCIDENTS: Mapping[str, Incident] = {
    "no-trouble": Incident("t4-4", set(), ('state="healthy"} 1',)),
    "xid-on-one-gpu": Incident("t4-4", {"GpuUnhealthy"}, ('xid="79"',), {2: {"xid": 79}}),
    "xid-on-the-only-gpu": Incident(
        "t4-4", {"GpuUnhealthy"}, ('xid="79"',), {0: {"xid": 79}}, flags=("--include-gpus=0",)
    ),
    "xid-on-all-gpus": Incident(
        "t4-4",
        {"GpuNodeUnhealthy"},
        ('devices_faulty{resource="nvidia.com/gpu"} 4',),
        {gpu: {"xid": 79} for gpu in range(4)},
    ),
    "only-gpu-of-a-resource": Incident(
        "a100-mig-mixed", {"GpuUnhealthy"}, ('signal="xid",xid="79"',), {7: {"xid": 79}}, flags=MIXED
    ),
    "driver-not-loaded": Incident(
        "t4-4",
        {"GpuDriverTrouble"},
        ("gpu_plugin_driver_up 0", 'faulty{resource="nvidia.com/gpu"} 4'),
        {gpu: {"error": 9} for gpu in range(4)},
    ),
    "hanging-call": Incident("t4-4", {"GpuUnhealthy"}, ('signal="hung",xid=""', "calls_hanging 1"), {1: {"hang": 600}}),
    "hot-gpu": Incident(
        "t4-4", {"GpuTemperatureNearThreshold"}, ('signal="slowdown-temperature",xid=""',), {1: {"temperature": 93}}
    ),
    "cordoned-gpus": Incident("t4-4", set(), ('devices_held_back{resource="nvidia.com/gpu"} 4',), cordoned=range(4)),
    "no-kubelet": Incident(
        "a100-mig-mixed",
        {"GpuResourceNotRegistered"},
        (f'registered{{resource="{GPU}"}} 0', f'registered{{resource="{SMALL_MIG}"}} 0', "attribution_up 0"),
        kubelet_stops=True,
        flags=MIXED,
    ),
}
"""By the name of the node."""


def record_incidents() -> Mapping[str, str]:
    """Return a scrape of each node of `INCIDENTS`, by its name."""
    scrapes: dict[str, str] = {}

    async def record_all() -> None:
        for name, incident in INCIDENTS.items():
            scrapes[name] = await _incident(incident)

    anyio.run(record_all)
    return scrapes


async def _incident(incident: Incident) -> str:
    with _daemon(incident.profile, *incident.flags) as (daemon, port):
        async with StandInKubelet(daemon.directory) as kubelet:
            count = 1 if incident.flags == ("--include-gpus=0",) else 4
            await kubelet.wait_for(healthy(kubelet, count), timeout=PATIENCE)
            for gpu, faults in incident.faults.items():
                daemon.fault(gpu, **faults)
            for gpu in incident.cordoned:
                request(daemon.state, "cordon", gpu=gpu)
            if incident.kubelet_stops:
                await kubelet.stop()
            return await _scraped(port, *incident.until)


def series(scrape: str, node: str) -> Iterator[tuple[str, str]]:
    """Yield the name and labels of each sample of a scrape, with these of its target, and the value."""
    for line in ("up 1", *(line for line in scrape.splitlines() if not line.startswith("#"))):
        name, labels, value = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line).groups()  # type: ignore[union-attr]
        target = f'node="{node}",instance="{node}:9480",job="gpu-plugin"'
        yield f"{name}{{{f'{labels},' if labels else ''}{target}}}", value


@contextmanager
def _daemon(profile: str, *flags: str) -> Iterator[tuple[DaemonProcess, int]]:
    with short_directory() as root:
        directory = root / "device-plugins"
        directory.mkdir()
        daemon = DaemonProcess(directory, profile=profile)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        try:
            daemon.start(f"--http-address=127.0.0.1:{port}", "--nvml-timeout=3s", *flags)
            yield daemon, port
        finally:
            daemon.kill()


async def _scraped(port: int, *texts: str) -> str:
    """The metrics, once they have all these texts."""
    text = ""
    with anyio.move_on_after(PATIENCE):
        while True:
            text = await anyio.to_thread.run_sync(_get, port)
            if all(each in text for each in texts):
                return text
            await anyio.sleep(0.1)  # there is no event for a changed scrape
    raise AssertionError(f"/metrics never had all of {texts}; missing: {[each for each in texts if each not in text]}")


def _get(port: int) -> str:
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=accept)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return str(answer.read().decode())


def names_and_labels(scrapes: Scrapes) -> dict[str, set[str]]:
    """The labels of each metric that there is, by the name of its samples."""
    found: dict[str, set[str]] = {}
    for texts in scrapes.values():
        for text in texts:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    found.setdefault(sample.name, set()).update(sample.labels)
    return found


class Recorded:
    """A running Prometheus with scrapes of the last minutes."""

    def __init__(self, port: int, now: int) -> None:
        self.now = now
        self._port = port

    def ask(self, expr: str, *, instant: bool) -> list[Mapping[str, Any]]:
        """The series that a query gives, now or over the time. Raises AssertionError with the reason of Prometheus."""
        times: Mapping[str, int] = (
            {"time": self.now} if instant else {"start": self.now - MINUTES * 60, "end": self.now, "step": STEP}
        )
        path = "query" if instant else "query_range"
        asked = urllib.parse.urlencode({"query": expr, **times}).encode()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/v1/{path}", asked, timeout=20) as answer:
                told = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expr}: {error.read().decode()}") from error
        return list(told["data"]["result"])


@contextmanager
def replayed(programs: Prometheus, scrapes: Scrapes) -> Iterator[Recorded]:
    """Run a Prometheus with these scrapes, which have the labels of the chart's PodMonitor."""
    now = int(time.time()) // STEP * STEP
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with (folder / "samples.txt").open("w") as file:
            file.writelines(_samples(scrapes, now))
        (folder / "prometheus.yml").write_text("{}\n")
        command = [str(programs.tool), "tsdb", "create-blocks-from", "openmetrics", "samples.txt", "data"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        command = [str(programs.server), "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
        command += ["--storage.tsdb.retention.time=10y", f"--web.listen-address=127.0.0.1:{port}"]
        with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as server:
            try:
                assert server.stderr is not None
                said: list[str] = []
                for line in server.stderr:
                    said.append(line)
                    if "Server is ready to receive web requests" in line:
                        break
                else:
                    raise AssertionError(f"Prometheus ended:\n{''.join(said)}")
                yield Recorded(port, now)
            finally:
                server.terminate()
                server.communicate()


def _samples(scrapes: Scrapes, now: int) -> Iterator[str]:
    """A third of the time before the plugins are restarted, a third after that, and a third with faults.

    The pods of a restarted plugin have other addresses, and for minutes both are seen.
    """
    begin, restart, fault = (now - MINUTES * part for part in (60, 40, 20))
    for node, (sound, faulty) in scrapes.items():
        for pod, text, first, last in (
            (0, sound, begin, restart),
            (1, sound, restart, fault - STEP),
            (1, faulty, fault, now),
        ):
            target = f'cluster="lab",node="{node}",instance="{node}-{pod}:9480",job="gpu-plugin"'
            for line in ("up 1", *(line for line in text.splitlines() if not line.startswith("#"))):
                name, labels, value = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line).groups()  # type: ignore[union-attr]
                own = f"{labels}," if labels else ""
                # honorLabels keeps the pod label of the plugin.
                scraped = "" if ",pod=" in f",{own}" else f',pod="gpu-plugin-{pod}"'
                for at in range(first, last + 1, STEP):
                    yield f"{name}{{{own}{target}{scraped}}} {value} {at}\n"
    yield "# EOF\n"
