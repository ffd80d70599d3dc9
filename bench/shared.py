"""Many devices in several resources: 8 GPUs with 7 slices each, and 8 replicas of each slice."""

import time
from pathlib import Path

from bench.kubelet import Kubelet, ListStream, listening
from bench.plan import MeasurementError, Plan
from bench.process import DAEMON, Child, memory, running, state_dir
from bench.quantiles import median, percentile
from bench.table import Row
from gpu_plugin.state.log import FILES

PROFILE = "h100-mig-single"
SLICES = "nvidia.com/mig-1g.10gb"
REPLICAS = 8
FIRST, OTHERS = "nvidia.com/first", "nvidia.com/others"
"""The resource of GPU 0's slices, and the resource of all other slices."""

QUIET = 1.0
"""Seconds after one resource has its new list, in which the unchanged resource must get no list."""


def _forget_state(directory: Path) -> None:
    for name in FILES:
        (state_dir(directory) / name).unlink()


def many_devices(plan: Plan, directory: Path) -> list[Row]:
    """Measure the time to the first lists, a change of one resource without a list for the other, and the memory."""
    started, applied = [], []
    directory.mkdir()
    file = directory / "config.yaml"
    with listening(directory) as kubelet:
        file.write_text("version: v1\n")
        with running(_command(directory, "--mig-strategy", "mixed"), directory / "log") as daemon:
            stream = ListStream(kubelet.registered().socket)
            stream.next()
            plain = memory(daemon.pid, "VmRSS")
            daemon.terminate()  # before the stream is closed, since the daemon would register again
            stream.close()
        _forget_state(directory)  # so that the next daemon has no device to retire
        for at in range(plan.rounds + 1):
            file.write_text(_sharing(REPLICAS))
            with running(_command(directory, "--mig-strategy", "mixed"), directory / "log") as daemon:
                streams, began = _served(kubelet, daemon)
                resident = memory(daemon.pid, "VmRSS")
                change = _change(file, streams)
                daemon.terminate()
                for stream in streams.values():
                    stream.close()
            _forget_state(directory)
            if at:
                started.append(began * 1000)
                applied.append(change * 1000)
    figure = f"{8 * 7 * REPLICAS} devices"
    return [
        Row(f"{figure}: start to lists", "ms", len(started), median(started), percentile(started, 99), 400),
        Row(
            f"{figure}: config change",
            "ms",
            len(applied),
            median(applied),
            percentile(applied, 99),
            2000,
            note=f"written to new list; nothing on the other resource for {QUIET:g} s after",
        ),
        Row(
            f"{figure}: RSS more than 56 unshared",
            "MiB",
            1,
            max(0.0, resident - plain),
            budget=2,
            note=f"{resident:.1f} MiB",
        ),
    ]


def _command(directory: Path, *more: str) -> list[str]:
    return [
        *(DAEMON, "run", "--simulate", PROFILE),
        *("--device-plugin-dir", str(directory), "--state-dir", str(state_dir(directory))),
        *("--config-file", str(directory / "config.yaml"), *more),
    ]


def _sharing(replicas: int) -> str:
    own = ", ".join(f"'0:{index}'" for index in range(7))
    return (
        "version: v1\nsharing: {timeSlicing: {resources: [\n"
        f"  {{name: {SLICES}, rename: {FIRST}, devices: [{own}], replicas: {replicas}}},\n"
        f"  {{name: {SLICES}, rename: {OTHERS}, devices: 49, replicas: {REPLICAS}}}]}}}}\n"
    )


def _served(kubelet: Kubelet, daemon: Child) -> tuple[dict[str, ListStream], float]:
    """Return the streams of both resources, and the seconds until both had their first list."""
    streams = {}
    for _ in range(2):
        registration = kubelet.registered()
        streams[registration.resource] = ListStream(registration.socket)
    lists = {name: stream.next() for name, stream in streams.items()}
    counts = {name: len(received.ids()) for name, received in lists.items()}
    if counts != {FIRST: 7 * REPLICAS, OTHERS: 49 * REPLICAS}:
        raise MeasurementError(f"the daemon serves other devices than expected: {counts}")
    return streams, max(received.at for received in lists.values()) - daemon.began


def _change(file: Path, streams: dict[str, ListStream]) -> float:
    """Return the seconds from a write that adds a replica in one resource to the resource's new list."""
    written = time.perf_counter()
    file.write_text(_sharing(REPLICAS + 1))
    received = streams[FIRST].next()
    if len(received.ids()) != 7 * (REPLICAS + 1):
        raise MeasurementError(f"the change led to {len(received.ids())} devices")
    if streams[OTHERS].within(QUIET) is not None:
        raise MeasurementError("a change of one resource sent a list on another")
    return received.at - written
