"""Run `gpu-plugin` in forked processes, without the cost of its imports.

Each pytest worker has one server process that has imported everything and forks for each request. A forked process has its own
arguments, environment, standard streams, signals and exit status. Tests of imports, and of signals during imports, need a process
that starts cold.
"""

import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import anyio.to_thread

ROOT = Path(__file__).parents[2]
LARGEST_REQUEST = 1 << 20
"""Bytes of arguments and environment."""


class Forked:
    """A running `gpu-plugin`, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, told: IO[str]) -> None:
        self._told, self._lock = told, threading.Lock()
        self.pid = int(told.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Exit status, minus a signal's number; None while it runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """Exit status, once it has one. Raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("gpu-plugin", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        with self._lock:
            if self.returncode is None and select.select([self._told], [], [], timeout)[0]:
                self.returncode = int(self._told.readline())
                self._told.close()
            return self.returncode


class ForkServer:
    """The client of a process that has imported everything and forks on request."""

    def __init__(self) -> None:
        self._asked, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.node.forked", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd=ROOT,
            )

    def start(self, arguments: list[str], environ: Mapping[str, str], out: IO[bytes], errors: IO[bytes]) -> Forked:
        """Starts `gpu-plugin` with these arguments, this whole environment, and these standard streams."""
        reading, writing = os.pipe()
        try:
            request = json.dumps({"arguments": arguments, "environ": dict(environ), "directory": str(Path.cwd())})
            socket.send_fds(self._asked, [request.encode()], [out.fileno(), errors.fileno(), writing])
        finally:
            os.close(writing)
        return Forked(os.fdopen(reading, buffering=1))

    def close(self) -> None:
        """End the server. Its forked processes go on."""
        self._asked.close()
        self._process.wait()


_servers: list[ForkServer] = []
_first = threading.Lock()


def fork(arguments: list[str], environ: Mapping[str, str], out: IO[bytes], errors: IO[bytes]) -> Forked:
    """Fork a process by the worker's server."""
    with _first:
        if not _servers:
            _servers.append(ForkServer())
    return _servers[0].start(arguments, environ, out, errors)


def end() -> None:
    """Ends the worker's server, if it has one."""
    while _servers:
        _servers.pop().close()


def run(
    *arguments: object, environ: Mapping[str, str] | None = None, seconds: float = 20
) -> subprocess.CompletedProcess[str]:
    """Runs `gpu-plugin` to its end, as `subprocess.run` does; `environ` comes on top of the environment."""
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = fork(words, {**os.environ, **(environ or {})}, out, errors)
        try:
            status = process.wait(seconds)
        finally:
            process.kill()
            process.wait()
        said = [(file.seek(0), file.read().decode())[1] for file in (out, errors)]
    return subprocess.CompletedProcess(words, status, *said)


async def ran(*arguments: object, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`run` on a thread."""
    return await anyio.to_thread.run_sync(partial(run, *arguments, environ=environ))


def _import_all() -> None:
    """Import all modules that any verb needs."""
    import gpu_plugin  # noqa: PLC0415 - only the server needs all of it

    for module in pkgutil.walk_packages(gpu_plugin.__path__, "gpu_plugin."):
        importlib.import_module(module.name)
    for name in ("uvloop", "yaml", "lightkube", "pynvml", "pythonjsonlogger.json"):
        importlib.import_module(name)


def _serve(requests: socket.socket) -> bool:
    """Fork for each request until the socket closes. Return True in a forked process, which is then set up."""
    running: dict[int, tuple[int, int]] = {}
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready == requests.fileno():
                request, received, _, _ = socket.recv_fds(requests, LARGEST_REQUEST, 3)
                if not request:
                    return False
                pid = os.fork()
                if not pid:
                    requests.detach()
                    _become(json.loads(request), *received[:2])
                    return True
                out, errors, told = received
                os.close(out)
                os.close(errors)
                os.write(told, b"%d\n" % pid)
                process = os.pidfd_open(pid)
                running[process] = pid, told
                poll.register(process, select.POLLIN)
            else:
                pid, told = running.pop(ready)
                poll.unregister(ready)
                os.close(ready)
                os.write(told, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(told)


def _become(request: Mapping[str, Any], out: int, errors: int) -> None:
    """Give this process the requested streams, environment, directory and arguments. Close all other descriptors."""
    os.dup2(out, 1)
    os.dup2(errors, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["directory"])
    sys.argv = ["gpu-plugin", *request["arguments"]]


if __name__ == "__main__":
    _import_all()
    if _serve(socket.socket(fileno=int(sys.argv[1]))):
        from gpu_plugin.__main__ import main

        sys.exit(main())
