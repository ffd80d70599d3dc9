"""What stands in for nvidia-cuda-mps-control on a simulated node, run by its path: `mps_control.py [-f]`.

With -f it is the daemon: it listens on `control` in $CUDA_MPS_PIPE_DIRECTORY, keeps the limits it is told, answers what they
are, and writes every command into control.log in $CUDA_MPS_LOG_DIRECTORY. Without, it passes on the commands that it reads,
and prints the answers. As with the real one, a directory that holds a daemon already takes no second.

A file called `fault` in the log directory makes the daemon fail, looked for at every command, and at the start:

    crash        exits with status 1 at the next command, or at the start
    hang         answers no command
    refuse TEXT  refuses commands that begin with TEXT
    server       starts a process that outlives it, as a server may
"""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

COMMAND = (sys.executable, "-I", "-S", __file__)
"""How to run it: it needs nothing but the standard library, and is run often."""

SOCKET = "control"
LOG = "control.log"
FAULT = "fault"
SERVER = "server.pid"

_LONGEST = 64 * 1024
_SERVER_SECONDS = 3600


def main(arguments: list[str]) -> int:
    """The daemon with -f, a client of it without. Gives the exit status."""
    pipe = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
    return _daemon(pipe, Path(os.environ["CUDA_MPS_LOG_DIRECTORY"])) if "-f" in arguments else _client(pipe)


def _client(pipe: Path) -> int:
    for command in sys.stdin.read().splitlines():
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(pipe / SOCKET))
                connection.sendall(command.encode())
                connection.shutdown(socket.SHUT_WR)
                status, _, text = _all(connection).partition(" ")
            except (FileNotFoundError, ConnectionError):
                status, text = "1", "Cannot find MPS control daemon process"
        if text:
            print(text)  # noqa: T201
        if status != "0":
            return 1
    return 0


def _daemon(pipe: Path, log: Path) -> int:
    if _fault(log) == "crash":
        print("simulated crash at the start")  # noqa: T201
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    path = pipe / SOCKET
    with suppress(FileNotFoundError):
        if _listens(path):
            print(f"An instance of this daemon is already running in {pipe}")  # noqa: T201
            return 1
        path.unlink()
    with socket.socket(socket.AF_UNIX) as listener, (log / LOG).open("a", buffering=1) as record:
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(16)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        record.write(f"Start, devices {visible}\n")
        if _fault(log) == "server":
            _start_server(log)
        limits = {str(ordinal): "" for ordinal in range(len(visible.split(",")) if visible else 0)}
        threads = "100.0"
        while True:
            connection, _ = listener.accept()
            with connection:
                command = _all(connection).strip()
                if not command:
                    continue
                record.write(f"Cmd:{command}\n")
                match _fault(log).split(" ", 1):
                    case ["crash"]:
                        print("simulated crash")  # noqa: T201
                        return 1
                    case ["hang"]:
                        signal.pause()
                    case ["refuse", text] if command.startswith(text):
                        _answer(connection, 1, "simulated refusal")
                        continue
                match command.split():
                    case ["get_default_active_thread_percentage"]:
                        _answer(connection, 0, threads)
                    case ["set_default_active_thread_percentage", share]:
                        threads = str(float(share))
                        _answer(connection, 0, threads)
                    case ["set_default_device_pinned_mem_limit", ordinal, limit] if ordinal in limits:
                        limits[ordinal] = limit
                        _answer(connection, 0, "")
                    case ["get_default_device_pinned_mem_limit", ordinal] if ordinal in limits:
                        _answer(connection, 0, limits[ordinal])
                    case ["quit"]:
                        path.unlink()
                        _answer(connection, 0, "")
                        return 0
                    case _:
                        _answer(connection, 1, f"unknown command or device: {command}")


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


def _all(connection: socket.socket) -> str:
    received = b""
    while len(received) < _LONGEST and (chunk := connection.recv(4096)):
        received += chunk
    return received.decode(errors="replace")


def _answer(connection: socket.socket, status: int, text: str) -> None:
    with suppress(OSError):  # it may have waited long enough
        connection.sendall(f"{status} {text}".encode())


def _fault(log: Path) -> str:
    try:
        return (log / FAULT).read_text().strip()
    except FileNotFoundError:
        return ""


def _start_server(log: Path) -> None:
    server = subprocess.Popen(  # noqa: S603 - a program of our own
        [sys.executable, "-S", "-c", f"import time; time.sleep({_SERVER_SECONDS})"], start_new_session=True
    )
    (log / SERVER).write_text(str(server.pid))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
