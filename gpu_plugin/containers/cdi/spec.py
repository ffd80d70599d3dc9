"""The Container Device Interface's document, after its specification 1.1.0 (cncf-tags/container-device-interface, SPEC.md).

The classes are the JSON Schema: what is read by them has the right keys and types. `faults` judges what a schema cannot say.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec

from gpu_plugin.containers import cdi_names

VERSIONS = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
"""Versions of the specification that runtimes know, in their order."""

MAX_BYTES = 16 * 1024 * 1024  # more than any specification is: that of 16 GPUs of 7 MIG devices each takes 0.2 MiB

_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Variable = Annotated[str, msgspec.Meta(pattern="^[^=]+=")]
_Unsigned = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Block(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, rename="camel"):
    """A part of the document. What is left out has its default, and what has its default is left out."""


class DeviceNode(Block, frozen=True, kw_only=True):
    """A device node for the container. `type` is c, b, u or p as in mknod(1); `file_mode` has the permission bits alone."""

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
    ]  # those of OCI runtimes
    path: _Text
    args: tuple[str, ...] = ()
    env: tuple[_Variable, ...] = ()
    timeout: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None


class IntelRdt(Block, frozen=True, kw_only=True):
    """Resource Director Technology of Intel's processors; read and never written by us."""

    clos_id: str = msgspec.field(name="closID", default="")
    l3_cache_schema: str = msgspec.field(name="l3CacheSchema", default="")
    mem_bw_schema: str = msgspec.field(name="memBwSchema", default="")
    schemata: tuple[str, ...] = ()
    enable_monitoring: bool = False
    enable_cmt: bool = msgspec.field(name="enableCMT", default=False)
    enable_mbm: bool = msgspec.field(name="enableMBM", default=False)


class NetDevice(Block, frozen=True, kw_only=True):
    """A network interface to move into the container; read and never written by us."""

    host_interface_name: _Text
    name: _Text


class Edits(Block, frozen=True, kw_only=True):
    """What is changed in a container."""

    env: tuple[_Variable, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    net_devices: tuple[NetDevice, ...] = ()
    hooks: tuple[Hook, ...] = ()
    mounts: tuple[Mount, ...] = ()
    intel_rdt: IntelRdt | None = None
    additional_gids: tuple[_Unsigned, ...] = ()


class SpecDevice(Block, frozen=True, kw_only=True):
    """One device by name."""

    name: _Text
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    container_edits: Edits


class Spec(Block, frozen=True, kw_only=True):
    """The devices of one kind, vendor/class, and what every container gets that has one of them."""

    cdi_version: _Text
    kind: _Text
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    devices: Annotated[tuple[SpecDevice, ...], msgspec.Meta(min_length=1)]
    container_edits: Edits = Edits()


_KIND = re.compile(r"([A-Za-z](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)/([A-Za-z](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)")
_DEVICE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._:-]*[A-Za-z0-9])?")


def made(kind: str, devices: tuple[SpecDevice, ...], common: Edits) -> Spec:
    """The document of the lowest version that may say this: older runtimes refuse what is newer than they are."""
    spec = Spec(cdi_version=VERSIONS[0], kind=kind, devices=devices, container_edits=common)
    return msgspec.structs.replace(spec, cdi_version=minimum_version(spec))


def minimum_version(spec: Spec) -> str:
    """The lowest version whose specification knows everything in the document (specs-go, MinimumRequiredVersion)."""
    edits = [spec.container_edits, *(device.container_edits for device in spec.devices)]
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
    """The document as JSON, the same bytes for the same document."""
    return msgspec.json.format(msgspec.json.encode(spec, order="deterministic"), indent=1) + b"\n"


def from_plain(content: object) -> Spec:
    """The document that JSON or YAML was read to. Raises ValueError, as `$.devices[0].name: what is wrong`."""
    try:
        return msgspec.convert(content, Spec)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at ")
        place = path.strip("`").removeprefix("key` in `")  # msgspec's way to say that a key is meant, which is not text
        raise ValueError(f"{place or '$'}: {text[:1].lower()}{text[1:].replace('`', chr(39))}") from None


# Keys below which the library has pointers: it crashes on null among their items, so no runtime serves such a file.
_BLOCKS = frozenset(("deviceNodes", "netDevices", "hooks", "mounts"))
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
"""Keys whose values are numbers, true or false. All other values are text, lists or objects."""


def as_runtimes_read(content: object) -> Spec:
    """The document that CDI's library makes of plain values, which is laxer than the JSON Schema.

    Null stands for a value that is left out, and a number, true or false for its text. Source: pkg/cdi/spec.go, ParseSpec,
    which reads both JSON and YAML by go.yaml.in/yaml/v3. Raises ValueError as `from_plain`.
    """
    return from_plain(_lax(content))


def _lax(value: object, key: str = "") -> object:
    if isinstance(value, dict) and key == "annotations":
        return {name: "" if each is None else _lax(each) for name, each in value.items()}
    if isinstance(value, dict):
        return {name: _lax(each, name) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_lax(each, key) for each in value if each is not None or key in _BLOCKS]
    if key in TYPED_KEYS or not isinstance(value, bool | int | float):
        return value
    return str(value).lower() if isinstance(value, bool) else str(value)


def from_json(content: bytes) -> Spec:
    """The document in these bytes. Raises ValueError."""
    try:
        plain = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    return from_plain(plain)


def faults(spec: Spec) -> Iterator[str]:
    """What is wrong with a document beyond its schema, a sentence each; nothing where runtimes take it."""
    version = spec.cdi_version.removeprefix("v")
    if version not in VERSIONS:
        yield f"$.cdiVersion: {spec.cdi_version!r} is none of {', '.join(VERSIONS)}"
    elif VERSIONS.index(version) < VERSIONS.index(least := minimum_version(spec)):
        yield f"$.cdiVersion: {spec.cdi_version} does not know everything in this document: it takes {least} or later"
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
    """Kubernetes' rules for annotation keys (apimachinery, ValidateAnnotations), which CDI's library goes by."""
    for key in annotations:
        prefix, slash, name = key.rpartition("/")
        named = re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", name)
        domain = re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", prefix.lower()) if slash else True
        if not named or not domain:
            yield f"{place}.annotations: {key!r} is not an annotation key such as example.com/name"


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of the document, made from the classes that read it."""
    return msgspec.json.schema(Spec)


def device_nodes(spec: Spec) -> Iterator[DeviceNode]:
    """Every device node in it; one that several devices have comes as often."""
    for edits in (spec.container_edits, *(device.container_edits for device in spec.devices)):
        yield from edits.device_nodes


def mounted(spec: Spec) -> tuple[str, ...]:
    """The paths on the host that it mounts, each once."""
    edits = [spec.container_edits, *(device.container_edits for device in spec.devices)]
    return tuple(dict.fromkeys(mount.host_path for each in edits for mount in each.mounts))


def hook_programs(spec: Spec) -> tuple[str, ...]:
    """The programs on the host that it has the runtime run, each once."""
    edits = [spec.container_edits, *(device.container_edits for device in spec.devices)]
    return tuple(dict.fromkeys(hook.path for each in edits for hook in each.hooks))


def host_paths(spec: Spec) -> tuple[str, ...]:
    """What must be on the host for its devices, each path once."""
    nodes = (node.host_path or node.path for node in device_nodes(spec))
    return tuple(dict.fromkeys((*mounted(spec), *nodes, *hook_programs(spec))))


def gpu_nodes(specs: Mapping[str, Spec]) -> dict[str, frozenset[str]]:
    """The device nodes that a container gets with each device of the class gpu, by its name; `specs` are by file name."""
    spec = specs.get(cdi_names.file_name(cdi_names.GPU))
    if spec is None:
        return {}
    common = [node.path for node in spec.container_edits.device_nodes]
    return {
        device.name: frozenset([*common, *(node.path for node in device.container_edits.device_nodes)])
        for device in spec.devices
    }


def other_names(specs: Mapping[str, Spec]) -> frozenset[str]:
    """The qualified names of all devices that are of other classes; `specs` are by file name."""
    return frozenset(
        f"{spec.kind}={device.name}"
        for file, spec in specs.items()
        if file != cdi_names.file_name(cdi_names.GPU)
        for device in spec.devices
    )
