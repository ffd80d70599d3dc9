"""Remarks for operators who bring a file of NVIDIA's plugin v0.20.0: the keys that take effect here and not there.

NVIDIA's config loader validates `resources`, and `rename` and `devices` of shared resources, and discards them with a warning
(api/config/v1/config.go, DisableResourceNamingInConfig; replicas.go). It puts nvidia.com/ before every resource name. So every
program with this loader refuses a name with another domain, including GPU feature discovery and the MPS control daemon.
"""

from collections.abc import Iterator, Sequence

from gpu_plugin.config.document import Document, Place, spell
from gpu_plugin.config.errors import Fault
from gpu_plugin.config.names import DOMAIN
from gpu_plugin.config.schema_v1 import File

_MAX_SHOWN = 3


def remarks_on_switching(document: Document, file: File) -> list[Fault]:
    """Return a remark on all keys that NVIDIA's plugin ignores, and a remark on all names that its programs refuse, if any."""
    ignored = list(_ignored(file))
    foreign = [(place, name) for place, name in _names(file) if name and name.partition("/")[0] != DOMAIN]
    remarks = []
    if ignored:
        reason = f"{_some([spell(place) for place in ignored])}: applied here, ignored by NVIDIA's plugin v0.20.0"
        remarks.append(document.fault(ignored[0], reason)._replace(path=""))
    if foreign:
        names = list(dict.fromkeys(name for _, name in foreign))
        reason = (
            f"{_some(names)}: a name with another domain than {DOMAIN}, for which NVIDIA's GPU feature discovery and MPS control "
            "daemon refuse the file; if they run on this node too, give them a file without it"
        )
        remarks.append(document.fault(foreign[0][0], reason)._replace(path=""))
    return remarks


def unshared(document: Document, file: File) -> list[Fault]:
    """Return a remark for each entry under `sharing` with one replica. NVIDIA's plugin refuses such a file."""
    reason = "one replica: these devices are not shared"
    return [
        document.fault((*place, "replicas"), reason) for place, _, _, row in file.sharing.rows() if row.replicas == 1
    ]


def _ignored(file: File) -> Iterator[Place]:
    for key, patterns in (("gpus", file.resources.gpus), ("mig", file.resources.mig)):
        if patterns:
            yield ("resources", key)
    for place, _, _, row in file.sharing.rows():
        if row.rename:
            yield (*place, "rename")
        if row.devices and not row.devices.everything:
            yield (*place, "devices")


def _names(file: File) -> Iterator[tuple[Place, str]]:
    for key, patterns in (("gpus", file.resources.gpus), ("mig", file.resources.mig)):
        for index, pattern in enumerate(patterns):
            if pattern is not None:
                yield ("resources", key, index, "name"), pattern.name
    for place, _, _, row in file.sharing.rows():
        yield (*place, "name"), row.name
        yield (*place, "rename"), row.rename


def _some(items: Sequence[str]) -> str:
    more = f" and {len(items) - _MAX_SHOWN} more" if len(items) > _MAX_SHOWN else ""
    return f"{', '.join(items[:_MAX_SHOWN])}{more}"
