"""One question to the kubelet's PodResources service: which devices do pods hold now, and which pods are they."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import anyio

from gpu_plugin.kubelet import pod_listing, wire
from gpu_plugin.kubelet.bounded_channel import CallError, call
from gpu_plugin.kubelet.pod_listing import HoldersByDevice
from gpu_plugin.runtime.printable import excerpt
from gpu_plugin.runtime.threads import computed

OFF_LOOP_BYTES = 4 * 1024
"""Longer answers are decoded on a thread, at first some 2 ms a KiB, so that the event loop is not held up."""


T = TypeVar("T")


async def allocated(socket: Path, timeout: float = 5.0) -> frozenset[tuple[str, str]]:
    """The pairs of resource name and device id that active pods hold, asked of the kubelet at `socket`.

    Some that a pod holds are not among them: those of an Allocate under way, and those that only a plain init container
    was given, which stay the pod's to its end. Kubelets before 1.34 list pods that have ended, too. The kubelet answers
    100 calls a second and 10 at once; all others are refused.

    Raises:
        CallError: there is no such socket, nobody answers on it, the kubelet refuses, does not answer within `timeout`
            seconds, or answers something else.
    """
    return await _ask(
        socket, timeout, wire.POD_RESOURCES_LIST, lambda data: frozenset(pod_listing.decode_holders(data))
    )


async def holders(socket: Path, timeout: float = 5.0, before: HoldersByDevice | None = None) -> HoldersByDevice:
    """The containers that hold each (resource name, device id); asked as `allocated` asks, and as complete.

    Where that is what was known `before`, it is the same object.

    Raises:
        CallError: as `allocated`.
    """

    def decode(data: bytes) -> HoldersByDevice:
        allocated = pod_listing.decode_holders(data)
        return allocated if before is None or allocated != before else before

    return await _ask(socket, timeout, wire.POD_RESOURCES_LIST, decode)


async def allocatable(socket: Path, timeout: float = 5.0) -> Mapping[str, frozenset[str]]:
    """The ids of the devices that the kubelet takes for healthy, by resource name, whichever plugin told it of them.

    Kubelets from 1.23 on answer this. A resource whose plugin the kubelet takes for gone is not there.

    Raises:
        CallError: as `allocated`.
    """
    return await _ask(socket, timeout, wire.POD_RESOURCES_ALLOCATABLE, pod_listing.decode_allocatable)


async def _ask(socket: Path, timeout: float, method: str, decode: Callable[[bytes], T]) -> T:
    """What `decode` makes of the answer. Raises CallError, also where it raises ValueError."""
    who = f"the kubelet's PodResources service at {socket}"
    try:
        answer = await call(socket, method, wire.EMPTY, timeout, who)
        with anyio.fail_after(timeout):  # what is left behind ends by itself: the answer is not endless
            return await computed(decode, answer, apart=len(answer) >= OFF_LOOP_BYTES)
    except CallError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise CallError(
            f"there is no PodResources socket at {socket}: mount the kubelet's pod-resources directory into the "
            "container, or name the socket with --pod-resources-socket"
        ) from None
    except TimeoutError:
        raise CallError(f"the answer of {socket} could not be read within {timeout:g} s") from None
    except ValueError as error:
        raise CallError(
            f"{socket} answers, but not as the kubelet's PodResources service does: {excerpt(str(error))}"
        ) from None
