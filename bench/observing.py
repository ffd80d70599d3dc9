"""The cost of observing: all observing parts together, the Kubernetes client, and a listener without requests."""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.api_server import NODE, serving_api
from bench.counted import Count
from bench.node import serving
from bench.page import READERS, UPDATE, read, status
from bench.plan import MeasurementError, Plan
from bench.probes import ADDRESS, asking, free_port
from bench.process import cpu_seconds, memory
from bench.quantiles import median, median_ratio
from bench.scrape import DEVICES, PODS, REQUEST, checked, full_node
from bench.table import Row

SAMPLES = 3
"""The number of pairs of daemons, one with the observed feature and one without. Each pair takes half a minute."""

WATCHED = 10
"""The number of scrapes, one after each update of the open pages."""

SETTLE = 2.0
"""Seconds after which a start, and the work after the last request, have ended."""

CLIENT = ("httpx2", "httpcore2", "lightkube", "h11")
"""The packages of the Kubernetes client."""


def together(plan: Plan, directory: Path) -> list[Row]:
    """Measure the memory of listener, scrapes, status page with its readers, and pods by device, on a full node."""
    del plan
    directory.mkdir()
    grown = []
    for at in range(SAMPLES):
        pair = directory / str(at)
        pair.mkdir()
        grown.append(_observed(pair / "with", free_port()) - _observed(pair / "without", None))
    note = f"16 GPUs, {DEVICES} devices, {PODS} pods; a scrape every two seconds, {READERS} open pages"
    return [
        Row(
            "observing, all of it: RSS more than without",
            "MiB",
            SAMPLES,
            median(grown),
            None,
            6,
            note=note,
            series={"mib": grown},
        )
    ]


def _observed(directory: Path, port: int | None) -> float:
    """Return the resident memory in MiB of a full node's daemon.

    With a port, the daemon is observed in all ways. Without a port, it is idle for the same time.
    """
    directory.mkdir()
    with ExitStack() as stack:
        node = stack.enter_context(full_node(directory, port))
        if port is None:
            time.sleep(WATCHED * UPDATE + SETTLE)
            return memory(node.daemon.pid, "VmRSS")
        ask = asking(port)
        checked(ask)
        status(ask)
        for _ in range(WATCHED):
            read(ask, UPDATE)
            ask(REQUEST)
        time.sleep(SETTLE)
        return memory(node.daemon.pid, "VmRSS")


def kubernetes_client(plan: Plan, directory: Path) -> list[Row]:
    """Measure the memory of the Kubernetes client with a watch on the Node, and the modules imported without the feature: 0."""
    del plan
    directory.mkdir()
    grown, imported = [], []
    with serving_api(directory) as api:
        flags = ("--cordon-annotation=true", f"--node-name={NODE}", f"--kubeconfig={api.kubeconfig}")
        for at in range(SAMPLES):
            resident = []
            for which, more in (("without", ()), ("with", flags)):
                file = directory / f"imported-{which}-{at}"
                program = (sys.executable, "-m", "bench.imported", str(file), ",".join(CLIENT))
                with serving(directory / f"{which}-{at}", *more, program=program) as node:
                    if more:
                        api.wait()
                    time.sleep(SETTLE)
                    resident.append(memory(node.daemon.pid, "VmRSS"))
                    node.stream.close()
                    node.daemon.terminate()
                imported.append(int(file.read_text()))
            grown.append(resident[1] - resident[0])
    if not imported[1]:
        raise MeasurementError(
            f"the daemon watches the Node and has imported none of {', '.join(CLIENT)}: update CLIENT"
        )
    return [
        Row(
            "Kubernetes client, a watch: RSS more than without",
            "MiB",
            SAMPLES,
            median(grown),
            None,
            14,
            series={"mib": grown},
        ),
        Row(
            "Kubernetes client, not asked for: its modules",
            "modules",
            SAMPLES,
            max(imported[::2]),
            budget=0,
            note=f"{imported[1]} where the Node is watched",
        ),
    ]


def unasked(plan: Plan, directory: Path) -> list[Row]:
    """Measure processor time and NVML calls of a daemon with an unused listener and, at the same time, of a daemon without it."""
    directory.mkdir()
    flags: Sequence[tuple[str, ...]] = ((f"--http-address={ADDRESS}:{free_port()}",), ())
    with ExitStack() as stack:
        counts, pids = [], []
        for at, more in enumerate(flags):
            file = directory / f"calls-{at}"
            file.touch()
            program = (sys.executable, "-m", "bench.counted", str(file))
            node = stack.enter_context(serving(directory / str(at), *more, program=program))
            counts.append(Count(file))
            stack.callback(counts[-1].close)
            pids.append(node.daemon.pid)
        time.sleep(SETTLE)
        used: list[list[float]] = [[], []]
        calls: list[list[float]] = [[], []]
        for _ in range(SAMPLES):
            before = [(cpu_seconds(pid), count.read()) for pid, count in zip(pids, counts, strict=True)]
            time.sleep(plan.idle_seconds)
            for side, (pid, count) in enumerate(zip(pids, counts, strict=True)):
                used[side].append((cpu_seconds(pid) - before[side][0]) / plan.idle_seconds * 1000)
                calls[side].append((count.read() - before[side][1]) / plan.idle_seconds)
    return [
        Row(
            f"listener that nobody asks: {figure}",
            unit,
            SAMPLES,
            median(ours),
            bare=median(bare),
            ratio=median_ratio(ours, bare),
            ratio_budget=1.1,
            note="bare: no listener",
            series={unit: ours, f"bare {unit}": bare},
        )
        for figure, unit, (ours, bare) in (("idle CPU", "ms/s", used), ("NVML calls", "calls/s", calls))
    ]
