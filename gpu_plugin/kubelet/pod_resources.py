"""One question to the kubelet's PodResources service: which devices do pods hold now, and which pods are they."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import anyio
from grpclib.client import UnaryUnaryMethod
from grpclib.const import Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from gpu_plugin.kubelet import pod_listing, wire
from gpu_plugin.kubelet.bounded_channel import BoundedChannel
from gpu_plugin.kubelet.pod_listing import HoldersByDevice
from gpu_plugin.runtime.threads import computed

MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""What is read of one answer at most: the usual limit of the Go clients of this service."""


OFF_LOOP_BYTES = 64 * 1024
"""From so many bytes on an answer is read on a thread (30 µs a KiB), so that the loop runs on."""


T = TypeVar("T")


class PodResourcesError(Exception):
    """The kubelet did not say what pods hold: nothing follows about any device. The text says why."""


async def allocated(socket: Path, timeout: float = 5.0) -> frozenset[tuple[str, str]]:
    """The pairs of resource name and device id that active pods hold, asked of the kubelet at `socket`.

    Some that a pod holds are not among them: those of an Allocate under way, and those that only a plain init container
    was given, which stay the pod's to its end. Kubelets before 1.34 list pods that have ended, too. The kubelet answers
    100 calls a second and 10 at once; all others are refused.

    Raises:
        PodResourcesError: there is no such socket, nobody answers on it, the kubelet refuses, does not answer within
            `timeout` seconds, or answers something else.
    """
    return await _ask(socket, timeout, wire.POD_RESOURCES_LIST, pod_listing.decode_allocated)


async def holders(socket: Path, timeout: float = 5.0, before: HoldersByDevice | None = None) -> HoldersByDevice:
    """The containers that hold each (resource name, device id); asked as `allocated` asks, and as complete.

    Where that is what was known `before`, it is the same object.

    Raises:
        PodResourcesError: as `allocated`.
    """

    def decode(data: bytes) -> HoldersByDevice:
        allocated = pod_listing.decode_holders(data)
        return allocated if before is None or allocated != before else before

    return await _ask(socket, timeout, wire.POD_RESOURCES_LIST, decode)


async def allocatable(socket: Path, timeout: float = 5.0) -> Mapping[str, frozenset[str]]:
    """The ids of the devices that the kubelet takes for healthy, by resource name, whichever plugin told it of them.

    Kubelets from 1.23 on answer this. A resource whose plugin the kubelet takes for gone is not there.

    Raises:
        PodResourcesError: as `allocated`.
    """
    return await _ask(socket, timeout, wire.POD_RESOURCES_ALLOCATABLE, pod_listing.decode_allocatable)


async def _ask(socket: Path, timeout: float, method: str, decode: Callable[[bytes], T]) -> T:
    """What `decode` makes of the answer. Raises PodResourcesError, also where it raises ValueError."""
    outcome: T | PodResourcesError | None = None

    async def ask() -> None:
        # In a task of its own: when a connection breaks, grpclib cancels the task that waits on it and swallows that, and
        # whoever runs on in that task stands half cancelled.
        nonlocal outcome
        try:
            answer = await _call(socket, timeout, method)
            with anyio.fail_after(timeout):  # what is left behind ends by itself: the answer is not endless
                outcome = await computed(decode, answer, apart=len(answer) >= OFF_LOOP_BYTES)
        except TimeoutError:
            outcome = PodResourcesError(f"the answer of {socket} could not be read within {timeout:g} s")
        except ValueError as error:
            outcome = PodResourcesError(
                f"{socket} answers, but not as the kubelet's PodResources service does: {error}"
            )
        except PodResourcesError as error:
            outcome = error

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
    if outcome is None:
        raise PodResourcesError(f"the kubelet's PodResources service at {socket} hung up in the middle of the call")
    if isinstance(outcome, PodResourcesError):
        raise outcome
    return outcome


async def _call(socket: Path, timeout: float, method: str) -> bytes:
    """The bytes of the answer. Raises PodResourcesError."""
    channel = BoundedChannel(str(socket), MAX_ANSWER_BYTES)
    call: UnaryUnaryMethod[bytes, bytes] = UnaryUnaryMethod(channel, method, bytes, bytes)
    try:
        return await call(wire.EMPTY, timeout=timeout)
    except FileNotFoundError:
        raise PodResourcesError(
            f"there is no PodResources socket at {socket}: mount the kubelet's pod-resources directory into the "
            "container, or name the socket with --pod-resources-socket"
        ) from None
    except TimeoutError:
        raise PodResourcesError(_late(socket, timeout)) from None
    except OSError as error:
        reason = error.strerror or error
        raise PodResourcesError(f"nobody answers on the kubelet's PodResources socket {socket}: {reason}") from None
    except GRPCError as error:
        if error.status is Status.DEADLINE_EXCEEDED and not error.message:
            raise PodResourcesError(_late(socket, timeout)) from None
        said = f"{error.status.name} {error.message or ''}".strip()
        raise PodResourcesError(f"the kubelet's PodResources service at {socket} refused: {said}") from None
    except (StreamTerminatedError, ProtocolError) as error:
        raise PodResourcesError(
            f"the kubelet's PodResources service at {socket} ended the call: {channel.fault or error}"
        ) from None
    except Exception as error:  # what does not speak gRPC meets h2's and grpclib's own assertions
        raise PodResourcesError(
            f"{socket} answers, but not as the kubelet's PodResources service does: {error!r}"
        ) from error
    finally:
        channel.close()


def _late(socket: Path, timeout: float) -> str:
    return f"the kubelet's PodResources service at {socket} did not answer within {timeout:g} s"
