"""A hostile container: a process in a new mount namespace, with the MPS directories mounted as in the answer of Allocate.

Run it as `hostile.py SPECIFICATION DEED ARGUMENT...`. It mounts the directories, switches to the user of the specification,
runs the deed, and prints a line with the result. A lasting deed ends when its standard input is closed.
"""

import ctypes
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

ROOT = "/mnt"  # of the container, in its own mount namespace
_CLONE_NEWNS = 0x20000  # unshare(2), linux/sched.h; os.unshare came with Python 3.12

NAMES = ("control", "control_lock", "control_privileged", "log")


class Bind(msgspec.Struct, frozen=True):
    """A bind mount; `inside` is a path below the container's root."""

    host: str
    inside: str
    read_only: bool


class Specification(msgspec.Struct, frozen=True):
    """The container. `program` is NVIDIA's control program on the host, `pipe` the pipe directory in the container."""

    uid: int
    program: str
    pipe: str
    binds: tuple[Bind, ...]


class Container:
    """Starts deeds of one hostile container."""

    def __init__(self, specification: Specification) -> None:
        self._specification = specification
        self._started: list[subprocess.Popen[str]] = []

    def do(self, deed: str, *arguments: str) -> str:
        """Run a deed that ends by itself and return its result."""
        process = self.start(deed, *arguments)
        return process.communicate(timeout=30)[0].strip()

    def start(self, deed: str, *arguments: str) -> "subprocess.Popen[str]":
        """Start a lasting deed. It prints its first line when it has begun."""
        process = subprocess.Popen(
            [sys.executable, __file__, msgspec.json.encode(self._specification).decode(), deed, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


def links(pipe: Path, victim: str) -> str:
    """Try all ways to replace each of the daemon's files by a link to `victim`. Return the attempts that succeeded."""
    done = []
    for name in (*NAMES, "new"):
        path = pipe / name
        attempts: dict[str, Callable[[], object]] = {
            "chmod": partial(path.chmod, 0o777),
            "write": partial(_write, path),
            "unlink": path.unlink,
            "rename": partial(path.rename, f"{path}.old"),
            "symlink": partial(path.symlink_to, victim),
            "mkdir": Path(f"{path}.directory").mkdir,
        }
        for attempt, call in attempts.items():
            with suppress(OSError):
                call()
                done.append(f"{attempt} {name}")
    return " ".join(done) or "nothing"


def _write(path: Path) -> None:
    """Write to a regular file. Writes to sockets and FIFOs are allowed and not tried."""
    if not path.is_file():
        raise PermissionError
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))


def keep_linking(pipe: Path, victim: str) -> Iterable[str]:
    """Replace the names by links repeatedly, faster than a daemon starts."""
    yield "linking"
    while True:
        for name in NAMES:
            with suppress(OSError):
                (pipe / f".{name}").symlink_to(victim)
                (pipe / f".{name}").rename(pipe / name)


def read_lock(pipe: Path) -> Iterable[str]:
    """Hold a read lock of `control_lock`, if this user may read the file."""
    try:
        descriptor = os.open(pipe / "control_lock", os.O_RDONLY)
        fcntl.lockf(descriptor, fcntl.LOCK_SH)  # blocks until the daemon ends
    except PermissionError as error:
        yield str(error.strerror)
    else:
        yield "locked"


def silent(pipe: Path, name: str) -> Iterable[str]:
    """Connect, and send nothing."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(pipe / name))
        yield "connected"


def ask(pipe: Path, *commands: str) -> str:
    """Run NVIDIA's program as this user and return its answers."""
    done = subprocess.run(
        [f"{ROOT}/program"],
        input="".join(f"{command}\n" for command in commands),
        env={"CUDA_MPS_PIPE_DIRECTORY": str(pipe)},
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    return " ".join(done.stdout.split())


def write_fifo(pipe: Path) -> str:
    """Write to the FIFO of the daemon's log, as every CUDA client does."""
    os.close(os.open(pipe / "log", os.O_WRONLY | os.O_NONBLOCK))
    return "written"


def fill_fifo(pipe: Path) -> str:
    """Write bytes that are not a log record. They end the daemon's reader of the FIFO, and then fill the FIFO."""
    descriptor = os.open(pipe / "log", os.O_WRONLY | os.O_NONBLOCK)
    full = 0
    while full < 100:  # attempts in a row: the daemon's reader has ended
        try:
            os.write(descriptor, b"\xff" * 4096)
            full = 0
        except BlockingIOError:
            full += 1
            time.sleep(0.002)
    return "full"


DEEDS: dict[str, Callable[..., str | Iterable[str]]] = {
    deed.__name__: deed for deed in (links, keep_linking, read_lock, silent, ask, write_fifo, fill_fifo)
}


def _enter(specification: Specification) -> None:
    if ctypes.CDLL(None).unshare(_CLONE_NEWNS) != 0:
        raise PermissionError("a mount namespace needs root")
    _mount("--make-rprivate", "/")
    _mount("-t", "tmpfs", "tmpfs", ROOT)
    program = Path(ROOT, "program")
    program.write_bytes(Path(specification.program).read_bytes())
    program.chmod(0o755)
    for bind in specification.binds:
        inside = ROOT + bind.inside
        Path(inside).mkdir(parents=True)
        _mount("--bind", bind.host, inside)
        if bind.read_only:
            _mount("-o", "remount,bind,ro", inside)
    if specification.uid:
        os.setgroups([])
        os.setgid(specification.uid)
        os.setuid(specification.uid)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def main(specification: Specification, deed: str, *arguments: str) -> None:
    _enter(specification)
    result = DEEDS[deed](Path(ROOT + specification.pipe), *arguments)
    if isinstance(result, str):
        print(result, flush=True)
        return
    for line in result:
        print(line, flush=True)
        if deed != "keep_linking":
            sys.stdin.read()


if __name__ == "__main__":
    main(msgspec.convert(json.loads(sys.argv[1]), Specification), *sys.argv[2:])
