"""Register: its order, its error texts, and the connections that it leaves (contract 2.1, 2.2)."""

import asyncio
import time
from typing import Any

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from demo.stand_in_kubelet import AdmissionError, EventKind

from .fake_plugin import FakePlugin, healthy, plugin

GPU = "nvidia.com/gpu"


async def test_answers_with_the_error_texts_of_the_kubelet(kubelet):
    async with plugin(kubelet, registered=False) as fake:
        fake.options_error = GRPCError(Status.INTERNAL, "no driver")
        wrongs: list[tuple[dict[str, Any], str]] = [
            ({"version": "v1alpha1"}, 'requested API version "v1alpha1" is not supported by kubelet. Supported '),
            ({"resource": "gpu"}, 'the ResourceName "gpu" is invalid'),
            ({}, "failed to get device plugin options: rpc error: code = Internal desc = no driver"),
        ]
        for wrong, text in wrongs:
            with pytest.raises(GRPCError, match=text) as raised:
                await fake.register(**wrong)
            assert raised.value.status is Status.UNKNOWN
    assert GPU not in kubelet.resources


async def test_gives_up_dialling_an_endpoint_nobody_serves(kubelets):
    kubelet = await kubelets(dial_timeout=0.05)
    async with plugin(kubelet, registered=False) as fake:
        with pytest.raises(GRPCError, match=r"^.*failed to dial device plugin: context deadline exceeded"):
            await fake.register(endpoint="other.sock")


async def test_older_kubelet_disconnects_the_newer_plugin_when_the_older_one_ends(kubelet):
    async with plugin(kubelet, "a.sock", healthy("x")) as a, plugin(kubelet, "b.sock", healthy("x", "y")) as b:
        await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 2, 1)
        assert kubelet.resources[GPU].streams == 2
        a.send(healthy("x"))  # both feed the table, the last message wins
        await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 1, 1)
        await a.close()
        await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 0, 1)
        await kubelet.wait_for(lambda: not kubelet.resources[GPU].streams, 1)
        await asyncio.wait_for(b.was_dropped.wait(), 1)
        await b.register()
        await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 2, 1)


async def test_older_kubelet_keeps_requests_from_the_older_plugin_after_the_newer_one_ended(kubelet):
    async with plugin(kubelet, "a.sock", healthy("x")) as a:
        async with plugin(kubelet, "b.sock", healthy("y")):
            pass
        await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 0, 1)
        a.send(healthy("x", "z"))
        await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 2, 1)
        with pytest.raises(AdmissionError, match="has been stopped"):
            await kubelet.admit("p", {GPU: 1})


@pytest.mark.parametrize(("generation", "left"), [("1.36", 0), ("1.37", 1)])
async def test_the_end_of_the_middle_one_of_three_plugins(kubelets, generation, left):
    kubelet = await kubelets(generation=generation)
    async with plugin(kubelet, "a.sock", healthy("x")) as a:
        b = FakePlugin(kubelet.directory, "b.sock", devices=healthy("x"))
        await b.serve()
        await b.register()
        async with plugin(kubelet, "c.sock", healthy("x")) as c:
            await kubelet.wait_for(lambda: kubelet.resources[GPU].streams == 3, 1)
            await b.close(orderly=False)
            await kubelet.wait_for(lambda: kubelet.resources[GPU].streams == (2 if left else 1), 1)
            assert kubelet.resources[GPU].allocatable == left
            if not left:
                await asyncio.wait_for(c.was_dropped.wait(), 1)
            else:
                assert c.dropped == 0
                await kubelet.admit("p", {GPU: 1})
                assert a.called("allocate") == [{"x"}]  # the oldest took the requests from the newest


@pytest.mark.parametrize("generation", ["1.36", "1.37"])
async def test_the_last_list_counts_and_the_last_registered_plugin_gets_the_requests(kubelets, generation):
    kubelet = await kubelets(generation=generation)
    async with plugin(kubelet, "a.sock", healthy("x")) as a, plugin(kubelet, "b.sock", healthy("x")) as b:
        a.send(healthy("x", "y"))
        await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 2, 1)
        await kubelet.admit("p", {GPU: 2})
        assert (a.called("allocate"), b.called("allocate")) == ([], [{"x", "y"}])


async def test_newer_kubelet_sends_the_older_plugin_requests_by_the_ended_ones_list(kubelets):
    kubelet = await kubelets(generation="1.37")
    unknown = GRPCError(Status.NOT_FOUND, "unknown device")
    async with plugin(kubelet, "a.sock", healthy("x"), allocate=lambda _: unknown) as a:
        async with plugin(kubelet, "b.sock", healthy("other")):
            await kubelet.wait_for(lambda: kubelet.resources[GPU].healthy == {"other"}, 1)
        await kubelet.wait_for(lambda: kubelet.resources[GPU].streams == 1, 1)
        assert kubelet.resources[GPU].healthy == {"other"}
        with pytest.raises(AdmissionError, match="unknown device"):
            await kubelet.admit("p", {GPU: 1})
        assert a.called("allocate") == [{"other"}]
        a.send(healthy("x"))
        await kubelet.wait_for(lambda: kubelet.resources[GPU].healthy == {"x"}, 1)
        assert kubelet.resources[GPU].endpoint.endswith("a.sock")
    await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 0, 1)  # the last plugin has ended
    kubelet.check()


async def test_newer_kubelet_refuses_a_path_that_is_connected_until_it_restarts(kubelets):
    kubelet = await kubelets(generation="1.37", dial_timeout=0.05)
    async with plugin(kubelet, "a.sock", healthy("x")) as a:
        with pytest.raises(GRPCError, match="device plugin already connected"):
            await a.register()
        await a.close()
        await kubelet.wait_for(lambda: not kubelet.resources[GPU].streams, 1)
        assert kubelet.resources[GPU].allocatable == 1  # though the plugin has ended
        await a.serve()
        with pytest.raises(GRPCError, match="device plugin already connected"):
            await a.register()
        await kubelet.restart()
        await a.serve()
        await a.register()
        await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 1, 1)
        assert (await kubelet.admit("p", {GPU: 1})).ids == ("x",)


async def test_a_failed_second_register_orphans_the_first_plugin(kubelet):
    async with plugin(kubelet, "a.sock", healthy("x")) as a:
        async with plugin(kubelet, "b.sock", registered=False) as b:
            b.options_error = GRPCError(Status.INTERNAL, "no")
            with pytest.raises(GRPCError):
                await b.register()
        assert kubelet.resources[GPU].streams == 1
        await a.close()
        (kubelet.directory / "a.sock").unlink()
        await kubelet.wait_for(lambda: not kubelet.resources[GPU].streams, 1)
        assert kubelet.resources[GPU].allocatable == 1  # nobody noticed
        with pytest.raises(AdmissionError, match=r"Unavailable.*connect: no such file or directory"):
            await kubelet.admit("p", {GPU: 1})


async def test_one_process_with_two_streams_is_a_violation(kubelet):
    async with plugin(kubelet, devices=healthy("x")) as fake:
        await fake.register()
        await kubelet.wait_for(lambda: kubelet.resources[GPU].streams == 2, 1)
    assert "2 live ListAndWatch streams" in kubelet.violations[0]
    with pytest.raises(AssertionError, match="close the old transports"):
        kubelet.check()


async def test_two_registers_in_flight_are_a_violation(kubelet):
    kubelet.fail_next_register("hang", times=2)
    async with plugin(kubelet, registered=False) as fake:
        calls = [asyncio.create_task(fake.register()) for _ in range(2)]
        await kubelet.wait_for(lambda: kubelet.violations, what="the violation")
        assert not any(call.done() for call in calls)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
    assert kubelet.registrations[GPU].most_in_flight == 2
    assert any("two Registers in flight" in text for text in kubelet.violations)


async def test_lets_a_register_down_as_told(kubelet):
    kubelet.fail_next_register("refuse", "not now")
    kubelet.fail_next_register("reset")
    kubelet.fail_next_register("hang")
    async with plugin(kubelet, registered=False) as fake:
        with pytest.raises(GRPCError, match="not now"):
            await fake.register()
        with pytest.raises((StreamTerminatedError, ConnectionError)):
            await fake.register()
        with pytest.raises((TimeoutError, StreamTerminatedError, GRPCError)):
            await fake.register(timeout=0.05)
        await kubelet.wait_for(lambda: not kubelet.registrations[GPU].in_flight, 1)
        for answer_only in (False, True):
            kubelet.delay_register(0.05, answer_only=answer_only)
            begun = time.perf_counter()
            await fake.register()
            assert time.perf_counter() - begun >= 0.05
            kubelet.delay_register(0, answer_only=answer_only)
            await kubelet.wait_for(lambda: fake.streams, 1)
            await kubelet.drop_stream(GPU)
    assert kubelet.registrations[GPU].accepted == 2
    kubelet.check()


@pytest.mark.parametrize("how", ["close", "goaway", "rst"])
async def test_drops_a_stream_and_never_opens_it_again(kubelet, how):
    async with plugin(kubelet, devices=healthy("x")) as fake:
        await kubelet.drop_stream(GPU, how)
        state = kubelet.resources[GPU]
        assert (state.capacity, state.allocatable, state.streams) == (1, 0, 0)
        await asyncio.wait_for(fake.was_dropped.wait(), 1)
        await fake.register()
        await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 1, 1)
        assert kubelet.registrations[GPU].total == 2
    kubelet.check()


async def test_records_how_a_stream_ended(kubelet):
    async with plugin(kubelet, devices=healthy("x")) as fake:
        for end, text in ((None, "OK"), (GRPCError(Status.ABORTED, "enough"), "Aborted: enough")):
            fake.send(end)
            await kubelet.wait_for(lambda: not kubelet.resources[GPU].streams, 1)
            ended = [event for event in kubelet.events if event.kind is EventKind.STREAM_ENDED]
            assert ended[-1].text == text
            await fake.register()
            await kubelet.wait_for(lambda: kubelet.resources[GPU].streams == 1 and fake.streams, 1)
        await fake.close()
        await kubelet.wait_for(lambda: not kubelet.resources[GPU].streams, 1)
    assert "received prior goaway: code: NO_ERROR" in kubelet.events[-1].text


async def test_forgets_a_resource_five_minutes_after_its_plugin(kubelets):
    now = 0.0
    kubelet = await kubelets(clock=lambda: now)
    async with plugin(kubelet, devices=healthy("x", "y")):
        pass
    await kubelet.wait_for(lambda: not kubelet.resources[GPU].streams, 1)
    with pytest.raises(
        AdmissionError, match=r"no healthy devices present; cannot allocate unhealthy devices nvidia.com/gpu"
    ):
        await kubelet.admit("p", {GPU: 1})
    now = 299.0
    assert (kubelet.resources[GPU].capacity, kubelet.resources[GPU].allocatable) == (2, 0)
    now = 301.0
    assert GPU not in kubelet.resources
    with pytest.raises(AdmissionError, match=r"Node didn't have enough resource: nvidia.com/gpu"):
        await kubelet.admit("p", {GPU: 1})


async def test_endpoint_with_a_directory_part_is_a_violation(kubelet):
    (kubelet.directory / "sub").mkdir()
    async with plugin(kubelet, "sub/a.sock", healthy("x")):
        assert kubelet.resources[GPU].allocatable == 1  # it works all the same
    assert "directory part" in kubelet.violations[0]


async def test_a_socket_path_longer_than_the_system_takes_is_a_violation(kubelets):
    kubelet = await kubelets(dial_timeout=0.01)
    async with plugin(kubelet, registered=False) as fake:
        with pytest.raises(GRPCError):
            await fake.register(endpoint="x" * 108)
    assert "unix sockets take 107" in kubelet.violations[0]
