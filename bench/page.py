"""The cost of the status page on a full node: 16 GPUs, 448 devices, 100 pods that hold them."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bench.calls import two_processors
from bench.plan import MeasurementError, Plan
from bench.probes import asking, free_port
from bench.process import memory
from bench.quantiles import median, percentile
from bench.scrape import DEVICES, PODS, full_node, pin
from bench.table import Row

EVERY = 1.05
"""Seconds between two answers. The daemon makes an answer at most once a second."""

PAGES, READERS = 12, 8

WATCHED = 10.0
"""Seconds for which pages are open."""

UPDATE = 2.0
"""Seconds between two requests of an open page."""

STATUS = b"GET /status.json HTTP/1.1\r\nHost: localhost\r\n\r\n"


def measure(plan: Plan, directory: Path) -> list[Row]:
    """Measure the time of the page, and its memory and processor time with its readers, in a daemon under regular scrapes."""
    del plan
    directory.mkdir()
    with ExitStack() as stack:
        _, server = stack.enter_context(two_processors())
        port = free_port()
        node = stack.enter_context(full_node(directory, port))
        pid = node.daemon.pid
        pin(pid, server)
        ask = asking(port)
        ask(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(EVERY)
        unseen = memory(pid, "VmRSS")
        answer = status(ask)
        taken = []
        for _ in range(PAGES):
            time.sleep(EVERY)
            began = time.perf_counter()
            ask(STATUS)
            taken.append((time.perf_counter() - began) * 1000)
        before, began = _processor(pid), time.perf_counter()
        read(ask, WATCHED)
        share = (_processor(pid) - before) / (time.perf_counter() - began) * 100
        grown = memory(pid, "VmRSS") - unseen
        return [
            Row(
                f"status page: 16 GPUs, {DEVICES} devices, {PODS} pods",
                "ms",
                len(taken),
                median(taken),
                percentile(taken, 99),
                50,
                note=f"{len(answer) / 1024:.0f} KiB",
                series={"ms": taken},
            ),
            Row(f"status page: RSS more than before, {READERS} readers", "MiB", 1, grown, budget=3),
            Row(f"status page: {READERS} readers, share of a processor", "%", 1, share, budget=5),
        ]


def _processor(pid: int) -> float:
    """Return the processor time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def status(ask: Callable[[bytes], bytes]) -> bytes:
    """Return the data of the page.

    Raises:
        MeasurementError: the answer is not the data.
    """
    answer = ask(STATUS)
    if not answer.startswith(b"HTTP/1.1 200") or b"machine-learning" not in answer:
        raise MeasurementError(f"this is not the data of a status page: {answer[:200]!r}")
    return answer


def read(ask: Callable[[bytes], bytes], seconds: float) -> None:
    """Request the data as `READERS` open pages do, for this time."""
    end = time.monotonic() + seconds

    def page() -> None:
        while time.monotonic() < end:
            ask(STATUS)
            time.sleep(UPDATE)

    pages = [threading.Thread(target=page) for _ in range(READERS)]
    for each in pages:
        each.start()
    for each in pages:
        each.join()
