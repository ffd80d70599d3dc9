"""Every fault of a node, as the kubelet, the operator and the next process of the daemon see it."""

import signal
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import pytest

from demo.stand_in_kubelet.journal import EventKind
from gpu_plugin.cli import main
from gpu_plugin.runtime.control import request
from tests.node.daemon import GPU, healthy, ids

SICK = 2
"""The index of the GPU that gets the faults."""


@dataclass(frozen=True)
class Fault:
    """The flags that cause a fault, the signal and verdict that it must give, and the flags that end it."""

    flags: tuple[str, ...]
    signal: str
    verdict: str
    end: tuple[str, ...]
    profile: str = "hgx-h100"


FAULTS = [
    Fault(("--xid", "48"), "xid", "FATAL", ("--reset",)),
    Fault(("--xid", "79"), "xid", "FATAL", ("--heal",)),
    Fault(("--xid", "79"), "xid", "FATAL", ("--reboot",)),
    Fault(("--xid", "95"), "xid", "FATAL", ("--reset",), "dgx1-v100"),
    Fault(("--xid", "500"), "xid", "DEGRADED", ("--reset",)),
    Fault(("--lost",), "lost", "FATAL", ("--reboot",)),
    Fault(("--vanish",), "vanished", "FATAL", ("--return",)),
    Fault(("--recovery-action", "gpu-reset"), "recovery-action", "FATAL", ("--reset",)),
    Fault(("--recovery-action", "drain-p2p"), "recovery-action", "FATAL", ("--recovery-action", "none")),
    Fault(("--ecc-uncorrected", "1"), "ecc-uncorrected", "DEGRADED", ("--reset",)),
    Fault(("--ecc-uncorrected", "1"), "ecc-uncorrected", "FATAL", ("--reset",), "dgx1-v100"),
    Fault(("--remap-pending",), "remap-pending", "DEGRADED", ("--reset",)),
    Fault(("--remap-failure",), "remap-failure", "FATAL", ("--heal",)),
    Fault(("--nvlink-down", "5"), "nvlink", "DEGRADED", ("--reset",)),
    Fault(("--fabric", "unhealthy"), "fabric", "FATAL", ("--fabric", "completed")),
    Fault(("--pcie-width", "8"), "pcie-width", "DEGRADED", ("--heal",)),
    Fault(("--margin", "-7"), "margin", "FATAL", ("--heal",)),
    Fault(("--temperature", "94"), "temperature", "FATAL", ("--heal",)),
]


def name(fault: Fault) -> str:
    return " ".join((*fault.flags, fault.profile, *fault.end))


async def command(daemon, *arguments: str) -> int:
    """Run a verb of `gpu-plugin` for this daemon and return its exit status."""
    verb, *rest = arguments
    return await anyio.to_thread.run_sync(main, [verb, "--state-dir", str(daemon.state), *rest])


async def fault(daemon, *flags: str, gpu: int | str = SICK) -> None:
    assert await command(daemon, "fault", "--gpu", str(gpu), *flags) == 0


async def explained(daemon, gpu: int | str = SICK) -> dict[str, Any]:
    """Return the daemon's explanation of a GPU."""
    status = await anyio.to_thread.run_sync(partial(request, daemon.state, "status"))
    return dict(next(each for each in status["gpus"] if gpu in (each["index"], each["uuid"])))


async def until_told(daemon, expected, gpu: int | str = SICK, seconds: float = 15) -> dict[str, Any]:
    """Return the explanation of a GPU as soon as `expected` is true for it."""
    told: dict[str, Any] = {}
    with anyio.move_on_after(seconds):
        while not expected(told := await explained(daemon, gpu)):
            await anyio.sleep(0.05)
        return told
    raise AssertionError(f"GPU {gpu} never reached that state: {told}")


def held_by(fault: Fault):
    """Return a condition: the GPU has the signal and the verdict of the fault."""

    def met(told: dict[str, Any]) -> bool:
        return any(each["name"] == fault.signal and each["verdict"] == fault.verdict for each in told["signals"])

    return met


def sound(told: dict[str, Any]) -> bool:
    return (told["healthy"], told["verdict"]) == (True, "OK")


@pytest.mark.timeout(150)  # the last wait alone may take a minute
@pytest.mark.parametrize("case", FAULTS, ids=name)
async def test_a_fault_is_told_outlives_a_kill_and_ends_with_its_proof(kubelet, daemon, case):
    daemon.profile = case.profile
    daemon.start("--temperature-recovery", "300ms")
    await kubelet.wait_for(healthy(kubelet, 8))
    sick = ids(kubelet)[SICK]
    expected = 7 if case.verdict == "FATAL" else 8
    await fault(daemon, *case.flags)
    before = await until_told(daemon, held_by(case), sick)
    assert (before["index"], before["uuid"]) == (SICK, sick)
    assert before["verdict"] == case.verdict
    await kubelet.wait_for(healthy(kubelet, expected))
    assert sorted(kubelet.resources[GPU].unhealthy) == ([sick] if case.verdict == "FATAL" else [])
    daemon.signal(signal.SIGKILL)  # the verdict must be on disk by now
    await daemon.exit()
    mark = len(kubelet.events)
    daemon.start("--temperature-recovery", "300ms")
    await kubelet.wait_for(lambda: kubelet.registrations[GPU].accepted == 2)
    await kubelet.wait_for(healthy(kubelet, expected))
    after = await until_told(daemon, held_by(case), sick)  # by uuid: a driver that counts without it has another GPU 2
    (first, again) = (next(each for each in told["signals"] if each["name"] == case.signal) for told in (before, after))
    assert again["since"] == first["since"]
    assert all(event.changed.get(sick) != "Healthy" for event in kubelet.events[mark:] if expected == 7)
    if "--reboot" in case.end:
        assert await command(daemon, "fault", "--reboot") == 0
    else:
        await fault(daemon, *case.end, gpu=sick)
    if case.verdict == "FATAL":
        await kubelet.wait_for(healthy(kubelet, 8), 20)
    if case.signal not in ("temperature", "margin"):  # the slowdown signals need two cool minutes
        # The driver's events come back with the next event set, after a pause of up to a minute (nvml/events.py).
        await until_told(daemon, sound, sick, seconds=75)
    status, seconds = await daemon.stop()
    assert (status, seconds < 2) == (0, True)


async def test_a_whole_gpu_xid_reaches_every_slice_and_replica_and_an_instances_only_its_own(kubelet, daemon):
    daemon.profile = "h100-mig-single"
    config = daemon.directory / "config.yaml"
    config.write_text(
        "version: v1\nflags: {migStrategy: single}\n"
        "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"
    )
    daemon.start("--config-file", str(config))
    await kubelet.wait_for(lambda: GPU in kubelet.resources and kubelet.resources[GPU].streams == 1)
    everything = len(ids(kubelet))
    await kubelet.wait_for(healthy(kubelet, everything))
    told = await explained(daemon, 1)
    slices = [device["id"] for device in told["devices"]]
    assert len(slices) == 7
    assert {identifier.split("::")[0] for identifier in ids(kubelet)} >= set(slices)
    await fault(daemon, "--xid", "48", "--instance", "7/0", gpu=1)
    await kubelet.wait_for(healthy(kubelet, everything - 4))
    (hit,) = {identifier.split("::")[0] for identifier in kubelet.resources[GPU].unhealthy}
    assert hit in slices
    await fault(daemon, "--xid", "48", gpu=1)
    await kubelet.wait_for(healthy(kubelet, everything - 28))
    assert {identifier.split("::")[0] for identifier in kubelet.resources[GPU].unhealthy} == set(slices)


async def test_a_gpu_is_released_for_maintenance_and_comes_back_reset(kubelet, daemon):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    await fault(daemon, "--xid", "48")
    await kubelet.wait_for(healthy(kubelet, 7))
    assert await command(daemon, "release", str(SICK)) == 0
    told = await until_told(daemon, lambda told: any(each["name"] == "maintenance" for each in told["signals"]))
    assert not told["healthy"]
    await fault(daemon, "--reset")
    daemon.signal(signal.SIGKILL)
    await daemon.exit()
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 7))
    assert any(each["name"] == "maintenance" for each in (await explained(daemon))["signals"])
    assert await command(daemon, "resume", str(SICK)) == 0
    await kubelet.wait_for(healthy(kubelet, 8), 20)
    await until_told(daemon, sound)


async def test_a_storm_of_application_xids_changes_no_list(kubelet, daemon):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    lists = sum(event.kind is EventKind.LIST for event in kubelet.events)
    for _ in range(30):
        daemon.fault(SICK, xid=31)
    told = await until_told(daemon, lambda told: told["verdict"] in ("APP", "DEGRADED"))
    assert told["healthy"]
    assert any("31" in each["detail"] for each in told["signals"])
    assert sum(event.kind is EventKind.LIST for event in kubelet.events) == lists
