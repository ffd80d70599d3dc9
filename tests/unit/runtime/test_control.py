import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from functools import partial

import anyio
import pytest
from anyio import to_thread

from gpu_plugin import cli
from gpu_plugin.config.errors import ConfigError
from gpu_plugin.runtime import control
from gpu_plugin.runtime.control import server


async def echo(request):
    return {"got": dict(request)}


async def ask(state, verb, **fields):
    return await to_thread.run_sync(lambda: control.request(state, verb, **fields))


async def say(state, line):
    """A client's raw bytes and the reply's."""
    reader, writer = await asyncio.open_unix_connection(str(state / control.SOCKET))
    writer.write(line)
    reply = await reader.read()
    writer.close()
    return reply


async def test_a_request_and_its_reply(tmp_path):
    async with server.serve(tmp_path, {"echo": echo}):
        assert await ask(tmp_path, "echo", gpu=3, text="\n°") == {"got": {"gpu": 3, "text": "\n°"}}
        assert await ask(tmp_path, "echo") == {"got": {}}
        assert (tmp_path / control.SOCKET).stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / control.SOCKET).exists()


async def test_a_state_directory_is_made(tmp_path):
    state = tmp_path / "new" / "state"
    async with server.serve(state, {"echo": echo}):
        assert await ask(state, "echo") == {"got": {}}
        assert state.stat().st_mode & 0o777 == 0o700


async def test_a_directory_too_long_for_a_socket_address(tmp_path):
    state = tmp_path / ("d" * 120)
    state.mkdir()
    async with server.serve(state, {"echo": echo}):
        assert await ask(state, "echo", gpu=1) == {"got": {"gpu": 1}}
    assert not any(state.iterdir())


async def test_refusals(tmp_path, caplog):
    async def refuse(_):
        raise ConfigError("GPU 9: this node has GPUs 0 to 7")

    async def fail(_):
        raise control.RefusedError("the disk is full")

    async def broken(_):
        raise KeyError("secret")

    async def unspeakable(_):
        return {"it": object()}

    async def endless(_):
        return {"it": "x" * 2**20}

    verbs = {
        "refuse": refuse,
        "fail": fail,
        "broken": broken,
        "unspeakable": unspeakable,
        "endless": endless,
        "echo": echo,
    }
    async with server.serve(tmp_path, verbs):
        with pytest.raises(control.BadRequestError, match=r"^GPU 9: this node has GPUs 0 to 7$"):
            await ask(tmp_path, "refuse")
        with pytest.raises(control.ControlError, match=r"^the disk is full$") as refused:
            await ask(tmp_path, "fail")
        assert refused.type is control.ControlError
        for verb in ("broken", "unspeakable"):
            with pytest.raises(control.ControlError, match=r"^internal error: the daemon's log has the details$"):
                await ask(tmp_path, verb)
        assert "KeyError: 'secret'" in caplog.text
        with pytest.raises(control.ControlError, match=r"endless: the reply is too long"):
            await ask(tmp_path, "endless")
        with pytest.raises(control.UnknownVerbError, match=r"no verb no; it has: broken, echo, endless, fail, refuse"):
            await ask(tmp_path, "no")
        with pytest.raises(
            control.ControlError, match="echo: the request has 70027 bytes, more than the limit of 65536"
        ):
            await ask(tmp_path, "echo", it="x" * 70000)
        assert await ask(tmp_path, "echo") == {"got": {}}


async def test_a_reply_may_be_longer_than_a_request(tmp_path):
    async def long(_):
        return {"it": "x" * 1_000_000}

    async with server.serve(tmp_path, {"long": long}):
        assert await ask(tmp_path, "long") == {"it": "x" * 1_000_000}


@pytest.mark.parametrize(
    "line", [b"\n", b"no\n", b"[]\n", b'{"verb": 1}\n', b"[" * 60000 + b"\n", b"\xff\n", b"x" * 65537]
)
async def test_a_line_that_is_no_request(tmp_path, line):
    async with server.serve(tmp_path, {"echo": echo}):
        reply = json.loads(await say(tmp_path, line))
        assert not reply["ok"]
        assert reply["error"].startswith("a request is one line of JSON")


async def test_a_verb_that_takes_too_long_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "SECONDS_TO_ANSWER", 0.02)

    async def forever(_):
        await anyio.sleep_forever()

    async with server.serve(tmp_path, {"forever": forever}):
        with pytest.raises(control.ControlError, match=r"forever took longer than 0.02 s and was cancelled"):
            await ask(tmp_path, "forever")


async def test_a_client_that_says_nothing_is_hung_up_on(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_SECONDS_TO_ASK", 0.02)
    async with server.serve(tmp_path, {"echo": echo}):
        assert await say(tmp_path, b'{"verb"') == b""


async def test_leaving_ends_connections_at_once(tmp_path):
    began = anyio.Event()

    async def forever(_):
        began.set()
        await anyio.sleep_forever()

    async with server.serve(tmp_path, {"forever": forever}):
        silent, silent_writer = await asyncio.open_unix_connection(str(tmp_path / control.SOCKET))
        busy, busy_writer = await asyncio.open_unix_connection(str(tmp_path / control.SOCKET))
        busy_writer.write(b'{"verb": "forever"}\n')
        await began.wait()
        left = time.perf_counter()
    assert await silent.read() == b""
    assert await busy.read() == b""
    assert time.perf_counter() - left < 5  # milliseconds on an idle machine
    for writer in (silent_writer, busy_writer):
        writer.close()


async def test_leaving_by_cancellation(tmp_path):
    async def daemon(*, task_status):
        async with server.serve(tmp_path, {"echo": echo}):
            task_status.started()
            await anyio.sleep_forever()

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            await group.start(lambda *, task_status: daemon(task_status=task_status))
            _, writer = await asyncio.open_unix_connection(str(tmp_path / control.SOCKET))
            group.cancel_scope.cancel()
    assert not (tmp_path / control.SOCKET).exists()
    writer.close()
    await asyncio.sleep(0)


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
async def test_the_socket_is_its_owners_from_the_start_and_no_other_file_is_touched(tmp_path, umask, monkeypatch):
    theirs = tmp_path / "theirs"
    theirs.write_text("")
    theirs.chmod(0o644)
    bind = socket.socket.bind
    modes = []

    def swapped(self, address):
        """Binds, and has a link to another file in the socket's place before anything else is done."""
        bind(self, address)
        modes.append((tmp_path / control.SOCKET).stat().st_mode & 0o777)
        (tmp_path / control.SOCKET).unlink()
        (tmp_path / control.SOCKET).symlink_to(theirs)

    class Socket(socket.socket):
        bind = swapped

    monkeypatch.setattr(socket, "socket", Socket)
    before = os.umask(umask)
    try:
        async with server.serve(tmp_path, {"echo": echo}):
            pass
    finally:
        os.umask(before)
    assert modes == [0o600]
    assert theirs.stat().st_mode & 0o777 == 0o644


async def test_every_verb_is_refused_while_there_is_nothing_to_ask(tmp_path):
    why = ["the label is awaited"]
    async with server.serve_refusals(tmp_path, lambda: f"nothing is served yet: {why[0]}"):
        for verb in ("status", "cordon"):
            with pytest.raises(control.ControlError, match=r"^nothing is served yet: the label is awaited$"):
                await ask(tmp_path, verb)
        why[0] = "the API forbids it"
        with pytest.raises(control.ControlError, match=r"the API forbids it$"):
            await ask(tmp_path, "status")
    async with server.serve(tmp_path, {"echo": echo}), server.serve_refusals(tmp_path, lambda: "nothing"):
        assert await ask(tmp_path, "echo") == {"got": {}}


async def test_a_socket_of_a_killed_daemon_is_replaced(tmp_path):
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / control.SOCKET))
    dead.close()
    async with server.serve(tmp_path, {"echo": echo}):
        assert await ask(tmp_path, "echo") == {"got": {}}


async def test_a_second_daemon_is_told_about_the_first(tmp_path):
    async with server.serve(tmp_path, {"echo": echo}):
        with pytest.raises(ConfigError, match=r"control.sock: another daemon already uses this state directory"):
            async with server.serve(tmp_path, {}):
                pass
        assert await ask(tmp_path, "echo") == {"got": {}}


async def test_another_s_socket_is_left_alone(tmp_path):
    async with server.serve(tmp_path, {"echo": echo}):
        (tmp_path / control.SOCKET).unlink()
        other = socket.socket(socket.AF_UNIX)
        other.bind(str(tmp_path / control.SOCKET))
    assert (tmp_path / control.SOCKET).exists()
    other.close()


async def test_what_is_in_the_way_is_named(tmp_path):
    (tmp_path / control.SOCKET).write_text("")
    with pytest.raises(
        ConfigError, match=r"control.sock: a file that is not a socket has the name of the control socket"
    ):
        async with server.serve(tmp_path, {}):
            pass
    with pytest.raises(ConfigError, match=r"--state-dir: .*/control.sock is not a directory"):
        async with server.serve(tmp_path / control.SOCKET, {}):
            pass


def test_no_daemon(tmp_path, monkeypatch):
    for state in (tmp_path, tmp_path / "none"):
        with pytest.raises(control.NoDaemonError, match=r"no daemon answers at .*control.sock: is one running"):
            control.request(state, "echo")
    (tmp_path / "file").write_text("")
    with pytest.raises(control.NoDaemonError, match=r"/file is not a directory: is --state-dir right\?"):
        control.request(tmp_path / "file", "echo")

    def refused(*_arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(control.NoDaemonError, match=r"permission denied: only root and the daemon's user"):
        control.request(tmp_path, "echo")


async def test_a_request_while_one_daemon_hands_over_to_another_is_answered_by_the_new_daemon(tmp_path):
    (tmp_path / control.LOCK).write_text('{"pid": 1, "leaving": true}')
    replies = []

    async def ask():
        replies.append(await anyio.to_thread.run_sync(control.request, tmp_path, "echo"))

    async with anyio.create_task_group() as clients:
        clients.start_soon(ask)
        await anyio.sleep(0.1)
        async with server.serve(tmp_path, {"echo": echo}):
            while not replies:
                await anyio.sleep(0.01)


def test_a_lock_that_is_no_file_holds_up_no_request(tmp_path):
    os.mkfifo(tmp_path / control.LOCK)
    with pytest.raises(control.NoDaemonError):
        control.request(tmp_path, "echo")


def test_a_request_waits_for_a_new_daemon_no_longer_than_a_takeover_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "SECONDS_TO_HAND_OVER", 0.05)
    (tmp_path / control.LOCK).write_text('{"pid": 1, "leaving": true}')
    with pytest.raises(control.NoDaemonError):
        control.request(tmp_path, "echo")


async def test_a_verb_is_told_who_asks(tmp_path):
    async def who(_request):
        return {"who": str(server.asking.get())}

    async with server.serve(tmp_path, {"who": who}):
        told = await ask(tmp_path, "who")
    assert re.fullmatch(rf"uid {os.getuid()}, process {os.getpid()} \(.+\)", told["who"])
    assert str(server.asking.get()) == "unknown"


def answer_once(tmp_path, reply):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / control.SOCKET))
    listener.listen()

    def serve():
        connection, _ = listener.accept()
        with (
            connection,
            contextlib.suppress(BrokenPipeError, ConnectionResetError),
        ):  # who asked may hang up on too long a reply
            connection.recv(65536)
            connection.sendall(reply)

    thread = threading.Thread(target=serve)
    thread.start()
    return listener, thread


@pytest.mark.parametrize("reply", [b"", b"hello\n", b"[]\n", b'{"ok": 1}\n', b"x" * 2_000_000])
def test_something_else_that_listens_there(tmp_path, reply):
    listener, thread = answer_once(tmp_path, reply)
    with listener, pytest.raises(control.ControlError, match=r"is not a gpu-plugin daemon|no daemon answers"):
        control.request(tmp_path, "echo")
    thread.join(5)
    assert not thread.is_alive()


# The command


def fault(state, *arguments):
    return cli.main(["fault", "--state-dir", str(state), *arguments])


async def test_the_fault_command_against_real_gpus(tmp_path, capsys):
    async with server.serve(tmp_path, {"echo": echo}):
        assert await to_thread.run_sync(lambda: fault(tmp_path, "--gpu", "0", "--lost")) == 1
    assert "only a daemon with --simulate accepts faults" in capsys.readouterr().err


def test_the_state_directory_comes_from_the_environment(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("STATE_DIR", str(tmp_path / "other"))
    assert cli.main(["fault", "--gpu", "0", "--lost"]) == 3
    assert str(tmp_path / "other" / "control.sock") in capsys.readouterr().err


def test_the_fault_command_is_light():
    code = (
        "import sys, gpu_plugin.cli.fault;"
        "heavy = {'asyncio', 'anyio', 'grpclib', 'betterproto', 'msgspec', 'yaml'} & set(sys.modules);"
        "sys.exit(', '.join(heavy) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))


def listening(state, backlog):
    """A daemon that accepts nothing for now: its socket, and connections that fill its backlog."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(state / control.SOCKET))
    listener.listen(backlog)
    waiting: list[socket.socket] = []
    while True:
        client = socket.socket(socket.AF_UNIX)
        client.setblocking(False)
        try:
            client.connect(str(state / control.SOCKET))
        except BlockingIOError:
            client.close()
            return listener, waiting
        waiting.append(client)


def test_a_daemon_that_is_too_busy_to_accept_is_there_and_is_waited_for(tmp_path, monkeypatch):
    listener, waiting = listening(tmp_path, 0)
    with listener, contextlib.ExitStack() as stack:
        for client in waiting:
            stack.enter_context(client)
        assert control.answers(tmp_path)

        def accept():
            for _ in range(len(waiting) + 1):
                connection, _ = listener.accept()
                with connection:
                    if connection.recv(65536):
                        connection.sendall(b'{"ok": true, "late": 1}\n')

        def room(seconds):  # the daemon comes round once somebody has tried in vain
            monkeypatch.undo()
            thread.start()
            time.sleep(seconds)

        thread = threading.Thread(target=accept)
        monkeypatch.setattr(time, "sleep", room)
        for client in waiting:
            client.shutdown(socket.SHUT_WR)
        assert control.request(tmp_path, "echo") == {"late": 1}
        thread.join(5)
    assert not control.answers(tmp_path)


def test_a_daemon_that_never_accepts_does_not_answer_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(control, "PATIENCE", 0.05)
    listener, waiting = listening(tmp_path, 0)
    with listener, pytest.raises(control.NoDaemonError, match="does not answer in time"):
        control.request(tmp_path, "echo")
    for client in waiting:
        client.close()


async def test_hundreds_of_requests_at_once_are_all_answered(tmp_path):
    async with server.serve(tmp_path, {"echo": echo}), anyio.create_task_group() as tasks:
        limiter = anyio.CapacityLimiter(300)
        for number in range(300):
            tasks.start_soon(
                partial(to_thread.run_sync, partial(control.request, tmp_path, "echo", n=number), limiter=limiter)
            )
