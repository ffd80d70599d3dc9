"""Remarks for operators who bring a file of NVIDIA's plugin v0.20.0: the keys that take effect here and not there.

NVIDIA's config loader validates `resources`, and `rename` and `devices` of shared resources, and discards them with a warning
(api/config/v1/config.go, DisableResourceNamingInConfig; replicas.go). It puts nvidia.com/ before every resource name. So every
program with this loader refuses a name with another domain, including GPU feature discovery and the MPS control daemon.
"""

from collections.abc import Sequence

from gpu_plugin.config.document import Document, Place, spell
from gpu_plugin.config.errors import Fault
from gpu_plugin.config.names import DOMAIN
from gpu_plugin.config.schema_v1 import File


def remarks_on_switching(document: Document, file: File) -> list[Fault]:
    """Return a remark on all keys that NVIDIA's plugin ignores, and a remark on all names that its programs refuse, if any."""
    ignored: list[Place] = []
    names: dict[str, Place] = {}  # the first place of each
    for key, patterns in (("gpus", file.resources.gpus), ("mig", file.resources.mig)):
        if patterns:
            ignored.append(("resources", key))
        for index, pattern in enumerate(patterns):
            if pattern is not None:
                names.setdefault(pattern.name, ("resources", key, index, "name"))
    for place, _, _, row in file.sharing.rows():
        names.setdefault(row.name, (*place, "name"))
        if row.rename:
            names.setdefault(row.rename, (*place, "rename"))
            ignored.append((*place, "rename"))
        if row.devices and not row.devices.everything:
            ignored.append((*place, "devices"))
    foreign = [name for name in names if name.partition("/")[0] != DOMAIN]
    remarks = []
    if ignored:
        reason = f"{_some([spell(place) for place in ignored])}: applied here, ignored by NVIDIA's plugin v0.20.0"
        remarks.append(document.fault(ignored[0], reason)._replace(path=""))
    if foreign:
        reason = (
            f"{_some(foreign)}: a name with another domain than {DOMAIN}, for which NVIDIA's GPU feature discovery and MPS "
            "control daemon refuse the file; if they run on this node too, give them a file without it"
        )
        remarks.append(document.fault(names[foreign[0]], reason)._replace(path=""))
    return remarks


def unshared(document: Document, file: File) -> list[Fault]:
    """Return a remark for each entry under `sharing` with one replica. NVIDIA's plugin refuses such a file."""
    reason = "one replica: these devices are not shared"
    return [
        document.fault((*place, "replicas"), reason) for place, _, _, row in file.sharing.rows() if row.replicas == 1
    ]


def _some(items: Sequence[str]) -> str:
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return f"{', '.join(items[:3])}{more}"
