"""Requests to the kubelet's PodResources service: the devices that pods hold, their pods, and the healthy devices."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import anyio

from gpu_plugin.kubelet import pod_listing, wire
from gpu_plugin.kubelet.bounded_channel import CallError, call
from gpu_plugin.kubelet.pod_listing import HoldersByDevice
from gpu_plugin.runtime.printable import excerpt
from gpu_plugin.runtime.threads import computed

# Longer answers are decoded on a thread, so that the event loop is not blocked: the first time takes about 2 ms a KiB.
OFF_LOOP_BYTES = 4 * 1024

T = TypeVar("T")


async def allocated(socket: Path, timeout: float = 5.0) -> frozenset[tuple[str, str]]:
    """Request from the kubelet at `socket` the pairs of resource name and device id that active pods hold.

    The result lacks the devices of an unfinished Allocate, and the devices that only a plain init container has, which
    the pod keeps until it ends. Kubelets before 1.34 also list pods that have ended. The kubelet answers 100 calls a second, 10
    of them at once, and refuses all others.

    Raises:
        CallError: the socket does not exist, no server answers on it, the kubelet refuses the call, does not answer within
            `timeout` seconds, or sends another message.
    """
    return frozenset(await holders(socket, timeout))


async def holders(socket: Path, timeout: float = 5.0) -> HoldersByDevice:
    """Request the containers that hold each (resource name, device id). The result lacks the same devices as in `allocated`.

    Raises:
        CallError: as `allocated`.
    """
    return await _ask(socket, timeout, wire.POD_RESOURCES_LIST, pod_listing.decode_holders)


async def allocatable(socket: Path, timeout: float = 5.0) -> Mapping[str, frozenset[str]]:
    """Request the ids of the devices that the kubelet counts as healthy, by resource name, of all plugins.

    Kubelets answer this from 1.23 on. The result has no resource whose plugin has disconnected from the kubelet.

    Raises:
        CallError: as `allocated`.
    """
    return await _ask(socket, timeout, wire.POD_RESOURCES_ALLOCATABLE, pod_listing.decode_allocatable)


async def _ask(socket: Path, timeout: float, method: str, decode: Callable[[bytes], T]) -> T:
    """Return the decoded answer. Raises CallError, also if `decode` raises ValueError."""
    who = f"the kubelet's PodResources service at {socket}"
    try:
        answer = await call(socket, method, wire.EMPTY, timeout, who)
        with anyio.fail_after(timeout):  # after a timeout, the thread ends by itself: the answer is finite
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
