"""The answer of the kubelet's PodResources service."""

import time
from collections.abc import Mapping
from pathlib import Path

import anyio
import msgspec
from msgspec.structs import replace

from gpu_plugin.kubelet import pod_resources
from gpu_plugin.kubelet.bounded_channel import CallError


class PodResources(msgspec.Struct, frozen=True):
    """The answer of the kubelet's PodResources service, and the time it took in seconds.

    `allocated` is the number of devices that pods have, `healthy` the number of devices of each resource that are healthy for
    the kubelet. `trouble` is the reason if there is no answer. `absent` is True if there is no socket.
    """

    path: str
    seconds: float = 0.0
    allocated: int = 0
    healthy: Mapping[str, int] = msgspec.field(default_factory=dict)
    trouble: str = ""
    absent: bool = False


def read_pod_resources(path: str, patience: float) -> PodResources:
    """Return the service's answers to two requests, which take at most `patience` seconds together. Blocks.

    The requests run on a separate event loop, because connecting to a socket reads its directory, which may hang.
    """
    answer: PodResources = anyio.run(_ask, path, patience)
    return replace(answer, absent=bool(answer.trouble) and not Path(path).exists())


async def _ask(path: str, patience: float) -> PodResources:
    began = time.monotonic()
    try:
        allocated = await pod_resources.allocated(Path(path), patience)
        seconds = time.monotonic() - began
        healthy = await pod_resources.allocatable(Path(path), max(0.1, patience - seconds))
    except CallError as error:
        return PodResources(path, time.monotonic() - began, trouble=str(error))
    return PodResources(path, seconds, len(allocated), {name: len(ids) for name, ids in healthy.items()})
