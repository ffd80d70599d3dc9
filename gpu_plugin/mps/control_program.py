"""Runs NVIDIA's control program nvidia-cuda-mps-control as a client: finds it, sends commands to a daemon, reads answers.

A daemon is only contacted through this program, never through a connection of our own. The protocol between program and daemon
(sequenced packets: a greeting, credentials, lengths, commands) is undocumented. After accepting a connection the daemon waits
for its first packet, so an open connection without packets blocks all clients of the daemon (seen with driver 535). The
program belongs to the daemon's driver and so uses its protocol; NVIDIA's plugin uses it too.

Exit status 0 only means that the daemon was reached. The status is also 0 if the daemon refuses a limit or does not know a
command, and possibly if another client is connected at the same time. So limits are read back.
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

LONGEST_ANSWER = 1000  # longer answers are cut to this number of characters

_MAX_READ = 64 * 1024


def find_program(roots: Sequence[str], path: str | None = None, more: str = "") -> str:
    """Find the control program below these driver roots, else on `path` (None: $PATH).

    Raises NotStartedError if it is not found, with the searched places; `more` is an additional remedy for the message.
    """
    places = [f"{root.rstrip('/')}/usr/bin/{PROGRAM}" for root in roots if root.rstrip("/")]
    for place in places:
        if os.path.isfile(place) and os.access(place, os.X_OK):  # noqa: PTH113 - Path's raises without search permission
            return place
    found = shutil.which(PROGRAM, path=path)
    if found is None:
        raise NotStartedError(
            f"no {PROGRAM} at {', '.join([*places, '$PATH'])}; install the driver's compute utilities{more}"
        )
    return found


def environment(program: str, *variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment for the program, without CUDA's variables and with `variables`.

    The program's directory comes first in PATH: the server program that a daemon starts is in the same directory.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    directory = os.path.dirname(program)  # noqa: PTH120 - a string, as all parts of PATH
    path = os.pathsep.join(part for part in (directory, inherited.get("PATH", os.defpath)) if part)
    return {**inherited, **{name: value for each in variables for name, value in each.items()}, "PATH": path}


def start_client(control: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the program as a client, which reads commands from its standard input.

    Raises NotStartedError if it cannot be started.
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
    """Return the error for a daemon that has not answered a command within `patience` seconds."""
    return MpsError(f"its control has not answered {command.splitlines()[0]!r} for {patience:g} s")


def answer_of(client: subprocess.Popen[bytes], command: str, patience: float) -> str:
    """Send one or more lines of commands to a new client, and return its answer in one line.

    Blocks for up to `patience` seconds, then kills the client.

    Pods have the pipe directory too, so another process may answer: the length of the answer is limited. Raises MpsError if
    the daemon is not there (a status other than 0), or does not answer in time.
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
    output_text = " ".join(output.decode(errors="replace").split())[:LONGEST_ANSWER]
    if status:
        raise MpsError(
            f"its control answers {command.splitlines()[0]!r} with status {status}: {output_text or 'no word'}"
        )
    return output_text


def _read(descriptor: int, until: float) -> bytes:
    """Read until the other end closes, up to a limit. Raises TimeoutError at time `until` of the monotonic clock."""
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
