"""A daemon on a simulated node under our kubelet, registered and with an open stream. Most figures begin in this state."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.kubelet import Kubelet, ListStream, Registration, listening
from bench.process import DAEMON, PROFILE, Child, daemon_command, running


@dataclass(slots=True)
class Node:
    """A served node. `stream` has delivered its first list, and `ids` are the ids in it."""

    directory: Path
    kubelet: Kubelet
    daemon: Child
    registration: Registration
    stream: ListStream
    ids: list[str]


@contextmanager
def serving(directory: Path, *flags: str, profile: str = PROFILE, program: Sequence[str] = (DAEMON,)) -> Iterator[Node]:
    """Serve a node of this profile in a new `directory` until the context ends. `program` is the gpu-plugin command."""
    directory.mkdir()
    with ExitStack() as stack:
        kubelet = stack.enter_context(listening(directory))
        command = daemon_command(directory, *flags, profile=profile, program=program)
        daemon = stack.enter_context(running(command, directory / "log"))
        registration = kubelet.registered()
        node = Node(directory, kubelet, daemon, registration, ListStream(registration.socket), [])
        try:
            node.ids = node.stream.next().ids()
            yield node
        finally:
            node.stream.close()  # a figure may have replaced the stream
