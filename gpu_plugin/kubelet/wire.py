"""The device plugin API's bytes, as the daemon reads and writes them; the generated messages are `messages`.

What repeats is encoded once and joined. That is sound because protobuf concatenates: the encoding of a message with fields
[a, b] is the encoding of [a] followed by that of [b]. A list of 2,000 devices of which
one changed costs one encoding and a join, 0.1 ms instead of 170.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice

import msgspec

from gpu_plugin.access.container import ContainerEdits, DeviceSpec, Mount
from gpu_plugin.devices.device import MAX_LIST_BYTES, Device
from gpu_plugin.kubelet.fields import (
    NUMBER,
    Span,
    entry,
    fields,
    int32,
    message,
    number_field,
    spans,
    text,
    text_field,
)

VERSION = "v1beta1"
HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"
MAX_MESSAGE_BYTES = MAX_LIST_BYTES
"""What the kubelet's client takes in one message; a longer list ends the stream for good."""

REGISTER = "/v1beta1.Registration/Register"
OPTIONS = "/v1beta1.DevicePlugin/GetDevicePluginOptions"
LIST_AND_WATCH = "/v1beta1.DevicePlugin/ListAndWatch"
PREFERRED = "/v1beta1.DevicePlugin/GetPreferredAllocation"
ALLOCATE = "/v1beta1.DevicePlugin/Allocate"
PRE_START = "/v1beta1.DevicePlugin/PreStartContainer"

POD_RESOURCES_LIST = "/v1.PodResourcesLister/List"
POD_RESOURCES_ALLOCATABLE = "/v1.PodResourcesLister/GetAllocatableResources"
POD_RESOURCES_GET = "/v1.PodResourcesLister/Get"

EMPTY = b""

MAX_CONTAINERS = 64
"""Containers of one request. Every kubelet sends a request for each container
(pkg/kubelet/cm/devicemanager/manager.go, devicesToAllocate and allocateContainerResources)."""

MAX_IDS = 1 << 18
"""Device ids of one request. A kubelet names each listed device twice at most, and a list has no room for half as many."""


class TooLargeError(ValueError):
    """A request with more containers or ids than any kubelet sends. It is refused before it is decoded to its end."""


class PreferredRequest(msgspec.Struct, frozen=True):
    """One container's GetPreferredAllocation request."""

    available: Sequence[str]
    must_include: Sequence[str]
    size: int


def decode_allocate(data: bytes) -> list[list[str]]:
    """The device ids of each container of an AllocateRequest.

    Raises:
        TooLargeError: more than MAX_CONTAINERS containers or MAX_IDS ids.
        ValueError: the bytes cannot be decoded.
    """
    decoded: list[list[str]] = []
    left = MAX_IDS
    for container in _containers(data):
        ids = _bounded_texts(data, container, left)
        left -= len(ids)
        decoded.append(ids)
    return decoded


def decode_preferred(data: bytes) -> list[PreferredRequest]:
    """The containers of a PreferredAllocationRequest. Raises as `decode_allocate` does."""
    decoded: list[PreferredRequest] = []
    left = MAX_IDS
    for container in _containers(data):
        asked = _preferred_request(data, container, left)
        left -= len(asked.available) + len(asked.must_include)
        decoded.append(asked)
    return decoded


def decode_pre_start(data: bytes) -> list[str]:
    """The device ids of a PreStartContainerRequest. Raises as `decode_allocate` does."""
    return _bounded_texts(data, (0, len(data)), MAX_IDS)


def _containers(data: bytes) -> list[Span]:
    """Where the containers of a request lie."""
    lying = spans(data, (0, len(data)), 1)
    found = list(islice(lying, MAX_CONTAINERS))
    more = sum(1 for _ in islice(lying, MAX_IDS))  # counted for the message, 0.3 µs each
    if more:
        number = f"{'more than ' if more == MAX_IDS else ''}{len(found) + more}"
        raise TooLargeError(
            f"the request has {number} containers; at most {MAX_CONTAINERS} are accepted, and a kubelet sends 1"
        )
    return found


def _bounded_texts(data: bytes, within: Span, most: int) -> list[str]:
    ids = [data[begin:end].decode() for begin, end in islice(spans(data, within, 1), most + 1)]
    if len(ids) > most:
        raise _too_many_ids()
    return ids


def _too_many_ids() -> TooLargeError:
    return TooLargeError(f"the request has more than {MAX_IDS} device ids; a list of devices has no room for so many")


def _preferred_request(data: bytes, within: Span, most: int) -> PreferredRequest:
    available, must_include, size = [], [], 0
    for number, kind, begin, end in fields(data, within):
        if number == 1:
            available.append(text(data, number, kind, begin, end))
        elif number == 2:
            must_include.append(text(data, number, kind, begin, end))
        elif number == 3:
            if kind != NUMBER:
                raise ValueError(f"field {number} is not a number")
            size = int32(begin)
        if len(available) + len(must_include) > most:
            raise _too_many_ids()
    return PreferredRequest(available, must_include, size)


def encode_options(*, pre_start: bool, preferred: bool) -> bytes:
    """A DevicePluginOptions."""
    return number_field(1, pre_start) + number_field(2, preferred)


def encode_register(endpoint: str, resource: str, *, pre_start: bool, preferred: bool) -> bytes:
    """A RegisterRequest: `endpoint` is our socket's file name in the kubelet's device plugin directory."""
    options = encode_options(pre_start=pre_start, preferred=preferred)
    return text_field(1, VERSION) + text_field(2, endpoint) + text_field(3, resource) + message(4, options)


def encode_allocate(answers: Iterable[ContainerEdits]) -> bytes:
    """An AllocateResponse with one container response for each of `answers`, in order."""
    return b"".join(message(1, _container(edits)) for edits in answers)


def encode_preferred(answers: Iterable[Sequence[str]]) -> bytes:
    """A PreferredAllocationResponse with one container response for each of `answers`, in order: 50 ms for 60,000 ids."""
    return b"".join([message(1, b"".join(map(_preferred_id, ids))) for ids in answers])


@lru_cache(4096)
def _preferred_id(identifier: str) -> bytes:
    return message(1, identifier.encode())


AllocatedDevice = tuple[str, str, tuple[int, ...]]
"""A device of a container: its resource, its id, its NUMA node ids (empty: none known)."""


class PodListing(msgspec.Struct, frozen=True):
    """One pod as PodResources tells of it: what its `containers` hold, by their names."""

    name: str
    namespace: str
    containers: Mapping[str, Sequence[AllocatedDevice]]


def encode_pod_resources(pods: Iterable[PodListing]) -> bytes:
    """A ListPodResourcesResponse, or a GetPodResourcesResponse where it is one pod: the kubelet's side of the service."""
    return b"".join(message(1, _pod(pod)) for pod in pods)


def encode_allocatable(devices: Iterable[AllocatedDevice]) -> bytes:
    """An AllocatableResourcesResponse."""
    return b"".join(message(1, part) for device in devices for part in _container_devices(device))


def decode_pod_request(data: bytes) -> tuple[str, str]:
    """Name and namespace of a GetPodResourcesRequest. Raises ValueError on bytes that are none."""
    said = {field[0]: text(data, *field) for field in fields(data, (0, len(data)))}
    return said.get(1, ""), said.get(2, "")


def _pod(pod: PodListing) -> bytes:
    from gpu_plugin.kubelet._api import v1  # noqa: PLC0415 - 2 ms that only the kubelet's side pays

    parts = [bytes(v1.PodResources(pod.name, pod.namespace))]
    for name, devices in pod.containers.items():
        entries = [message(2, part) for device in devices for part in _container_devices(device)]
        parts.append(message(3, b"".join([bytes(v1.ContainerResources(name)), *entries])))
    return b"".join(parts)


@lru_cache(4096)
def _container_devices(device: AllocatedDevice) -> tuple[bytes, ...]:
    """A ContainerDevices for each NUMA node of a device, as the kubelet makes them; one without topology where it has none."""
    from gpu_plugin.kubelet._api import v1  # noqa: PLC0415 - as above

    resource, identifier, numa = device
    places = [v1.TopologyInfo([v1.NumaNode(node)]) for node in numa]
    if not places:
        return (bytes(v1.ContainerDevices(resource, [identifier])),)
    return tuple(bytes(v1.ContainerDevices(resource, [identifier], place)) for place in places)


class ListEncoder:
    """Encodes lists of devices, each device once for as long as it stays as it is.

    The same devices in another order are the same list: to the kubelet its order means nothing.

    Not safe between threads: one encoder serves one resource's list on one thread at a time.
    """

    def __init__(self) -> None:
        self._last: Sequence[Device] = ()
        self._parts: list[bytes] = []
        self._encoded = b""

    def fresh(self, devices: Sequence[Device]) -> int:
        """How many of `devices` are not those of the last list: at most about 20 µs of work each."""
        if len(devices) != len(self._last):
            return len(devices)
        return sum(map(operator.is_not, devices, self._last))

    def encode(self, devices: Sequence[Device]) -> bytes:
        """A ListAndWatchResponse of these devices."""
        before, moved = self._parts, False
        if len(devices) == len(self._last):
            together = zip(devices, self._last, before, strict=True)
            self._parts = [part if new is old else _device(new) for new, old, part in together]
            moved = any(new is not old and new.id != old.id for new, old in zip(devices, self._last, strict=True))
        else:
            self._parts = [_device(device) for device in devices]
        self._last = devices
        if not (moved and set(self._parts) == set(before)):
            self._encoded = b"".join(self._parts)
        return self._encoded


def _device(device: Device) -> bytes:
    return message(1, _device_id(device.id) + _health(not device.reason) + _topology(device.numa))


@lru_cache(1 << 17)
def _device_id(identifier: str) -> bytes:
    return text_field(1, identifier)


@lru_cache(2)
def _health(healthy: bool) -> bytes:  # noqa: FBT001
    return text_field(2, HEALTHY if healthy else UNHEALTHY)


@lru_cache(256)
def _topology(numa: tuple[int, ...]) -> bytes:
    if not numa:  # no topology message at all where the node is unknown: the kubelet takes node -1 for a real one
        return b""
    return message(3, b"".join([message(1, number_field(1, node)) for node in numa]))


def _container(edits: ContainerEdits) -> bytes:
    parts = [_entry(1, name, value) for name, value in edits.envs.items()]
    parts += [_mount(mount) for mount in edits.mounts]
    parts += [_spec(spec) for spec in edits.devices]
    parts += [_entry(4, name, value) for name, value in edits.annotations.items()]
    parts += [_cdi(name) for name in edits.cdi_devices]
    return b"".join(parts)


_entry = lru_cache(1024)(entry)


@lru_cache(1024)
def _mount(mount: Mount) -> bytes:
    paths = text_field(1, mount.container_path) + text_field(2, mount.host_path)
    return message(2, paths + number_field(3, mount.read_only))


@lru_cache(1024)
def _spec(spec: DeviceSpec) -> bytes:
    paths = text_field(1, spec.container_path) + text_field(2, spec.host_path)
    return message(3, paths + text_field(3, spec.permissions))


@lru_cache(1024)
def _cdi(name: str) -> bytes:
    return message(5, text_field(1, name))
