"""The time from a hardware fault until the kubelet's streams have it."""

import time
from collections.abc import Sequence
from pathlib import Path

from bench.kubelet import DeviceList, ListStream
from bench.node import serving
from bench.plan import Plan
from bench.process import state_dir
from bench.quantiles import median, percentile
from bench.table import Judged, Row
from gpu_plugin.runtime import control

XID = 79
APPLICATION_XID = 13
"""An Xid that does not make the GPU Unhealthy, so no list is sent."""

BETWEEN = 0.1
"""Seconds between two changes, twice as long as the daemon waits to send several changes as one list."""


def xid_to_streams(plan: Plan, directory: Path) -> list[Row]:
    """Measure the time from an Xid in the driver to the list on the slower of two streams, on each GPU in turn.

    The daemon returns the time of the Xid on the same clock as perf_counter (CLOCK_MONOTONIC).
    """
    taken, asked = [], []
    with serving(directory, "--health-poll-interval=100ms", "--flap-guard=0s") as node:
        state = state_dir(directory)
        second = ListStream(node.registration.socket)
        try:
            second.next()
            streams = (node.stream, second)
            gpus = range(len(node.ids))
            for _ in range(2 * plan.rounds):
                for gpu in gpus:
                    time.sleep(BETWEEN)
                    raised = float(control.request(state, "fault", gpu=gpu, xid=XID)["at"])
                    lists = [stream.next() for stream in streams]
                    _read_until(streams, lists, unhealthy=gpu + 1)
                    taken.append((max(received.at for received in lists) - raised) * 1000)
                for gpu in gpus:
                    control.request(state, "fault", gpu=gpu, heal=True)
                _read_until(streams, lists, unhealthy=0)
                time.sleep(BETWEEN)
                sent = time.perf_counter()
                control.request(state, "fault", gpu=0, xid=APPLICATION_XID)
                asked.append((time.perf_counter() - sent) * 1000)
        finally:
            second.close()
    return [
        Row(
            "Xid to both streams",
            "ms",
            len(taken),
            median(taken),
            percentile(taken, 99),
            5,
            Judged.P99,
            note=f"worst {max(taken):.1f} ms",
            series={"ms": taken},
        ),
        Row(
            "asking for a fault, alone",
            "ms",
            len(asked),
            median(asked),
            percentile(asked, 99),
            note="a round trip on the control socket; not in the row above",
            series={"ms": asked},
        ),
    ]


def _read_until(streams: Sequence[ListStream], lists: list[DeviceList], unhealthy: int) -> None:
    """Read each stream until its newest list has this number of Unhealthy devices. `lists` gets the newest lists."""
    for at, stream in enumerate(streams):
        while lists[at].unhealthy != unhealthy:
            lists[at] = stream.next()
