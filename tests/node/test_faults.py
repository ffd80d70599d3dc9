"""Faults of a running node, as the kubelet and its pods see them."""

import signal
import time

import pytest

from gpu_plugin.runtime.control import request
from gpu_plugin.state.log import FILES, HEALTH
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


@pytest.mark.parametrize(
    ("disabled", "enabled", "xid", "fatal"),
    [
        ("", "", 79, True),
        ("all", "", 79, False),
        ("all", "79", 79, True),
        ("48, 62", "", 48, False),
        ("", "31", 31, True),
    ],
)
async def test_the_operators_lists_decide_which_xids_are_fatal(kubelet, daemon, disabled, enabled, xid, fatal):
    daemon.profile = "t4-4"
    daemon.start(environ={"DP_DISABLE_HEALTHCHECKS": disabled, "DP_ENABLE_HEALTHCHECKS": enabled})
    await kubelet.wait_for(healthy(kubelet, 4))
    daemon.fault(2, xid=xid)
    await daemon.said("is Unhealthy: " if fatal else "the GPU stays as it is")
    await kubelet.wait_for(healthy(kubelet, 3 if fatal else 4))


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
