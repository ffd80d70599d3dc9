"""HTTP over real sockets: answers, and limits for slow, broken and hostile clients."""

import asyncio
import errno
import logging
import os
import socket
import struct
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from gpu_plugin.telemetry.listener import server
from gpu_plugin.telemetry.listener.answer import Answer
from gpu_plugin.telemetry.listener.server import Limits, Server
from gpu_plugin.telemetry.metrics.exposition import PROMETHEUS
from tests.unit.waiting import until

PATIENT = Limits(step=30, goodbye=30)
HURRIED = Limits(step=0.05, goodbye=0.05)
LARGE = "x" * 2**24
GET = b"GET /good HTTP/1.1\r\nHost: a\r\n\r\n"
SLOW = b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n"
LARGE_PAGE = b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n"


async def _good(_):
    return Answer(200, "all is well\n")


async def _large(_):
    return Answer(200, LARGE, PROMETHEUS.content_type)


async def _slow(_):
    await anyio.sleep_forever()
    raise AssertionError


async def _broken(_):
    raise RuntimeError("it fell over")


async def _unchanged(request):
    return Answer(304, "", headers=(("ETag", request.headers["if-none-match"]), ("X-Several", request.headers["x"])))


PAGES = {"/good": _good, "/large": _large, "/slow": _slow, "/broken": _broken, "/same": _unchanged}


@asynccontextmanager
async def serving(limits=PATIENT, host="127.0.0.1"):
    """Run a server, and give it with its port. At the end, check that no connection is left."""
    made = Server(host, 0, PAGES, limits)
    async with anyio.create_task_group() as tasks:
        bound = await made.listen()
        tasks.start_soon(made.serve, bound)
        yield made, bound[0].getsockname()[1]
        tasks.cancel_scope.cancel()
    assert not made._visits


async def ask(port, request, host="127.0.0.1"):
    """Send a request and return everything that the server sends."""
    with anyio.fail_after(20):
        async with await anyio.connect_tcp(host, port) as client:
            await client.send(request)
            return await everything(client)


async def everything(client):
    received = b""
    try:
        while True:
            received += await client.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return received


def descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def head(answer):
    return answer.partition(b"\r\n\r\n")[0].decode().splitlines()


def body(answer):
    return answer.partition(b"\r\n\r\n")[2].decode()


async def test_a_page_has_its_headers():
    async with serving() as (_, port):
        answer = await ask(port, GET)
    status, *headers = head(answer)
    assert status == "HTTP/1.1 200 OK"
    told = dict(line.split(": ", 1) for line in headers)
    assert told.pop("Date").endswith(" GMT")
    assert told == {
        "Content-Type": "text/plain; charset=utf-8",
        "Content-Length": "12",
        "X-Content-Type-Options": "nosniff",
        "Connection": "close",
    }
    assert body(answer) == "all is well\n"


async def test_a_large_page_arrives_whole_with_its_own_type():
    async with serving() as (_, port):
        answer = await ask(port, LARGE_PAGE)
    assert body(answer) == LARGE
    assert f"Content-Type: {PROMETHEUS.content_type}" in head(answer)


@pytest.mark.parametrize(
    ("request_", "status", "said"),
    [
        (b"GET /good?verbose HTTP/1.1\r\nHost: a\r\n\r\n", 200, "all is well\n"),
        (b"GET http://a:80/good HTTP/1.1\r\nHost: a\r\n\r\n", 200, "all is well\n"),
        (b"GET /good HTTP/1.0\r\n\r\n", 200, "all is well\n"),
        (b"GET /good HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n", 200, "all is well\n"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", 404, "no such page; the pages are /good, /large, /slow, /broken, "),
        (b"GET /good/ HTTP/1.1\r\nHost: a\r\n\r\n", 404, "no such page"),
        (b"GET //good HTTP/1.1\r\nHost: a\r\n\r\n", 404, "no such page"),
        (b"GET http://[ HTTP/1.1\r\nHost: a\r\n\r\n", 404, "no such page"),
        (b"GET /%67ood HTTP/1.1\r\nHost: a\r\n\r\n", 404, "no such page"),
        (b"POST /good HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx", 405, "only GET, HEAD are answered\n"),
        (b"DELETE /good HTTP/1.1\r\nHost: a\r\n\r\n", 405, "only GET, HEAD"),
        (b"CONNECT /good HTTP/1.1\r\nHost: a\r\n\r\n", 405, "only GET, HEAD"),
        (b"GET /broken HTTP/1.1\r\nHost: a\r\n\r\n", 500, "the daemon's log has the details\n"),
        (b"GET /good HTTP/1.1\r\n\r\n", 400, ""),  # no Host
        (b"GET /good HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n", 400, ""),
        (b"GET /good HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, ""),
        (b"GET /good HTTP/9.9\r\nHost: a\r\n\r\n", 505, "only HTTP/1.0 and HTTP/1.1 are supported"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, ""),  # somebody speaks TLS
        (b"\0" * 100 + b"\r\n\r\n", 400, ""),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "only HTTP/1.0 and HTTP/1.1 are supported"),
    ],
)
async def test_the_answer_to_each_request(request_, status, said, caplog):
    async with serving() as (_, port):
        answer = await ask(port, request_)
        assert await ask(port, GET)  # the next request is served as usual
    assert head(answer)[0].split()[1] == str(status)
    assert said in body(answer)
    assert ("Allow: GET, HEAD" in head(answer)) == (status == 405)
    assert ("it fell over" in caplog.text) == (status == 500)


async def test_head_is_answered_without_a_body():
    async with serving() as (_, port):
        answer = await ask(port, b"HEAD /large HTTP/1.1\r\nHost: a\r\n\r\n")
    assert body(answer) == ""
    assert f"Content-Length: {len(LARGE)}" in head(answer)


async def test_only_the_first_pipelined_request_is_answered():
    async with serving() as (_, port):
        assert (await ask(port, GET * 50)).count(b"HTTP/1.1 200 OK") == 1


async def test_a_client_that_closed_its_sending_side_is_answered():
    async with serving() as (_, port), await anyio.connect_tcp("127.0.0.1", port) as client:
        await client.send(GET)
        await client.send_eof()
        with anyio.fail_after(20):
            assert body(await everything(client)) == "all is well\n"


async def test_half_a_request_is_a_bad_request():
    async with serving() as (_, port), await anyio.connect_tcp("127.0.0.1", port) as client:
        await client.send(GET[:12])
        await client.send_eof()
        with anyio.fail_after(20):
            assert head(await everything(client))[0] == "HTTP/1.1 400 Bad Request"


@pytest.mark.parametrize(
    ("start", "status"),
    [
        (b"GET /good HTTP/1.1\r\nHost: a\r\nX: ", b" 431 "),
        (b"GET /good HTTP/1.1\r\nHost: a\r\nContent-Length: 10000000\r\n\r\n", b" 200 "),
    ],
    ids=["head", "body"],
)
async def test_ten_megabytes_are_answered_early_and_the_connection_is_closed(start, status):
    async with serving() as (made, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(start + b"x" * 10_000_000)
        with anyio.fail_after(20):
            assert status in await reader.readline()
        await until(lambda: not made._visits)  # although the client still sends
        writer.transport.abort()


async def test_a_slow_head_times_out():
    async with serving(HURRIED) as (_, port), await anyio.connect_tcp("127.0.0.1", port) as client:
        answers = []

        async def listen_in():
            answers.append(await everything(client))

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(listen_in)
                with pytest.raises((anyio.BrokenResourceError, OSError)):  # noqa: PT012 - whichever byte it is
                    while True:
                        await client.send(b"G")
                        await anyio.sleep(0.01)
        assert b"HTTP/1.1 408 Request Timeout" in answers[0]


async def test_a_slow_page_times_out():
    async with serving(HURRIED) as (_, port):
        answer = await ask(port, SLOW)
    assert head(answer)[0] == "HTTP/1.1 503 Service Unavailable"
    assert body(answer) == "no answer within 0.05 s\n"


async def test_a_client_that_never_reads_is_reset():
    async with serving(HURRIED) as (made, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(LARGE_PAGE)
        await until(lambda: made._visits)
        await until(lambda: not made._visits)
        with pytest.raises(ConnectionResetError):  # noqa: PT012 - whatever was sent before can be read
            while await reader.read(2**20):
                pass
        writer.transport.abort()


async def test_a_connection_that_the_client_keeps_open_is_closed():
    async with serving(Limits(goodbye=0.05)) as (made, port), await anyio.connect_tcp("127.0.0.1", port) as client:
        await client.send(GET)
        await until(lambda: made._visits)
        await until(lambda: not made._visits)


async def test_a_client_that_leaves_early_leaves_no_connection():
    async with serving() as (made, port):
        for request in (
            b"",
            GET[:5],
            SLOW,
            LARGE_PAGE,
        ):
            client = socket.create_connection(("127.0.0.1", port))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it sends RST
            client.send(request)
            await until(lambda: made._visits)
            client.close()
        await until(lambda: all(visit.answering for visit in made._visits))
        assert await ask(port, GET)


async def test_probes_are_answered_with_two_hundred_idle_connections():
    async with serving() as (made, port):
        await ask(port, GET)
        await until(lambda: not made._visits)
        before = descriptors()
        idle = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(200)]
        assert len(made._visits) <= 32
        for _ in range(40):  # more than there is room for, while all 32 places are taken
            assert body(await ask(port, GET)) == "all is well\n"
        for client in idle:
            await client.aclose()
        await until(lambda: not made._visits)
        await until(lambda: descriptors() == before)


async def test_two_hundred_requests_at_once_are_answered():
    async with serving() as (made, port):
        answered = []

        async def one():
            answered.append(body(await ask(port, GET)))

        async with anyio.create_task_group() as tasks:
            for _ in range(200):
                tasks.start_soon(one)
        assert answered == ["all is well\n"] * 200
        await until(lambda: not made._visits)


async def test_a_young_connection_is_not_closed_to_make_room():
    async with serving(Limits(connections=4, grace=30, step=30)) as (made, port):
        young = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(5)]
        await until(lambda: len(made._visits) == 4)
        for client in reversed(young):  # the last connection is not accepted yet
            await client.send(GET)
        for client in young:
            with anyio.fail_after(20):
                assert body(await everything(client)) == "all is well\n"
            await client.aclose()


async def test_connections_that_wait_for_an_answer_are_closed_last():
    async with serving(Limits(connections=2, grace=0, step=30, goodbye=30)) as (made, port):
        slow, answered = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(2)]
        await slow.send(SLOW)
        await answered.send(GET)
        assert body(await answered.receive()) == "all is well\n"
        await until(lambda: [visit.answering for visit in made._visits] == [True, False])
        assert body(await ask(port, GET)) == "all is well\n"
        with anyio.fail_after(20):
            assert await everything(answered) == b""
        later = await anyio.connect_tcp("127.0.0.1", port)
        await later.send(SLOW)
        await until(lambda: [visit.answering for visit in made._visits] == [True, True])
        assert body(await ask(port, GET)) == "all is well\n"
        with anyio.fail_after(20):
            assert await everything(slow) == b""  # the oldest made room
        assert [visit.answering for visit in made._visits].count(True) == 1
        for client in (slow, answered, later):
            await client.aclose()


async def test_a_client_that_does_not_read_is_reset_to_make_room():
    async with serving(Limits(connections=1, grace=0, step=30)) as (made, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(LARGE_PAGE)
        await until(lambda: [visit.answering for visit in made._visits] == [True])
        assert body(await ask(port, GET)) == "all is well\n"
        with pytest.raises(ConnectionResetError):  # noqa: PT012 - whatever was sent before can be read
            while await reader.read(2**20):
                pass
        writer.transport.abort()


async def test_the_server_stops_while_a_connection_waits_for_room():
    async with serving(Limits(connections=1, grace=30, step=30)) as (made, port):
        clients = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(2)]
        await until(lambda: len(made._visits) == 1)
    for client in clients:
        await client.aclose()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EINVAL])
async def test_an_error_of_accept_that_lasts_is_one_log_line(caplog, monkeypatch, number):
    loop = asyncio.get_running_loop()
    accept, tries = loop.sock_accept, 0

    async def exhausted(listener):
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise OSError(number, os.strerror(number))
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", exhausted)
    async with serving(Limits(pause=0.01)) as (_, port):
        assert body(await ask(port, GET)) == "all is well\n"
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert os.strerror(number) in errors[0]


async def test_a_connection_that_broke_before_accept_is_skipped(monkeypatch, caplog):
    loop = asyncio.get_running_loop()
    accept, broken = loop.sock_accept, [errno.ECONNABORTED, errno.EPROTO]

    async def breaking(listener):
        if broken:
            raise OSError(broken.pop(), "broken")
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", breaking)
    async with serving() as (_, port):
        assert body(await ask(port, GET)) == "all is well\n"
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


async def test_an_error_in_one_connection_ends_no_other_connection(monkeypatch, caplog):
    encoded = server._encoded
    failures = ["it fell over"]

    def fail_once(*arguments):
        if failures:
            raise RuntimeError(failures.pop())
        return encoded(*arguments)

    monkeypatch.setattr(server, "_encoded", fail_once)
    async with serving() as (_, port):
        assert await ask(port, GET) == b""
        assert body(await ask(port, GET)) == "all is well\n"
    assert "it fell over" in caplog.text


async def test_an_address_in_use_is_logged_once_and_used_once_it_is_free(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "gpu_plugin")
    monkeypatch.setattr(server, "FIRST_RETRY", 0.005)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        made = Server("127.0.0.1", port, PAGES)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run)
            await until(lambda: "Address already in use" in caplog.text)
            await anyio.sleep(0.05)
            other.close()
            await until(lambda: "are answered on" in caplog.text)
            assert body(await ask(port, GET)) == "all is well\n"
            tasks.cancel_scope.cancel()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == 1
    assert told[0].startswith(f"--http-address: cannot listen on 127.0.0.1:{port}: Address already in use; ")


async def test_the_server_stops_at_once_with_open_connections():
    async with serving() as (made, port):
        clients = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(3)]
        await clients[0].send(SLOW)
        await clients[1].send(LARGE_PAGE)
        await until(lambda: len(made._visits) == 3)
        began = anyio.current_time()
    assert anyio.current_time() - began < 0.5
    with pytest.raises(OSError):
        await anyio.connect_tcp("127.0.0.1", port)
    for client in clients:
        await client.aclose()


async def test_ipv6_and_all_addresses():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        async with serving(host="::1") as (_, port):
            assert body(await ask(port, GET, host="::1")) == "all is well\n"
    except OSError:
        pytest.skip("no IPv6 here")
    everywhere = Server("", 0, PAGES)
    sockets = await everywhere.listen()
    by_host = dict(bound.getsockname()[:2] for bound in sockets)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(everywhere.serve, sockets)
        assert body(await ask(by_host["0.0.0.0"], GET)) == "all is well\n"
        assert body(await ask(by_host["::"], GET, host="::1")) == "all is well\n"
        tasks.cancel_scope.cancel()


async def test_an_address_family_that_the_machine_lacks_is_skipped(monkeypatch):
    real = socket.socket

    def without_ipv6(family, *more):
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return real(family, *more)

    monkeypatch.setattr(socket, "socket", without_ipv6)
    [bound] = await Server("", 0, PAGES).listen()
    with bound:
        assert bound.getsockname()[0] == "0.0.0.0"
    with pytest.raises(OSError, match="not supported"):
        await Server("::1", 0, PAGES).listen()


async def test_an_address_of_another_machine_is_an_error():
    with pytest.raises(OSError, match="Cannot assign requested address"):
        await Server("192.0.2.1", 0, PAGES).listen()  # kept for documents (RFC 5737)


async def test_a_hanging_resolver_is_called_once(monkeypatch):
    over, asked = threading.Event(), []

    def hang(*_, **__):
        asked.append(1)
        over.wait()
        return real("127.0.0.1", 0, type=socket.SOCK_STREAM)

    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(server, "RESOLVE_WITHIN", 0.01)
    made = Server("node.example.com", 0, PAGES)
    try:
        for _ in range(5):
            with pytest.raises(TimeoutError, match=r"node\.example\.com was not resolved within"):
                await made.listen()
        assert len(asked) == 1
        assert [thread.name for thread in threading.enumerate()].count("http-address") == 1
    finally:
        over.set()
    monkeypatch.setattr(server, "RESOLVE_WITHIN", 20)
    [bound] = await made.listen()  # whose answer came late
    bound.close()
    assert len(asked) == 1


@pytest.mark.parametrize("host", ["a..b", "x" * 64, f"a.{'x' * 64}.b"])
async def test_an_invalid_host_name_is_an_error(host):
    with pytest.raises(OSError, match=f"{host} cannot be resolved: "):
        await Server(host, 80, PAGES).listen()


async def test_an_unchanged_page_is_answered_without_a_body():
    async with serving() as (_, port):
        answer = await ask(port, b'GET /same HTTP/1.1\r\nHost: a\r\nIf-None-Match: "7"\r\nX: a\r\nx: b\r\n\r\n')
    status, *headers = head(answer)
    assert status == "HTTP/1.1 304 Not Modified"
    assert 'ETag: "7"' in headers
    assert "X-Several: a, b" in headers
    assert not [line for line in headers if line.startswith("Content-Length")]
    assert not body(answer)
