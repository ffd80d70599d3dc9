"""A daemon on a simulated node under a kubelet of ours, registered and with an open stream: where most figures begin."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.kubelet import Kubelet, ListStream, Registration, listening
from bench.process import DAEMON, PROFILE, Child, daemon_command, running


@dataclass(slots=True)
class Node:
    """`stream` has delivered its first list, whose ids are `ids`."""

    directory: Path
    kubelet: Kubelet
    daemon: Child
    registration: Registration
    stream: ListStream
    ids: list[str]


@contextmanager
def serving(directory: Path, *flags: str, profile: str = PROFILE, program: Sequence[str] = (DAEMON,)) -> Iterator[Node]:
    """A served node of that profile in an empty `directory`, for as long as the context lasts; `program` is gpu-plugin."""
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
            node.stream.close()  # whichever is there by then: a figure may have opened it anew
