"""Faults of a running node, as the kubelet and its pods see them."""

import signal
import time

import pytest

from demo.stand_in_kubelet import AdmissionError
from demo.stand_in_kubelet.journal import EventKind
from gpu_plugin.runtime.control import request
from gpu_plugin.state.log import DEVICES, FILES, GPUS, HEALTH
from tests.node.daemon import GPU, healthy, ids
from tests.state_log import store


def unhealthy(kubelet):
    return sorted(kubelet.resources[GPU].unhealthy)


async def test_a_fatal_xid_costs_that_gpu_alone_and_a_repair_brings_it_back(kubelet, daemon):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    await kubelet.admit("pod", {GPU: 8})
    daemon.fault(3, xid=79)
    await kubelet.wait_for(healthy(kubelet, 7))
    sick = ids(kubelet)[3]
    assert unhealthy(kubelet) == [sick]
    status = kubelet.pod_health("pod")["main"][GPU]
    assert [identifier for identifier, health in status.items() if health != "Healthy"] == [sick]
    daemon.fault(3, heal=True)
    await kubelet.wait_for(healthy(kubelet, 8))


async def test_an_application_xid_changes_nothing(kubelet, daemon):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    for xid in (13, 31, 43, 45, 68, 109):  # those that NVIDIA's plugin ignores
        daemon.fault(1, xid=xid)
        await daemon.said(f"Xid {xid} ")
    assert kubelet.resources[GPU].allocatable == 8
    assert sum(event.kind is EventKind.LIST for event in kubelet.events) == 1


@pytest.mark.parametrize(
    ("disabled", "enabled", "xid", "fatal"),
    [
        ("", "", 79, True),
        ("", "", 31, False),
        ("all", "", 79, False),
        ("xids", "", 48, False),
        ("all", "79", 79, True),
        ("all", "79", 48, False),
        ("48, 62", "", 48, False),
        ("48,62", "", 79, True),
        ("", "31", 31, True),
        ("", "ALL", 13, True),
        ("nonsense", "", 79, True),
    ],
)
async def test_the_operators_lists_decide_which_xids_are_fatal(kubelet, daemon, disabled, enabled, xid, fatal):
    daemon.profile = "t4-4"
    daemon.start(environ={"DP_DISABLE_HEALTHCHECKS": disabled, "DP_ENABLE_HEALTHCHECKS": enabled})
    await kubelet.wait_for(healthy(kubelet, 4))
    daemon.fault(2, xid=xid)
    await daemon.said("is Unhealthy: " if fatal else "the GPU stays as it is")
    await kubelet.wait_for(healthy(kubelet, 3 if fatal else 4))


async def test_a_disabled_xid_is_no_fault_even_where_the_driver_wants_a_reset_after_it(kubelet, daemon):
    daemon.start(environ={"DP_DISABLE_HEALTHCHECKS": "48"})
    await kubelet.wait_for(healthy(kubelet, 8))
    daemon.fault(2, xid=48)
    await daemon.said("the driver asks for a reset of the GPU, after an Xid that is configured not to be a fault")
    daemon.fault(3, xid=62)
    await kubelet.wait_for(healthy(kubelet, 7))
    assert unhealthy(kubelet) == [ids(kubelet)[3]]


async def test_a_lost_gpu_is_unhealthy_and_found_again_after_repair(kubelet, daemon):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    daemon.fault(5, lost=True)
    await kubelet.wait_for(healthy(kubelet, 7))
    assert unhealthy(kubelet) == [ids(kubelet)[5]]
    daemon.fault(5, heal=True)
    await kubelet.wait_for(healthy(kubelet, 8))


async def test_a_gpu_lost_before_the_start_hides_no_other_and_keeps_its_name(kubelet, daemon):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    before = ids(kubelet)
    await kubelet.admit("pod", {GPU: 8})
    daemon.fault(3, lost=True)
    await kubelet.wait_for(healthy(kubelet, 7))
    await daemon.stop()
    store(daemon.state, HEALTH, {"boot_id": ""})
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 7))
    assert ids(kubelet) == before
    assert unhealthy(kubelet) == [before[3]]
    daemon.fault(3, heal=True)
    await kubelet.wait_for(healthy(kubelet, 8))


async def test_a_gpu_never_seen_before_and_lost_is_listed_and_later_named(kubelet, daemon):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    before = ids(kubelet)
    daemon.fault(3, lost=True)
    await kubelet.wait_for(healthy(kubelet, 7))
    await daemon.stop()
    for name in FILES:
        (daemon.state / name).unlink()
    await kubelet.restart()
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 7))
    assert unhealthy(kubelet) == ["GPU-unreadable-3"]
    daemon.fault(3, heal=True)
    await kubelet.wait_for(healthy(kubelet, 8))
    assert sorted(ids(kubelet)) == sorted(before)


@pytest.mark.parametrize("profile", ["hgx-h100", "dgx1-v100"])  # the latter's driver tells of no recovery action
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_a_restart_launders_no_fault(kubelet, daemon, end, profile):
    daemon.profile = profile
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    daemon.fault(6, xid=48)
    await kubelet.wait_for(healthy(kubelet, 7))
    sick = unhealthy(kubelet)
    daemon.signal(end)
    await daemon.exit()
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 7))
    assert unhealthy(kubelet) == sick
    with pytest.raises(AdmissionError):
        await kubelet.admit("greedy", {GPU: 8})


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_counters_that_our_own_restart_set_back_prove_no_reset(kubelet, daemon, end):
    daemon.profile = "dgx1-v100"
    daemon.start("--temperature-recovery", "300ms")
    await kubelet.wait_for(healthy(kubelet, 8))
    daemon.fault(6, **{"persistence-mode": "off"})
    daemon.fault(6, xid=48)
    await kubelet.wait_for(healthy(kubelet, 7))
    sick = unhealthy(kubelet)
    daemon.signal(end)
    await daemon.exit()
    daemon.start("--temperature-recovery", "300ms")
    await kubelet.wait_for(healthy(kubelet, 7))
    daemon.fault(2, temperature=120)
    await kubelet.wait_for(healthy(kubelet, 6))
    daemon.fault(2, temperature=40)
    await kubelet.wait_for(healthy(kubelet, 7))  # more looks than a proof takes
    assert unhealthy(kubelet) == sick
    daemon.fault(6, reset=True)
    await kubelet.wait_for(healthy(kubelet, 8))


async def test_a_driver_that_refuses_to_be_opened_once_costs_no_gpu(kubelet, daemon):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    request(daemon.state, "fault", **{"init-error": 999, "times": 1})
    request(daemon.state, "release", gpu=7)
    await kubelet.wait_for(healthy(kubelet, 7))
    daemon.fault(2, temperature=120)
    await kubelet.wait_for(healthy(kubelet, 6))
    assert unhealthy(kubelet) == sorted(ids(kubelet)[index] for index in (2, 7))
    named = {uuid for event in kubelet.events for uuid, health in event.changed.items() if health != "Healthy"}
    assert sorted(named) == unhealthy(kubelet), "nor was any other unhealthy in between"


async def test_another_boot_is_judged_afresh(kubelet, daemon):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    daemon.fault(6, xid=48)
    await kubelet.wait_for(healthy(kubelet, 7))
    request(daemon.state, "fault", reboot=True)
    await daemon.stop()
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))


async def test_a_corrupt_memory_is_said_and_costs_nothing_else(kubelet, daemon):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    await daemon.stop()
    for kind in (HEALTH, GPUS, DEVICES):
        store(daemon.state, kind, {"boot_id": 7})
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    await daemon.said(f"the record of {HEALTH} in {daemon.state} is invalid")


async def test_heat_takes_a_gpu_out_and_coolness_brings_it_back_after_its_time(kubelet, daemon):
    daemon.profile = "h200"  # shuts down at 95 °C, slows down at 89
    daemon.start("--temperature-recovery", "300ms")
    await kubelet.wait_for(healthy(kubelet, 1))
    daemon.fault(0, temperature=93)
    await kubelet.wait_for(healthy(kubelet, 0))
    daemon.fault(0, temperature=84)  # not cool enough: 5 °C below the slowdown threshold is
    await daemon.said("°C at its peak, shutdown threshold 95 °C")
    daemon.fault(0, temperature=83)
    cooled = time.perf_counter()
    await kubelet.wait_for(healthy(kubelet, 1))
    assert time.perf_counter() - cooled >= 0.3


async def test_a_hung_gpu_holds_up_nobody(kubelet, daemon):
    daemon.start("--nvml-timeout", "300ms")
    await kubelet.wait_for(healthy(kubelet, 8))
    daemon.fault(2, hang=600)
    await kubelet.wait_for(healthy(kubelet, 7))
    assert unhealthy(kubelet) == [ids(kubelet)[2]]
    daemon.fault(4, temperature=120)  # the others are still looked at
    await kubelet.wait_for(healthy(kubelet, 6))
    daemon.fault(6, xid=79)  # and heard
    await kubelet.wait_for(healthy(kubelet, 5))
    began = time.perf_counter()
    assert len((await kubelet.admit("pod", {GPU: 5})).allocations[0].ids) == 5
    assert time.perf_counter() - began < 1
    await kubelet.restart()  # a new one asks for options while it registers us, and waits for the answer
    await kubelet.wait_for(healthy(kubelet, 5), timeout=2)
    status, seconds = await daemon.stop()
    assert (status, seconds < 1) == (0, True)


async def test_a_gpu_that_hangs_from_the_start_hides_no_other(kubelet, daemon):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    before = ids(kubelet)
    daemon.fault(0, hang=600)
    await daemon.stop()
    daemon.start("--nvml-timeout", "300ms")
    await kubelet.wait_for(healthy(kubelet, 7))
    assert ids(kubelet) == before
    assert unhealthy(kubelet) == [before[0]]
    daemon.fault(0, heal=True)
    await kubelet.wait_for(healthy(kubelet, 8))


async def test_several_faults_are_each_their_own(kubelet, daemon):
    daemon.start()
    await kubelet.wait_for(healthy(kubelet, 8))
    daemon.fault(1, xid=79)
    daemon.fault(1, temperature=150)
    daemon.fault(2, xid=95)
    await kubelet.wait_for(healthy(kubelet, 6))
    daemon.fault(1, temperature=30)  # still fallen off the bus
    daemon.fault(2, heal=True)
    await kubelet.wait_for(healthy(kubelet, 7))
    assert unhealthy(kubelet) == [ids(kubelet)[1]]
