"""PodResources: the pods, containers and devices in its answers (contract 1.2)."""

import asyncio

import pytest
from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from demo.stand_in_kubelet import Container
from demo.stand_in_kubelet.pod_resources import PodResourcesService
from demo.stand_in_kubelet.server import SocketServer
from gpu_plugin.kubelet import messages, wire
from gpu_plugin.kubelet._api import v1
from gpu_plugin.kubelet.codec import BytesCodec

from .fake_plugin import device, healthy, plugin

GPU = "nvidia.com/gpu"
MIG = "nvidia.com/mig-1g.10gb"


async def ask(socket, method, request=None):
    async with Channel(path=str(socket), codec=BytesCodec()) as channel:
        call: UnaryUnaryMethod[bytes, bytes] = UnaryUnaryMethod(channel, method, bytes, bytes)
        return await call(bytes(request) if request is not None else b"", timeout=10)


def numa(entry):
    """The NUMA node ids of a ContainerDevices. Our .proto has no topology; it is field 3, as in the plugin API's Device."""
    return [node.id for node in messages.Device().parse(bytes(entry)).topology.nodes]


async def pods(kubelet):
    """Pod → container → (resource, device ids, NUMA node ids) of each entry, as generated code reads the answer."""
    answer = v1.ListPodResourcesResponse().parse(await ask(kubelet.pod_resources_socket, wire.POD_RESOURCES_LIST))
    return {
        (pod.namespace, pod.name): {
            container.name: [
                (each.resource_name, tuple(each.device_ids), tuple(numa(each))) for each in container.devices
            ]
            for container in pod.containers
        }
        for pod in answer.pod_resources
    }


async def test_tells_every_pod_and_container_with_each_device_and_its_numa_node(kubelet):
    assert kubelet.pod_resources_socket == kubelet.directory.parent / "pod-resources/kubelet.sock"
    assert await pods(kubelet) == {}
    listed = [device("a", "Healthy", 0), device("b", "Healthy", 0, 1), device("c")]
    async with plugin(kubelet, devices=listed):
        await kubelet.admit("p", containers=[Container("one", {GPU: 3}), Container("idle", {})])
        await kubelet.admit("bare", {})
        told = await pods(kubelet)
        assert list(told) == [("default", "p"), ("default", "bare")]
        assert told["default", "bare"] == {"main": []}
        assert list(told["default", "p"]) == ["one", "idle"]
        assert sorted(told["default", "p"]["one"]) == [
            *((GPU, ("a",), (0,)), (GPU, ("b",), (0,)), (GPU, ("b",), (1,)), (GPU, ("c",), ()))
        ]
        assert told["default", "p"]["idle"] == []
    assert kubelet.pod_resources_lists == 2
    kubelet.check()


async def test_tells_what_is_held_and_not_what_is_being_given(kubelet):
    async with plugin(kubelet, devices=healthy("a", "b")) as fake:
        fake.may_allocate.clear()
        admission = asyncio.create_task(kubelet.admit("p", {GPU: 1}))
        await asyncio.wait_for(fake.allocating.wait(), 10)
        assert await pods(kubelet) == {("default", "p"): {"main": []}}
        fake.may_allocate.set()
        (held,) = (await admission).ids
        assert await pods(kubelet) == {("default", "p"): {"main": [(GPU, (held,), ())]}}
        kubelet.release("p")
        assert await pods(kubelet) == {}


@pytest.mark.parametrize("orderly", [True, False])
async def test_what_pods_hold_is_told_across_restarts_and_without_plugins(kubelet, orderly):
    async with plugin(kubelet, devices=[device("a", "Healthy", 1)]):
        await kubelet.admit("p", {GPU: 1})
    await kubelet.stop(orderly=orderly)
    with pytest.raises(ConnectionRefusedError):
        await pods(kubelet)
    await kubelet.start()
    assert await pods(kubelet) == {("default", "p"): {"main": [(GPU, ("a",), (1,))]}}


async def test_what_can_be_allocated_is_what_is_healthy_in_use_or_not(kubelet):
    async with (
        plugin(kubelet, "a.sock", [device("a", "Healthy", 0), device("b", "Unhealthy", 0)]),
        plugin(kubelet, "b.sock", healthy("m"), resource=MIG),
    ):
        await kubelet.admit("p", {GPU: 1})
        data = await ask(kubelet.pod_resources_socket, wire.POD_RESOURCES_ALLOCATABLE)
        entries = v1.AllocatableResourcesResponse().parse(data).devices
        told = {(each.resource_name, *each.device_ids): numa(each) for each in entries}
        assert told == {(GPU, "a"): [0], (MIG, "m"): []}


async def test_answers_ten_calls_at_once_and_a_hundred_a_second(directory):
    now = 0.0
    service = PodResourcesService(dict, dict, lambda: now)
    server = SocketServer([service])
    await server.listen(directory / "x.sock")

    async def answers(count):
        for _ in range(count):
            assert await ask(directory / "x.sock", wire.POD_RESOURCES_LIST) == b""
        with pytest.raises(GRPCError, match="rejected by rate limit") as raised:
            await ask(directory / "x.sock", wire.POD_RESOURCES_LIST)
        assert raised.value.status is Status.RESOURCE_EXHAUSTED

    try:
        await answers(10)
        now += 0.0301
        await answers(3)
        now += 60
        await answers(10)
        assert service.lists == 23
    finally:
        server.drop(orderly=True)
        await server.wait_dropped()


async def test_is_served_where_it_is_told_to_be_or_nowhere(kubelets, directory):
    elsewhere = directory / "pods" / "x.sock"
    kubelet = await kubelets(pod_resources_socket=elsewhere)
    assert await pods(kubelet) == {}
    await kubelet.stop()
    kubelet = await kubelets(pod_resources_socket=None)
    assert not (directory.parent / "pod-resources").exists()


async def test_tells_of_sidecars_before_containers_and_of_no_other_init_container(kubelet):
    async with plugin(kubelet, devices=healthy("a", "b", "c", "d")):
        containers = [
            Container("main", {GPU: 1}),
            Container("init", {GPU: 3}, "init"),
            Container("sidecar", {GPU: 1}, "sidecar"),
        ]
        admission = await kubelet.admit("p", containers=containers)
        told = (await pods(kubelet))["default", "p"]
        assert list(told) == ["sidecar", "main"]
        known = {identifier for entries in told.values() for _, ids, _ in entries for identifier in ids}
        assert known == {i for each in admission.allocations if each.container != "init" for i in each.ids}
        assert len(known) == 2
        assert len(kubelet.resources[GPU].allocated) == 3  # the pod keeps the others, which PodResources does not list
