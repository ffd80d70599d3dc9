"""The kubelet's checkpoint of its pods: content, times of writing, and use after a start (contract 2.4).

Rules of the stand-in that tests of the plugin need, their sources, and the tests of the same rules on a real kubelet. Twins are
in tests/cluster (by default in test_kubelet_books). Sources are below pkg/kubelet/cm/devicemanager:

| rule | source | twin |
|---|---|---|
| the checkpoint's form | checkpoint/checkpoint.go | has_the_form |
| it keeps a pod that has ended until a list comes | manager.go, genericDeviceUpdateCallback | until_a_list_comes |
| an admission with devices collects and writes | manager.go, allocateContainerResources | forgotten_and_the_file_written |
| PodResources answers before kubelet.sock is there | kubelet.go, ListenAndServePodResources | before_the_device_manager_listens |
| a damaged checkpoint is an empty one | manager.go, readCheckpoint | damaged |
| an unchanged list has the file written | manager.go, genericDeviceUpdateCallback | an_unchanged_list |
| a refused pod leaves its first devices counted | manager.go, UpdateAllocatedDevices | none: the scheduler places no such pod |
| sockets go at the start, other files stay | manager.go, CleanupPluginDirectory | test_restarts: new_ones_start (our socket) |
| Register's error texts | plugin/v1beta1/server.go, Register | none: the plugin gives no cause for them |
| a stream that is dropped is never opened again | plugin/v1beta1/handler.go, runClient | none: no real one drops it when told |
| a resource is forgotten after five minutes | types.go, endpointStopGracePeriod | none: it would take five minutes |
| a list has 4 MiB at most | grpc-go's default, which client.go leaves | none: the plugin refuses to send more |
| panics over ids that are gone | manager.go, allocateContainerResources; topology_hints.go | none: it is to send no such list |
| NUMA policies refuse what they cannot align | topology_hints.go | none; test_placement has the hint |
"""

import asyncio
import base64
import json

import pytest

from demo.stand_in_kubelet import AdmissionError, Container, StandInKubelet
from gpu_plugin.kubelet import checkpoint, messages, pod_resources
from gpu_plugin.kubelet.bounded_channel import CallError

from .fake_plugin import device, healthy, plugin

GPU = "nvidia.com/gpu"


def content(kubelet):
    return json.loads((kubelet.directory / checkpoint.NAME).read_text())


def named(kubelet):
    return {identifier for _, identifier in checkpoint.read(kubelet.directory)[0]}


async def test_it_has_the_form_of_1_20_and_later(kubelet):
    async with plugin(kubelet, devices=[device("a", "Healthy", 0, 1), device("b"), device("c", "Unhealthy")]):
        admission = await kubelet.admit("p", {GPU: 2})
        written = content(kubelet)
        assert written.keys() == {"Data", "Checksum"}
        assert written["Data"]["RegisteredDevices"] == {GPU: ["a", "b"]}
        [entry] = written["Data"]["PodDeviceEntries"]
        assert entry.keys() == {"PodUID", "ContainerName", "ResourceName", "DeviceIDs", "AllocResp"}
        assert entry["DeviceIDs"] == {"0": ["a"], "1": ["a"], "-1": ["b"]}
        answer = messages.decode(messages.ContainerAllocateResponse, base64.b64decode(entry["AllocResp"]))
        assert dict(answer.envs) == dict(admission.only.response.envs)
        assert (kubelet.directory / checkpoint.NAME).stat().st_mode & 0o777 == 0o600


async def test_it_keeps_a_pod_that_has_ended_until_it_is_collected_and_something_is_written(kubelet):
    async with plugin(kubelet, devices=healthy("a", "b")) as fake:
        await kubelet.admit("p", {GPU: 1})
        held = named(kubelet)
        kubelet.release("p")
        assert named(kubelet) == held
        fake.send(healthy("a", "b", "c"))
        await kubelet.wait_for(lambda: kubelet.resources[GPU].capacity == 3)
        assert named(kubelet) == held  # it was not collected
        assert await pod_resources.allocated(kubelet.pod_resources_socket) == frozenset()
        assert named(kubelet) == held  # it was not written
        fake.send(healthy("a", "b"))
        await kubelet.wait_for(lambda: kubelet.resources[GPU].capacity == 2)
        assert named(kubelet) == set()


async def test_an_admission_that_asks_for_devices_collects_and_writes(kubelet):
    async with plugin(kubelet, devices=healthy("a")):
        await kubelet.admit("p", {GPU: 1})
        kubelet.release("p")
        await kubelet.admit("none", {})
        assert kubelet.resources[GPU].free == set()
        await kubelet.admit("q", {GPU: 1})
        assert named(kubelet) == {"a"}


async def test_pods_are_known_after_the_socket_and_pod_resources_answers_before_it(directory):
    kubelet = StandInKubelet(directory)
    assert kubelet.pod_resources_socket is not None
    await kubelet.start()
    async with plugin(kubelet, devices=healthy("a")):
        await kubelet.admit("p", {GPU: 1})
        await kubelet.stop(orderly=False)
        assert kubelet.socket.exists()
        before = kubelet.socket.stat().st_ino, kubelet.socket.stat().st_ctime_ns
        starting = asyncio.create_task(kubelet.start(runtime_ready=0.2, sources_ready=0.2))
        told = None
        while told is None:
            try:
                told = await pod_resources.allocated(kubelet.pod_resources_socket)
            except CallError:
                await asyncio.sleep(0)
        assert told == frozenset()
        assert (kubelet.socket.stat().st_ino, kubelet.socket.stat().st_ctime_ns) == before  # still the dead one's
        await starting
        assert await pod_resources.allocated(kubelet.pod_resources_socket) == frozenset()
        await kubelet.wait_for(lambda: kubelet._admission.sources_ready, timeout=2)
        assert await pod_resources.allocated(kubelet.pod_resources_socket) == {(GPU, "a")}
        assert named(kubelet) == {"a"}
    await kubelet.stop()


@pytest.mark.parametrize(
    "damage", ["", "{", '{"Data": {"PodDeviceEntries": null, "RegisteredDevices": {}}, "Checksum": 1}']
)
async def test_a_damaged_checkpoint_is_an_empty_one(kubelet, damage):
    async with plugin(kubelet, devices=healthy("a")) as fake:
        await kubelet.admit("p", {GPU: 1})
        (kubelet.directory / checkpoint.NAME).write_text(damage)
        await kubelet.restart()
        assert GPU not in kubelet.resources
        await fake.close()
        await fake.serve()
        await fake.register()
        await kubelet.wait_for(lambda: GPU in kubelet.resources and kubelet.resources[GPU].free == {"a"}, 1)


async def test_a_pod_that_is_refused_leaves_its_first_devices_counted_until_the_next_admission(kubelet):
    async with plugin(kubelet, devices=healthy("a", "b")):
        with pytest.raises(AdmissionError):
            await kubelet.admit("p", containers=[Container("one", {GPU: 1}), Container("two", {GPU: 2})])
        assert len(kubelet.resources[GPU].free) == 1
        assert len((await kubelet.admit("q", {GPU: 2})).ids) == 2
