"""CDI specifications: the time to make them, the delay of a start, and the time of Allocate with their names."""

import itertools
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from bench.calls import WARM_UP, Side, allocate, two_processors
from bench.kubelet import DeviceList, ListStream, dial, listening, unary
from bench.node import serving
from bench.plan import MeasurementError, Plan
from bench.process import ROOT, daemon_command, running
from bench.quantiles import median, median_ratio, percentile
from bench.table import Row
from gpu_plugin.kubelet import wire
from gpu_plugin.simulation.driver_files import shared_library

VERSION = "580.159.04"
LIBRARIES = 60

NODE = f"""\
name: sliced
driver_version: {VERSION}
count: 8
gpu:
  name: NVIDIA A100-SXM4-40GB
  architecture: 7
  memory_bytes: 42949672960
  mig_profiles: a100-40gb
  mig: [1g.5gb, 1g.5gb, 1g.5gb, 1g.5gb, 1g.5gb, 1g.5gb, 1g.5gb]
dev: [/dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia-uvm-tools, /dev/nvidia-modeset]
"""


def specifications(plan: Plan, directory: Path) -> list[Row]:
    """Measure the first specification of 8 GPUs of 7 slices each with 60 libraries, and a check that finds no change."""
    first: list[float] = []
    looks: list[float] = []
    found: dict[str, float] = {}
    for at in range(plan.rounds):
        place = directory / str(at)
        _driver_root(place / "driver")
        (place / "node.yaml").write_text(NODE)
        command = [sys.executable, "-m", "bench.specs_once", str(place)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MeasurementError(f"bench.specs_once: {done.stderr[-500:]}")
        result = json.loads(done.stdout)
        first.append(result.pop("first_ms"))
        looks += result.pop("looks_ms")
        found = result
    note = f"{found['devices']} devices, {found['mounts']} mounts, {found['bytes'] / 1024:.0f} KiB; imports and write included"
    if (found["searches"], found["rewritten"]) != (1, 0):
        raise MeasurementError(f"checks without a change searched or wrote: {found}")
    return [
        Row(
            "CDI specification of 8 x 7 slices, 60 libraries",
            "ms",
            len(first),
            median(first),
            percentile(first, 99),
            150,
            note=note,
            series={"ms": first},
        ),
        Row("CDI: a look where nothing changed", "ms", len(looks), median(looks), percentile(looks, 99), 5),
        Row("CDI: file system calls of such a look", "calls", len(looks), found["calls"], None, 400, note="every 5 s"),
    ]


def allocate_by_name(plan: Plan, directory: Path) -> list[Row]:
    """Measure Allocate of one GPU by CDI name, in turn with Allocate by environment variable."""
    directory.mkdir()
    specs = directory / "specs"
    flags = ("--device-list-strategy=cdi-cri", f"--cdi-dir={specs}")
    with ExitStack() as stack:
        client, server = stack.enter_context(two_processors())
        plain = stack.enter_context(serving(directory / "plain"))
        named = stack.enter_context(serving(directory / "named", *flags))
        os.sched_setaffinity(0, client)
        _settled(named.stream, DeviceList(0, b"Unhealthy"))
        sides = []
        for node in (named, plain):
            os.sched_setaffinity(node.daemon.pid, server)
            channel = stack.enter_context(dial(node.registration.socket))
            requests = [allocate([identifier]) for identifier in node.ids]
            call = unary(channel, wire.ALLOCATE)
            for request in (requests * WARM_UP)[:WARM_UP]:
                call(request)
            sides.append(Side(node.daemon, call, itertools.cycle(requests)))
        for _ in range(plan.rounds):
            for side in sides:
                side.round(plan.calls)
    by_name, by_variable = sides
    return [
        Row(
            "Allocate 1 by CDI name",
            "ms",
            plan.rounds * plan.calls,
            median(by_name.p50) / 1000,
            median(by_name.p99) / 1000,
            bare=median(by_variable.p50) / 1000,
            ratio=median_ratio(by_name.p50, by_variable.p50),
            ratio_budget=1.1,
            note="bare: the same daemon with envvar",
        )
    ]


def start(plan: Plan, directory: Path) -> list[Row]:
    """Measure process start to Register with CDI names, in turn with envvar, with and without an earlier specification."""
    directory.mkdir()
    taken: dict[str, list[float]] = {"plain": [], "left": [], "fresh": []}
    with listening(directory) as kubelet:
        for at in range(2 * plan.rounds + 1):
            for kind, times in taken.items():
                specs = directory / "specs"
                if kind == "fresh":
                    for file in specs.glob("*.json"):
                        file.unlink()
                flags = () if kind == "plain" else ("--device-list-strategy=cdi-cri", f"--cdi-dir={specs}")
                with running(daemon_command(directory, *flags), directory / "log") as daemon:
                    registration = kubelet.registered()
                    stream = ListStream(registration.socket)
                    try:
                        _settled(stream, stream.next())
                        daemon.terminate()
                    finally:
                        stream.close()
                if at:
                    times.append((registration.at - daemon.began) * 1000)
    rows = []
    for kind, what in (("left", "after a restart"), ("fresh", "the first time")):
        later = [one - other for one, other in zip(taken[kind], taken["plain"], strict=True)]
        note = f"start to registered {median(taken[kind]):.0f} ms, with envvar {median(taken['plain']):.0f} ms"
        rows.append(
            Row(
                f"CDI: start to registered, later {what}",
                "ms",
                len(later),
                median(taken[kind]) - median(taken["plain"]),
                None,
                10,
                note=note,
                series={"later_ms": later, **taken},
            )
        )
    return rows


def _settled(stream: ListStream, last: DeviceList) -> None:
    """Wait for a list without an unhealthy device. All devices are unhealthy until the specification is written."""
    while last.unhealthy:
        last = stream.next()


def _driver_root(root: Path) -> None:
    libraries = root / "usr/lib64"
    libraries.mkdir(parents=True)
    for name in ("libcuda", "libnvidia-ml", *(f"libnvidia-part{at}" for at in range(LIBRARIES - 2))):
        (libraries / f"{name}.so.{VERSION}").write_bytes(shared_library(f"{name}.so.1"))
        (libraries / f"{name}.so.1").symlink_to(f"{name}.so.{VERSION}")
