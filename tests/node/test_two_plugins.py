"""Another plugin registers the daemon's resource and ends, under both generations of the kubelet."""

import pytest

from demo.stand_in_kubelet import AdmissionError, StandInKubelet
from tests.node.daemon import GPU, healthy, ids
from tests.unit.demo.stand_in_kubelet.fake_plugin import healthy as fit
from tests.unit.demo.stand_in_kubelet.fake_plugin import plugin


@pytest.fixture
async def newer_kubelet(directory):
    async with StandInKubelet(directory, generation="1.37") as running:
        yield running
    running.check()


async def test_pods_start_again_after_one_request_for_a_device_of_a_plugin_that_ended(newer_kubelet, daemon):
    daemon.start()
    await newer_kubelet.wait_for(healthy(newer_kubelet, 8))
    ours = ids(newer_kubelet)
    async with plugin(newer_kubelet, "other.sock", fit("other-0", "other-1"), preferred_available=False):
        await newer_kubelet.wait_for(lambda: newer_kubelet.resources[GPU].allocatable == 2)
    await newer_kubelet.wait_for(lambda: newer_kubelet.resources[GPU].streams == 1)
    assert newer_kubelet.resources[GPU].healthy == {"other-0", "other-1"}
    with pytest.raises(AdmissionError, match="unknown device"):
        await newer_kubelet.admit("first", {GPU: 2})
    await newer_kubelet.wait_for(healthy(newer_kubelet, 8), timeout=2)
    assert ids(newer_kubelet) == ours
    assert set((await newer_kubelet.admit("second", {GPU: 2})).ids) <= set(ours)
    assert newer_kubelet.registrations[GPU].accepted == 2  # the daemon did not register again


async def test_a_sick_gpu_that_another_plugin_listed_as_healthy_is_unhealthy_after_the_next_request(
    newer_kubelet, daemon
):
    daemon.start()
    await newer_kubelet.wait_for(healthy(newer_kubelet, 8))
    ours = ids(newer_kubelet)
    daemon.fault(0, xid=79)
    await newer_kubelet.wait_for(healthy(newer_kubelet, 7))
    (sick,) = newer_kubelet.resources[GPU].unhealthy
    async with plugin(newer_kubelet, "other.sock", fit(*ours)):
        await newer_kubelet.wait_for(lambda: newer_kubelet.resources[GPU].allocatable == 8)
    await newer_kubelet.wait_for(lambda: newer_kubelet.resources[GPU].streams == 1)
    # The kubelet asks for a choice among all eight, so the request shows the wrong list before a pod is refused.
    chosen = (await newer_kubelet.admit("first", {GPU: 2})).ids
    await newer_kubelet.wait_for(healthy(newer_kubelet, 7), timeout=2)
    assert newer_kubelet.resources[GPU].unhealthy == {sick}
    assert sick not in chosen
