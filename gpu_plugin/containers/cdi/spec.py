"""The document of the Container Device Interface, specification 1.1.0 (cncf-tags/container-device-interface, SPEC.md).

The classes are the JSON Schema: a document that they decode has the right keys and types. `faults` checks the rules that a schema
cannot express.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import msgspec

from gpu_plugin.containers import cdi_names

# Versions of the specification that runtimes support, the oldest first.
VERSIONS = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")

MAX_BYTES = 16 * 1024 * 1024  # no specification is longer: with 16 GPUs of 7 MIG devices each, it takes 0.2 MiB

_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Variable = Annotated[str, msgspec.Meta(pattern="^[^=]+=")]
_Unsigned = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Block(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, rename="camel"):
    """A part of the document. A missing key means the default value, and default values are not written."""


class DeviceNode(Block, frozen=True, kw_only=True):
    """A device node for the container. `type` is c, b, u or p as in mknod(1); `file_mode` has only the permission bits."""

    path: _Text
    host_path: str = ""
    type: Literal["", "b", "c", "u", "p"] = ""
    major: _Number = 0
    minor: _Number = 0
    file_mode: Annotated[int, msgspec.Meta(ge=0, le=0o7777)] | None = None
    permissions: Annotated[str, msgspec.Meta(pattern="^(|none|[rwm]+)$")] = ""
    uid: _Unsigned | None = None
    gid: _Unsigned | None = None


class Mount(Block, frozen=True, kw_only=True):
    """A bind mount into the container."""

    host_path: _Text
    container_path: _Text
    options: tuple[str, ...] = ()
    type: str = ""


class Hook(Block, frozen=True, kw_only=True):
    """A program of the host that the runtime runs while it makes the container."""

    hook_name: Literal[
        "prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"
    ]  # the hooks of OCI runtimes
    path: _Text
    args: tuple[str, ...] = ()
    env: tuple[_Variable, ...] = ()
    timeout: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None


class IntelRdt(Block, frozen=True, kw_only=True):
    """Resource Director Technology of Intel's processors. This plugin reads it and never writes it."""

    clos_id: str = msgspec.field(name="closID", default="")
    l3_cache_schema: str = msgspec.field(name="l3CacheSchema", default="")
    mem_bw_schema: str = msgspec.field(name="memBwSchema", default="")
    schemata: tuple[str, ...] = ()
    enable_monitoring: bool = False
    enable_cmt: bool = msgspec.field(name="enableCMT", default=False)
    enable_mbm: bool = msgspec.field(name="enableMBM", default=False)


class NetDevice(Block, frozen=True, kw_only=True):
    """A network interface to move into the container. This plugin reads it and never writes it."""

    host_interface_name: _Text
    name: _Text


class Edits(Block, frozen=True, kw_only=True):
    """Changes to a container."""

    env: tuple[_Variable, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    net_devices: tuple[NetDevice, ...] = ()
    hooks: tuple[Hook, ...] = ()
    mounts: tuple[Mount, ...] = ()
    intel_rdt: IntelRdt | None = None
    additional_gids: tuple[_Unsigned, ...] = ()


class SpecDevice(Block, frozen=True, kw_only=True):
    """A device and its name."""

    name: _Text
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    container_edits: Edits


class Spec(Block, frozen=True, kw_only=True):
    """The devices of one kind, vendor/class. Every container with such a device also gets `container_edits`."""

    cdi_version: _Text
    kind: _Text
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    devices: Annotated[tuple[SpecDevice, ...], msgspec.Meta(min_length=1)]
    container_edits: Edits = Edits()


_KIND = re.compile(r"([A-Za-z](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)/([A-Za-z](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)")
_DEVICE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._:-]*[A-Za-z0-9])?")


def made(kind: str, devices: tuple[SpecDevice, ...], common: Edits) -> Spec:
    """Return a document with the lowest possible version, since older runtimes refuse newer versions."""
    spec = Spec(cdi_version=VERSIONS[0], kind=kind, devices=devices, container_edits=common)
    return msgspec.structs.replace(spec, cdi_version=minimum_version(spec))


def minimum_version(spec: Spec) -> str:
    """Return the lowest version that supports the whole document (specs-go, MinimumRequiredVersion)."""
    edits = all_edits(spec)
    rdts = [each.intel_rdt for each in edits if each.intel_rdt is not None]
    if any(each.net_devices for each in edits) or any(rdt.schemata or rdt.enable_monitoring for rdt in rdts):
        return "1.1.0"
    if rdts or any(each.additional_gids for each in edits):
        return "0.7.0"
    if spec.annotations or any(device.annotations for device in spec.devices) or "." in spec.kind.partition("/")[2]:
        return "0.6.0"
    if any(device.name[0] in "0123456789" for device in spec.devices):
        return "0.5.0"
    if any(node.host_path for each in edits for node in each.device_nodes):
        return "0.5.0"
    if any(mount.type for each in edits for mount in each.mounts):
        return "0.4.0"
    return VERSIONS[0]


def to_json(spec: Spec) -> bytes:
    """Encode the document as JSON. Equal documents have equal bytes."""
    return msgspec.json.format(msgspec.json.encode(spec, order="deterministic"), indent=1) + b"\n"


def from_plain(content: object) -> Spec:
    """Convert plain values from JSON or YAML to a document. Raises ValueError with a text such as `$.devices[0].name: REASON`."""
    try:
        return msgspec.convert(content, Spec)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at ")
        place = path.strip("`").removeprefix("key` in `")  # msgspec's prefix if a key is not text
        raise ValueError(f"{place or '$'}: {text[:1].lower()}{text[1:].replace('`', chr(39))}") from None


# Keys whose items are pointers in CDI's library: it crashes on null among the items, so no runtime can use such a file.
_BLOCKS = frozenset(("deviceNodes", "netDevices", "hooks", "mounts"))

# Keys whose values are numbers, true or false. All other values are text, lists or objects.
TYPED_KEYS = frozenset(
    (
        "major",
        "minor",
        "fileMode",
        "uid",
        "gid",
        "timeout",
        "additionalGids",
        "enableMonitoring",
        "enableCMT",
        "enableMBM",
    )
)


def as_runtimes_read(content: object) -> Spec:
    """Convert plain values to a document by the rules of CDI's library, which accepts more than the JSON Schema.

    Null means a missing value. A number, true or false is accepted for its text. Source: pkg/cdi/spec.go, ParseSpec, which reads
    both JSON and YAML by go.yaml.in/yaml/v3. Raises ValueError as `from_plain`.
    """
    return from_plain(_lax(content))


def _lax(value: object, key: str = "") -> object:
    if isinstance(value, dict) and key == "annotations":
        return {name: "" if each is None else _lax(each) for name, each in value.items()}
    if isinstance(value, dict):
        return {name: _lax(each, name) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_lax(each, key) for each in value if each is not None or key in _BLOCKS]
    if key == "fileMode" and type(value) is int and 0 <= value <= 0xFFFFFFFF:  # Go's os.FileMode has 32 bits
        return value & 0o7777
    if key in TYPED_KEYS or not isinstance(value, bool | int | float):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)


def from_json(content: bytes) -> Spec:
    """Decode a document from JSON. Raises ValueError."""
    try:
        plain = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    return from_plain(plain)


def faults(spec: Spec) -> Iterator[str]:
    """Yield a sentence for each fault of a document that its schema cannot find.

    Without a fault, runtimes accept the document.
    """
    version = spec.cdi_version.removeprefix("v")
    if version not in VERSIONS:
        yield f"$.cdiVersion: {spec.cdi_version!r} is not one of {', '.join(VERSIONS)}"
    elif VERSIONS.index(version) < VERSIONS.index(least := minimum_version(spec)):
        yield f"$.cdiVersion: {spec.cdi_version} is too low for the content of this document, which needs {least} or later"
    if _KIND.fullmatch(spec.kind) is None:
        yield (
            f"$.kind: {spec.kind!r} is not of the form vendor/class: letters, digits, -, _ and . with a letter in front and "
            "a letter or digit at the end"
        )
    yield from _annotation_faults("$", spec.annotations)
    yield from _edits_faults("$.containerEdits", spec.container_edits)
    seen: set[str] = set()
    for at, device in enumerate(spec.devices):
        place = f"$.devices[{at}]"
        if _DEVICE.fullmatch(device.name) is None:
            yield f"{place}.name: {device.name!r}: letters, digits, -, _, . and :, with a letter or digit at both ends"
        if device.name in seen:
            yield f"{place}.name: {device.name!r} is already listed above"
        seen.add(device.name)
        if device.container_edits == Edits():
            yield f"{place}.containerEdits: empty: a device must change something"
        yield from _annotation_faults(place, device.annotations)
        yield from _edits_faults(f"{place}.containerEdits", device.container_edits)


def _edits_faults(place: str, edits: Edits) -> Iterator[str]:
    class_of_service = edits.intel_rdt.clos_id if edits.intel_rdt else ""
    if class_of_service != "/" and (class_of_service in (".", "..") or re.search("[/\n]", class_of_service)):
        yield f"{place}.intelRdt.closID: {class_of_service!r} is not a directory name; / is the root class"
    for what, interfaces in (
        ("hostInterfaceName", [each.host_interface_name for each in edits.net_devices]),
        ("name", [each.name for each in edits.net_devices]),
    ):
        if len(set(interfaces)) < len(interfaces):
            yield f"{place}.netDevices: the same {what} appears in two of them"


def _annotation_faults(place: str, annotations: Mapping[str, str]) -> Iterator[str]:
    """Yield faults by Kubernetes' rules for annotation keys, which CDI's library uses (apimachinery, ValidateAnnotations)."""
    for key in annotations:
        prefix, slash, name = key.rpartition("/")
        named = re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", name)
        domain = re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", prefix.lower()) if slash else True
        if not named or not domain:
            yield f"{place}.annotations: {key!r} is not an annotation key such as example.com/name"


def all_edits(spec: Spec) -> list[Edits]:
    """Return the common edits, and the edits of each device."""
    return [spec.container_edits, *(device.container_edits for device in spec.devices)]


def device_nodes(spec: Spec) -> list[DeviceNode]:
    """Return the common device nodes, and the device nodes of every device. Device nodes may occur more than once."""
    return [node for edits in all_edits(spec) for node in edits.device_nodes]


def mounted(spec: Spec) -> tuple[str, ...]:
    """Return the host paths of all mounts, without duplicates."""
    return tuple(dict.fromkeys(mount.host_path for edits in all_edits(spec) for mount in edits.mounts))


def hook_programs(spec: Spec) -> tuple[str, ...]:
    """Return the host paths of all hook programs, without duplicates."""
    return tuple(dict.fromkeys(hook.path for edits in all_edits(spec) for hook in edits.hooks))


def host_paths(spec: Spec) -> tuple[str, ...]:
    """Return the host paths of all mounts, device nodes and hook programs, without duplicates."""
    nodes = (node.host_path or node.path for node in device_nodes(spec))
    return tuple(dict.fromkeys((*mounted(spec), *nodes, *hook_programs(spec))))


def gpu_nodes(specs: Mapping[str, Spec]) -> dict[str, frozenset[str]]:
    """Return the device nodes for each device of the class gpu, by device name. `specs` has the specifications by file name."""
    spec = specs.get(cdi_names.file_name(cdi_names.GPU))
    if spec is None:
        return {}
    common = [node.path for node in spec.container_edits.device_nodes]
    return {
        device.name: frozenset([*common, *(node.path for node in device.container_edits.device_nodes)])
        for device in spec.devices
    }


def other_names(specs: Mapping[str, Spec]) -> frozenset[str]:
    """Return the qualified names of all devices of other classes. `specs` has the specifications by file name."""
    return frozenset(
        f"{spec.kind}={device.name}"
        for file, spec in specs.items()
        if file != cdi_names.file_name(cdi_names.GPU)
        for device in spec.devices
    )
