"""The values of a node's labels, by the rules of NVIDIA's GPU Feature Discovery v0.20.0. Pure.

Source: NVIDIA/k8s-device-plugin, internal/lm. There are two differences. If there are several GPU models, GPU Feature Discovery
describes any of them, and this module always the same model. If a value is not known, GPU Feature Discovery writes no labels, and
this module omits that label.
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

LONGEST_VALUE = 63  # characters of a label's value (apimachinery, validation.IsValidLabelValue)

# The mode by PCI class code: VGA controller, and 3D controller.
_MODES = {0x030000: "graphics", 0x030200: "compute"}

# The architecture by the major number of the compute capability. `_family` has the major numbers 7 and 8.
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

_UNWANTED = re.compile(r"[^A-Za-z0-9_. -]")
_EDGES = "-_."

# The bytes of the configuration space that have the capabilities. An unprivileged process can read only the first 64.
CONFIG_BYTES = 256


class VgpuHost(msgspec.Struct, frozen=True):
    """The version and branch of the hypervisor's driver, read from a vGPU of this machine."""

    version: str = ""
    branch: str = ""


class HostFacts(msgspec.Struct, frozen=True):
    """Facts of the machine for the labels, in addition to its GPUs.

    Attributes:
        machine: the product name from the firmware; None if it cannot be read.
        pci_classes: the class codes of PCI devices, by bus id in NVML's form.
        vgpu: the hypervisor's driver; None if this machine has no vGPU.
    """

    machine: str | None = None
    pci_classes: Mapping[str, int] = msgspec.field(default_factory=dict)
    vgpu: VgpuHost | None = None


def labels_of(node: Node, settings: Settings, host: HostFacts) -> dict[str, str]:
    """Return the labels of a node with these GPUs under these settings, without the timestamp.

    Only GPUs that the driver has described count, including GPUs that are gone and still listed. Without such GPUs the only
    label is `vgpu.present`. Kubernetes accepts every value.
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
    # Some keys include the driver's name of a MIG profile, so they may be invalid.
    return {key: valid(value) for key, value in labels.items() if not label_key_fault(key)}


def stamped(labels: Mapping[str, str], before: Mapping[str, str], now: float) -> dict[str, str]:
    """Return the labels with a timestamp: the former timestamp if the labels are unchanged, else `now`, Unix time in seconds."""
    unchanged = TIMESTAMP in before and {**before, TIMESTAMP: ""} == {**labels, TIMESTAMP: ""}
    return {**labels, TIMESTAMP: before[TIMESTAMP] if unchanged else str(int(now))}


def sanitised(text: str) -> str:
    """Make a model or machine name fit a label's value: remove invalid characters, and replace white space by a hyphen."""
    return "-".join(_UNWANTED.sub("", text).split())


def valid(value: str) -> str:
    """Make a value valid for Kubernetes: cut it to 63 characters, with a letter or digit first and last."""
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
    """Return labels of the driver's version, if it has two or three numbers, and of its CUDA version, under old and new keys."""
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
        major, minor = map(str, node.cuda_version)
        labels |= {
            "cuda.runtime.major": major,
            "cuda.runtime.minor": minor,
            "cuda.runtime-version.major": major,
            "cuda.runtime-version.minor": minor,
            "cuda.runtime-version.full": f"{major}.{minor}",
        }
    return {f"{DOMAIN}/{name}": value for name, value in labels.items()}


def _mode(gpus: Sequence[Gpu], classes: Mapping[str, int]) -> str:
    """Return the mode of the GPUs by their PCI class; "unknown" if they differ."""
    seen = {classes.get(gpu.pci_bus_id) for gpu in gpus}
    return _MODES.get(seen.pop() or 0, "unknown") if len(seen) == 1 else "unknown"


def _clique(node: Node, gpus: Iterable[Gpu]) -> dict[str, str]:
    """Return the label of the GPUs' NVLink domain in the cluster and their clique; no label if the GPUs differ."""
    words = (node.cliques.get(gpu.uuid, "").rpartition(".") for gpu in gpus)
    fabrics = {
        (cluster, clique) for cluster, _, clique in words if "-" in cluster
    }  # a cluster uuid, not a mesh within the node
    if len(fabrics) != 1:
        return {}
    ((cluster, clique),) = fabrics
    return {f"{DOMAIN}/gpu.clique": f"{cluster}.{clique}"}


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
    profiles = {mig.profile for gpu in in_mig_mode for mig in gpu.mig_devices}
    if (
        not all(gpu.mig_enabled for gpu in gpus)
        or not all(gpu.mig_devices for gpu in in_mig_mode)
        or len(profiles) != 1
    ):
        # Strategy single cannot describe these GPUs.
        invalid = {
            "product": f"{sanitised(in_mig_mode[0].model)}-MIG-INVALID",
            "count": 0,
            "replicas": 0,
            "memory": 0,
            "sharing-strategy": "",  # else it would be "time-slicing" for replicas that no pod can get
        }
        return labels | _under(GPU_RESOURCE, invalid)
    return labels | _slices(in_mig_mode, settings, lambda _: GPU_RESOURCE)


def _whole(gpus: Sequence[Gpu], settings: Settings) -> dict[str, str]:
    """Return labels of whole GPUs, partitioned or not. They describe one model, and count its GPUs.

    If there are several models, the model with the most GPUs is described; of equals, the model of the lowest index. Models with
    a GPU that is not partitioned come first.
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
    """Return labels of MIG devices for each profile. `named` returns the resource; the first device describes its profile."""
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
    values: dict[str, object | None] = {
        "memory": None if mig.memory_bytes is None else mig.memory_bytes >> 20,
        "slices.gi": mig.gpu_slices,
        "slices.ci": mig.compute_slices,
    }
    if mig.engines is not None:
        values |= {
            "multiprocessors": mig.engines.multiprocessors,
            "engines.copy": mig.engines.copy,
            "engines.decoder": mig.engines.decoder,
            "engines.encoder": mig.engines.encoder,
            "engines.jpeg": mig.engines.jpeg,
            "engines.ofa": mig.engines.ofa,
        }
    return {name: value for name, value in values.items() if value is not None}


def _base(parts: Iterable[str], count: int, shared: SharedResource | None) -> dict[str, object]:
    """Return product, count, replicas and sharing strategy. A shared resource that keeps its name has a product with -SHARED."""
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
    """Return the architecture of a compute capability, named as in GPU Feature Discovery."""
    if major == 7:
        return "volta" if minor < 5 else "turing"
    if major == 8:
        return "ampere" if minor < 9 else "ada-lovelace"
    return _FAMILIES.get(major, "undefined")


def vgpu_host(config: bytes) -> VgpuHost | None:
    """Return the hypervisor's driver if `config`, the first bytes of a PCI configuration space, is of a vGPU; else None.

    Sources: the PCI Local Bus Specification 3.0 (6.7, capabilities list), and internal/vgpu of NVIDIA/k8s-device-plugin v0.20.0.
    A vGPU's vendor-specific capability has the bytes id, next and length, and the signature "VF". Then come records: an id, a
    length that includes these two bytes, and data. Record 0 has ten bytes of version and ten bytes of branch.
    """
    capability = _vendor_specific(config)
    if capability[3:5] != b"VF":
        return None
    at = 5
    while at + 1 < len(capability) and capability[at]:
        if not capability[at + 1]:
            return VgpuHost()
        at += capability[at + 1]
    data = capability[at + 2 : at + 22]
    if len(data) < 20:
        return VgpuHost()
    version, branch = (part.strip(b"\0").decode("ascii", "replace") for part in (data[:10], data[10:]))
    return VgpuHost(version, branch)


def _vendor_specific(config: bytes) -> bytes:
    """Return the first vendor-specific capability; empty if the device has none, or fewer than CONFIG_BYTES were read."""
    status, has_capabilities, first = 0x06, 0x10, 0x34
    vendor_specific, broken = 0x09, 0xFF  # ids of capabilities
    if len(config) < CONFIG_BYTES or not config[status] & has_capabilities:
        return b""
    seen: set[int] = set()
    at = config[first]
    while at and at not in seen and at + 2 < len(config) and config[at] != broken:
        if config[at] == vendor_specific:
            return config[at : at + config[at + 2]]
        seen.add(at)
        at = config[at + 1]
    return b""
