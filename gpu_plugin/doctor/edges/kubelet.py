"""The kubelet's device plugin directory, its sockets, and the PodResources service. Blocks."""

import os
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

import anyio
from msgspec.structs import replace

from gpu_plugin.doctor.edges.directories import directory
from gpu_plugin.doctor.facts import KubeletDirectory, PodResources
from gpu_plugin.kubelet import checkpoint, pod_resources
from gpu_plugin.kubelet.bounded_channel import CallError
from gpu_plugin.kubelet.socket import PREFIX
from gpu_plugin.runtime.peer import listening

_MAX_SOCKETS = 64
"""The most sockets of other plugins that are reported."""


def kubelet_directory(path: str, registration: str) -> KubeletDirectory:
    """Return the device plugin directory. `registration` is the path of the kubelet's own socket."""
    found = directory(path)
    if not found.is_directory or found.error:
        return KubeletDirectory(found)
    written, others = False, list[str]()
    with suppress(OSError):  # `found` already reports a directory that cannot be listed
        entries = sorted(os.scandir(path), key=attrgetter("name"))
        written = any(entry.name == checkpoint.NAME for entry in entries)
        for entry in entries:
            ours = entry.path == registration or entry.name.startswith(PREFIX) or entry.name == "kubelet.sock"
            is_socket = not entry.is_symlink() and Path(entry.path).is_socket()
            if not ours and len(others) < _MAX_SOCKETS and is_socket and listening(entry.path):
                others.append(entry.name)
    return KubeletDirectory(found, written, tuple(others))


def pods(path: str, patience: float, clock: Callable[[], float]) -> PodResources:
    """Return the PodResources service's answers to two requests, which take at most `patience` seconds together. Blocks.

    The requests run on a separate event loop, because connecting to a socket reads its directory, which may hang.
    """
    answer: PodResources = anyio.run(_ask, path, patience, clock)
    return replace(answer, absent=bool(answer.trouble) and not Path(path).exists())


async def _ask(path: str, patience: float, clock: Callable[[], float]) -> PodResources:
    began = clock()
    try:
        allocated = await pod_resources.allocated(Path(path), patience)
        seconds = clock() - began
        healthy = await pod_resources.allocatable(Path(path), max(0.1, patience - seconds))
    except CallError as error:
        return PodResources(path, clock() - began, trouble=str(error))
    return PodResources(path, seconds, len(allocated), {name: len(ids) for name, ids in healthy.items()})
