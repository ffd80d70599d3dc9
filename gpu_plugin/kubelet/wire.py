"""The messages of the device plugin API, from the daemon's values to bytes and back, by betterproto.

Each repeated part of an answer is encoded once, as an answer with this part alone, and the parts are joined. This is correct
because protobuf messages can be concatenated: the encoding of a message with the fields [a, b] is the encoding of [a] followed by
the encoding of [b]. If 1 device in 2,000 changes, a list takes one encoding and a join: 0.2 ms instead of 170 ms.
"""

import operator
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice

from betterproto import ParsedField, parse_fields

from gpu_plugin.containers.edits import ContainerEdits, DeviceSpec, Mount
from gpu_plugin.devices.device import MAX_LIST_BYTES, Device
from gpu_plugin.kubelet import messages
from gpu_plugin.kubelet.messages import ContainerPreferredAllocationRequest, decode, encoded_part

VERSION = "v1beta1"
HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"
# The longest message that the kubelet's client accepts. A longer list ends the stream permanently.
MAX_MESSAGE_BYTES = MAX_LIST_BYTES

REGISTER = "/v1beta1.Registration/Register"
OPTIONS = "/v1beta1.DevicePlugin/GetDevicePluginOptions"
LIST_AND_WATCH = "/v1beta1.DevicePlugin/ListAndWatch"
PREFERRED = "/v1beta1.DevicePlugin/GetPreferredAllocation"
ALLOCATE = "/v1beta1.DevicePlugin/Allocate"
PRE_START = "/v1beta1.DevicePlugin/PreStartContainer"

POD_RESOURCES_LIST = "/v1.PodResourcesLister/List"
POD_RESOURCES_ALLOCATABLE = "/v1.PodResourcesLister/GetAllocatableResources"

EMPTY = b""

# Containers of one request. Every kubelet sends a request for each container (pkg/kubelet/cm/devicemanager/manager.go,
# devicesToAllocate and allocateContainerResources).
MAX_CONTAINERS = 64

# Device ids of one request. A kubelet names each listed device twice at most, and a list has no room for half as many.
MAX_IDS = 1 << 18


class TooLargeError(ValueError):
    """A request with more containers or ids than any kubelet sends."""


def decode_allocate(data: bytes) -> list[list[str]]:
    """Decode the device ids of each container of an AllocateRequest.

    Raises:
        TooLargeError: more than MAX_CONTAINERS containers or MAX_IDS ids.
        ValueError: the bytes are not such a message.
    """
    _check_containers(data)
    request = decode(messages.AllocateRequest, data)
    if not request.container_requests:  # also if the bytes end within the first key
        raise ValueError("the AllocateRequest has no container")
    try:
        return [_texts(container.device_ids) for container in request.container_requests]
    except (AttributeError, TypeError) as error:  # betterproto keeps a value of another type
        raise ValueError(f"not an AllocateRequest message: {error}") from None


def decode_preferred(data: bytes) -> list[ContainerPreferredAllocationRequest]:
    """Decode the containers of a PreferredAllocationRequest. Raises as `decode_allocate` does."""
    _check_containers(data)
    containers = decode(messages.PreferredAllocationRequest, data).container_requests
    try:
        for container in containers:
            _texts(container.available_device_ids)
            _texts(container.must_include_device_ids)
            operator.index(container.allocation_size)
    except (AttributeError, TypeError) as error:  # as above
        raise ValueError(f"not a PreferredAllocationRequest message: {error}") from None
    return containers


def decode_pre_start(data: bytes) -> list[str]:
    """Decode the device ids of a PreStartContainerRequest. Raises as `decode_allocate` does."""
    if len(data) > 2 * MAX_IDS:
        _check_ids(data, MAX_IDS)
    return decode(messages.PreStartContainerRequest, data).device_ids


def _texts(values: list[str]) -> list[str]:
    """Return the values. Raises TypeError if a value is not text."""
    "".join(values)
    return values


def _check_containers(data: bytes) -> None:
    """Refuse a request with too many containers or ids before they are decoded, which takes 1 KiB for each container."""
    if len(data) <= 2 * MAX_CONTAINERS:  # the shortest field has two bytes
        return
    containers = _fields(data, MAX_CONTAINERS + 1)
    if len(containers) > MAX_CONTAINERS:
        raise TooLargeError(f"the request has more than {MAX_CONTAINERS} containers, and a kubelet sends 1")
    if len(data) > 2 * MAX_IDS:
        left = MAX_IDS
        for container in containers:
            if isinstance(container.value, bytes):
                left = _check_ids(container.value, left)


def _check_ids(data: bytes, most: int) -> int:
    """Refuse a container with more ids than `most`, and return how many more the others may have."""
    left = most - len(_fields(data, most + 1))
    if left < 0:
        raise TooLargeError(f"the request has more than {MAX_IDS} device ids; a list of devices has no room for them")
    return left


def _fields(data: bytes, most: int) -> list[ParsedField]:
    """Return the first `most` fields of a message, not decoded. Raises ValueError if the message ends within a field."""
    try:
        return list(islice(parse_fields(data), most))
    except EOFError:
        raise ValueError("the request ends within a field") from None


def encode_options(*, pre_start: bool, preferred: bool) -> bytes:
    """Encode a DevicePluginOptions."""
    return bytes(messages.DevicePluginOptions(pre_start, preferred))


def encode_register(endpoint: str, resource: str) -> bytes:
    """Encode a RegisterRequest. `endpoint` is our socket's file name in the kubelet's device plugin directory."""
    options = messages.DevicePluginOptions(pre_start_required=False, get_preferred_allocation_available=True)
    return bytes(messages.RegisterRequest(VERSION, endpoint, resource, options))


def encode_allocate(answers: Iterable[ContainerEdits]) -> bytes:
    """Encode an AllocateResponse with one container response for each of `answers`, in order."""
    return _joined(map(_container, answers))


def encode_preferred(answers: Iterable[Sequence[str]]) -> bytes:
    """Encode a PreferredAllocationResponse with one container response for each of `answers`, in order."""
    return _joined(b"".join(map(_preferred_id, ids)) for ids in answers)


class ListEncoder:
    """Encodes lists of devices. A device is encoded again only after a change.

    The same devices in another order are the same list: the order has no meaning to the kubelet.

    Not thread-safe: one encoder encodes the list of one resource, on one thread at a time.
    """

    def __init__(self) -> None:
        self._last: Sequence[Device] = ()
        self._parts: list[bytes] = []
        self._encoded = b""

    def fresh(self, devices: Sequence[Device]) -> int:
        """Return the number of devices that differ from the last list. Each takes about 30 µs to encode at most."""
        if len(devices) != len(self._last):
            return len(devices)
        return sum(map(operator.is_not, devices, self._last))

    def encode(self, devices: Sequence[Device]) -> bytes:
        """Encode a ListAndWatchResponse of these devices."""
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


def _joined(parts: Iterable[bytes]) -> bytes:
    """Return a message whose field 1 has these encoded messages, each after its length."""
    return b"".join(map(encoded_part, parts))


def _device(device: Device) -> bytes:
    return _joined([_device_id(device.id) + _health(not device.reason) + _topology(device.numa)])


@lru_cache(1 << 17)
def _device_id(identifier: str) -> bytes:
    return bytes(messages.Device(id=identifier))


@lru_cache(2)
def _health(healthy: bool) -> bytes:  # noqa: FBT001
    return bytes(messages.Device(health=HEALTHY if healthy else UNHEALTHY))


@lru_cache(256)
def _topology(numa: tuple[int, ...]) -> bytes:
    if not numa:  # no topology message at all if the node is unknown: the kubelet takes node -1 for a real node
        return b""
    return bytes(messages.Device(topology=messages.TopologyInfo([messages.NumaNode(node) for node in numa])))


@lru_cache(4096)
def _preferred_id(identifier: str) -> bytes:
    return bytes(messages.ContainerPreferredAllocationResponse([identifier]))


def _container(edits: ContainerEdits) -> bytes:
    parts = [_env(name, value) for name, value in edits.envs.items()]
    parts += [_mount(mount) for mount in edits.mounts]
    parts += [_spec(spec) for spec in edits.devices]
    parts += [_annotation(name, value) for name, value in edits.annotations.items()]
    parts += [_cdi(name) for name in edits.cdi_devices]
    return b"".join(parts)


@lru_cache(1024)
def _env(name: str, value: str) -> bytes:
    return bytes(messages.ContainerAllocateResponse(envs={name: value}))


@lru_cache(1024)
def _mount(mount: Mount) -> bytes:
    encoded = messages.Mount(mount.container_path, mount.host_path, mount.read_only)
    return bytes(messages.ContainerAllocateResponse(mounts=[encoded]))


@lru_cache(1024)
def _spec(spec: DeviceSpec) -> bytes:
    encoded = messages.DeviceSpec(spec.container_path, spec.host_path, spec.permissions)
    return bytes(messages.ContainerAllocateResponse(devices=[encoded]))


@lru_cache(1024)
def _annotation(name: str, value: str) -> bytes:
    return bytes(messages.ContainerAllocateResponse(annotations={name: value}))


@lru_cache(1024)
def _cdi(name: str) -> bytes:
    return bytes(messages.ContainerAllocateResponse(cdi_devices=[messages.CdiDevice(name)]))
