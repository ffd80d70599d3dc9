"""Remarks for operators who bring a file of NVIDIA's plugin v0.20.0: the keys that take effect here and not there.

NVIDIA's config loader validates `resources`, and `rename` and `devices` of shared resources, and discards them with a warning
(api/config/v1/config.go, DisableResourceNamingInConfig; replicas.go). It puts nvidia.com/ before every resource name. So every
program with this loader refuses a name with another domain, including GPU feature discovery and the MPS control daemon.
"""

from collections.abc import Iterator, Mapping, Sequence

from gpu_plugin.config.document import Document, Place, at, spell
from gpu_plugin.config.errors import Fault
from gpu_plugin.config.names import DOMAIN
from gpu_plugin.config.sharing import SECTIONS

_MAX_SHOWN = 3

_PATTERNS: tuple[Place, ...] = (("resources", "gpus"), ("resources", "mig"))
"""The places of resource names by pattern."""


def remarks_on_switching(document: Document) -> list[Fault]:
    """Return a remark on all keys that NVIDIA's plugin ignores, and a remark on all names that its programs refuse, if any."""
    ignored = list(_ignored(document.content))
    foreign = [
        (place, name) for place, name in _names(document.content) if name.partition("/")[0] not in {name, "", DOMAIN}
    ]
    remarks = []
    if ignored:
        reason = f"{_some([spell(place) for place in ignored])}: applied here, ignored by NVIDIA's plugin v0.20.0"
        remarks.append(Fault(reason, document.source, document.line(ignored[0])))
    if foreign:
        names = list(dict.fromkeys(name for _, name in foreign))
        reason = (
            f"{_some(names)}: a name with another domain than {DOMAIN}, for which NVIDIA's GPU feature discovery and MPS control "
            "daemon refuse the file; if they run on this node too, give them a file without it"
        )
        remarks.append(Fault(reason, document.source, document.line(foreign[0][0])))
    return remarks


def unshared(document: Document) -> list[Fault]:
    """Return a remark for each entry under `sharing` with one replica. NVIDIA's plugin refuses such a file."""
    reason = "one replica: these devices are not shared"
    return [
        document.fault((*place, "replicas"), reason)
        for place, row in _shared(document.content)
        if row.get("replicas") == 1 and row.get("replicas") is not True
    ]


def _ignored(content: Mapping[str, object]) -> Iterator[Place]:
    for place in _PATTERNS:
        if next(_rows(content, place), None) is not None:
            yield place
    for place, row in _shared(content):
        yield from ((*place, key) for key in ("rename", "devices") if row.get(key) not in (None, "all"))


def _names(content: Mapping[str, object]) -> Iterator[tuple[Place, str]]:
    for patterns in _PATTERNS:
        for place, row in _rows(content, patterns):
            yield (*place, "name"), str(row.get("name") or "")
    for place, row in _shared(content):
        for key in ("name", "rename"):
            yield (*place, key), str(row.get(key) or "")


def _shared(content: Mapping[str, object]) -> Iterator[tuple[Place, Mapping[str, object]]]:
    for section in SECTIONS:
        yield from _rows(content, ("sharing", section, "resources"))


def _rows(content: Mapping[str, object], place: Place) -> Iterator[tuple[Place, Mapping[str, object]]]:
    rows = at(content, place)
    for index, row in enumerate(rows if isinstance(rows, list | tuple) else ()):
        if isinstance(row, Mapping):
            yield (*place, index), row


def _some(items: Sequence[str]) -> str:
    more = f" and {len(items) - _MAX_SHOWN} more" if len(items) > _MAX_SHOWN else ""
    return f"{', '.join(items[:_MAX_SHOWN])}{more}"
