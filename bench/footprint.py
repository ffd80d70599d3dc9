"""Memory, and CPU when nothing happens."""

import itertools
import time
from pathlib import Path

from bench.calls import allocate, preferred_requests
from bench.kubelet import dial, unary
from bench.node import serving
from bench.plan import Plan
from bench.process import cpu_seconds, memory, threads
from bench.table import Row
from gpu_plugin.kubelet import wire

CALLS = 100
"""The number of Allocate calls, and of GetPreferredAllocation calls, before memory is read."""

SETTLE = 2.0
"""Seconds between the last call and the idle time, longer than any timer that a call or the start begins."""


def memory_and_idling(plan: Plan, directory: Path) -> list[Row]:
    """Measure resident memory after 200 calls, its peak, and the share of a core used while idle at default settings."""
    with serving(directory) as node:
        with dial(node.registration.socket) as channel:
            allocations = itertools.cycle([allocate([identifier]) for identifier in node.ids])
            preferences = itertools.cycle(preferred_requests(node.ids))
            calls = (unary(channel, wire.ALLOCATE), allocations), (unary(channel, wire.PREFERRED), preferences)
            for call, requests in calls:
                for request in itertools.islice(requests, CALLS):
                    call(request)
        pid = node.daemon.pid
        resident, peak, count = memory(pid, "VmRSS"), memory(pid, "VmHWM"), threads(pid)
        time.sleep(SETTLE)
        began, used = time.perf_counter(), cpu_seconds(pid)
        time.sleep(plan.idle_seconds)
        used = cpu_seconds(pid) - used
        elapsed = time.perf_counter() - began
    return [
        Row("RSS after 200 calls", "MiB", 1, resident, budget=40, note=f"peak {peak:.1f} MiB, {count} threads"),
        Row(
            "idle CPU",
            "% core",
            1,
            used / elapsed * 100,
            budget=0.2,
            note=f"{used * 1000:.1f} ms in {elapsed:.1f} s",
        ),
    ]
