"""The cost of the listener for probes and metrics: its memory, and the time of an answer in comparison with a bare server."""

import itertools
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bench.calls import WARM_UP, Side, two_processors
from bench.node import serving
from bench.plan import PATIENCE, MeasurementError, Plan
from bench.process import memory, running
from bench.quantiles import median, median_ratio
from bench.table import Row

ADDRESS = "127.0.0.1"

SETTLE = 1.0
"""Seconds between the first list and the reading of memory. The GPUs have been checked by then."""


def measure(plan: Plan, directory: Path) -> list[Row]:
    """Measure the memory of a listener after a request for each page, and the time of two pages, in turn with a bare server."""
    directory.mkdir()
    grown = [_grown(directory / str(at)) for at in range(plan.rounds)]
    rows = [
        Row("listener: RSS more than without", "MiB", len(grown), median(grown), budget=3, series={"mib": grown}),
    ]
    with ExitStack() as stack:
        client, server = stack.enter_context(two_processors())
        os.sched_setaffinity(0, client)
        port = free_port()
        node = stack.enter_context(serving(directory / "served", f"--http-address={ADDRESS}:{port}"))
        os.sched_setaffinity(node.daemon.pid, server)
        for page, budget in (("livez", 1.0), ("metrics", 1.0)):
            answer = _checked(asking(port, page))
            (directory / page).write_bytes(answer)
            bare_port = free_port()
            command = [sys.executable, "-m", "bench.bare_http", str(bare_port), str(directory / page)]
            bare = stack.enter_context(running(command, directory / "bare-log"))
            if not bare.output.readline():
                raise MeasurementError(f"the bare server does not start: {bare.log_tail()}")
            os.sched_setaffinity(bare.pid, server)
            request = itertools.cycle([f"GET /{page} HTTP/1.1\r\nHost: node\r\n\r\n".encode()])
            ours, compared = sides = (
                Side(node.daemon, asking(port), request),
                Side(bare, asking(bare_port), request),
            )
            for side in sides:
                for sent in itertools.islice(side.requests, WARM_UP):
                    side.call(sent)
            for _ in range(plan.rounds):
                for side in sides:
                    side.round(plan.calls)
            rows.append(_row(f"/{page}, {len(answer) / 1024:.1f} KiB", plan, ours, compared, budget))
    return rows


def free_port() -> int:
    """Return a free TCP port."""
    with socket.create_server((ADDRESS, 0)) as free:
        return int(free.getsockname()[1])


def asking(port: int, page: str = "") -> Callable[[bytes], bytes]:
    """Return a function that sends a request on a new connection and returns the answer. An empty request means GET `page`."""

    def ask(request: bytes) -> bytes:
        with socket.create_connection((ADDRESS, port), timeout=PATIENCE) as connection:
            connection.sendall(request or f"GET /{page} HTTP/1.1\r\nHost: node\r\n\r\n".encode())
            received = bytearray()
            while more := connection.recv(65536):
                received += more
        return bytes(received)

    return ask


def _grown(directory: Path) -> float:
    """Return the memory of a listener in MiB after every page was requested."""
    directory.mkdir()
    resident = []
    for at, flags in enumerate(([], [f"--http-address={ADDRESS}:{free_port()}"])):
        with serving(directory / str(at), *flags) as node:
            for flag in flags:
                for page in ("startupz", "readyz", "livez", "metrics"):
                    for _ in range(8):
                        _checked(asking(int(flag.rpartition(":")[2]), page))
            time.sleep(SETTLE)
            resident.append(memory(node.daemon.pid, "VmRSS"))
    without, listening = resident
    return listening - without


def _checked(ask: Callable[[bytes], bytes]) -> bytes:
    """Return the answer to a request once it is successful. The first check of the GPUs may still run."""
    deadline = time.perf_counter() + PATIENCE
    while not (answer := ask(b"")).startswith(b"HTTP/1.1 200 "):
        if time.perf_counter() > deadline:
            raise MeasurementError(f"not the answer one would expect: {answer[:200]!r}")
    return answer


def _row(figure: str, plan: Plan, served: Side, bare: Side, budget: float) -> Row:
    return Row(
        f"listener: {figure}",
        "ms",
        plan.rounds * plan.calls,
        median(served.p50) / 1000,
        median(served.p99) / 1000,
        budget,
        bare=median(bare.p50) / 1000,
        ratio=median_ratio(served.p50, bare.p50),
        note=f"server CPU {median(served.cpu):.0f} us a request, bare {median(bare.cpu):.0f}",
        series={"p50_us": served.p50, "p99_us": served.p99, "bare_p50_us": bare.p50, "bare_p99_us": bare.p99},
    )
