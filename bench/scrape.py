"""The cost of a scrape on a full node: 16 GPUs, 448 devices, 100 pods that hold them. `python -m bench.scrape PORT` scrapes."""

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc

from bench.calls import WARM_UP, Side, allocate, two_processors
from bench.kubelet import dial, unary
from bench.node import Node, serving
from bench.plan import PATIENCE, MeasurementError, Plan
from bench.probes import asking, free_port
from bench.process import memory, running
from bench.quantiles import median, median_ratio, percentile
from bench.table import Row
from gpu_plugin.kubelet import wire
from gpu_plugin.kubelet._api import v1

PROFILE = "dgx2-16"
REPLICAS, PODS, DEVICES = 28, 100, 448
RESOURCE = "nvidia.com/gpu"

EVERY = 1.05
"""Seconds between two scrapes. The daemon makes the text at most once a second."""

SCRAPES = 12

ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
REQUEST = f"GET /metrics HTTP/1.1\r\nHost: node\r\nAccept: {ACCEPT}\r\n\r\n".encode()


def measure(plan: Plan, directory: Path) -> list[Row]:
    """Measure the time of a scrape, its effect on Allocate, and the memory after scrapes."""
    directory.mkdir()
    with ExitStack() as stack:
        client, server = stack.enter_context(two_processors())
        port = free_port()
        node = stack.enter_context(full_node(directory, port))
        pin(node.daemon.pid, server)
        unscraped = memory(node.daemon.pid, "VmRSS")
        ask = asking(port)
        text = checked(ask)
        taken = []
        for _ in range(SCRAPES):
            time.sleep(EVERY)
            began = time.perf_counter()
            ask(REQUEST)
            taken.append((time.perf_counter() - began) * 1000)
        grown = memory(node.daemon.pid, "VmRSS") - unscraped
        return [
            Row(
                f"scrape: 16 GPUs, {DEVICES} devices, {PODS} pods",
                "ms",
                len(taken),
                median(taken),
                percentile(taken, 99),
                20,
                note=f"{len(text) / 1024:.0f} KiB in {len(text.splitlines())} lines, written in pieces of 2 ms",
                series={"ms": taken},
            ),
            Row("scrape: RSS more than before the first", "MiB", 1, grown, budget=6),
            *_beside(plan, node, port, directory, client),
        ]


def _beside(plan: Plan, node: Node, port: int, directory: Path, client: set[int]) -> list[Row]:
    """Measure Allocate with a scrape every second, in turn with Allocate without scrapes."""
    with ExitStack() as stack:
        channel = stack.enter_context(dial(node.registration.socket))
        call = unary(channel, wire.ALLOCATE)
        requests = [allocate([identifier]) for identifier in node.ids]
        scraped, alone = (Side(node.daemon, call, itertools.cycle(requests)) for _ in range(2))
        for request in itertools.islice(alone.requests, WARM_UP):
            call(request)
        # Enough calls for several scrapes in each round.
        calls = max(plan.calls, 10_000)
        for _ in range(plan.rounds):
            alone.round(calls)
            with running([sys.executable, "-m", "bench.scrape", str(port)], directory / "scraper-log") as scraper:
                pin(scraper.pid, client)
                if not scraper.output.readline():
                    raise MeasurementError(f"the scrapes do not begin: {scraper.log_tail()}")
                scraped.round(calls)
    return [
        Row(
            "Allocate p99, scraped every second",
            "ms",
            plan.rounds * calls,
            median(scraped.p99) / 1000,
            bare=median(alone.p99) / 1000,
            ratio=median_ratio(scraped.p99, alone.p99),
            ratio_budget=1.1,
            note="bare: not scraped",
            series={"p99_us": scraped.p99, "bare_p99_us": alone.p99},
        )
    ]


@contextmanager
def full_node(directory: Path, port: int | None) -> Iterator[Node]:
    """Serve a node of 16 GPUs with 28 replicas each, which 100 pods hold. With a port, the daemon has a listener."""
    file, socket = directory / "config.yaml", directory / "pods.sock"
    file.write_text(
        f"version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - {{name: {RESOURCE}, replicas: {REPLICAS}}}\n"
    )
    flags = [f"--config-file={file}", f"--pod-resources-socket={socket}"]
    if port is not None:
        flags.append(f"--http-address=127.0.0.1:{port}")
    with serving(directory / "served", *flags, profile=PROFILE) as node:
        if len(node.ids) != DEVICES:
            raise MeasurementError(f"{len(node.ids)} devices instead of {DEVICES}")
        with _pod_resources(socket, node.ids):
            yield node


@contextmanager
def _pod_resources(socket: Path, ids: list[str]) -> Iterator[None]:
    """Serve PodResources: each pod holds about the same number of these devices."""
    pods = [
        v1.PodResources(
            f"training-job-{number:04}-worker",
            "machine-learning",
            [v1.ContainerResources("main", [v1.ContainerDevices(RESOURCE, ids[number::PODS])])],
        )
        for number in range(PODS)
    ]
    answer = bytes(v1.ListPodResourcesResponse(pods))

    def listed(request: bytes, context: grpc.ServicerContext) -> bytes:
        del request, context
        return answer

    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "List": grpc.unary_unary_rpc_method_handler(listed, None, None)
    }
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1.PodResourcesLister", handlers),))
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


def checked(ask: Callable[[bytes], bytes]) -> bytes:
    """Return the answer once it has every device with its pod, and the readings of every GPU."""
    deadline = time.perf_counter() + PATIENCE
    while True:
        text = ask(REQUEST)
        if (
            text.endswith(b"# EOF\n")
            and text.count(b"\ngpu_plugin_pod_device{") == DEVICES
            and text.count(b"\ngpu_plugin_gpu_temperature_celsius{") == 16
        ):
            return text
        if time.perf_counter() > deadline:
            raise MeasurementError(f"not the metrics of a full node: {text[:400]!r}")
        time.sleep(EVERY)


def pin(pid: int, processors: set[int]) -> None:
    """Run a process on these processors only."""
    os.sched_setaffinity(pid, processors)


def _scrape(port: int) -> None:
    """Scrape every second until the process is ended."""
    ask = asking(port)
    ask(REQUEST)
    print("scraped", flush=True)
    while True:
        time.sleep(EVERY)
        ask(REQUEST)


if __name__ == "__main__":
    _scrape(int(sys.argv[1]))
