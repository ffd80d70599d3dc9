"""Whether a PCI device is a vGPU, and which driver its hypervisor has, by its configuration space. Pure.

Sources: the PCI Local Bus Specification 3.0 (6.7, capabilities list), and internal/vgpu of NVIDIA/k8s-device-plugin v0.20.0 for
what a vGPU's vendor-specific capability holds: after id, next and length the signature "VF", then records of an id, a length
that counts both, and their data; record 0 has ten bytes of version and ten of branch.
"""

import msgspec

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


def vgpu_host(config: bytes) -> VgpuHost | None:
    """The hypervisor's driver, where these first bytes of a device's configuration space are a vGPU's; None where not."""
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
