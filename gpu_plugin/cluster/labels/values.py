"""What the labels of a node say: NVIDIA's GPU Feature Discovery v0.20.0, rule by rule. Pure.

Source: NVIDIA/k8s-device-plugin, internal/lm. Where it takes one of several models by chance, here it is always the same one;
where it gives up on all labels because one thing is not known, here that one is left out.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from gpu_plugin.config.names import DOMAIN, PRESENT, TIMESTAMP, label_key_fault
from gpu_plugin.config.settings import Settings
from gpu_plugin.config.sharing import MPS, SharedResource
from gpu_plugin.devices.device import mig_resource
from gpu_plugin.devices.node import Gpu, MigDevice, Node
from gpu_plugin.devices.plan import GPU_RESOURCE, counted_as, served_gpus

LONGEST_VALUE = 63
"""Characters of a label's value (apimachinery, validation.IsValidLabelValue)."""

# By PCI class code: a VGA controller, and a 3D one.
_MODES = {0x030000: "graphics", 0x030200: "compute"}

_FAMILIES = {
    1: "tesla",
    2: "fermi",
    3: "kepler",
    5: "maxwell",
    6: "pascal",
    9: "hopper",
    10: "blackwell",
    12: "blackwell",
    13: "rubin",
}
"""By the major number of the compute capability, those that a minor number parts aside."""

_UNWANTED = re.compile(r"[^A-Za-z0-9_. -]")
_EDGES = "-_."


CONFIG_BYTES = 256
"""The part of the configuration space that has the capabilities. Who is not privileged reads only the first 64."""

# Offsets and values of the configuration space, and the lengths of a vGPU's capability.
_STATUS = 0x06
_HAS_CAPABILITIES = 0x10
_FIRST = 0x34
_VENDOR_SPECIFIC = 0x09
_BROKEN = 0xFF
_SIGNATURE = b"VF"
_RECORDS = 5
_TEXT = 10


class VgpuHost(msgspec.Struct, frozen=True):
    """The driver of the hypervisor that gives this machine its vGPUs, as one of them says: its version and its branch."""

    version: str = ""
    branch: str = ""


class HostFacts(msgspec.Struct, frozen=True):
    """What labels say of the machine itself, beside its GPUs.

    `machine` is the product name that firmware tells, None where it cannot be read; `pci_classes` are class codes of PCI devices,
    by bus id as NVML writes it; `vgpu` is the hypervisor's driver where this machine has vGPUs.
    """

    machine: str | None = None
    pci_classes: Mapping[str, int] = msgspec.field(default_factory=dict)
    vgpu: VgpuHost | None = None


def labels_of(node: Node, settings: Settings, host: HostFacts) -> dict[str, str]:
    """The labels of a node with these GPUs under these settings, but for the timestamp.

    Only GPUs that the driver has described count, those that are listed although they are gone included. Without any there are
    no labels but the one that says whether there are vGPUs. Every value is one that Kubernetes takes.
    """
    gpus = served_gpus(node, settings)
    by_mps = any(entry.strategy == MPS for entry in settings.sharing)
    labels = _vgpu(host.vgpu)
    if gpus:
        labels |= {
            PRESENT: "true",
            f"{DOMAIN}/gpu.machine": "unknown" if host.machine is None else sanitised(host.machine),
            **_versions(node),
            f"{DOMAIN}/mig.capable": str(any(gpu.mig_capable for gpu in gpus)).lower(),
            f"{DOMAIN}/mps.capable": str(by_mps and not any(gpu.mig_enabled for gpu in gpus)).lower(),
            **_resources(gpus, settings),
            f"{DOMAIN}/gpu.mode": _mode(gpus, host.pci_classes),
            **_clique(node, gpus),
        }
    return {
        key: valid(value) for key, value in labels.items() if not label_key_fault(key)
    }  # the driver's name of a MIG profile is part of some


def stamped(labels: Mapping[str, str], before: Mapping[str, str], now: float) -> dict[str, str]:
    """The labels with their timestamp: that of those `before` where they were the same, else `now`, Unix time in seconds."""
    unchanged = TIMESTAMP in before and {**before, TIMESTAMP: ""} == {**labels, TIMESTAMP: ""}
    return {**labels, TIMESTAMP: before[TIMESTAMP] if unchanged else str(int(now))}


def sanitised(text: str) -> str:
    """A model or machine as a part of a label's value: what no label may have is left out, and blanks are one hyphen."""
    return "-".join(_UNWANTED.sub("", text).split())


def valid(value: str) -> str:
    """The value, or as much of its beginning as Kubernetes takes: 63 characters, a letter or digit first and last."""
    return _UNWANTED.sub("", value).replace(" ", "-").lstrip(_EDGES)[:LONGEST_VALUE].rstrip(_EDGES)


def _vgpu(host: VgpuHost | None) -> dict[str, str]:
    labels = {f"{DOMAIN}/vgpu.present": str(host is not None).lower()}
    if host is not None and host.version:
        labels |= {
            f"{DOMAIN}/vgpu.host-driver-version": host.version,
            f"{DOMAIN}/vgpu.host-driver-branch": host.branch,
        }
    return labels


def _versions(node: Node) -> dict[str, str]:
    """Labels of the driver's version, if that has two or three numbers, and of its CUDA version; under new names and old ones."""
    labels: dict[str, str] = {}
    parts = node.driver_version.split(".")
    if len(parts) in (2, 3):
        major, minor, revision = (*parts, "")[:3]
        labels |= {
            "cuda.driver.major": major,
            "cuda.driver.minor": minor,
            "cuda.driver.rev": revision,
            "cuda.driver-version.major": major,
            "cuda.driver-version.minor": minor,
            "cuda.driver-version.revision": revision,
            "cuda.driver-version.full": node.driver_version,
        }
    if node.cuda_version is not None:
        cuda_major, cuda_minor = map(str, node.cuda_version)
        labels |= {
            "cuda.runtime.major": cuda_major,
            "cuda.runtime.minor": cuda_minor,
            "cuda.runtime-version.major": cuda_major,
            "cuda.runtime-version.minor": cuda_minor,
            "cuda.runtime-version.full": f"{cuda_major}.{cuda_minor}",
        }
    return {f"{DOMAIN}/{name}": value for name, value in labels.items()}


def _mode(gpus: Sequence[Gpu], classes: Mapping[str, int]) -> str:
    """What the GPUs are for, by their PCI class, where it is the same for all."""
    seen = {classes.get(gpu.pci_bus_id) for gpu in gpus}
    return _MODES.get(seen.pop() or 0, "unknown") if len(seen) == 1 else "unknown"


def _clique(node: Node, gpus: Iterable[Gpu]) -> dict[str, str]:
    """The NVLink domain of the cluster that the GPUs are in, and their clique in it, where that is one for all."""
    words = (node.cliques.get(gpu.uuid, "").rpartition(".") for gpu in gpus)
    fabrics = {(cluster, clique) for cluster, _, clique in words if "-" in cluster}  # a uuid: no mesh of the node's own
    if len(fabrics) != 1:
        return {}
    ((cluster, clique),) = fabrics
    return {f"{DOMAIN}/gpu.clique": f"{cluster}.{clique}"}


# What there is of each resource


def _resources(gpus: Sequence[Gpu], settings: Settings) -> dict[str, str]:
    labels = _whole(gpus, settings)
    if settings.mig_strategy == "none":
        return labels
    labels |= {f"{DOMAIN}/mig.strategy": settings.mig_strategy}
    in_mig_mode = [gpu for gpu in gpus if gpu.mig_enabled and gpu.model]
    if settings.mig_strategy == "mixed":
        return labels | _slices(in_mig_mode, settings, mig_resource)
    if not in_mig_mode:
        return labels
    if _unequal(gpus, in_mig_mode):
        invalid = {
            "product": f"{sanitised(in_mig_mode[0].model)}-MIG-INVALID",
            "count": 0,
            "replicas": 0,
            "memory": 0,
            "sharing-strategy": "",  # it would say "time-slicing" of replicas that nobody can get
        }
        return labels | _under(GPU_RESOURCE, invalid)
    return labels | _slices(in_mig_mode, settings, lambda _: GPU_RESOURCE)


def _unequal(gpus: Sequence[Gpu], in_mig_mode: Sequence[Gpu]) -> bool:
    """Whether strategy single has no word for these: some are not partitioned, one has no MIG device, or sizes differ."""
    profiles = {mig.profile for gpu in in_mig_mode for mig in gpu.mig_devices}
    return (
        any(not gpu.mig_enabled for gpu in gpus)
        or any(not gpu.mig_devices for gpu in in_mig_mode)
        or len(profiles) != 1
    )


def _whole(gpus: Sequence[Gpu], settings: Settings) -> dict[str, str]:
    """Labels of whole GPUs, partitioned or not. Of several models one is described, and its GPUs are counted.

    It is the one of which there are most, among those with a GPU that is not partitioned, if there are any; of equals that of the
    lowest index.
    """
    known = [gpu for gpu in gpus if gpu.model]
    if not known:
        return {}
    candidates = [gpu for gpu in known if not gpu.mig_enabled] or known
    counts = Counter(gpu.model for gpu in known)
    of_candidates = dict.fromkeys(gpu.model for gpu in candidates)
    model = max(of_candidates, key=lambda each: counts[each])  # the first of equals
    gpu = next(gpu for gpu in candidates if gpu.model == model)
    shared = None if gpu.mig_enabled else _entry(counted_as(gpu, settings), settings)
    labels: dict[str, object] = _base((model,), counts[model], shared)
    if gpu.mig_enabled:
        labels["replicas"] = 0
    if gpu.memory_bytes:
        labels["memory"] = gpu.memory_bytes >> 20
    if gpu.compute_capability is not None:
        major, minor = gpu.compute_capability
        labels |= {"family": _family(major, minor), "compute.major": major, "compute.minor": minor}
    return _under(GPU_RESOURCE, labels)


def _slices(in_mig_mode: Iterable[Gpu], settings: Settings, named: Callable[[str], str]) -> dict[str, str]:
    """Labels of MIG devices by profile, under the resource that `named` gives it; the first of each describes all."""
    first: dict[str, tuple[Gpu, MigDevice]] = {}
    counts: Counter[str] = Counter()
    for gpu in in_mig_mode:
        for mig in gpu.mig_devices:
            first.setdefault(mig.profile, (gpu, mig))
            counts[mig.profile] += 1
    labels: dict[str, str] = {}
    for profile, (gpu, mig) in first.items():
        shared = _entry(counted_as(gpu, settings, mig), settings)
        parts = (gpu.model, "MIG", profile.replace("+", "."))
        labels |= _under(named(profile), _base(parts, counts[profile], shared) | _attributes(mig))
    return labels


def _attributes(mig: MigDevice) -> dict[str, object]:
    told: dict[str, object | None] = {
        "memory": None if mig.memory_bytes is None else mig.memory_bytes >> 20,
        "slices.gi": mig.gpu_slices,
        "slices.ci": mig.compute_slices,
    }
    if mig.engines is not None:
        told |= {
            "multiprocessors": mig.engines.multiprocessors,
            "engines.copy": mig.engines.copy,
            "engines.decoder": mig.engines.decoder,
            "engines.encoder": mig.engines.encoder,
            "engines.jpeg": mig.engines.jpeg,
            "engines.ofa": mig.engines.ofa,
        }
    return {name: value for name, value in told.items() if value is not None}


def _base(parts: Iterable[str], count: int, shared: SharedResource | None) -> dict[str, object]:
    """Product, count, replicas and how it is shared. What is shared under its own name says so in the product."""
    product = [sanitised(part) for part in parts]
    replicas = shared.replicas if shared is not None else 1
    if shared is not None and replicas > 1 and shared.offered_as == shared.name:
        product.append("SHARED")
    strategy = shared.strategy if shared is not None and replicas > 1 else "none"
    return {"product": "-".join(product), "count": count, "replicas": replicas, "sharing-strategy": strategy}


def _entry(resource: str, settings: Settings) -> SharedResource | None:
    return next((entry for entry in settings.sharing if entry.name == resource), None)


def _under(resource: str, values: Mapping[str, object]) -> dict[str, str]:
    return {f"{resource}.{name}": str(value) for name, value in values.items()}


def _family(major: int, minor: int) -> str:
    """The architecture by its compute capability, in the words of GPU Feature Discovery."""
    if major == 7:
        return "volta" if minor < 5 else "turing"
    if major == 8:
        return "ampere" if minor < 9 else "ada-lovelace"
    return _FAMILIES.get(major, "undefined")


def vgpu_host(config: bytes) -> VgpuHost | None:
    """The hypervisor's driver, where these first bytes of a device's configuration space are a vGPU's; None where not.

    Sources: the PCI Local Bus Specification 3.0 (6.7, capabilities list), and internal/vgpu of NVIDIA/k8s-device-plugin v0.20.0
    for what a vGPU's vendor-specific capability holds: after id, next and length the signature "VF", then records of an id, a
    length that counts both, and their data; record 0 has ten bytes of version and ten of branch.
    """
    capability = _vendor_specific(config)
    if capability[3:_RECORDS] != _SIGNATURE:
        return None
    at = _RECORDS
    while at + 1 < len(capability) and capability[at]:
        if not capability[at + 1]:
            return VgpuHost()
        at += capability[at + 1]
    data = capability[at + 2 : at + 2 + 2 * _TEXT]
    if len(data) < 2 * _TEXT:
        return VgpuHost()
    return VgpuHost(_text(data[:_TEXT]), _text(data[_TEXT:]))


def _vendor_specific(config: bytes) -> bytes:
    """The first vendor-specific capability; empty where there is none, or the space was not read whole."""
    if len(config) < CONFIG_BYTES or not config[_STATUS] & _HAS_CAPABILITIES:
        return b""
    seen: set[int] = set()
    at = config[_FIRST]
    while at and at not in seen and at + 2 < len(config) and config[at] != _BROKEN:
        if config[at] == _VENDOR_SPECIFIC:
            return config[at : at + config[at + 2]]
        seen.add(at)
        at = config[at + 1]
    return b""


def _text(data: bytes) -> str:
    return data.strip(b"\0").decode("ascii", "replace")
