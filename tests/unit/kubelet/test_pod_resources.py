"""Questions to the kubelet about the devices of pods: the answers, and all failures."""

import asyncio
import os
import re
import socket
import threading
from collections.abc import Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from hypothesis import given, settings
from hypothesis import strategies as st

from demo.stand_in_kubelet import Container, StandInKubelet
from demo.stand_in_kubelet.pod_resources import PodResourcesService, encode_pods
from demo.stand_in_kubelet.server import SocketServer
from gpu_plugin.kubelet import bounded_channel, pod_listing, pod_resources, wire
from gpu_plugin.kubelet._api import v1
from gpu_plugin.kubelet.bounded_channel import CallError
from gpu_plugin.kubelet.pod_listing import Holder
from gpu_plugin.kubelet.pod_resources import allocated
from tests.unit.demo.stand_in_kubelet.fake_plugin import device, healthy, plugin

GPU = "nvidia.com/gpu"
MIG = "nvidia.com/mig-1g.10gb"


@pytest.fixture
def path(directory: Path) -> Path:
    return directory / "p.sock"


@asynccontextmanager
async def answering(path, answer):
    """A gRPC server on `path` whose List does what `answer` does with the stream."""

    class Lister:
        def __mapping__(self) -> Mapping[str, Handler]:
            return {wire.POD_RESOURCES_LIST: Handler(answer, Cardinality.UNARY_UNARY, bytes, bytes)}

    async with serving(path, Lister()):
        yield


@asynccontextmanager
async def serving(path, service):
    server = SocketServer([service])
    await server.listen(path)
    try:
        yield
    finally:
        server.drop(orderly=False)
        await server.wait_dropped()


@asynccontextmanager
async def listening(path, handle):
    """A server of bytes on `path`; connections still open at the end are cut."""
    writers = []

    async def accept(reader, writer):
        writers.append(writer)
        await handle(reader, writer)

    server = await asyncio.start_unix_server(accept, path)
    try:
        yield
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await server.wait_closed()


def sends(data):
    async def answer(stream):
        await stream.recv_message()
        await stream.send_message(data)

    return answer


class TestWithTheStandIn:
    async def test_says_what_pods_hold_and_no_more_once_they_ended(self, directory):
        async with StandInKubelet(directory / "device-plugins", numa_policy="best-effort") as kubelet:
            where = kubelet.pod_resources_socket
            assert where is not None
            assert await allocated(where) == frozenset()
            listed = [device("a", "Healthy", 0, 1), device("b", "Healthy", 1), device("c")]
            async with (
                plugin(kubelet, "a.sock", listed),
                plugin(kubelet, "b.sock", healthy("m", "n"), resource=MIG),
            ):
                both = await kubelet.admit("p", containers=[Container("x", {GPU: 2}), Container("y", {MIG: 1})])
                expected = {(each.resource, i) for each in both.allocations for i in each.ids}
                assert len(expected) == 3
                assert await allocated(where) == expected
                more = {(MIG, i) for i in (await kubelet.admit("q", {MIG: 1})).ids}
                assert await allocated(where) == expected | more
                kubelet.release("p")
                assert await allocated(where) == more
            await kubelet.restart()
            assert await allocated(where) == more
            kubelet.check()

    async def test_a_refusal_is_told_in_the_kubelets_words(self, path):
        service = PodResourcesService(dict, dict, lambda: 0.0)
        async with serving(path, service):
            for _ in range(10):
                assert await allocated(path) == frozenset()
            with pytest.raises(CallError, match="refused: RESOURCE_EXHAUSTED rejected by rate limit"):
                await allocated(path)

    async def test_a_socket_of_another_service_is_a_refusal(self, directory):
        async with StandInKubelet(directory) as kubelet:
            # grpclib ends calls of unknown methods without a content type, a Go server with UNIMPLEMENTED
            with pytest.raises(CallError, match=f"{kubelet.socket} refused: Missing content-type header"):
                await allocated(kubelet.socket)


class TestWhereNobodyAnswersRightly:
    async def test_a_path_on_which_nobody_listens(self, path, directory):
        dead, long = directory / "dead.sock", directory / ("x" * 120)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(os.fspath(dead))
        for where, words in (
            (path, f"no PodResources socket at {path}: .*--pod-resources-socket"),
            (dead, f"no answer on {dead}: Connection refused"),
            (directory, f"no answer on {directory}"),
            (long, "path too long"),
        ):
            with pytest.raises(CallError, match=words):
                await allocated(where)

    async def test_one_that_takes_the_connection_and_says_nothing(self, path):
        gone = asyncio.Event()

        async def swallow(reader, _writer):
            while await reader.read(4096):
                pass
            gone.set()

        async with listening(path, swallow):
            with pytest.raises(CallError, match=r"did not answer within 0\.05 s"):
                await allocated(path, 0.05)
            await asyncio.wait_for(gone.wait(), 10)  # we hung up

    @pytest.mark.parametrize("received", [0, 1, 24, 60])
    async def test_one_that_hangs_up_at_any_moment(self, path, received):
        async def hang_up(reader, writer):
            await reader.read(received)
            writer.transport.abort()

        async with listening(path, hang_up):
            for _ in range(5):
                with pytest.raises(CallError, match=re.escape(str(path))):
                    await allocated(path, 10)
                task = asyncio.current_task()
                assert task
                assert not task.cancelling()  # grpclib cancels the task that it wakes
                await asyncio.sleep(0)

    @pytest.mark.parametrize(
        "said",
        [
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            b"\x00" * 100,
            b"\xff" * 100,
        ],
    )
    async def test_one_that_speaks_something_else(self, path, said):
        async def speak(_reader, writer):
            writer.write(said)
            writer.close()

        async with listening(path, speak):
            with pytest.raises(CallError, match=re.escape(str(path))):
                await allocated(path, 10)

    @pytest.mark.parametrize("data", [b"\x0a\x05ab", b"\x0a", b"\xff" * 11, b"\x0b", b"\x0a\x04\x1a\x02\x12\xff"])
    async def test_an_answer_that_is_no_message(self, path, data):
        async with answering(path, sends(data)):
            with pytest.raises(CallError, match="not as the kubelet's PodResources service does"):
                await allocated(path)

    async def test_no_answer_at_all(self, path):
        async def ends(stream):
            await stream.recv_message()

        async with answering(path, ends):
            with pytest.raises(CallError):
                await allocated(path)

    async def test_an_error_status(self, path):
        async def fails(stream):
            await stream.recv_message()
            raise GRPCError(Status.INTERNAL, "the checkpoint is gone")

        async with answering(path, fails):
            with pytest.raises(CallError, match="refused: INTERNAL the checkpoint is gone"):
                await allocated(path)

    async def test_an_answer_without_end_is_read_up_to_a_limit(self, path, monkeypatch):
        monkeypatch.setattr(bounded_channel, "MAX_ANSWER_BYTES", 100_000)
        async with answering(path, sends(encode_pods({"p" * 200_000: {}}))):
            with pytest.raises(CallError, match="its answer has more than 100000 bytes"):
                await allocated(path)
        path.unlink()
        async with answering(path, sends(encode_pods({"p" * 90_000: {}}))):
            assert await allocated(path) == frozenset()

    async def test_reading_a_long_answer_has_an_end(self, path, monkeypatch):
        going_on = threading.Event()
        monkeypatch.setattr(pod_listing, "decode_holders", lambda _: going_on.wait(30) and frozenset())
        try:
            async with answering(path, sends(b"a" * pod_resources.OFF_LOOP_BYTES)):
                with anyio.fail_after(10), pytest.raises(CallError, match="could not be read within 1 s"):
                    await allocated(path, 1)
        finally:
            going_on.set()

    async def test_one_who_asks_may_lose_patience(self, path):
        asked = asyncio.Event()
        dropped = asyncio.Event()

        async def never(stream):
            asked.set()
            try:
                await stream.recv_message()
                await asyncio.get_running_loop().create_future()
            finally:
                dropped.set()

        before = asyncio.all_tasks()
        async with answering(path, never):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(allocated, path)
                await asyncio.wait_for(asked.wait(), 10)
                tasks.cancel_scope.cancel()
            await asyncio.wait_for(dropped.wait(), 10)
        assert asyncio.all_tasks() <= before


texts = st.text(max_size=8)
resources = st.lists(st.builds(v1.ContainerDevices, texts, st.lists(texts, max_size=3)), max_size=3)
containers = st.lists(st.builds(v1.ContainerResources, texts, resources), max_size=3)
answers = st.builds(
    v1.ListPodResourcesResponse, st.lists(st.builds(v1.PodResources, texts, texts, containers), max_size=3)
)


@settings(max_examples=50)
@given(answers)
def test_reads_what_generated_code_writes(answer):
    expected = {
        (devices.resource_name, identifier)
        for pod in answer.pod_resources
        for container in pod.containers
        for devices in container.devices
        for identifier in devices.device_ids
    }
    assert frozenset(pod_listing.decode_holders(bytes(answer))) == expected
    assert pod_listing.decode_holders(bytes(answer)) == {
        pair: {
            Holder(pod.namespace, pod.name, container.name)
            for pod in answer.pod_resources
            for container in pod.containers
            for devices in container.devices
            if devices.resource_name == pair[0] and pair[1] in devices.device_ids
        }
        for pair in expected
    }


@settings(max_examples=50)
@given(answers, st.data())
def test_an_answer_cut_short_is_read_to_a_part_or_refused(answer, data):
    whole = bytes(answer)
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    try:
        told = frozenset(pod_listing.decode_holders(cut))
    except ValueError:
        return
    assert told <= frozenset(pod_listing.decode_holders(whole))


def test_fields_that_are_not_ours_are_skipped():
    varint, fixed64, fixed32, text = b"\x30\x96\x01", b"\x39" + b"8" * 8, b"\x45" + b"4" * 4, b"\x4a\x02ab"
    devices = b"\x0a\x01r" + b"\x12\x01i" + varint + fixed64 + fixed32 + text
    container = b"\x12" + bytes([len(devices)]) + devices + varint + fixed32
    pod = b"\x1a" + bytes([len(container)]) + container + fixed64 + text
    assert frozenset(pod_listing.decode_holders(b"\x0a" + bytes([len(pod)]) + pod + fixed64)) == {("r", "i")}


@pytest.mark.parametrize(
    "answer",
    [
        b"\x08\x01",  # a number in place of the pods
        b"\x0a\x05\x0a\x01p",  # a pod that ends too early
        b"\x0a\x02\x08\x01",  # a number in place of the name of a pod, or of a resource
        b"\x0a",
    ],
)
def test_a_damaged_answer_never_means_that_no_pod_holds_a_device(answer):
    with pytest.raises(ValueError, match="message"):
        pod_listing.decode_holders(answer)
    with pytest.raises(ValueError, match="message"):
        pod_listing.decode_allocatable(answer)
