"""NVIDIA's control program, nvidia-cuda-mps-control, as a client: where it is, how a daemon is asked with it, what it answers.

A daemon is asked through this program and never by a connection of our own. What the program and the daemon say to each
other (sequenced packets: a greeting, credentials, lengths, commands) is documented nowhere, and a daemon that has accepted a
connection waits for its first packet: one that is opened and says nothing keeps every client of the daemon out (seen with
driver 535). The program is of the daemon's own driver, speaks as it does, and is what NVIDIA's plugin asks with.

An exit status of 0 means that the daemon was there, not that it did what it was told: a limit that it refuses, or a command
that it does not know, is answered with status 0 too, and so may one that meets another client's. So limits are read back.
"""

import os
import select
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from gpu_plugin.mps.errors import MpsError, NotStartedError

PROGRAM = "nvidia-cuda-mps-control"

LONGEST_ANSWER = 1000  # characters of an answer that are passed on

_MAX_READ = 64 * 1024


def find_program(roots: Sequence[str], path: str | None = None, more: str = "") -> str:
    """The control program: under one of these driver roots, else on `path` (None: $PATH).

    Raises NotStartedError where it is nowhere, with the places that were looked at; `more` is what else can be done about it.
    """
    places = [f"{root.rstrip('/')}/usr/bin/{PROGRAM}" for root in roots if root.rstrip("/")]
    for place in places:
        if os.path.isfile(place) and os.access(place, os.X_OK):  # noqa: PTH113 - Path's raises where it may not look
            return place
    found = shutil.which(PROGRAM, path=path)
    if found is None:
        raise NotStartedError(
            f"no {PROGRAM} at {', '.join([*places, '$PATH'])}; install the driver's compute utilities{more}"
        )
    return found


def environment(program: str, *variables: Mapping[str, str]) -> dict[str, str]:
    """What the program is run with: our own environment without CUDA's variables, and `variables`.

    Its directory comes first on the search path: the server that a daemon starts lies beside it, under a driver root too.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    directory = os.path.dirname(program)  # noqa: PTH120 - a string, as everything on a search path
    path = os.pathsep.join(part for part in (directory, inherited.get("PATH", os.defpath)) if part)
    return {**inherited, **{name: value for each in variables for name, value in each.items()}, "PATH": path}


def start_client(control: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts the program as a client, which reads commands from its standard input.

    Raises NotStartedError where it cannot be started.
    """
    try:
        return subprocess.Popen(  # noqa: S603 - no shell
            control,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(control[0], variables),
            start_new_session=True,
        )
    except OSError as error:
        raise NotStartedError(f"{control[0]} cannot be started: {error.strerror}") from None


def unanswered(command: str, patience: float) -> MpsError:
    """The error for a daemon that has not answered a command within `patience` seconds."""
    return MpsError(f"its control has not answered {_first(command)!r} for {patience:g} s")


def _first(commands: str) -> str:
    """The first of several lines of commands, for messages."""
    return commands.partition("\n")[0]


def answer_of(client: subprocess.Popen[bytes], command: str, patience: float) -> str:
    """What a client that was just started answers to a command, or to several lines of commands, in one line.

    Blocks for up to `patience` seconds, then kills it.

    Pods have the pipe directory too, so what answers there is read with care: no more than an answer can be. Raises MpsError
    where the daemon is not there, which is another status than 0, or does not answer in time.
    """
    until = time.monotonic() + patience
    with client as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(f"{command}\n".encode())
                process.stdin.close()
            output = _read(process.stdout.fileno(), until)
            status = process.wait(max(0.0, until - time.monotonic())) if len(output) < _MAX_READ else 0
        except (TimeoutError, subprocess.TimeoutExpired):
            raise unanswered(command, patience) from None
        finally:
            process.kill()
    said = " ".join(output.decode(errors="replace").split())[:LONGEST_ANSWER]
    if status:
        raise MpsError(f"its control answers {_first(command)!r} with status {status}: {said or 'no word'}")
    return said


def _read(descriptor: int, until: float) -> bytes:
    """What comes until the other end closes, or enough of it. Raises TimeoutError at `until`, of the monotonic clock."""
    received = b""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    while len(received) < _MAX_READ:
        if not waiting.poll(max(0.0, until - time.monotonic()) * 1000):
            raise TimeoutError
        chunk = os.read(descriptor, _MAX_READ - len(received))
        if not chunk:
            break
        received += chunk
    return received
