"""Registering, and registering again after everything that can part a plugin from its kubelet."""

import asyncio
from pathlib import Path

import anyio
import pytest
from grpclib.exceptions import StreamTerminatedError
from msgspec.structs import replace

from demo.stand_in_kubelet import StandInKubelet
from demo.stand_in_kubelet.journal import EventKind
from gpu_plugin.kubelet import endpoint
from gpu_plugin.kubelet.bounded_channel import BoundedChannel
from gpu_plugin.kubelet.counts import FAILED
from gpu_plugin.kubelet.directory import POLL_INTERVAL
from gpu_plugin.kubelet.server import SocketServer
from tests.unit.daemon.skipping_loop import SkippingLoop
from tests.unit.kubelet.serving import GPU, registered, serving
from tests.unit.kubelet.test_list_and_watch import open_stream

SOON = POLL_INTERVAL / 2
"""Seconds in which an event is noticed on a busy machine. A wait that no event ends takes POLL_INTERVAL."""


async def test_serves_before_it_registers_and_says_who_it_is(kubelet, directory):
    async with serving(directory):
        await kubelet.wait_for(registered(kubelet))
        count = kubelet.registrations[GPU]
        assert (count.total, count.accepted, count.most_in_flight) == (1, 1, 1)
        first = next(e for e in kubelet.events if e.kind is EventKind.REGISTER)
        assert Path(first.endpoint).parent == directory
        assert kubelet.resources[GPU].allocatable == 8


@pytest.mark.parametrize("how", ["refuse", "reset", "hang"])
async def test_a_failed_registration_is_tried_again(kubelet, directory, monkeypatch, caplog, how):
    monkeypatch.setattr(endpoint, "REGISTER_DEADLINE", 0.1)
    kubelet.fail_next_register(how, "no room", times=2)
    async with serving(directory):
        await kubelet.wait_for(registered(kubelet))
        count = kubelet.registrations[GPU]
        assert (count.total, count.most_in_flight, kubelet.resources[GPU].streams) == (3, 1, 1)
    assert ("the kubelet refused: no room" in caplog.text) == (how == "refuse")


@pytest.mark.parametrize("grace", [0.0, 0.0005, 0.002, 0.01])
async def test_a_kubelet_that_hangs_up_at_any_moment_is_asked_again(directory, grace, caplog):
    """A kubelet on its way out takes the connection and drops it, sooner or later."""
    taken = 0

    async def hang_up(_reader, writer):
        nonlocal taken
        taken += 1
        await asyncio.sleep(grace)
        writer.transport.abort()

    server = await asyncio.start_unix_server(hang_up, directory / "kubelet.sock")
    async with serving(directory) as plugin:
        with anyio.move_on_after(0.5):
            while True:
                await plugin.look.wait(0.05)
        assert taken > 2
        assert not [record for record in caplog.records if record.exc_info]
        server.close()
        async with StandInKubelet(directory) as kubelet:
            await kubelet.wait_for(registered(kubelet), timeout=SOON)


async def test_a_kubelet_that_removed_our_socket_while_starting_is_not_asked_to_dial_it(
    kubelet, directory, monkeypatch, caplog
):
    original = BoundedChannel.connect
    sockets: list[Path] = []

    async def removing(self, timeout):
        await original(self, timeout)
        if not sockets:
            sockets.extend(plugin.sockets)
            sockets[0].unlink()

    monkeypatch.setattr(BoundedChannel, "connect", removing)
    async with serving(directory) as plugin:
        await kubelet.wait_for(registered(kubelet))
        assert kubelet.registrations[GPU].total == 1
        assert plugin.sockets != sockets
    assert "our socket was removed while the kubelet was starting" in caplog.text


async def test_a_restart_at_any_moment_is_noticed_by_its_events(kubelet, directory):
    async with serving(directory):
        await kubelet.wait_for(registered(kubelet))
        for turn in range(20):
            accepted = kubelet.registrations[GPU].accepted
            await kubelet.restart(orderly=bool(turn % 2), pause=(0, 0.0005, 0.001, 0.003)[turn % 4])
            await kubelet.wait_for(registered(kubelet, accepted + 1), timeout=SOON)


async def test_our_socket_unlinked_while_we_register_is_made_again(kubelet, directory):
    kubelet.delay_register(0.2)  # time to lose the socket before the kubelet dials it
    async with serving(directory) as plugin:
        await kubelet.wait_for(lambda: GPU in kubelet.registrations)
        plugin.sockets[0].unlink()
        await kubelet.wait_for(registered(kubelet), timeout=SOON)
        assert kubelet.registrations[GPU].total == 1


async def test_a_kubelets_drop_is_seen_while_somebody_else_still_watches(kubelet, directory):
    async with serving(directory) as plugin:
        await kubelet.wait_for(registered(kubelet))
        channel, stream, _ = await open_stream(plugin.sockets[0])
        await kubelet.drop_stream(GPU)
        await kubelet.wait_for(registered(kubelet, 2), timeout=SOON)
        with pytest.raises(StreamTerminatedError):  # a new beginning closes every old connection
            await stream.recv_message()
        channel.close()


async def test_a_directory_in_the_place_of_the_kubelets_socket_is_waited_out(directory):
    (directory / "kubelet.sock").mkdir()
    async with serving(directory) as plugin:
        for _ in range(20):
            plugin.look.ring()
            await anyio.sleep(0.005)
        assert plugin.sockets == []


def test_a_socket_that_goes_is_made_again_at_once_the_first_time_and_after_it_has_worked_for_long(directory):
    async def pauses():
        took = []
        async with serving(directory, 1, register=False) as plugin:
            # Its work begins a moment after its socket is there.
            for works_for in (0.1, 0.1, 0.1, endpoint.STABLE + 5, 0.1, endpoint.STABLE - 5):
                while not plugin.sockets:
                    await plugin.look.wait(1)
                await anyio.sleep(works_for)
                plugin.sockets[0].unlink()
                gone = anyio.current_time()
                while not plugin.sockets:
                    await plugin.look.wait(1)
                took.append(anyio.current_time() - gone)
        return took

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        took = runner.run(pauses())
    assert took == pytest.approx([0, 0.05, 0.1, 0, 0.05, 0.1], rel=0.11)


async def test_an_answer_that_comes_late_is_still_an_answer(kubelet, directory):
    kubelet.delay_register(0.3, answer_only=True)
    async with serving(directory):
        await kubelet.wait_for(registered(kubelet))
        assert kubelet.registrations[GPU].total == 1


async def test_waits_for_a_kubelet_that_is_not_there_yet(directory):
    async with serving(directory) as plugin:
        assert plugin.sockets == []
        kubelet = StandInKubelet(directory)
        await kubelet.start(bind_to_listen=0.05)  # the socket appears before anyone listens on it
        await kubelet.wait_for(registered(kubelet))
        assert kubelet.registrations[GPU].total == 1
        await kubelet.stop()
        kubelet.check()


async def test_waits_for_a_directory_that_is_not_there_yet(directory):
    inner = directory / "a" / "b"
    async with serving(inner):
        inner.mkdir(parents=True)
        async with StandInKubelet(inner) as kubelet:
            await kubelet.wait_for(registered(kubelet), timeout=SOON)


@pytest.mark.parametrize("how", ["goaway", "close", "rst"])
async def test_a_dropped_stream_leads_to_one_new_registration_within_a_second(kubelet, directory, how):
    async with serving(directory):
        await kubelet.wait_for(registered(kubelet))
        await kubelet.drop_stream(GPU, how)
        await kubelet.wait_for(registered(kubelet, 2), timeout=SOON)
        assert kubelet.registrations[GPU].total == 2
        assert kubelet.resources[GPU].allocatable == 8


@pytest.mark.parametrize("orderly", [True, False])
async def test_a_kubelet_restart_leads_to_one_new_registration_on_a_new_socket(kubelet, directory, orderly):
    async with serving(directory) as plugin:
        await kubelet.wait_for(registered(kubelet))
        before = plugin.sockets
        await kubelet.restart(orderly=orderly)
        await kubelet.wait_for(registered(kubelet, 2), timeout=SOON)
        assert kubelet.registrations[GPU].total == 2
        assert plugin.sockets != before
        assert len(plugin.sockets) == 1


async def test_a_stale_event_for_the_socket_in_use_changes_nothing(kubelet, directory):
    async with serving(directory) as plugin:
        await kubelet.wait_for(registered(kubelet))
        for _ in range(3):
            plugin.look.ring()
            await anyio.lowlevel.checkpoint()
        (directory / "somebody-else.sock").touch()
        plugin.fail(0)
        await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 7)
        assert kubelet.registrations[GPU].total == 1


async def test_two_instances_live_side_by_side_and_the_newer_stays(kubelet, directory, monkeypatch):
    async with serving(directory) as old:
        await kubelet.wait_for(registered(kubelet))
        monkeypatch.setattr(endpoint, "socket_path", lambda d, r, n: d / f"gpu-plugin-newer-{n}.sock")
        async with serving(directory) as new:
            await kubelet.wait_for(lambda: kubelet.registrations[GPU].accepted == 2)
            await kubelet.wait_for(lambda: kubelet.resources[GPU].streams == 2)
            assert len(old.sockets) == 2  # both sockets are live and stay
            old.scope.cancel()
            await kubelet.wait_for(
                lambda: kubelet.resources[GPU].streams == 1 and kubelet.resources[GPU].allocatable == 8
            )
            new.fail(0)
            await kubelet.wait_for(lambda: kubelet.resources[GPU].allocatable == 7)


async def test_a_server_that_died_is_begun_again_and_others_do_not_notice(kubelet, directory, monkeypatch):
    servers = []
    bind = SocketServer.bind

    async def remembered(server, path):
        servers.append(server)
        await bind(server, path)

    monkeypatch.setattr(SocketServer, "bind", remembered)
    async with serving(directory) as one, serving(directory, 2, "nvidia.com/other"):
        await kubelet.wait_for(registered(kubelet))
        await kubelet.wait_for(registered(kubelet, resource="nvidia.com/other"))
        ours = next(s for s in servers if "-gpu-" in str(s._path))
        ours._server.close()
        one.look.ring()
        await kubelet.wait_for(registered(kubelet, 2), timeout=SOON)
        assert kubelet.registrations["nvidia.com/other"].total == 1


async def test_an_unexpected_failure_while_serving_is_mended(kubelet, directory, monkeypatch, caplog):
    calls = []

    async def failing_once(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            raise RuntimeError("never seen before")
        return await original(*arguments)

    original = BoundedChannel.ask
    monkeypatch.setattr(BoundedChannel, "ask", failing_once)
    async with serving(directory):
        await kubelet.wait_for(registered(kubelet))
    assert "never seen before" in caplog.text


async def test_a_directory_that_cannot_be_served_in_is_said_and_tried_again(kubelet, directory, monkeypatch, caplog):
    bind = SocketServer.bind
    refusals = [OSError(28, "No space left on device")] * 2

    async def refused(server, path):
        if refusals:
            raise refusals.pop()
        await bind(server, path)

    monkeypatch.setattr(SocketServer, "bind", refused)
    async with serving(directory):
        await kubelet.wait_for(registered(kubelet))
    assert "No space left on device" in caplog.text


async def test_a_socket_that_goes_as_soon_as_it_is_made_is_no_failed_registration(
    kubelet, directory, monkeypatch, caplog
):
    """As a kubelet that starts removes it: nothing has gone wrong between us."""
    caplog.set_level("INFO")
    start = SocketServer.start
    removed: list[str] = []

    async def start_too_early(server, sock):
        await start(server, sock=sock)
        if not removed:
            removed.append(sock.getsockname())
            Path(removed[0]).unlink()

    monkeypatch.setattr(SocketServer, "start", start_too_early)
    async with serving(directory) as plugin:
        await kubelet.wait_for(registered(kubelet))
    assert f"{GPU}: our socket was removed as soon as it was made; registering again" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert not plugin.endpoint._shared.counts.registrations[GPU, FAILED]


async def test_a_socket_that_cannot_be_made_again_while_we_register_is_said_as_what_it_is(
    kubelet, directory, monkeypatch, caplog
):
    rebind = SocketServer.rebind
    refused: list[int] = []

    async def no_space(server):
        if refused:
            return await rebind(server)
        refused.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SocketServer, "rebind", no_space)
    kubelet.delay_register(0.2)  # time to lose the socket before the kubelet dials it
    async with serving(directory) as plugin:
        await kubelet.wait_for(lambda: GPU in kubelet.registrations)
        plugin.sockets[0].unlink()
        await kubelet.wait_for(registered(kubelet))
    assert refused
    assert f"cannot serve in {directory}: [Errno 28] No space left on device" in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


HERE, OTHER = (1, 2, 3), (1, 2, 4)
WELL = endpoint.View(
    listening=True,
    registering=True,
    kubelet_before=HERE,
    kubelet_now=HERE,
    streams=1,
    streams_opened=1,
    age=1.0,
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"streams": 2, "streams_opened": 5}, ""),
        ({"kubelet_now": None}, ""),  # a dead kubelet's socket may go long before its stream does
        ({"streams": 0, "streams_opened": 0}, ""),
        ({"streams": 0, "streams_opened": 0, "age": 31.0}, "opened no stream"),
        ({"streams": 0}, "dropped our stream"),
        ({"kubelet_now": OTHER}, "new socket"),
        ({"listening": False}, "socket is gone"),
        ({"registering": False, "streams": 0, "kubelet_now": OTHER}, ""),
        ({"registering": False, "listening": False}, "socket is gone"),
    ],
)
def test_what_ends_an_incarnation(change, reason):
    said = endpoint.over(replace(WELL, **change))
    assert reason in said
    assert bool(said) == bool(reason)


async def test_the_kubelet_that_took_the_registration_is_the_one_that_counts(kubelet, directory, monkeypatch):
    """A kubelet that starts between the look at its socket and the call is not taken for a newer kubelet later."""
    original, restarts = SocketServer.bind, iter([True])

    async def restarted(self, path):
        if next(restarts, False):
            await kubelet.restart()
        await original(self, path)

    monkeypatch.setattr(SocketServer, "bind", restarted)
    async with serving(directory) as plugin:
        await kubelet.wait_for(registered(kubelet))
        for _ in range(3):
            plugin.look.ring()
            await anyio.sleep(0.05)
        assert kubelet.registrations[GPU].total == 1


async def test_a_kubelet_that_stays_away_is_said_again_as_a_warning(directory, caplog, monkeypatch):
    monkeypatch.setattr(endpoint, "POLL_INTERVAL", 0.01)
    monkeypatch.setattr(endpoint, "REMINDER", 0.03)
    caplog.set_level("INFO")
    async with serving(directory):
        with anyio.fail_after(5):
            while sum("waiting for the kubelet: no" in each.getMessage() for each in caplog.records) < 3:
                await anyio.sleep(0.005)
    levels = [each.levelname for each in caplog.records if "waiting for the kubelet: no" in each.getMessage()]
    assert levels[:3] == ["INFO", "WARNING", "WARNING"]
    assert {each.resource for each in caplog.records if "waiting" in each.getMessage()} == {GPU}
