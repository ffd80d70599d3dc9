"""Allocate, GetPreferredAllocation and PreStartContainer, as the kubelet meets them."""

import contextlib
import itertools
import logging
import threading

import anyio
import anyio.to_thread
import pytest
from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from demo.stand_in_kubelet import AdmissionError
from gpu_plugin.config.sharing import SharedResource
from gpu_plugin.containers.conflicts import PairWatch
from gpu_plugin.devices.node import Gpu, Link, Node
from gpu_plugin.kubelet import messages, wire
from gpu_plugin.kubelet import service as service_module
from gpu_plugin.kubelet.codec import BytesCodec
from gpu_plugin.kubelet.counts import KubeletCounts
from gpu_plugin.kubelet.feed import ListFeed
from gpu_plugin.kubelet.server import SocketServer
from gpu_plugin.kubelet.service import (
    DevicePluginService,
    RequestRejectedError,
    UnhealthyDeviceError,
    UnknownDeviceError,
)
from gpu_plugin.kubelet.snapshot import SnapshotStore
from gpu_plugin.placement.subsets import Placement
from gpu_plugin.placement.topology import Topology
from gpu_plugin.placement.whole import Budget
from gpu_plugin.runtime.pulse import Pulse
from tests.unit.kubelet.serving import GPU, devices, registered, serving, view

IDS = [d.id for d in devices(8)]


def made(listed=None) -> DevicePluginService:
    store = SnapshotStore()
    store.publish({GPU: view(devices(8) if listed is None else listed)})
    feed = ListFeed.__new__(ListFeed)
    feed.resource = GPU
    return DevicePluginService(feed, store, Pulse())


def test_n_requests_get_n_answers_in_order():
    answers = made().allocate([[IDS[3]], [IDS[1], IDS[0]], [IDS[7]]])
    assert [a.envs["NVIDIA_VISIBLE_DEVICES"] for a in answers] == [IDS[3], f"{IDS[0]},{IDS[1]}", IDS[7]]


@given(st.lists(st.sampled_from(IDS), min_size=1, max_size=12), st.randoms())
@settings(max_examples=100)
def test_the_same_devices_get_the_same_bytes_in_any_order_and_number(ids, rng):
    service = made()
    shuffled = [*ids, rng.choice(ids)]
    rng.shuffle(shuffled)
    request, other = (
        bytes(messages.AllocateRequest([messages.ContainerAllocateRequest(list(each))])) for each in (ids, shuffled)
    )
    assert service.allocate_bytes(request) == service.allocate_bytes(other) == made().allocate_bytes(request)


@pytest.mark.parametrize("identifier", ["", "GPU-of-another-node", IDS[0] + "::0", "é\n" * 10])
def test_an_unknown_device_is_refused_by_name(identifier):
    with pytest.raises(UnknownDeviceError) as refused:
        made().allocate([[IDS[0]], [identifier]])
    assert repr(identifier) in str(refused.value)
    assert refused.value.status is Status.NOT_FOUND


def test_two_resources_that_one_container_may_have_got_are_said_and_answered_as_ever(caplog):
    store, pairs, now = SnapshotStore(), PairWatch(), [5.0]
    names = (GPU, "nvidia.com/shared")
    store.publish({name: view(devices(8), name) for name in names})
    services = {}
    for name in names:
        feed = ListFeed.__new__(ListFeed)
        feed.resource = name
        services[name] = DevicePluginService(feed, store, Pulse(), pairs, lambda: now[0])
    alone = made().allocate([[IDS[1]]])
    services[GPU].allocate([[IDS[0]]])
    now[0] += 0.004
    assert services["nvidia.com/shared"].allocate([[IDS[1]]]) == alone
    assert caplog.text.count("nvidia.com/gpu and nvidia.com/shared were allocated within") == 1
    now[0] += 60
    services[GPU].allocate([[IDS[0]]])
    assert caplog.text.count("were allocated within") == 1


def test_what_is_asked_for_is_noted_before_it_is_looked_at_and_ids_of_others_are_not(monkeypatch):
    service = made()
    store, noted = service._store, []
    note = store.recent.note

    def retired_meanwhile(resource, ids, now):
        note(resource, ids, now)
        noted.extend(ids)
        store.publish({GPU: view(tuple(replace(device, reason="gone") for device in devices(8)))})

    monkeypatch.setattr(store.recent, "note", retired_meanwhile)
    with pytest.raises(UnhealthyDeviceError, match="gone"):
        service.allocate([[IDS[1], "GPU-of-another-node"]])
    assert noted == [IDS[1]]


def test_an_unhealthy_device_is_refused_by_name_and_reason():
    listed = list(devices(8))
    listed[2] = replace(listed[2], reason="Xid 79 (GPU has fallen off the bus)")
    with pytest.raises(UnhealthyDeviceError, match=f"{IDS[2]} is unhealthy: Xid 79") as refused:
        made(tuple(listed)).allocate([[IDS[2]]])
    assert refused.value.status is Status.FAILED_PRECONDITION


def shared(count, *, single):
    entry = SharedResource(GPU, GPU, 2, single_requests=single)
    return tuple(replace(d, id=f"{d.id}::{n}", sharing=entry) for d in devices(count) for n in range(2))


def test_several_shared_devices_for_one_container_are_refused_where_the_operator_forbids_it():
    listed = shared(2, single=True)
    with pytest.raises(RequestRejectedError, match="maximum request size for shared resources is 1; found 2"):
        made(listed).allocate([[listed[0].id, listed[2].id]])
    one_each = made(listed).allocate([[listed[0].id], [listed[1].id, listed[1].id]])
    assert [a.envs["NVIDIA_VISIBLE_DEVICES"] for a in one_each] == [devices(2)[0].id] * 2


def test_replicas_of_one_gpu_are_that_gpu_once():
    listed = shared(2, single=False)
    [answer] = made(listed).allocate([[listed[1].id, listed[0].id, listed[2].id]])
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == f"{devices(2)[0].id},{devices(2)[1].id}"


async def test_a_pods_event_names_the_device_and_the_reason(kubelet, directory):
    async with serving(directory, 1) as plugin:
        await kubelet.wait_for(registered(kubelet))
        uuid = devices(1)[0].id
        # Health changed a moment ago, and the kubelet has the former list.
        current = plugin.store.current.resources[GPU]
        plugin.store.current = replace(
            plugin.store.current, resources={GPU: current.with_reasons({uuid: "Xid 48 (double-bit ECC error)"})}
        )
        with pytest.raises(AdmissionError) as refused:
            await kubelet.admit("pod", {GPU: 1})
        assert "code = FailedPrecondition" in str(refused.value)
        assert f"{uuid} is unhealthy: Xid 48 (double-bit ECC error)" in str(refused.value)


async def call(path, method, request):
    channel = Channel(path=str(path), codec=BytesCodec())
    try:
        return await UnaryUnaryMethod(channel, method, bytes, bytes)(request, timeout=5)
    finally:
        channel.close()


async def test_the_kubelets_wrong_requests_send_the_list_again_at_most_once_a_second(directory):
    now, store = [0.0], SnapshotStore()
    store.publish({GPU: view(devices(8)).with_reasons({devices(8)[2].gpu: "Xid 79"})})
    service = DevicePluginService(ListFeed(GPU, store), store, Pulse(), clock=lambda: now[0])
    server, path = SocketServer(service), directory / "wrong.sock"
    await server.bind(path)
    unknown, sick, right = (
        bytes(messages.AllocateRequest([messages.ContainerAllocateRequest([each])])) for each in ("x", IDS[2], IDS[0])
    )
    choice = preferred_request((IDS, [], 2))
    sound = [each for each in IDS if each != IDS[2]]

    async with Channel(path=str(path), codec=BytesCodec()) as kubelet:

        async def ask(method, request):
            with contextlib.suppress(GRPCError):
                await UnaryUnaryMethod(kubelet, method, bytes, bytes)(request, timeout=5)
            return store.resends(GPU)

        await ask(wire.OPTIONS, wire.EMPTY)  # as the kubelet does when a plugin registers
        assert await ask(wire.ALLOCATE, right) == 0
        assert await ask(wire.PREFERRED, preferred_request((sound, [], 2))) == 0
        for second, wrong in enumerate([(wire.ALLOCATE, unknown), (wire.ALLOCATE, sick), (wire.PREFERRED, choice)], 1):
            now[0] = float(second)
            assert [await ask(*wrong) for _ in range(3)] == [second] * 3
        now[0] = 10.0
        with pytest.raises(GRPCError):
            await call(path, wire.ALLOCATE, unknown)  # another client's
        assert await ask(wire.ALLOCATE, right) == 3
    await server.end()


async def test_requests_of_the_kubelet_are_counted_and_those_of_other_clients_are_not(directory):
    store, counts = SnapshotStore(), KubeletCounts()
    store.publish({GPU: view(devices(8))})
    server, path = (
        SocketServer(DevicePluginService(ListFeed(GPU, store), store, Pulse(), counts=counts)),
        directory / "c",
    )
    await server.bind(path)
    right, wrong = (bytes(messages.AllocateRequest([messages.ContainerAllocateRequest([i])])) for i in (IDS[0], "x"))
    async with Channel(path=str(path), codec=BytesCodec()) as kubelet:
        for method, request in [(wire.OPTIONS, wire.EMPTY), (wire.ALLOCATE, right), (wire.ALLOCATE, wrong)]:
            with contextlib.suppress(GRPCError):
                await UnaryUnaryMethod(kubelet, method, bytes, bytes)(request, timeout=5)
        await call(path, wire.ALLOCATE, right)  # another client's
    assert counts.requests == {GPU: 2}
    await server.end()


@pytest.mark.parametrize("method", [wire.ALLOCATE, wire.PRE_START])
async def test_bytes_that_are_no_request_get_a_clear_status(kubelet, directory, method):
    async with serving(directory) as plugin:
        await kubelet.wait_for(registered(kubelet))
        with pytest.raises(GRPCError) as refused:
            await call(plugin.sockets[0], method, b"\x0a\xff\xff\xff\xff")
        assert refused.value.status is Status.INVALID_ARGUMENT


async def test_pre_start_answers_at_once_and_as_often_as_asked(kubelet, directory):
    async with serving(directory) as plugin:
        await kubelet.wait_for(registered(kubelet))
        request = bytes(messages.PreStartContainerRequest(IDS[:2]))
        for _ in range(3):
            assert await call(plugin.sockets[0], wire.PRE_START, request) == b""


async def test_options_ask_for_preferences_and_for_no_pre_start(kubelet, directory):
    async with serving(directory) as plugin:
        await kubelet.wait_for(registered(kubelet))
        answer = messages.decode(messages.DevicePluginOptions, await call(plugin.sockets[0], wire.OPTIONS, wire.EMPTY))
        assert answer.get_preferred_allocation_available
        assert not answer.pre_start_required


def preferred_request(*asks):
    return bytes(
        messages.PreferredAllocationRequest(
            [messages.ContainerPreferredAllocationRequest(list(a), list(m), s) for a, m, s in asks]
        )
    )


def preferences(data):
    return [list(c.device_ids) for c in messages.decode(messages.PreferredAllocationResponse, data).container_responses]


@given(st.data())
@settings(max_examples=150)
def test_a_preference_is_exact_or_empty(data):
    available = data.draw(st.lists(st.sampled_from(IDS), unique=True))
    must = data.draw(st.lists(st.sampled_from([*IDS, "stranger"]), unique=True, max_size=4))
    size = data.draw(st.integers(-2, 10))
    [answer] = preferences(made().preferred_bytes(preferred_request((available, must, size))))
    possible = 0 < size <= len(available) and set(must) <= set(available) and len(must) <= size
    if possible:
        assert len(answer) == len(set(answer)) == size
        assert set(must) <= set(answer) <= set(available)
    else:
        assert answer == []


def test_each_container_gets_an_answer_of_its_own():
    answers = preferences(made().preferred_bytes(preferred_request((IDS, [], 2), (IDS[:1], [], 2), (IDS, [IDS[5]], 1))))
    assert [len(a) for a in answers] == [2, 0, 1]


def test_a_preference_never_fails_whatever_goes_wrong(monkeypatch, caplog):
    def broken(*_):
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(service_module, "preferred", broken)
    assert preferences(made().preferred_bytes(preferred_request((IDS, [], 2)))) == [[]]
    assert "a fault of ours" in caplog.text
    assert made().preferred_bytes(b"\x0a\xff\xff\xff\xff") == b"\x0a\x00"


def test_a_choice_is_made_within_a_budget_of_time(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(service_module, "CHOOSING", Budget(ticks.__next__, 0.0))
    linked = {(IDS[a], IDS[b]): Link(int(a == b - 3)) for a, b in itertools.combinations(range(8), 2)}
    probed = Node(tuple(Gpu(uuid, at) for at, uuid in enumerate(IDS)), linked)
    service = made()
    listed = replace(view(devices(8)), placement=Placement.of(Topology.of(probed)))
    service._store.publish({GPU: listed})
    assert preferences(service.preferred_bytes(preferred_request((IDS, [], 2)))) == [[IDS[0], IDS[3]]]
    assert next(ticks) > 1  # when it is up, and whether it is


def test_what_is_preferred_is_told_at_debug_level_as_simulate_allocation_takes_it(caplog):
    asked = preferred_request((IDS[2::-1], [IDS[1]], 2), (IDS, [], 9))
    service = made()
    with caplog.at_level(logging.INFO, logger=service_module.__name__):
        service.preferred_bytes(asked)
    assert not caplog.text
    with caplog.at_level(logging.DEBUG, logger=service_module.__name__):
        service.preferred_bytes(asked)
    assert [record.getMessage() for record in caplog.records] == [
        f"{GPU}: preferred {IDS[0]},{IDS[1]} of --available {','.join(IDS[:3])} --size 2 --must {IDS[1]}",
        f"{GPU}: preferred none of --available {','.join(IDS)} --size 9",
    ]


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ([f"a::{at}" for at in range(128)], ",".join(sorted(f"a::{at}" for at in range(128)))),
        ([f"{of}::{at}" for at in range(65) for of in "ba"], "a:65,b:65"),
        ([f"{at:03}::0" for at in range(129)], "129 devices"),
    ],
)
def test_many_ids_are_told_by_how_many_there_are_of_each_gpu(ids, told, caplog):
    with caplog.at_level(logging.DEBUG, logger=service_module.__name__):
        made().preferred_bytes(preferred_request((ids, [], 200)))
    assert f" of --available {told} --size 200" in caplog.text


def test_a_preference_for_a_resource_that_is_gone_is_left_to_the_kubelet():
    service = made()
    service._store.publish({})
    assert preferences(service.preferred_bytes(preferred_request((IDS, [], 2)))) == [[]]


async def test_a_long_request_is_worked_on_beside_the_loop(directory, monkeypatch):
    """However long the work takes, other calls are answered: not only while the request is still on its way."""
    working, going, original = threading.Event(), threading.Event(), DevicePluginService.preferred_bytes

    def slow(self, request):
        working.set()
        assert going.wait(10), "the event loop waits for this"
        return original(self, request)

    monkeypatch.setattr(DevicePluginService, "preferred_bytes", slow)
    server, path = SocketServer(made()), directory / "long.sock"
    await server.bind(path)
    question = preferred_request(([f"GPU-{at:060}" for at in range(1400)], [], 1))
    async with anyio.create_task_group() as calls:
        calls.start_soon(call, path, wire.PREFERRED, question)
        await anyio.to_thread.run_sync(working.wait, 10)
        with anyio.fail_after(5):
            await call(path, wire.OPTIONS, wire.EMPTY)
        going.set()
    await server.end()
