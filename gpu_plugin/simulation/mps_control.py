"""A substitute for nvidia-cuda-mps-control on a simulated node, run by its path: `mps_control.py [-f]`.

With -f it is the daemon: it listens on `control` in $CUDA_MPS_PIPE_DIRECTORY, stores and reports limits, and logs each command
in control.log in $CUDA_MPS_LOG_DIRECTORY. Without -f it sends the commands from its standard input to the daemon, and prints
the answers.

It behaves like the real program (driver 535) where others depend on it. A lock on `control_lock` shows that the daemon runs, as
do its answers; its files remain when it ends; a directory with a daemon accepts no second daemon. Refused commands get exit
status 0: a memory limit gets an empty answer, a percentage the value that stays in force, an unknown command a sentence. Status
1 means that there is no daemon. Memory is reported in whole GiB from one GiB on. The protocol is different, since the real
protocol is undocumented. A client that connects and sends nothing blocks all others. If two clients send commands at once,
both are answered here; the real daemon refuses one, sends it an empty answer, or lets it wait forever. With the real program,
root's clients use `control_privileged`.

A file `fault` in the log directory makes the daemon fail. It is read at the start and before each command:

    crash        exit with status 1 at the start, or at the next command
    hang         answer no command
    refuse TEXT  ignore limits in commands that begin with TEXT
    unknown TEXT do not know commands whose names contain TEXT
    server       start a process that survives the daemon, as a server may
"""

import fcntl
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

# The command to run it. It uses only the standard library, since it runs often.
COMMAND = (sys.executable, "-I", "-S", __file__)

SOCKET = "control"
LOCK = "control_lock"
LOG_PIPE = "log"
PRIVILEGED = "control_privileged"
LOG = "control.log"
FAULT = "fault"
SERVER = "server.pid"


def main(arguments: list[str]) -> int:
    """Run the daemon with -f, else a client. Return the exit status."""
    pipe = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
    return _daemon(pipe, Path(os.environ["CUDA_MPS_LOG_DIRECTORY"])) if "-f" in arguments else _client(pipe)


def _client(pipe: Path) -> int:
    for command in sys.stdin.read().splitlines():
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(pipe / SOCKET))
                connection.sendall(command.encode())
                connection.shutdown(socket.SHUT_WR)
                text = _all(connection)
            except (FileNotFoundError, ConnectionError):
                print("Cannot find MPS control daemon process")  # noqa: T201
                return 1
        if text:
            print(text)  # noqa: T201
    return 0


def _daemon(pipe: Path, log: Path) -> int:
    if _fault(log) == "crash":
        print("simulated crash at the start")  # noqa: T201
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    path = pipe / SOCKET
    _open_log(pipe / LOG_PIPE)
    lock = os.open(pipe / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)  # held until the process ends
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        print("An instance of this daemon is already running")  # noqa: T201
        return 1
    path.unlink(missing_ok=True)
    (pipe / PRIVILEGED).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener, (log / LOG).open("a", buffering=1) as record:
        with socket.socket(socket.AF_UNIX) as privileged:  # for root's clients; this program does not listen there
            privileged.bind(str(pipe / PRIVILEGED))
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
                        _answer(connection, threads if command.startswith("set_default_active") else "")
                        continue
                    case ["unknown", text] if text in command.split()[0]:
                        _answer(connection, f'Unknown command "{command.split()[0]}"')
                        continue
                match command.split():
                    case ["get_default_active_thread_percentage"]:
                        _answer(connection, threads)
                    case ["set_default_active_thread_percentage", share]:
                        threads = _share(share) or threads
                        _answer(connection, threads)
                    case ["set_default_device_pinned_mem_limit", ordinal, limit] if ordinal in limits:
                        limits[ordinal] = limit
                        _answer(connection, "")
                    case ["get_default_device_pinned_mem_limit", ordinal] if ordinal in limits:
                        _answer(connection, _rounded(limits[ordinal]))
                    case ["set_default_device_pinned_mem_limit" | "get_default_device_pinned_mem_limit", *_]:
                        _answer(connection, "")
                    case ["quit"]:
                        _answer(connection, "")
                        return 0
                    case [name, *_]:
                        _answer(connection, f'Unknown command "{name}"')


def _open_log(path: Path) -> None:
    """Make the FIFO of the log as the real daemon does, following links: write to an existing file, then set its mode."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.write(descriptor, b"Start")
        os.close(descriptor)
    with suppress(FileExistsError):
        os.mkfifo(path)
    path.chmod(0o777)


def _share(text: str) -> str:
    """Return a percentage as in answers; empty if it is not between 0 and 100."""
    with suppress(ValueError):
        return f"{float(text):.1f}" if 0 < float(text) <= 100 else ""
    return ""


def _rounded(limit: str) -> str:
    if not limit:
        return ""
    mebibytes = int(limit.removesuffix("M"))
    return f"{mebibytes}M" if mebibytes < 1024 else f"{mebibytes // 1024}G"


def _all(connection: socket.socket) -> str:
    received = b""
    while len(received) < 65536 and (chunk := connection.recv(4096)):
        received += chunk
    return received.decode(errors="replace")


def _answer(connection: socket.socket, text: str) -> None:
    with suppress(OSError):  # the client may have given up
        connection.sendall(text.encode())


def _fault(log: Path) -> str:
    try:
        return (log / FAULT).read_text().strip()
    except FileNotFoundError:
        return ""


def _start_server(log: Path) -> None:
    server = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"], start_new_session=True)
    (log / SERVER).write_text(str(server.pid))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
