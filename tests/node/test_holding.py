"""Hardware that pods hold, over restarts of the kubelet and of the daemon, under the daemon as it runs."""

import time

import pytest

from tests.node.daemon import GPU, healthy, ids

SMALL = "nvidia.com/mig-1g.10gb"

pytestmark = pytest.mark.anyio


async def test_a_kubelet_that_knows_no_pods_yet_frees_nothing(kubelet, daemon):
    daemon.profile = "h100-mig-single"
    daemon.start("--mig-strategy", "mixed")
    await kubelet.wait_for(healthy(kubelet, 56, SMALL))
    held = (await kubelet.admit("pod", {SMALL: 1})).ids[0]
    for gpu in range(8):
        daemon.fault(gpu, mig="none")
    await kubelet.wait_for(healthy(kubelet, 7))
    # Its PodResources answers at once and lists nothing, for longer than a retired device stays listed by itself.
    await kubelet.restart(orderly=False, runtime_ready=7.5, sources_ready=1.0)
    await kubelet.wait_for(healthy(kubelet, 7))
    await kubelet.wait_for(lambda: held in ids(kubelet, SMALL))
    lists = kubelet.pod_resources_lists
    await kubelet.wait_for(lambda: kubelet.pod_resources_lists >= lists + 2)
    assert kubelet.resources[GPU].allocatable == 7
    kubelet.release("pod")
    await kubelet.wait_for(healthy(kubelet, 8), timeout=30)


async def test_what_no_pod_holds_is_offered_under_its_new_name_seconds_after_a_restart(kubelet, daemon):
    """The former process may have answered an Allocate last that the kubelet has not written down yet: a second and a list."""
    daemon.profile = "h100-mig-single"
    daemon.start("--mig-strategy", "mixed")
    await kubelet.wait_for(healthy(kubelet, 56, SMALL))
    await kubelet.admit("pod", {SMALL: 1})
    daemon.kill()
    daemon.start("--mig-strategy", "single")
    await kubelet.wait_for(lambda: GPU in kubelet.resources and kubelet.resources[GPU].capacity == 56)
    assert kubelet.resources[GPU].allocatable == 0
    began = time.monotonic()
    await kubelet.wait_for(healthy(kubelet, 55), timeout=10)
    assert time.monotonic() - began < 3.5
    await kubelet.wait_for(lambda: len(ids(kubelet, SMALL)) == 1, timeout=10)
    assert time.monotonic() - began < 7
